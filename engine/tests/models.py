"""Small random `qwen35` models of many shapes, written in milliseconds; no tokenizer, no meaning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from engine import quants
from engine.model.config import ModelConfig

QUANTISED = tuple(quants.QUANT_FORMATS)
FLOATS = tuple(quants.FLOAT_FORMATS)

_UNIT = {
    "Q4_K": 1 / 250,
    "Q5_K": 1 / 500,
    "Q6_K": 1 / 1400,
    "IQ4_XS": 1 / 1300,
    "IQ3_S": 1 / 150,
    "Q8_0": 1 / 74,
}
"""Block scale that gives random blocks of a format weights of standard deviation near 1."""


@dataclass(frozen=True)
class Shape:
    """What a model looks like; `types` are drawn from for each matrix inside the layers."""

    n_layer: int = 4
    n_k_heads: int = 2
    n_v_heads: int = 6
    d_state: int = 64
    head_dim: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_embd: int = 256
    n_ff: int = 512
    n_vocab: int = 512
    token_embd: str = "Q4_K"
    output: str | None = "Q6_K"  # None: tied to token_embd
    types: tuple[str, ...] = QUANTISED
    sections: tuple[int, int, int, int] | None = None

    @property
    def value_dim(self) -> int:
        return self.n_v_heads * self.d_state

    @property
    def conv_channels(self) -> int:
        return 2 * self.n_k_heads * self.d_state + self.value_dim

    @property
    def n_rot(self) -> int:
        return self.head_dim // 4

    @property
    def rope_sections(self) -> tuple[int, int, int, int]:
        n_pairs = self.n_rot // 2
        third = (n_pairs + 2) // 3
        return self.sections or (third, third, n_pairs - 2 * third, 0)


SHAPES: dict[str, Shape] = {
    "4 layers, 2 key heads, 3x value heads": Shape(d_state=128, n_vocab=2051),
    "5 layers, 4 key heads, tied": Shape(
        n_layer=5, n_k_heads=4, n_v_heads=4, d_state=128, head_dim=256, n_head=2, n_head_kv=1, output=None
    ),
    "4 layers, 16 key heads, 3x value heads": Shape(
        n_k_heads=16, n_v_heads=48, n_ff=256, token_embd="IQ3_S", output="IQ4_XS"
    ),
    "4 layers, 16 key heads, head size 256": Shape(
        n_k_heads=16, n_v_heads=16, head_dim=256, n_head=3, n_head_kv=1, token_embd="Q6_K", output="Q5_K"
    ),
    "8 layers, 2 value heads, Q8_0, tied": Shape(
        n_layer=8, n_v_heads=2, n_head=2, n_head_kv=2, token_embd="Q8_0", output=None, sections=(2, 2, 2, 2)
    ),
    "4 layers, float formats": Shape(types=FLOATS, token_embd="F16", output="BF16", n_embd=160, n_ff=200),
}
"""Every format, both kinds of layers, tied and untied output; the first has a head large enough for threads."""

TINY = Shape(
    n_k_heads=1,
    n_v_heads=2,
    d_state=32,
    head_dim=32,
    n_head=2,
    n_head_kv=1,
    n_ff=256,
    n_vocab=48,
    sections=(2, 1, 1, 0),
)
"""Small enough to be computed one scalar at a time."""

CONFIG_27B = ModelConfig(
    n_layer=64,
    n_layer_nextn=0,
    n_embd=5120,
    n_ff=17408,
    n_vocab=248320,
    n_head=24,
    n_head_kv=4,
    head_dim=256,
    n_rot=64,
    rope_freq_base=1e7,
    rope_sections=(11, 11, 10, 0),
    rms_eps=1e-6,
    ssm_d_conv=4,
    ssm_d_inner=6144,
    ssm_d_state=128,
    n_v_heads=48,
    n_k_heads=16,
    full_attention_interval=4,
    n_ctx_train=262144,
    tied_output=False,
)
"""The article's model."""


def is_float(shape: Shape) -> bool:
    """Say whether a model of this shape has no quantised matrix at all."""
    return shape.types == FLOATS


