"""What a fixture model is: its shape, the type of every tensor, and the tensor list that follows from both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

DEFAULT_MATRIX_TYPE = "Q4_K"
_F32_MATRICES = frozenset({"ssm_alpha", "ssm_beta", "ssm_conv1d"})
_NO_SUFFIX = frozenset({"ssm_a"})


@dataclass(frozen=True)
class TypeRule:
    """Store the named matrices of the listed layers as `type`; `layers` None means every layer.

    tensors: names without `blk.N.` and `.weight`, such as `ffn_down`. Later rules win over earlier ones.
    """

    tensors: tuple[str, ...]
    type: str
    layers: tuple[int, ...] | None = None

    def covers(self, stem: str, layer: int) -> bool:
        """Return whether the rule names the matrix `stem` of `layer`."""
        return stem in self.tensors and (self.layers is None or layer in self.layers)


@dataclass(frozen=True)
class ModelSpec:
    """Describe one fixture of architecture `qwen35` completely; the file is a function of this and nothing else.

    Hyperparameters carry GGUF's names; `n_layer` is the trunk without an MTP block. `group_size` ids share one
    code (see planted.py); `seed` drives the weights, `prompt_seed` the prompt. `redraws` are (group, draw) pairs:
    groups whose output rows are taken from another draw (see settle.py). Raises ValueError from `__post_init__`
    when the shape is not one llama.cpp and the block formats can hold.
    """

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_k_heads: int
    n_v_heads: int
    ssm_d_state: int
    seed: int
    prompt_seed: int = 0
    ssm_d_conv: int = 4
    full_attention_interval: int = 4
    rope_freq_base: float = 1e7
    rms_eps: float = 1e-6
    n_ctx_train: int = 262144
    group_size: int = 4
    tied_output: bool = False
    has_mtp_block: bool = False
    token_embd_type: str = "Q4_K"
    output_type: str = "Q6_K"
    rules: tuple[TypeRule, ...] = ()
    redraws: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _require(self.n_head % self.n_head_kv == 0, "n_head must be a multiple of n_head_kv")
        _require(self.n_v_heads % self.n_k_heads == 0, "n_v_heads must be a multiple of n_k_heads")
        _require(self.n_embd % 256 == 0, "n_embd must be a multiple of 256")
        _require(self.n_vocab >= 512, "n_vocab must be at least 512")
        _require(self.head_dim % 8 == 0, "head_dim must be a multiple of 8")

    @property
    def n_rot(self) -> int:
        """Rotated dims per head: a quarter of the head, as in the real models."""
        return self.head_dim // 4

    @property
    def rope_sections(self) -> tuple[int, int, int, int]:
        """The real models' 11:11:10 split of 32 rotation pairs, scaled to n_rot / 2 pairs."""
        n_pairs = self.n_rot // 2
        first = (n_pairs * 11 + 16) // 32
        return (first, first, n_pairs - 2 * first, 0)

    @property
    def ssm_d_inner(self) -> int:
        """Width of all value heads together."""
        return self.n_v_heads * self.ssm_d_state

    @property
    def n_conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return 2 * self.n_k_heads * self.ssm_d_state + self.ssm_d_inner

    def is_recurrent(self, layer: int) -> bool:
        """Return whether `layer` is a Gated-DeltaNet layer; the MTP block never is."""
        return layer < self.n_layer and (layer + 1) % self.full_attention_interval != 0


@dataclass(frozen=True)
class PlannedTensor:
    """One entry of the tensor directory: shape in GGUF order (row length first), type, size in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int

    @property
    def n_rows(self) -> int:
        """Number of rows; 1 for a vector."""
        return prod(self.shape[1:])


def plan_tensors(spec: ModelSpec) -> list[PlannedTensor]:
    """List every tensor of the file in file order, without making a single weight.

    Raises ValueError naming tensor and type when a row is not a whole number of blocks.
    """
    plan = [_planned("token_embd.weight", (spec.n_embd, spec.n_vocab), spec.token_embd_type)]
    for layer in range(spec.n_layer + int(spec.has_mtp_block)):
        for stem, shape in _layer_shapes(spec, layer):
            plan.append(_planned(_layer_name(stem, layer), shape, _layer_type(spec, stem, shape, layer)))
    plan.append(_planned("output_norm.weight", (spec.n_embd,), "F32"))
    if not spec.tied_output:
        plan.append(_planned("output.weight", (spec.n_embd, spec.n_vocab), spec.output_type))
    return plan


def _layer_shapes(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_norm", (spec.n_embd,)
    yield from _recurrent_shapes(spec) if spec.is_recurrent(layer) else _attention_shapes(spec)
    yield "post_attention_norm", (spec.n_embd,)
    yield "ffn_gate", (spec.n_embd, spec.n_ff)
    yield "ffn_up", (spec.n_embd, spec.n_ff)
    yield "ffn_down", (spec.n_ff, spec.n_embd)
    if layer == spec.n_layer:
        yield "nextn.eh_proj", (2 * spec.n_embd, spec.n_embd)
        yield "nextn.enorm", (spec.n_embd,)
        yield "nextn.hnorm", (spec.n_embd,)
        yield "nextn.shared_head_norm", (spec.n_embd,)


def _recurrent_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_qkv", (spec.n_embd, spec.n_conv_channels)
    yield "attn_gate", (spec.n_embd, spec.ssm_d_inner)
    yield "ssm_conv1d", (spec.ssm_d_conv, spec.n_conv_channels)
    yield "ssm_dt", (spec.n_v_heads,)
    yield "ssm_a", (spec.n_v_heads,)
    yield "ssm_beta", (spec.n_embd, spec.n_v_heads)
    yield "ssm_alpha", (spec.n_embd, spec.n_v_heads)
    yield "ssm_norm", (spec.ssm_d_state,)
    yield "ssm_out", (spec.ssm_d_inner, spec.n_embd)


def _attention_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    n_embd_kv = spec.n_head_kv * spec.head_dim
    yield "attn_q", (spec.n_embd, 2 * spec.n_head * spec.head_dim)
    yield "attn_k", (spec.n_embd, n_embd_kv)
    yield "attn_v", (spec.n_embd, n_embd_kv)
    yield "attn_output", (spec.n_head * spec.head_dim, spec.n_embd)
    yield "attn_q_norm", (spec.head_dim,)
    yield "attn_k_norm", (spec.head_dim,)


def _layer_name(stem: str, layer: int) -> str:
    if stem in _NO_SUFFIX:
        return f"blk.{layer}.{stem}"
    return f"blk.{layer}.{stem}.{'bias' if stem == 'ssm_dt' else 'weight'}"


def _layer_type(spec: ModelSpec, stem: str, shape: tuple[int, ...], layer: int) -> str:
    if len(shape) == 1:
        return "F32"
    covering = [rule.type for rule in spec.rules if rule.covers(stem, layer)]
    default = "F32" if stem in _F32_MATRICES else DEFAULT_MATRIX_TYPE
    return covering[-1] if covering else default


def _planned(name: str, shape: tuple[int, ...], type_name: str) -> PlannedTensor:
    n_block, block_n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if shape[0] % n_block:
        raise ValueError(f"{name}: row of {shape[0]} is not a multiple of {n_block}, which {type_name} needs")
    return PlannedTensor(name, shape, type_name, prod(shape) // n_block * block_n_bytes)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
