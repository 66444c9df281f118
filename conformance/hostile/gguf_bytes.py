"""A writer of GGUF files that keeps no rule: every count, length, type and offset can be a wrong one.

It shares no code with the reader and none with the `gguf` package, whose writer refuses most of what is wanted here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
"""Numbers of the value types."""

_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

TYPE_F32, TYPE_F16, TYPE_Q4_0, TYPE_Q8_0, TYPE_Q4_K = 0, 1, 2, 8, 12
"""Numbers of some tensor types."""

Piece = tuple[str, bytes]
"""Bytes of the file and the name of the boundary behind them."""


@dataclass(frozen=True)
class Key:
    """One key-value pair; payload is everything behind the value type."""

    name: bytes
    type: int
    payload: bytes

    def pieces(self, order: str) -> Iterator[Piece]:
        """Yield the parts of the pair in file order."""
        yield f"key length {self.name.decode(errors='replace')}", struct.pack(f"{order}Q", len(self.name))
        yield "key name", self.name
        yield "value type", struct.pack(f"{order}I", self.type)
        if self.type == ARRAY:
            yield "item type", self.payload[:4]
            yield "array length", self.payload[4:12]
            yield "half an array", self.payload[12 : 12 + len(self.payload[12:]) // 2]
            yield "array", self.payload[12 + len(self.payload[12:]) // 2 :]
        else:
            yield "value", self.payload


@dataclass(frozen=True)
class Tensor:
    """One tensor with its bytes; offset None stands for the right one, n_dims None for the number of sizes given."""

    name: bytes
    shape: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None
    n_dims: int | None = None

    def pieces(self, order: str, offset: int) -> Iterator[Piece]:
        """Yield the parts of the directory entry in file order."""
        yield f"tensor name length {self.name.decode(errors='replace')}", struct.pack(f"{order}Q", len(self.name))
        yield "tensor name", self.name
        yield "n_dims", struct.pack(f"{order}I", len(self.shape) if self.n_dims is None else self.n_dims)
        yield "shape", b"".join(struct.pack(f"{order}Q", n % (1 << 64)) for n in self.shape)
        yield "tensor type", struct.pack(f"{order}I", self.type)
        yield "offset", struct.pack(f"{order}Q", (offset if self.offset is None else self.offset) % (1 << 64))


@dataclass
class Gguf:
    """A file to be; counts of None are the true ones, order is that of `struct`."""

    keys: list[Key] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    alignment: int = 32
    order: str = "<"

    def key(self, name: str, type_: int, value: object) -> Gguf:
        """Set a key to one value, or to an array with `array`; keeps its place if it is there already."""
        return self._set(Key(name.encode(), type_, scalar(type_, value, self.order)))

    def array(self, name: str, item_type: int, values: Sequence[object], length: int | None = None) -> Gguf:
        """Set a key to an array, whose length may be said to be another."""
        n = len(values) if length is None else length
        items = b"".join(scalar(item_type, value, self.order) for value in values)
        return self._set(Key(name.encode(), ARRAY, struct.pack(f"{self.order}IQ", item_type, n) + items))

    def without(self, *names: str) -> Gguf:
        """Remove keys and tensors."""
        for name in names:
            self.index(name)
        self.keys = [key for key in self.keys if key.name.decode() not in names]
        self.tensors = [tensor for tensor in self.tensors if tensor.name.decode() not in names]
        return self

    def change(self, tensor: str, **changes: object) -> Gguf:
        """Change fields of a tensor."""
        at = self.index(tensor)
        self.tensors[at] = replace(self.tensors[at], **changes)  # type: ignore[arg-type]
        return self

    def index(self, name: str) -> int:
        """Return where a key or tensor is in its list; raises ValueError if there is none."""
        names = [key.name for key in self.keys], [tensor.name for tensor in self.tensors]
        return names[name.encode() in names[1]].index(name.encode())

    def pieces(self) -> Iterator[Piece]:
        """Yield the whole file in pieces, each with the name of the boundary behind it."""
        order = self.order
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        yield "magic", self.magic
        yield "version", struct.pack(f"{order}I", self.version)
        yield "n_tensors", struct.pack(f"{order}Q", n_tensors % (1 << 64))
        yield "n_keys", struct.pack(f"{order}Q", n_keys % (1 << 64))
        header_n_bytes = 24
        for part in self._directory():
            header_n_bytes += len(part[1])
            yield part
        yield "padding", bytes(-header_n_bytes % self.alignment)
        for tensor in self.tensors:
            yield f"data {tensor.name.decode(errors='replace')}", self._padded(tensor.data)

    def build(self) -> bytes:
        """Return the file."""
        return b"".join(data for _, data in self.pieces())

    def boundaries(self) -> dict[str, int]:
        """Return where the file may be cut, by what lies before: PART, or PART NAME of a key or tensor."""
        found: dict[str, int] = {}
        end, name = 0, ""
        for part, data in self.pieces():
            end += len(data)
            if part in ("key name", "tensor name"):
                name = data.decode(errors="replace")
            found[part] = found[f"{part} {name}"] = end
        return found

    def _directory(self) -> Iterator[Piece]:
        for key in self.keys:
            yield from key.pieces(self.order)
        offset = 0
        for tensor in self.tensors:
            yield from tensor.pieces(self.order, offset)
            offset += len(self._padded(tensor.data))

    def _padded(self, data: bytes) -> bytes:
        return data + bytes(-len(data) % self.alignment)

    def _set(self, key: Key) -> Gguf:
        names = [other.name for other in self.keys]
        if key.name in names:
            self.keys[names.index(key.name)] = key
        else:
            self.keys.append(key)
        return self


def scalar(type_: int, value: object, order: str = "<") -> bytes:
    """Return the bytes of one value; a string may be given as bytes."""
    if type_ != STRING:
        return struct.pack(f"{order}{_CODES[type_]}", value)
    data = value if isinstance(value, bytes) else str(value).encode()
    return struct.pack(f"{order}Q", len(data)) + data


N_EMBD = N_FF = 32
HEAD_DIM = D_STATE = 32
N_V_HEADS = 2
TOKENS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", "ab", "abc", "<|endoftext|>", "<|im_end|>"]
N_VOCAB = len(TOKENS)
_EPS = 1e-6

_NUMBERS = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": N_EMBD,
    "feed_forward_length": N_FF,
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": N_V_HEADS * D_STATE,
    "ssm.state_size": D_STATE,
    "ssm.time_step_rank": N_V_HEADS,
    "ssm.group_count": 1,
    "full_attention_interval": 2,
}
_FFN = {
    "attn_norm.weight": (N_EMBD,),
    "post_attention_norm.weight": (N_EMBD,),
    "ffn_gate.weight": (N_EMBD, N_FF),
    "ffn_up.weight": (N_EMBD, N_FF),
    "ffn_down.weight": (N_FF, N_EMBD),
}
_RECURRENT = {
    "attn_qkv.weight": (N_EMBD, (2 + N_V_HEADS) * D_STATE),
    "attn_gate.weight": (N_EMBD, N_V_HEADS * D_STATE),
    "ssm_conv1d.weight": (4, (2 + N_V_HEADS) * D_STATE),
    "ssm_dt.bias": (N_V_HEADS,),
    "ssm_a": (N_V_HEADS,),
    "ssm_beta.weight": (N_EMBD, N_V_HEADS),
    "ssm_alpha.weight": (N_EMBD, N_V_HEADS),
    "ssm_norm.weight": (D_STATE,),
    "ssm_out.weight": (N_V_HEADS * D_STATE, N_EMBD),
}
ATTENTION = {
    "attn_q.weight": (N_EMBD, 2 * HEAD_DIM),
    "attn_k.weight": (N_EMBD, HEAD_DIM),
    "attn_v.weight": (N_EMBD, HEAD_DIM),
    "attn_output.weight": (HEAD_DIM, N_EMBD),
    "attn_q_norm.weight": (HEAD_DIM,),
    "attn_k_norm.weight": (HEAD_DIM,),
}
NEXTN = {
    "nextn.eh_proj.weight": (2 * N_EMBD, N_EMBD),
    "nextn.enorm.weight": (N_EMBD,),
    "nextn.hnorm.weight": (N_EMBD,),
    "nextn.shared_head_norm.weight": (N_EMBD,),
}


def sound() -> Gguf:
    """Return a whole `qwen35` model of two layers, about 70 KB, that the engine and llama.cpp both run."""
    model = Gguf().key("general.architecture", STRING, "qwen35")
    for name, value in _NUMBERS.items():
        model.key(f"qwen35.{name}", U32, value)
    model.key("qwen35.attention.layer_norm_rms_epsilon", F32, _EPS).key("qwen35.rope.freq_base", F32, 10000.0)
    model.array("qwen35.rope.dimension_sections", I32, [2, 1, 1, 0])
    model.key("tokenizer.ggml.model", STRING, "gpt2").key("tokenizer.ggml.pre", STRING, "qwen35")
    model.array("tokenizer.ggml.tokens", STRING, TOKENS)
    model.array("tokenizer.ggml.token_type", I32, [1] * (N_VOCAB - 2) + [3, 3])
    model.array("tokenizer.ggml.merges", STRING, ["a b", "ab c"])
    model.key("tokenizer.ggml.eos_token_id", U32, N_VOCAB - 1)
    model.tensors = [
        tensor("token_embd.weight", (N_EMBD, N_VOCAB)),
        *block(0, {**_FFN, **_RECURRENT}),
        *block(1, {**_FFN, **ATTENTION}),
        tensor("output_norm.weight", (N_EMBD,)),
        tensor("output.weight", (N_EMBD, N_VOCAB)),
    ]
    return model


def block(il: int, shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of one block."""
    return [tensor(f"blk.{il}.{name}", shape) for name, shape in shapes.items()]


def mtp_block(il: int) -> list[Tensor]:
    """Return the tensors of a block that predicts further tokens."""
    return block(il, {**_FFN, **ATTENTION, **NEXTN})


def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return an F32 tensor of values that keep a model in range; ffn matrices are Q8_0."""
    n = int(np.prod(shape))
    if ".ffn_" in name:
        quants = (np.arange(n, dtype=np.int64) * 37 % 41 - 20).astype(np.int8).reshape(-1, 32)
        blocks = b"".join(struct.pack("<e", 0.01) + row.tobytes() for row in quants)
        return Tensor(name.encode(), shape, TYPE_Q8_0, blocks)
    if name.endswith("norm.weight"):
        values = np.ones(n, np.float32)
    elif name.endswith("ssm_a"):
        values = np.full(n, -0.5, np.float32)
    else:
        seed = [len(name), *name.encode()]
        values = (np.random.default_rng(seed).standard_normal(n) * shape[0] ** -0.5).astype(np.float32)
    return Tensor(name.encode(), shape, TYPE_F32, values.astype("<f4").tobytes())
