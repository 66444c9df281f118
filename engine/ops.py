"""The fused operations of the forward pass, as both backends implement them.

`engine.model.forward` is written against this protocol alone. Whatever looks at an op from outside (timing,
dumping, fault injection) wraps an `Ops` object; there is no second forward pass. Arrays belong to the backend:
NumPy arrays for `engine.reference`, device arrays for the CUDA backend. `n_tokens` is the width of the pack in
work, and every token's result is independent of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = Any
"""A backend's own array."""
Activation: TypeAlias = Any
"""A backend's own pair of an f32 vector and its int8 form; see `engine.numerics.Activation`."""
Matrix: TypeAlias = Any
"""A weight matrix in the backend's own layout; has n_in and n_out, y = W x has n_out elements from n_in."""


class Hyperparameters(Protocol):
    """What a backend must know of a model beyond the shapes of its arrays (`engine.model.config` has it)."""

    @property
    def n_head(self) -> int: ...  # noqa: D102
    @property
    def n_head_kv(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def n_rot(self) -> int: ...  # noqa: D102
    @property
    def rope_freq_base(self) -> float: ...  # noqa: D102
    @property
    def rope_sections(self) -> tuple[int, int, int, int]: ...  # noqa: D102
    @property
    def rms_eps(self) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one attention layer, each (n_ctx, n_head_kv, head_dim) f16."""

    k: Array
    v: Array


class Ops(Protocol):
    """One backend. The order of every rounding is fixed by `engine.numerics` and docs/numerics.md."""

    def load_matrix(self, type_name: str, raw: NDArray[np.uint8]) -> Matrix:
        """Take over a matrix from its rows as they lie in the file, (n_out, row_n_bytes) u8."""

    def load_vector(self, type_name: str, raw: NDArray[np.uint8]) -> Array:
        """Take over a small tensor as f32, (n_rows, n) or (n,) when it has one row."""

    def end_loading(self) -> None:
        """Free what only loading needed; called once after the last matrix."""

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
        """Return a zeroed buffer for the decode state.

        A backend may keep one buffer per name; asking for it again then ends the sequence that had it.
        """

    def begin_layer(self, il: int) -> None:
        """Name the layer that the next ops belong to, for error messages and wrappers."""

    def embed(self, type_name: str, table: NDArray[np.uint8], tokens: Sequence[int], first_position: int) -> Array:
        """Return the embedding rows of `tokens`, (n_tokens, n_embd) f32, from the table in host memory.

        Opens a forward pass: `first_position` says where in the sequence the first token stands.
        """

    def rms_norm(self, x: Array, weight: Array) -> Activation:
        """Normalise x (n_tokens, n_embd) and quantise the result."""

    def project(self, matrices: Sequence[Matrix], h: Activation) -> tuple[Array, ...]:
        """Return W h for several matrices that share an input, each (n_tokens, n_out) f32."""

    def project_add(self, matrix: Matrix, h: Activation, residual: Array) -> Array:
        """Return residual + W h, (n_tokens, n_out) f32; may overwrite `residual`."""

    def gate_up_silu(self, gate: Matrix, up: Matrix, h: Activation) -> Activation:
        """Return silu(gate h) * (up h), quantised, (n_tokens, n_ff)."""

    def conv_silu(self, qkv: Array, weight: Array, conv_state: Array) -> Array:
        """Run the causal depthwise convolution and SiLU over qkv (n_tokens, conv_channels).

        weight is (conv_channels, ssm_d_conv); conv_state (ssm_d_conv - 1, conv_channels), oldest input first,
        is shifted in place.
        """

    def gated_delta(self, qkv: Array, alpha: Array, beta: Array, dt: Array, a: Array, ssm_state: Array) -> Array:
        """Advance the delta rule by n_tokens steps and return its outputs, (n_tokens, n_v_heads, d) f32.

        qkv (n_tokens, conv_channels) holds q, k (n_k_heads of d each) and v (n_v_heads of d); alpha and beta
        are (n_tokens, n_v_heads). ssm_state (n_v_heads, d value rows, d key columns) is updated in place.
        """

    def gated_norm(self, o: Array, z: Array, weight: Array) -> Activation:
        """Return rms_norm(o) * silu(z) per head, flattened to (n_tokens, n_v_heads * d) and quantised."""

    def qk_norm_rope(
        self,
        qg: Array,
        k: Array,
        v: Array,
        q_norm: Array,
        k_norm: Array,
        positions: Sequence[int],
        cache: KVCache,
    ) -> tuple[Array, Array]:
        """Split qg into q and gate, normalise and rotate q and k, and write k and v to the cache as f16.

        qg is (n_tokens, n_head * 2 * head_dim) with q and gate alternating per head. Returns q and gate, each
        (n_tokens, n_head, head_dim) f32.
        """

    def attention(self, q: Array, cache: KVCache, positions: Sequence[int]) -> Array:
        """Attend from each token to cache positions 0..its own; return (n_tokens, n_head, head_dim) f32."""

    def sigmoid_gate(self, o: Array, gate: Array) -> Activation:
        """Return o * sigmoid(gate), flattened to (n_tokens, n_head * head_dim) and quantised."""

    def head(self, matrix: Matrix, h: Activation) -> Array:
        """Return the logits, (n_tokens, n_vocab) f32."""

    def argmax(self, logits: Array) -> int:
        """Return the lowest id among the largest of the last row of logits."""

    def append(self, run: Callable[[Sequence[int]], Array], state: Any, tokens: Sequence[int], pack: int) -> Array:
        """Append `tokens` of a prompt to `state` through `run` and return the logits after the last.

        A backend may cut them into packs of at most `pack` tokens and run each as a whole.
        """

    def decoder(self, run: Callable[[Sequence[int]], Array], state: Any) -> Any:
        """Return the `engine.decoder.Decoder` of a sequence; `run` appends tokens to its `state`."""

    def from_host(self, x: NDArray[np.float32]) -> Array:
        """Copy a NumPy array to the backend."""

    def to_host(self, x: Array) -> NDArray[np.float32]:
        """Copy an array to a NumPy array."""

    def describe(self) -> dict[str, Any]:
        """Return what a record should say of the backend: device, memory, threads."""
