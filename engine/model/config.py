"""Hyperparameters of a `qwen35` model, read from GGUF metadata, and the tensors such a model must have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import ModelFileError
from engine.gguf.reader import ModelFile, TensorInfo

__all__ = ["ARCHITECTURE", "ModelConfig", "check_tensors", "expected_tensors"]

ARCHITECTURE = "qwen35"

_DEFAULT_ROPE_FREQ_BASE = 10000.0
_DEFAULT_FULL_ATTENTION_INTERVAL = 4
_N_ROPE_SECTIONS = 4


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants the forward pass needs; names are GGUF's.

    Layers 0 .. n_layer-1 are the trunk. The n_layer_nextn blocks behind it predict further tokens (MTP) and
    take no part in plain decoding.
    """

    n_layer: int
    n_layer_nextn: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    rope_freq_base: float
    rope_sections: tuple[int, int, int, int]
    rms_eps: float
    ssm_d_conv: int
    ssm_d_inner: int
    ssm_d_state: int
    n_v_heads: int
    n_k_heads: int
    full_attention_interval: int
    n_ctx_train: int
    tied_output: bool

    @classmethod
    def from_model(cls, model: ModelFile) -> ModelConfig:
        """Read the configuration of `model`, with llama.cpp's defaults for absent optional keys.

        Raises ModelFileError naming the key when one is missing, of the wrong kind, or asks for something the
        forward pass does not do.
        """
        architecture = model.require("general.architecture", str)
        if architecture != ARCHITECTURE:
            raise model.error(f"key general.architecture is {architecture!r}, expected {ARCHITECTURE!r}")
        keys = _Keys(model)
        n_block, n_nextn = keys.positive("block_count"), keys.count("nextn_predict_layers", 0)
        interval = keys.positive("full_attention_interval", _DEFAULT_FULL_ATTENTION_INTERVAL)
        n_layer = n_block - n_nextn
        if n_block > len(model.tensors):
            raise keys.wrong("block_count", n_block, f"at most {len(model.tensors)}, the number of tensors in the file")
        if n_layer < 1:
            raise keys.wrong("nextn_predict_layers", n_nextn, f"less than block_count ({n_block})")
        attention = range(interval - 1, n_layer, interval) or range(n_layer)
        n_embd = keys.positive("embedding_length")
        n_head = keys.per_layer("attention.head_count", attention, n_block)
        head_dim = keys.positive("attention.key_length", n_embd // n_head)
        config = cls(
            n_layer=n_layer,
            n_layer_nextn=n_nextn,
            n_embd=n_embd,
            n_ff=keys.per_layer("feed_forward_length", range(n_layer), n_block),
            n_vocab=_n_vocab(model),
            n_head=n_head,
            n_head_kv=keys.per_layer("attention.head_count_kv", attention, n_block, n_head),
            head_dim=head_dim,
            n_rot=keys.positive("rope.dimension_count", head_dim),
            rope_freq_base=_rope_freq_base(keys),
            rope_sections=_rope_sections(keys),
            rms_eps=keys.positive_float("attention.layer_norm_rms_epsilon"),
            ssm_d_conv=keys.positive("ssm.conv_kernel"),
            ssm_d_inner=keys.positive("ssm.inner_size"),
            ssm_d_state=keys.positive("ssm.state_size"),
            n_v_heads=keys.positive("ssm.time_step_rank"),
            n_k_heads=keys.positive("ssm.group_count"),
            full_attention_interval=interval,
            n_ctx_train=keys.positive("context_length"),
            tied_output="output.weight" not in model.tensors,
        )
        _check_relations(keys, config)
        _check_plain_rope(keys)
        return config

    def is_recurrent(self, il: int) -> bool:
        """Say whether trunk layer `il` is a Gated-DeltaNet layer (else it is full attention)."""
        return (il + 1) % self.full_attention_interval != 0

    @property
    def n_layer_recurrent(self) -> int:
        """Number of Gated-DeltaNet layers in the trunk."""
        return self.n_layer - self.n_layer_attn

    @property
    def n_layer_attn(self) -> int:
        """Number of full-attention layers in the trunk."""
        return self.n_layer // self.full_attention_interval

    @property
    def n_gqa(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_head_kv

    @property
    def n_embd_q(self) -> int:
        """Width of all query heads together, which is also the input width of attn_output."""
        return self.n_head * self.head_dim

    @property
    def n_embd_kv(self) -> int:
        """Width of all key (or value) heads of an attention layer together."""
        return self.n_head_kv * self.head_dim

    @property
    def key_dim(self) -> int:
        """Width of all Gated-DeltaNet key heads together."""
        return self.n_k_heads * self.ssm_d_state

    @property
    def value_dim(self) -> int:
        """Width of all Gated-DeltaNet value heads together."""
        return self.n_v_heads * self.ssm_d_state

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: q, k and v of a Gated-DeltaNet layer."""
        return 2 * self.key_dim + self.value_dim


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape (GGUF order) of every tensor the forward pass reads."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.n_embd, config.n_vocab),
        "output_norm.weight": (config.n_embd,),
    }
    if not config.tied_output:
        shapes["output.weight"] = (config.n_embd, config.n_vocab)
    for il in range(config.n_layer):
        mixer = _recurrent_shapes(config) if config.is_recurrent(il) else _attention_shapes(config)
        for suffix, shape in {**_common_shapes(config), **mixer}.items():
            shapes[f"blk.{il}.{suffix}"] = shape
    return shapes


def check_tensors(model: ModelFile, config: ModelConfig) -> None:
    """Check that the trunk has exactly the tensors the forward pass reads, each of the right shape.

    Vectors and the convolution kernel must be F32, as the ops that read them take nothing else. Raises
    ModelFileError naming the first tensor that is missing, misshapen, of the wrong type or not known.
    """
    expected = expected_tensors(config)
    for name, shape in expected.items():
        info = model.tensor(name)
        if _trimmed(info.shape) != _trimmed(shape):
            raise model.error(f"tensor {name} has shape {list(info.shape)}, expected {list(shape)}")
        if _needs_f32(info) and info.type != "F32":
            raise model.error(f"tensor {name} has type {info.type}, expected F32")
    for name, info in model.tensors.items():
        if name not in expected and not _is_nextn(info, config):
            raise model.error(f"tensor {name} is unknown in a {ARCHITECTURE} model of {config.n_layer} layers")


class _Keys:
    """Reads `qwen35.*` keys with range checks; every error names the file and the full key."""

    def __init__(self, model: ModelFile) -> None:
        self.model = model

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1; `default` stands in for an absent key."""
        value = self.count(key, default)
        if value < 1:
            raise self.wrong(key, value, "at least 1")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 0; `default` stands in for an absent key."""
        full = self.full(key)
        value = self.model.require(full, int) if default is None else self.model.optional(full, int, default)
        if value < 0:
            raise self.wrong(key, value, "at least 0")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """Return a finite float above 0; `default` stands in for an absent key."""
        full, model = self.full(key), self.model
        value = model.require(full, float) if default is None else model.optional(full, float, default)
        if not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return value

    def per_layer(self, key: str, layers: range, n_block: int, default: int | None = None) -> int:
        """Return a key that is one value, or an array over all blocks whose entries for `layers` agree."""
        if self.model.metadata.array_length(self.full(key)) is None:
            return self.positive(key, default)
        values = self.model.require_array(self.full(key), int)
        if len(values) != n_block:
            raise self.wrong(key, f"an array of {len(values)}", f"{n_block} entries, one a block")
        chosen = sorted({values[il] for il in layers})
        if len(chosen) > 1 or chosen[0] < 1:
            raise self.wrong(key, f"{chosen} over its layers", "one value of at least 1 in all of them")
        return chosen[0]

    def full(self, key: str) -> str:
        return f"{ARCHITECTURE}.{key}"

    def wrong(self, key: str, found: object, expected: str) -> ModelFileError:
        return self.model.error(f"key {self.full(key)} is {found}, expected {expected}")


def _n_vocab(model: ModelFile) -> int:
    shape = model.tensor("token_embd.weight").shape
    if len(shape) < 2:
        raise model.error(f"tensor token_embd.weight has shape {list(shape)}, expected [n_embd, n_vocab]")
    n_tokens = model.metadata.array_length("tokenizer.ggml.tokens")
    if n_tokens is not None and n_tokens != shape[1]:
        wanted = f"{n_tokens}, one for each entry of tokenizer.ggml.tokens"
        raise model.error(f"tensor token_embd.weight has {shape[1]} rows, expected {wanted}")
    return shape[1]


def _rope_freq_base(keys: _Keys) -> float:
    """Read the base of the RoPE frequencies; below 1 they would grow from pair to pair."""
    key = "rope.freq_base"
    value = keys.positive_float(key, _DEFAULT_ROPE_FREQ_BASE)
    if value < 1:
        raise keys.wrong(key, value, "at least 1")
    return value


def _rope_sections(keys: _Keys) -> tuple[int, int, int, int]:
    """Read the four section sizes; like llama.cpp, a single number stands for four equal ones."""
    key = "rope.dimension_sections"
    if keys.model.metadata.array_length(keys.full(key)) is None:
        sections = [keys.count(key)] * _N_ROPE_SECTIONS
    else:
        sections = keys.model.require_array(keys.full(key), int)
    if len(sections) != _N_ROPE_SECTIONS or min(sections) < 0 or max(sections[:3]) == 0:
        raise keys.wrong(key, sections, "4 sizes, at least one of the first three positive")
    time, height, width, extra = sections
    return time, height, width, extra


def _check_relations(keys: _Keys, config: ModelConfig) -> None:
    """Check the relations between keys that llama.cpp relies on."""
    head_dim = config.head_dim
    value_length = keys.positive("attention.value_length", config.n_embd // config.n_head)
    if value_length != head_dim:
        raise keys.wrong("attention.value_length", value_length, f"{head_dim}, the length of a key")
    if config.n_head % config.n_head_kv:
        wanted = f"a multiple of head_count_kv ({config.n_head_kv})"
        raise keys.wrong("attention.head_count", config.n_head, wanted)
    if config.n_rot % 2 or config.n_rot > head_dim:
        wanted = f"an even number up to the head size ({head_dim})"
        raise keys.wrong("rope.dimension_count", config.n_rot, wanted)
    if config.n_v_heads % config.n_k_heads:
        wanted = f"a multiple of the {config.n_k_heads} key heads (ssm.group_count)"
        raise keys.wrong("ssm.time_step_rank", config.n_v_heads, wanted)
    if config.ssm_d_inner != config.value_dim:
        wanted = f"{config.value_dim} = ssm.time_step_rank * ssm.state_size"
        raise keys.wrong("ssm.inner_size", config.ssm_d_inner, wanted)


def _check_plain_rope(keys: _Keys) -> None:
    """Refuse context extension and non-causal attention, which the forward pass does not implement."""
    plain: dict[str, tuple[object, ...]] = {
        "rope.scaling.type": ("none", "linear"),
        "rope.scaling.factor": (0.0, 1.0),
        "rope.scale_linear": (0.0, 1.0),
        "rope.scaling.attn_factor": (1.0,),
        "attention.causal": (True,),
    }
    for key, allowed in plain.items():
        value = keys.model.metadata.get(keys.full(key), allowed[0])
        if value not in allowed:
            raise keys.wrong(key, value, " or ".join(str(choice) for choice in allowed))


def _common_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        "attn_norm.weight": (config.n_embd,),
        "post_attention_norm.weight": (config.n_embd,),
        "ffn_gate.weight": (config.n_embd, config.n_ff),
        "ffn_up.weight": (config.n_embd, config.n_ff),
        "ffn_down.weight": (config.n_ff, config.n_embd),
    }


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        "attn_q.weight": (config.n_embd, 2 * config.n_embd_q),  # a query and its output gate for each head
        "attn_k.weight": (config.n_embd, config.n_embd_kv),
        "attn_v.weight": (config.n_embd, config.n_embd_kv),
        "attn_output.weight": (config.n_embd_q, config.n_embd),
        "attn_q_norm.weight": (config.head_dim,),
        "attn_k_norm.weight": (config.head_dim,),
    }


def _recurrent_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        "attn_qkv.weight": (config.n_embd, config.conv_channels),
        "attn_gate.weight": (config.n_embd, config.value_dim),
        "ssm_conv1d.weight": (config.ssm_d_conv, config.conv_channels),
        "ssm_dt.bias": (config.n_v_heads,),
        "ssm_a": (config.n_v_heads,),
        "ssm_beta.weight": (config.n_embd, config.n_v_heads),
        "ssm_alpha.weight": (config.n_embd, config.n_v_heads),
        "ssm_norm.weight": (config.ssm_d_state,),
        "ssm_out.weight": (config.value_dim, config.n_embd),
    }


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop trailing dimensions of 1, which GGUF does not tell apart from absent ones."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _needs_f32(info: TensorInfo) -> bool:
    return len(_trimmed(info.shape)) == 1 or info.name.endswith("ssm_conv1d.weight")


def _is_nextn(info: TensorInfo, config: ModelConfig) -> bool:
    return info.block is not None and config.n_layer <= info.block < config.n_layer + config.n_layer_nextn
