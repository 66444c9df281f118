"""The NumPy backend: the numerics contract executed plainly, the golden model for every other backend."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import numerics, quants
from engine.decoder import EagerDecoder, Run
from engine.errors import NonFiniteError
from engine.numerics import F32, LANES_EMBD, LANES_HEAD, Activation
from engine.ops import Hyperparameters, KVCache
from engine.reference import attention, gated_delta, linear
from engine.reference.linear import NumpyMatrix


class NumpyOps:
    """`engine.ops.Ops` in NumPy; results do not depend on `n_threads`."""

    def __init__(self, config: Hyperparameters, n_threads: int) -> None:
        self._config = config
        self._n_threads = n_threads
        # A thread does not inherit its caller's np.errstate; what is not finite is reported by `_finite`.
        self._threads = ThreadPoolExecutor(n_threads, initializer=lambda: np.seterr(all="ignore"))
        self._frequencies = numerics.rope_frequencies(config.n_rot, config.rope_freq_base, config.rope_sections)
        self._layer = -1

    def load_matrix(self, type_name: str, raw: NDArray[np.uint8]) -> NumpyMatrix:
        """Unpack a matrix: about 1.25 bytes a weight for the quantised formats, 4 for the float ones."""
        return linear.load(type_name, raw)

    def load_vector(self, type_name: str, raw: NDArray[np.uint8]) -> F32:
        """Widen a small tensor to f32."""
        values = np.array(quants.dequantize(type_name, raw))
        return values[0] if values.shape[0] == 1 else values

    def end_loading(self) -> None:
        """Do nothing: matrices are unpacked as they come."""

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
        """Return a new zeroed array."""
        return np.zeros(shape, dtype=dtype)

    def begin_layer(self, il: int) -> None:
        """Remember the layer for error messages."""
        self._layer = il

    def embed(self, type_name: str, table: NDArray[np.uint8], tokens: Sequence[int], first_position: int) -> F32:
        """Dequantise the rows of `tokens`."""
        return quants.dequantize(type_name, table[list(tokens)])

    def rms_norm(self, x: F32, weight: F32) -> Activation:
        """Normalise over n_embd and quantise."""
        return numerics.quantize(numerics.rms_norm(x, weight, self._config.rms_eps, LANES_EMBD))

    def project(self, matrices: Sequence[NumpyMatrix], h: Activation) -> tuple[F32, ...]:
        """Return W h for each matrix."""
        return tuple(self._apply(matrix, h) for matrix in matrices)

    def project_add(self, matrix: NumpyMatrix, h: Activation, residual: F32) -> F32:
        """Return residual + W h."""
        return residual + self._apply(matrix, h)

    def gate_up_silu(self, gate: NumpyMatrix, up: NumpyMatrix, h: Activation) -> Activation:
        """Return silu(gate h) * (up h), quantised."""
        product = numerics.silu(self._apply(gate, h)) * self._apply(up, h)
        return numerics.quantize(self._finite("gate_up_silu", product))

    def conv_silu(self, qkv: F32, weight: F32, conv_state: F32) -> F32:
        """Convolve, apply SiLU and shift the state."""
        return gated_delta.conv_silu(qkv, weight, conv_state)

    def gated_delta(self, qkv: F32, alpha: F32, beta: F32, dt: F32, a: F32, ssm_state: F32) -> F32:
        """Advance the delta rule; g = softplus(alpha + dt) * a, decay = e^g."""
        n_v_heads, d = ssm_state.shape[:2]
        q, k, v = gated_delta.split_heads(qkv, n_v_heads, d, self._config.rms_eps)
        heads = self._key_heads(k.shape[1], n_v_heads)
        # Checked before the functions that would turn an infinity into 0 or 1.
        biased, beta = self._finite("gated_delta", alpha + dt), self._finite("gated_delta", beta)
        decay = numerics.exp(self._finite("gated_delta", numerics.softplus(biased) * a))
        out = gated_delta.delta_rule(q[:, heads], k[:, heads], v, decay, numerics.sigmoid(beta), ssm_state)
        return self._finite("gated_delta", out)

    def _key_heads(self, n_k_heads: int, n_v_heads: int) -> list[int]:
        return gated_delta.key_head_of_value_head(n_k_heads, n_v_heads)

    def gated_norm(self, o: F32, z: F32, weight: F32) -> Activation:
        """Normalise per head and multiply by silu(z)."""
        normed = numerics.rms_norm(o, weight, self._config.rms_eps, LANES_HEAD)
        return numerics.quantize((normed * numerics.silu(z.reshape(o.shape))).reshape(o.shape[0], -1))

    def qk_norm_rope(
        self,
        qg: F32,
        k: F32,
        v: F32,
        q_norm: F32,
        k_norm: F32,
        positions: Sequence[int],
        cache: KVCache,
    ) -> tuple[F32, F32]:
        """Normalise and rotate q and k, append k and v to the cache."""
        c = self._config
        n_tokens = len(positions)
        q_and_gate = qg.reshape(n_tokens, c.n_head, 2, c.head_dim)
        keys = k.reshape(n_tokens, c.n_head_kv, c.head_dim)
        cos, sin = numerics.rope_table(np.asarray(positions, dtype=np.int64), self._frequencies)
        q = numerics.rms_norm(q_and_gate[:, :, 0], q_norm, c.rms_eps, LANES_HEAD)
        keys = numerics.rms_norm(keys, k_norm, c.rms_eps, LANES_HEAD)
        cache.k[list(positions)] = numerics.to_f16(attention.rotate(keys, cos, sin))
        cache.v[list(positions)] = numerics.to_f16(v.reshape(keys.shape))
        return attention.rotate(q, cos, sin), q_and_gate[:, :, 1]

    def attention(self, q: F32, cache: KVCache, positions: Sequence[int]) -> F32:
        """Attend causally, one token at a time."""
        out = []
        for t, p in enumerate(positions):
            scores = self._finite("attention", attention.scores(q[t], cache.k[: p + 1]))
            out.append(self._finite("attention", attention.mix(scores, cache.v[: p + 1])))
        return np.stack(out)

    def sigmoid_gate(self, o: F32, gate: F32) -> Activation:
        """Return o * sigmoid(gate), quantised."""
        gate = self._finite("attention", gate)
        return numerics.quantize((o * numerics.sigmoid(gate)).reshape(o.shape[0], -1))

    def head(self, matrix: NumpyMatrix, h: Activation) -> F32:
        """Return the logits."""
        return self._finite("head", self._apply(matrix, h))

    def argmax(self, logits: F32) -> int:
        """Return the lowest id among the largest."""
        return int(np.argmax(logits[-1]))

    def append(self, run: Run, state: object, tokens: Sequence[int], pack: int) -> F32:
        """Append all tokens in one call."""
        return run(tokens)

    def decoder(self, run: Run, state: object) -> EagerDecoder:
        """Return a decoder that runs op by op."""
        return EagerDecoder(self, run)

    def from_host(self, x: F32) -> F32:
        """Return a copy."""
        return np.array(x)

    def to_host(self, x: F32) -> F32:
        """Return a copy."""
        return np.array(x)

    def describe(self) -> dict[str, Any]:
        """Return the number of threads."""
        return {"n_threads": self._n_threads}

    def _apply(self, matrix: NumpyMatrix, h: Activation) -> F32:
        return linear.apply(matrix, h, self._threads, self._n_threads)

    def _finite(self, op: str, x: F32) -> F32:
        if not np.isfinite(x).all():
            kind = "NaN" if np.isnan(x).any() else "infinity"
            where = "output head" if op == "head" else f"layer {self._layer}"
            raise NonFiniteError(f"{where}: op {op} produced {kind}; the weights or the state are damaged")
        return x