def random_rows(type_name: str, n_rows: int, n: int, std: float = 1.0, seed: int = 0) -> NDArray[np.uint8]:
    """Return random rows (n_rows, row_n_bytes) u8 of a block format, weights centred and near `std` in size."""
    rng = np.random.default_rng(seed)
    form = quants.QUANT_FORMATS[type_name]
    raw = rng.integers(0, 256, (n_rows, n // form.n_weights, form.block.itemsize), dtype=np.uint8)
    blocks = raw.view(form.block)[..., 0]
    blocks["d"] = _UNIT[type_name] * std * rng.uniform(0.8, 1.2, blocks.shape)
    if "dmin" in (form.block.names or ()):
        blocks["dmin"] = blocks["d"] * (7.5 if type_name == "Q4_K" else 15.5)
        scales = blocks["scales"]  # each minimum gets the number of its scale, so that weights are centred
        scales[..., 4:8] = scales[..., 0:4]
        scales[..., 8:12] = (scales[..., 8:12] & 15) * 17
    return raw.reshape(n_rows, -1)


def write_model(path: Path, shape: Shape, seed: int = 0) -> Path:
    """Write the model to `path` and return `path`."""
    writer = GGUFWriter(path, "qwen35")
    _add_hyperparameters(writer, shape)
    tensors = _Tensors(writer, shape, np.random.default_rng(seed))
    tensors.matrix("token_embd.weight", shape.n_embd, shape.n_vocab, shape.token_embd, std=1.0)
    tensors.weights("output_norm.weight", shape.n_embd)
    if shape.output is not None:
        tensors.matrix("output.weight", shape.n_embd, shape.n_vocab, shape.output)
    for il in range(shape.n_layer):
        tensors.layer(il)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_hyperparameters(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(shape.n_rot)
    writer.add_rope_dimension_sections(list(shape.rope_sections))
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(shape.value_dim)
    writer.add_ssm_state_size(shape.d_state)
    writer.add_ssm_time_step_rank(shape.n_v_heads)
    writer.add_ssm_group_count(shape.n_k_heads)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("none")


class _Tensors:
    """Adds random tensors to a writer."""

    def __init__(self, writer: GGUFWriter, shape: Shape, rng: np.random.Generator) -> None:
        self._writer, self._shape, self._rng = writer, shape, rng

    def matrix(self, name: str, n_in: int, n_out: int, type_name: str | None = None, std: float | None = None) -> None:
        """Add a matrix whose products keep the size of their input; the type is drawn if not given."""
        type_name = type_name or self._type_for(n_in)
        std = std or n_in**-0.5
        if type_name in quants.QUANT_FORMATS:
            rows: Any = random_rows(type_name, n_out, n_in, std, int(self._rng.integers(2**31)))
        else:
            w = (self._rng.standard_normal((n_out, n_in)) * std).astype(np.float32)
            rows = gguf.quants.quantize(w, GGMLQuantizationType[type_name])
        self._writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[type_name])

    def weights(self, name: str, n: int) -> None:
        """Add the weights of a norm."""
        self.vector(name, self._rng.uniform(0.8, 1.2, n))

    def vector(self, name: str, values: NDArray[np.float64]) -> None:
        """Add an F32 tensor."""
        self._writer.add_tensor(name, values.astype(np.float32))

    def layer(self, il: int) -> None:
        """Add one layer."""
        shape, blk = self._shape, f"blk.{il}"
        self.weights(f"{blk}.attn_norm.weight", shape.n_embd)
        self.weights(f"{blk}.post_attention_norm.weight", shape.n_embd)
        if (il + 1) % 4:
            self._recurrent(blk)
        else:
            self._attention(blk)
        self.matrix(f"{blk}.ffn_gate.weight", shape.n_embd, shape.n_ff)
        self.matrix(f"{blk}.ffn_up.weight", shape.n_embd, shape.n_ff)
        self.matrix(f"{blk}.ffn_down.weight", shape.n_ff, shape.n_embd)

    def _recurrent(self, blk: str) -> None:
        shape, rng = self._shape, self._rng
        self.matrix(f"{blk}.attn_qkv.weight", shape.n_embd, shape.conv_channels)
        self.matrix(f"{blk}.attn_gate.weight", shape.n_embd, shape.value_dim)
        self.vector(f"{blk}.ssm_conv1d.weight", rng.standard_normal((shape.conv_channels, 4)) * 0.5)
        self.vector(f"{blk}.ssm_dt.bias", rng.uniform(-4, 0, shape.n_v_heads))
        self.vector(f"{blk}.ssm_a", -rng.uniform(0.5, 8, shape.n_v_heads))
        self.matrix(f"{blk}.ssm_beta.weight", shape.n_embd, shape.n_v_heads, "F32")
        self.matrix(f"{blk}.ssm_alpha.weight", shape.n_embd, shape.n_v_heads, "F32")
        self.weights(f"{blk}.ssm_norm.weight", shape.d_state)
        self.matrix(f"{blk}.ssm_out.weight", shape.value_dim, shape.n_embd)

    def _attention(self, blk: str) -> None:
        shape = self._shape
        self.matrix(f"{blk}.attn_q.weight", shape.n_embd, 2 * shape.n_head * shape.head_dim)
        self.matrix(f"{blk}.attn_k.weight", shape.n_embd, shape.n_head_kv * shape.head_dim)
        self.matrix(f"{blk}.attn_v.weight", shape.n_embd, shape.n_head_kv * shape.head_dim)
        self.weights(f"{blk}.attn_q_norm.weight", shape.head_dim)
        self.weights(f"{blk}.attn_k_norm.weight", shape.head_dim)
        self.matrix(f"{blk}.attn_output.weight", shape.n_head * shape.head_dim, shape.n_embd)

    def _type_for(self, n_in: int) -> str:
        types = self._shape.types
        fitting = [t for t in types if t in FLOATS or n_in % quants.QUANT_FORMATS[t].n_weights == 0]
        return str(self._rng.choice(fitting))
