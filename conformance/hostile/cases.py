"""The corpus: model files that are wrong in one way each, or odd and still right, with what the engine must say.

Each is a change to one small sound model, so nothing else can be the reason. A message is the engine's whole line
behind `error: FILE: `; None means that the file runs. `because` explains a verdict that is not llama.cpp's.
"""

# ruff: noqa: E501 - a message is one line, however long

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from conformance.hostile import gguf_bytes as g
from conformance.hostile.gguf_bytes import ARRAY, BOOL, F32, F64, I32, STRING, U32, U64, Gguf, Key

__all__ = ["CASES", "FILE_NAME", "Case", "sound_case"]

FILE_NAME = "case.gguf"
_GATE = "blk.0.ffn_gate.weight"
_QKV = "blk.0.attn_qkv.weight"
_TYPES = "F32, F16, BF16, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_XS, IQ3_S"


@dataclass(frozen=True)
class Case:
    """One file: `make` puts it into a folder and returns its path."""

    id: str
    what: str
    message: str | None
    make: Callable[[Path], Path]
    because: str = ""

    @property
    def is_accepted(self) -> bool:
        """Whether the engine must run the file."""
        return self.message is None

    def error(self, path: Path) -> str:
        """Return the engine's line for the file at `path`."""
        return f"error: {path.name}: {self.message}"


Change = Callable[[Gguf], object]


def case(id_: str, what: str, message: str | None, change: Change, because: str = "") -> Case:
    """Return a case made by changing the sound model; `change` may return the file's bytes instead."""

    def make(folder: Path) -> Path:
        model = g.sound()
        changed = change(model)
        return _write(folder, changed if isinstance(changed, bytes) else model.build())

    return Case(id_, what, message, make, because)


def sound_case() -> Case:
    """Return the case that is right, from which the others are made."""
    return case("sound", "the model that all others are made from", None, lambda m: None)


def _write(folder: Path, data: bytes) -> Path:
    path = folder / FILE_NAME
    path.write_bytes(data)
    return path


def _starts() -> list[Case]:
    page = b"<!DOCTYPE html><html><head><title>404</title></head><body>Entry not found</body></html>"
    return [
        case("start/empty", "empty file", "not a GGUF file: starts with b'', expected b'GGUF'", lambda m: b""),
        case(
            "start/html",
            "HTML page saved as .gguf",
            "not a GGUF file: starts with b'<!DO', expected b'GGUF'",
            lambda m: page,
        ),
        case(
            "start/three-bytes", "only `GGU`", "not a GGUF file: starts with b'GGU', expected b'GGUF'", lambda m: b"GGU"
        ),
        case(
            "start/magic-only", "only the magic", "truncated: the file ends at byte 4, in the header", lambda m: b"GGUF"
        ),
        case(
            "start/ggml",
            "file of the older GGML format",
            "not a GGUF file: starts with b'lmgg', expected b'GGUF'",
            lambda m: setattr(m, "magic", b"lmgg"),
        ),
        case(
            "start/zip",
            "zip archive",
            "not a GGUF file: starts with b'PK\\x03\\x04', expected b'GGUF'",
            lambda m: setattr(m, "magic", b"PK\3\4"),
        ),
        case("start/version-0", "version 0", "GGUF version 0, expected 2 or 3", lambda m: setattr(m, "version", 0)),
        case("start/version-1", "version 1", "GGUF version 1, expected 2 or 3", lambda m: setattr(m, "version", 1)),
        case("start/version-2", "version 2, laid out like 3", None, lambda m: setattr(m, "version", 2)),
        case("start/version-4", "version 4", "GGUF version 4, expected 2 or 3", lambda m: setattr(m, "version", 4)),
        case(
            "start/version-max",
            "version 2^32 - 1",
            "GGUF version 4294967295, expected 2 or 3",
            lambda m: setattr(m, "version", 2**32 - 1),
        ),
        case("start/big-endian", "big-endian file", "big-endian GGUF, expected little-endian", _big_endian),
        case(
            "start/zeros",
            "4096 zero bytes",
            "not a GGUF file: starts with b'\\x00\\x00\\x00\\x00', expected b'GGUF'",
            lambda m: bytes(4096),
        ),
    ]


def _big_endian(model: Gguf) -> bytes:
    data = bytearray(model.build())
    data[4:24] = struct.pack(">IQQ", 3, len(model.tensors), len(model.keys))
    return bytes(data)


def _counts() -> list[Case]:
    tied = "the data then begins in the wrong place; llama.cpp runs the wrong weights, the engine sees that bytes are left over"
    return [
        case(
            "count/tensors-max",
            "2^64 - 1 tensors",
            "18446744073709551615 tensors and 25 keys cannot fit into 74848 bytes",
            lambda m: setattr(m, "n_tensors", -1),
        ),
        case(
            "count/tensors-2^63",
            "2^63 tensors",
            "9223372036854775808 tensors and 25 keys cannot fit into 74848 bytes",
            lambda m: setattr(m, "n_tensors", 2**63),
        ),
        case(
            "count/tensors-2^31",
            "2^31 tensors",
            "2147483648 tensors and 25 keys cannot fit into 74848 bytes",
            lambda m: setattr(m, "n_tensors", 2**31),
        ),
        case(
            "count/tensors-one-more",
            "one tensor more than there is",
            "tensor number 28 has a name of 0 bytes after 'output.weight', expected 1 to 63",
            lambda m: _count(m, "n_tensors", 1),
        ),
        case(
            "count/tensors-one-less",
            "one tensor less than there is",
            "4160 bytes follow the last tensor, expected the file to end there",
            lambda m: _count(m, "n_tensors", -1),
            tied,
        ),
        case(
            "count/keys-max",
            "2^64 - 1 keys",
            "28 tensors and 18446744073709551615 keys cannot fit into 74848 bytes",
            lambda m: setattr(m, "n_keys", -1),
        ),
        case(
            "count/keys-2^63",
            "2^63 keys",
            "28 tensors and 9223372036854775808 keys cannot fit into 74848 bytes",
            lambda m: setattr(m, "n_keys", 2**63),
        ),
        case(
            "count/keys-one-more",
            "one key more than there is",
            "tensor number 0 has a name of 9007199254740992 bytes after 'token_embd.weight', expected 1 to 63",
            lambda m: _count(m, "n_keys", 1),
        ),
        case(
            "count/keys-one-less",
            "one key less than there is",
            "tensor number 1 has a name of 0 bytes after 'tokenizer.ggml.eos_token_id', expected 1 to 63",
            lambda m: _count(m, "n_keys", -1),
        ),
        case(
            "count/nothing",
            "no key and no tensor",
            "key tokenizer.ggml.model is missing, expected a string",
            lambda m: Gguf().build(),
        ),
    ]


def _count(model: Gguf, field: str, more: int) -> None:
    setattr(model, field, len(model.tensors if field == "n_tensors" else model.keys) + more)


def _with_key(name: bytes, type_: int, payload: bytes) -> Change:
    return lambda m: m.keys.append(Key(name, type_, payload))


def _values() -> list[Case]:
    u64 = partial(struct.pack, "<Q")
    array = partial(struct.pack, "<IQ")
    return [
        case(
            "value/type-13", "value type 13", "key x has value type 13, expected 0 to 12", _with_key(b"x", 13, u64(0))
        ),
        case(
            "value/type-max",
            "value type 2^32 - 1",
            "key x has value type 4294967295, expected 0 to 12",
            _with_key(b"x", 2**32 - 1, u64(0)),
        ),
        case(
            "value/array-of-arrays",
            "array of arrays",
            "key x is an array of arrays, expected numbers or strings",
            _with_key(b"x", ARRAY, array(ARRAY, 1) + array(U32, 0)),
        ),
        case(
            "value/item-type-99",
            "array of value type 99",
            "key x has value type 99, expected 0 to 12",
            _with_key(b"x", ARRAY, array(99, 1) + u64(0)),
        ),
        case(
            "value/array-2^61",
            "array of 2^61 + 1 u64, 8 bytes modulo 2^64",
            "truncated: the file ends at byte 74880, in the header after 'x'",
            _with_key(b"x", ARRAY, array(U64, 2**61 + 1) + u64(0)),
        ),
        case(
            "value/array-2^40",
            "array of 2^40 bytes",
            "truncated: the file ends at byte 74848, in the header after 'x'",
            _with_key(b"x", ARRAY, array(0, 2**40)),
        ),
        case(
            "value/strings-2^60",
            "array of 2^60 strings",
            "truncated: the file ends at byte 74848, in the header after 'x'",
            _with_key(b"x", ARRAY, array(STRING, 2**60)),
        ),
        case(
            "value/string-max",
            "string of 2^64 - 1 bytes",
            "truncated: the file ends at byte 74848, in the header after 'x'",
            _with_key(b"x", STRING, u64(2**64 - 1)),
        ),
        case(
            "value/string-2^63",
            "string of 2^63 bytes",
            "truncated: the file ends at byte 74848, in the header after 'x'",
            _with_key(b"x", STRING, u64(2**63)),
        ),
        case(
            "value/item-max",
            "array with a string of 2^64 - 8 bytes",
            "truncated: the file ends at byte 74880, in the header after 'x'",
            _with_key(b"x", ARRAY, array(STRING, 2) + u64(2**64 - 8) + u64(0)),
        ),
        case("value/bool-2", "boolean stored as 2", None, _with_key(b"x", BOOL, b"\2")),
        case(
            "value/not-utf-8", "general.name is not UTF-8", None, lambda m: m.key("general.name", STRING, b"\xff\xfe")
        ),
        case("value/empty-array", "empty array", None, lambda m: m.array("x", U32, [])),
        case(
            "key/empty",
            "key without a name",
            "key number 25 has a name of 0 bytes after 'tokenizer.ggml.eos_token_id', expected 1 to 65535",
            _with_key(b"", U32, struct.pack("<I", 1)),
            "llama.cpp asserts it, which ends the process",
        ),
        case(
            "key/too-long",
            "key of 65,536 bytes",
            "key number 25 has a name of 65536 bytes after 'tokenizer.ggml.eos_token_id', expected 1 to 65535",
            _with_key(b"k" * 65536, U32, struct.pack("<I", 1)),
            "the format allows 65,535 bytes; llama.cpp does not check",
        ),
        case(
            "key/length-max",
            "key of 2^64 - 1 bytes",
            "key number 0 has a name of 18446744073709551615 bytes, expected 1 to 65535",
            lambda m: _patched(m, 24, u64(2**64 - 1)),
        ),
        case(
            "key/not-utf-8",
            "key that is not UTF-8",
            "key number 25 is named b'\\xff\\xfe', expected UTF-8",
            _with_key(b"\xff\xfe", U32, struct.pack("<I", 1)),
            "keys are ASCII by the format; llama.cpp compares bytes",
        ),
        case(
            "key/newline",
            "unknown key with a newline and a terminal escape",
            None,
            _with_key(b"a\n\x1b[31mb", U32, struct.pack("<I", 1)),
        ),
        case(
            "key/twice",
            "key given twice",
            "key qwen35.embedding_length occurs twice, expected once",
            lambda m: m.keys.append(m.keys[3]),
        ),
        case(
            "key/newline-twice",
            "key with a newline given twice",
            "key a\\nb occurs twice, expected once",
            lambda m: m.keys.extend([Key(b"a\nb", BOOL, b"\1")] * 2),
        ),
    ]


def _patched(model: Gguf, at: int, data: bytes) -> bytes:
    content = model.build()
    return content[:at] + data + content[at + len(data) :]


def _alignments() -> list[Case]:
    def aligned(n: int) -> Change:
        def change(model: Gguf) -> None:
            model.key("general.alignment", U32, n)
            model.alignment = n

        return change

    return [
        case(
            "alignment/0",
            "alignment 0",
            "key general.alignment is 0 (UINT32), expected a power of two (UINT32)",
            lambda m: m.key("general.alignment", U32, 0),
        ),
        case(
            "alignment/24",
            "alignment 24",
            "key general.alignment is 24 (UINT32), expected a power of two (UINT32)",
            aligned(24),
        ),
        case(
            "alignment/1",
            "alignment 1",
            None,
            aligned(1),
            "ggml wants the data aligned in memory and asserts it; the engine reads any position",
        ),
        case("alignment/4096", "alignment 4096", None, aligned(4096)),
        case(
            "alignment/2^31",
            "alignment 2^31 in a small file",
            "truncated: tensor token_embd.weight ends at byte 2147487744, the file at 74880: 2147412864 bytes are missing",
            lambda m: m.key("general.alignment", U32, 2**31),
        ),
        case(
            "alignment/64-said",
            "alignment 64 said, 32 used",
            "tensor blk.0.ssm_a starts at byte 37536, expected 37568",
            lambda m: m.key("general.alignment", U32, 64),
        ),
        case(
            "alignment/u64",
            "alignment stored as u64",
            "key general.alignment is 32 (UINT64), expected a power of two (UINT32)",
            lambda m: m.key("general.alignment", U64, 32),
            "llama.cpp asserts the type, which ends the process",
        ),
        case(
            "alignment/string",
            "alignment stored as text",
            "key general.alignment is '32' (STRING), expected a power of two (UINT32)",
            lambda m: m.key("general.alignment", STRING, "32"),
            "llama.cpp asserts the type, which ends the process",
        ),
        case(
            "alignment/array",
            "alignment stored as an array",
            "key general.alignment is [32] (ARRAY), expected a power of two (UINT32)",
            lambda m: m.array("general.alignment", U32, [32]),
            "llama.cpp takes the first entry",
        ),
    ]


def _tensor_entries() -> list[Case]:
    def changed(**changes: object) -> Change:
        return lambda m: m.change(_GATE, **changes)

    zero = "llama.cpp divides by the size before it checks it"
    return [
        case(
            "tensor/no-name",
            "tensor without a name",
            "tensor number 3 has a name of 0 bytes after 'blk.0.post_attention_norm.weight', expected 1 to 63",
            changed(name=b""),
        ),
        case(
            "tensor/name-64",
            "tensor name of 64 bytes",
            "tensor number 3 has a name of 64 bytes after 'blk.0.post_attention_norm.weight', expected 1 to 63",
            changed(name=b"n" * 64),
        ),
        case(
            "tensor/name-nul",
            "tensor name with a NUL behind it",
            "tensor blk.0.ffn_gate.weight is missing",
            changed(name=_GATE.encode() + b"\0"),
            "llama.cpp takes names as C strings, which end at the NUL",
        ),
        case(
            "tensor/name-not-utf-8",
            "tensor name that is not UTF-8",
            "tensor number 3 is named b'\\xff\\xfe', expected UTF-8",
            changed(name=b"\xff\xfe"),
        ),
        case(
            "tensor/name-newline",
            "unknown tensor with a newline in its name",
            "tensor blk.0.ffn_gate.weight is missing",
            changed(name=b"blk.0\nffn"),
        ),
        case(
            "tensor/name-digits",
            "block number of 50 digits",
            "tensor blk.0.ffn_gate.weight is missing",
            changed(name=b"blk." + b"9" * 50 + b".x"),
        ),
        case(
            "tensor/twice",
            "tensor given twice",
            "tensor blk.0.post_attention_norm.weight occurs twice in the directory, expected once",
            lambda m: m.tensors.append(m.tensors[2]),
        ),
        case(
            "shape/no-dimension",
            "no dimension",
            "tensor blk.0.ffn_gate.weight has 0 dimensions, expected 1 to 4",
            changed(shape=()),
        ),
        case(
            "shape/5-dimensions",
            "five dimensions",
            "tensor blk.0.ffn_gate.weight has 5 dimensions, expected 1 to 4",
            changed(shape=(32, 32, 1, 1, 1)),
        ),
        case(
            "shape/n-dims-max",
            "2^32 - 1 dimensions",
            "tensor blk.0.ffn_gate.weight has 4294967295 dimensions, expected 1 to 4",
            changed(n_dims=2**32 - 1),
        ),
        case(
            "shape/zero-in",
            "rows of 0",
            "tensor blk.0.ffn_gate.weight has shape [0, 32], expected 1 to 4 positive sizes",
            changed(shape=(0, 32)),
        ),
        case(
            "shape/zero-out",
            "0 rows",
            "tensor blk.0.ffn_gate.weight has shape [32, 0], expected 1 to 4 positive sizes",
            changed(shape=(32, 0)),
            zero,
        ),
        case(
            "shape/zero-4th",
            "fourth size 0",
            "tensor blk.0.ffn_gate.weight has shape [32, 32, 1, 0], expected 1 to 4 positive sizes",
            changed(shape=(32, 32, 1, 0)),
            zero,
        ),
        case(
            "shape/minus-1",
            "size -1 when read signed",
            "truncated: tensor blk.0.ffn_gate.weight ends at byte 627189298506124762494, the file at 74848: 627189298506124687646 bytes are missing",
            changed(shape=(32, -1)),
        ),
        case(
            "shape/minus-32",
            "row of -32 when read signed",
            "truncated: tensor blk.0.ffn_gate.weight ends at byte 627189298506124761440, the file at 74848: 627189298506124686592 bytes are missing",
            changed(shape=(-32, 32)),
        ),
        case(
            "shape/2^63",
            "size 2^63",
            "truncated: tensor blk.0.ffn_gate.weight ends at byte 313594649253062385056, the file at 74848: 313594649253062310208 bytes are missing",
            changed(shape=(32, 2**63)),
        ),
        case(
            "shape/product-2^64",
            "product 2^64",
            "truncated: tensor blk.0.ffn_gate.weight ends at byte 19599665578316406176, the file at 74848: 19599665578316331328 bytes are missing",
            changed(shape=(2**32, 2**32)),
        ),
        case(
            "shape/product-2^64-of-4",
            "product 2^64 over four sizes",
            "truncated: tensor blk.0.ffn_gate.weight ends at byte 19599665578316406176, the file at 74848: 19599665578316331328 bytes are missing",
            changed(shape=(2**16,) * 4),
        ),
        case(
            "shape/bytes-2^64",
            "size in bytes just above 2^64",
            "truncated: tensor blk.0.attn_qkv.weight ends at byte 18446744348587469408, the file at 74848: 18446744348587394560 bytes are missing",
            lambda m: m.change(_QKV, shape=(2**31, 2**31 + 32)),
        ),
        case(
            "shape/padded-2^64",
            "size that padding takes over 2^64",
            "truncated: tensor blk.0.attn_qkv.weight ends at byte 18446744073709562428, the file at 74816: 18446744073709487612 bytes are missing",
            lambda m: m.change(_QKV, shape=(2**62 - 1,)),
        ),
        case(
            "shape/half-block",
            "Q8_0 row of 33",
            "tensor blk.0.ffn_gate.weight (Q8_0) has rows of 33, expected a multiple of 32",
            changed(shape=(33, 32)),
        ),
        case("shape/trailing-ones", "four dimensions, the last two 1", None, changed(shape=(32, 32, 1, 1))),
        case(
            "type/removed-4",
            "removed type 4 (Q4_2)",
            f"tensor blk.0.ffn_gate.weight has type number 4, expected one of {_TYPES}",
            changed(type=4),
        ),
        case(
            "type/removed-31",
            "removed type 31 (Q4_0_4_4)",
            f"tensor blk.0.ffn_gate.weight has type number 31, expected one of {_TYPES}",
            changed(type=31),
        ),
        case(
            "type/39",
            "type 39 (MXFP4), newer",
            f"tensor blk.0.ffn_gate.weight has type MXFP4, expected one of {_TYPES}",
            changed(type=39),
        ),
        case(
            "type/q4_0",
            "type Q4_0, 576 bytes instead of 1088",
            f"tensor blk.0.ffn_gate.weight has type Q4_0, expected one of {_TYPES}",
            changed(type=2, data=bytes(18 * 32)),
            "llama.cpp runs this format, the engine does not",
        ),
        case(
            "type/i32",
            "type I32",
            f"tensor blk.0.attn_qkv.weight has type I32, expected one of {_TYPES}",
            lambda m: m.change(_QKV, type=26),
            "llama.cpp loads it and crashes in the product of matrices",
        ),
        case(
            "type/200",
            "type 200",
            f"tensor blk.0.ffn_gate.weight has type number 200, expected one of {_TYPES}",
            changed(type=200),
        ),
        case(
            "type/max",
            "type 2^32 - 1",
            f"tensor blk.0.ffn_gate.weight has type number 4294967295, expected one of {_TYPES}",
            changed(type=2**32 - 1),
        ),
        case(
            "type/2^31",
            "type 2^31, negative when read signed",
            f"tensor blk.0.ffn_gate.weight has type number 2147483648, expected one of {_TYPES}",
            changed(type=2**31),
        ),
    ]


def _offsets() -> list[Case]:
    return [
        case(
            "offset/past-end",
            "offset past the end",
            "tensor blk.0.ffn_gate.weight starts at byte 1073745056, expected 7584",
            lambda m: m.change(_GATE, offset=1 << 30),
        ),
        case(
            "offset/overlap",
            "two tensors at one offset",
            "tensor blk.0.ffn_gate.weight starts at byte 3232, expected 7584",
            lambda m: m.change(_GATE, offset=0),
        ),
        case(
            "offset/misaligned",
            "offset off by one",
            "tensor token_embd.weight starts at byte 3233, expected 3232",
            lambda m: m.change("token_embd.weight", offset=1),
        ),
        case(
            "offset/gap",
            "gap of one alignment",
            "tensor output.weight starts at byte 76960, expected 70752",
            lambda m: m.change("output.weight", offset=73728),
        ),
        case(
            "offset/2^63",
            "offset 2^63",
            "tensor blk.0.ffn_gate.weight starts at byte 9223372036854779040, expected 7584",
            lambda m: m.change(_GATE, offset=2**63),
        ),
        case(
            "offset/wraps",
            "offset 2^64 - 32, inside the header when added in 64 bits",
            "tensor blk.0.ffn_gate.weight starts at byte 18446744073709554816, expected 7584",
            lambda m: m.change(_GATE, offset=-32),
        ),
        case(
            "offset/swapped",
            "directory in another order than the data",
            "tensor token_embd.weight starts at byte 7328, expected 3232",
            _swapped,
        ),
        case(
            "offset/trailing",
            "64 bytes behind the last tensor",
            "64 bytes follow the last tensor, expected the file to end there",
            lambda m: m.build() + bytes(64),
            "llama.cpp does not look behind the last tensor",
        ),
    ]


def _swapped(model: Gguf) -> None:
    first, second = model.tensors[-1], model.tensors[0]
    model.tensors[-1], model.tensors[0] = replace(first, offset=0), replace(second, offset=4096)


def _cuts() -> list[Case]:
    """Return one case a structural boundary: the file ends exactly there."""
    parts = {
        "version": "truncated: the file ends at byte 8, in the header",
        "n_tensors": "truncated: the file ends at byte 16, in the header",
        "n_keys": "28 tensors and 25 keys cannot fit into 24 bytes",
        "key length general.architecture": "28 tensors and 25 keys cannot fit into 32 bytes",
        "key name general.architecture": "28 tensors and 25 keys cannot fit into 52 bytes",
        "value type general.architecture": "truncated: the file ends at byte 56, in the header after 'general.architecture'",
        "value general.architecture": "truncated: the file ends at byte 70, in the header after 'general.architecture'",
        "value qwen35.rope.freq_base": "truncated: the file ends at byte 771, in the header after 'qwen35.rope.freq_base'",
        "item type tokenizer.ggml.tokens": "truncated: the file ends at byte 966, in the header after 'tokenizer.ggml.tokens'",
        "array length tokenizer.ggml.tokens": "truncated: the file ends at byte 974, in the header after 'tokenizer.ggml.tokens'",
        "half an array tokenizer.ggml.tokens": "truncated: the file ends at byte 1131, in the header after 'tokenizer.ggml.tokens'",
        "array tokenizer.ggml.merges": "truncated: the file ends at byte 1533, in the header after 'tokenizer.ggml.merges'",
        "tensor name length token_embd.weight": "truncated: the file ends at byte 1584, in the header after 'tokenizer.ggml.eos_token_id'",
        "tensor name token_embd.weight": "truncated: the file ends at byte 1601, in the header after 'token_embd.weight'",
        "n_dims token_embd.weight": "truncated: the file ends at byte 1605, in the header after 'token_embd.weight'",
        "shape token_embd.weight": "truncated: the file ends at byte 1621, in the header after 'token_embd.weight'",
        "tensor type token_embd.weight": "truncated: the file ends at byte 1625, in the header after 'token_embd.weight'",
        "offset token_embd.weight": "truncated: the file ends at byte 1633, in the header after 'token_embd.weight'",
        "offset output.weight": "truncated: tensor token_embd.weight ends at byte 7328, the file at 3201: 4127 bytes are missing",
        "padding": "truncated: tensor token_embd.weight ends at byte 7328, the file at 3232: 4096 bytes are missing",
        "data token_embd.weight": "truncated: tensor blk.0.attn_norm.weight ends at byte 7456, the file at 7328: 128 bytes are missing",
        "data output_norm.weight": "truncated: tensor output.weight ends at byte 74848, the file at 70752: 4096 bytes are missing",
    }
    one_byte = "truncated: tensor output.weight ends at byte 74848, the file at 74847: 1 bytes are missing"
    return [
        *(
            case("cut/" + part.replace(" ", "-"), f"ends behind {part}", message, partial(_cut, part=part))
            for part, message in parts.items()
        ),
        case("cut/last-byte", "all but the last byte", one_byte, lambda m: m.build()[:-1]),
    ]


def _cut(model: Gguf, part: str) -> bytes:
    return model.build()[: model.boundaries()[part]]


def _hyperparameters() -> list[Case]:
    def number(name: str, value: int, type_: int = U32) -> Change:
        return lambda m: m.key(f"qwen35.{name}", type_, value)

    def real(name: str, value: float, type_: int = F32) -> Change:
        return lambda m: m.key(f"qwen35.{name}", type_, value)

    def numbers(name: str, values: list[int], type_: int = I32) -> Change:
        return lambda m: m.array(f"qwen35.{name}", type_, values)

    def absent(name: str) -> Change:
        return lambda m: m.without(f"qwen35.{name}")

    eps, base = "attention.layer_norm_rms_epsilon", "rope.freq_base"
    unchecked = "llama.cpp does not check the value"
    signed = "llama.cpp wants u32 exactly; the engine takes any integer that is in range"
    return [
        case(
            "model/no-architecture",
            "general.architecture missing",
            "key general.architecture is missing, expected a string",
            lambda m: m.without("general.architecture"),
        ),
        case(
            "model/architecture-u32",
            "general.architecture a number",
            "key general.architecture is 35, expected a string",
            lambda m: m.key("general.architecture", U32, 35),
        ),
        case(
            "model/architecture-unknown",
            "architecture of a later model",
            "key general.architecture is 'qwen99', expected 'qwen35'",
            lambda m: m.key("general.architecture", STRING, "qwen99"),
        ),
        case(
            "model/architecture-moe",
            "architecture qwen35moe",
            "key general.architecture is 'qwen35moe', expected 'qwen35'",
            lambda m: m.key("general.architecture", STRING, "qwen35moe"),
        ),
        case(
            "model/no-block-count",
            "block_count missing",
            "key qwen35.block_count is missing, expected an integer",
            absent("block_count"),
        ),
        case(
            "model/block-count-text",
            "block_count a string",
            "key qwen35.block_count is '2', expected an integer",
            lambda m: m.key("qwen35.block_count", STRING, "2"),
        ),
        case(
            "model/block-count-float",
            "block_count a float",
            "key qwen35.block_count is 2.0, expected an integer",
            real("block_count", 2.0),
        ),
        case("model/block-count-i32", "block_count stored as i32", None, number("block_count", 2, I32), signed),
        case(
            "model/block-count-minus-1",
            "block_count -1",
            "key qwen35.block_count is -1, expected at least 0",
            number("block_count", -1, I32),
        ),
        case(
            "model/block-count-0",
            "block_count 0",
            "key qwen35.block_count is 0, expected at least 1",
            number("block_count", 0),
            "llama.cpp aborts where it looks for the first layer's hyperparameters",
        ),
        case(
            "model/block-count-1",
            "block_count 1 of 2",
            "tensor blk.1.attn_norm.weight is unknown in a qwen35 model of 1 layers",
            number("block_count", 1),
        ),
        case(
            "model/block-count-3",
            "block_count 3 of 2",
            "tensor blk.2.attn_norm.weight is missing",
            number("block_count", 3),
        ),
        case(
            "model/block-count-600",
            "block_count 600",
            "key qwen35.block_count is 600, expected at most 28, the number of tensors in the file",
            number("block_count", 600),
        ),
        case(
            "model/block-count-max",
            "block_count 2^32 - 1",
            "key qwen35.block_count is 4294967295, expected at most 28, the number of tensors in the file",
            number("block_count", 2**32 - 1),
        ),
        case(
            "model/n-embd-0",
            "embedding_length 0",
            "key qwen35.embedding_length is 0, expected at least 1",
            number("embedding_length", 0),
        ),
        case(
            "model/n-embd-64",
            "embedding_length 64, tensors of 32",
            "tensor token_embd.weight has shape [32, 32], expected [64, 32]",
            number("embedding_length", 64),
        ),
        case(
            "model/n-ff-max",
            "feed_forward_length 2^32 - 1",
            "tensor blk.0.ffn_gate.weight has shape [32, 32], expected [32, 4294967295]",
            number("feed_forward_length", 2**32 - 1),
        ),
        case(
            "model/no-context-length",
            "context_length missing",
            "key qwen35.context_length is missing, expected an integer",
            absent("context_length"),
        ),
        case(
            "model/n-head-0",
            "head_count 0",
            "key qwen35.attention.head_count is 0, expected at least 1",
            number("attention.head_count", 0),
        ),
        case(
            "model/n-head-3-kv-2",
            "3 query heads, 2 KV heads",
            "key qwen35.attention.head_count is 3, expected a multiple of head_count_kv (2)",
            lambda m: m.key("qwen35.attention.head_count", U32, 3).key("qwen35.attention.head_count_kv", U32, 2),
        ),
        case(
            "model/n-head-array",
            "head counts as arrays, 0 where there is no attention",
            None,
            lambda m: m.array("qwen35.attention.head_count", U32, [0, 1]).array(
                "qwen35.attention.head_count_kv", U32, [0, 1]
            ),
            "llama.cpp takes the first layer's count for all, which is 0 here; the engine takes that of the attention layers",
        ),
        case(
            "model/n-head-array-of-1",
            "head_count an array of 1 for 2 blocks",
            "key qwen35.attention.head_count is an array of 1, expected 2 entries, one a block",
            numbers("attention.head_count", [1]),
        ),
        case(
            "model/n-head-array-zero",
            "head_count array with 0 for the attention layer",
            "key qwen35.attention.head_count is [0] over its layers, expected one value of at least 1 in all of them",
            numbers("attention.head_count", [1, 0]),
            "llama.cpp takes the first layer's count for all; the engine takes that of the attention layers",
        ),
        case(
            "model/n-head-array-text",
            "head_count an array of strings",
            "key qwen35.attention.head_count is an array of '1' and the like, expected each entry to be an integer",
            lambda m: m.array("qwen35.attention.head_count", STRING, ["1", "1"]),
            "llama.cpp asserts the type of the entries",
        ),
        case(
            "model/n-head-array-floats",
            "head_count an array of floats",
            "key qwen35.attention.head_count is an array of 1.0 and the like, expected each entry to be an integer",
            lambda m: m.array("qwen35.attention.head_count", F32, [1.0, 1.0]),
            "llama.cpp asserts the type of the entries",
        ),
        case(
            "model/head-dim-0",
            "key_length 0",
            "key qwen35.attention.key_length is 0, expected at least 1",
            number("attention.key_length", 0),
        ),
        case(
            "model/value-length-16",
            "value_length 16, key_length 32",
            "key qwen35.attention.value_length is 16, expected 32, the length of a key",
            number("attention.value_length", 16),
        ),
        case(
            "model/no-eps",
            "rms epsilon missing",
            "key qwen35.attention.layer_norm_rms_epsilon is missing, expected a float",
            absent(eps),
        ),
        case(
            "model/eps-f64",
            "rms epsilon stored as f64",
            None,
            real(eps, 1e-6, F64),
            "llama.cpp wants f32 exactly; the engine takes any float",
        ),
        case(
            "model/eps-nan",
            "rms epsilon NaN",
            "key qwen35.attention.layer_norm_rms_epsilon is nan, expected a positive number",
            real(eps, float("nan")),
            "llama.cpp asserts it in the first step",
        ),
        case(
            "model/eps-negative",
            "rms epsilon -1",
            "key qwen35.attention.layer_norm_rms_epsilon is -1.0, expected a positive number",
            real(eps, -1.0),
            "llama.cpp asserts it in the first step",
        ),
        case(
            "model/rope-base-0",
            "RoPE base 0",
            "key qwen35.rope.freq_base is 0.0, expected a positive number",
            real(base, 0.0),
            unchecked,
        ),
        case(
            "model/rope-base-inf",
            "RoPE base infinite",
            "key qwen35.rope.freq_base is inf, expected a positive number",
            real(base, float("inf")),
            unchecked,
        ),
        case(
            "model/rope-base-half",
            "RoPE base 0.5",
            "key qwen35.rope.freq_base is 0.5, expected at least 1",
            real(base, 0.5),
            unchecked,
        ),
        case(
            "model/rope-odd",
            "odd rope.dimension_count",
            "key qwen35.rope.dimension_count is 7, expected an even number up to the head size (32)",
            number("rope.dimension_count", 7),
            "llama.cpp asserts it in the first step",
        ),
        case(
            "model/rope-too-long",
            "rope.dimension_count above the head size",
            "key qwen35.rope.dimension_count is 64, expected an even number up to the head size (32)",
            number("rope.dimension_count", 64),
            "llama.cpp asserts it in the first step",
        ),
        case(
            "model/no-sections",
            "rope.dimension_sections missing",
            "key qwen35.rope.dimension_sections is missing, expected an integer",
            absent("rope.dimension_sections"),
        ),
        case(
            "model/sections-3",
            "three RoPE sections",
            "key qwen35.rope.dimension_sections is [2, 1, 1], expected 4 sizes, at least one of the first three positive",
            numbers("rope.dimension_sections", [2, 1, 1]),
        ),
        case(
            "model/sections-0",
            "RoPE sections all 0",
            "key qwen35.rope.dimension_sections is [0, 0, 0, 0], expected 4 sizes, at least one of the first three positive",
            numbers("rope.dimension_sections", [0, 0, 0, 0]),
            "llama.cpp asserts it in the first step",
        ),
        case(
            "model/sections-negative",
            "negative RoPE section",
            "key qwen35.rope.dimension_sections is [2, -1, 3, 0], expected 4 sizes, at least one of the first three positive",
            numbers("rope.dimension_sections", [2, -1, 3, 0]),
            unchecked,
        ),
        case(
            "model/rope-yarn",
            "RoPE scaled by yarn",
            "key qwen35.rope.scaling.type is yarn, expected none or linear",
            lambda m: m.key("qwen35.rope.scaling.type", STRING, "yarn"),
            "llama.cpp has it, the engine does not",
        ),
        case(
            "model/interval-0",
            "full_attention_interval 0",
            "key qwen35.full_attention_interval is 0, expected at least 1",
            number("full_attention_interval", 0),
            "llama.cpp divides by it",
        ),
        case(
            "model/interval-max",
            "full_attention_interval 2^32 - 1",
            "tensor blk.1.attn_qkv.weight is missing",
            number("full_attention_interval", 2**32 - 1),
        ),
        case(
            "model/conv-0",
            "ssm.conv_kernel 0",
            "key qwen35.ssm.conv_kernel is 0, expected at least 1",
            number("ssm.conv_kernel", 0),
        ),
        case(
            "model/state-0",
            "ssm.state_size 0",
            "key qwen35.ssm.state_size is 0, expected at least 1",
            number("ssm.state_size", 0),
        ),
        case(
            "model/groups-0",
            "ssm.group_count 0",
            "key qwen35.ssm.group_count is 0, expected at least 1",
            number("ssm.group_count", 0),
        ),
        case(
            "model/groups-3",
            "3 key heads for 2 value heads",
            "key qwen35.ssm.time_step_rank is 2, expected a multiple of the 3 key heads (ssm.group_count)",
            number("ssm.group_count", 3),
        ),
        case(
            "model/inner-65",
            "ssm.inner_size 65, heads of 64",
            "key qwen35.ssm.inner_size is 65, expected 64 = ssm.time_step_rank * ssm.state_size",
            number("ssm.inner_size", 65),
            "llama.cpp asserts it in the first step",
        ),
        case(
            "model/no-state-size",
            "ssm.state_size missing",
            "key qwen35.ssm.state_size is missing, expected an integer",
            absent("ssm.state_size"),
        ),
    ]


def _vocabularies() -> list[Case]:
    def tokens(*values: object) -> Change:
        return lambda m: m.array("tokenizer.ggml.tokens", STRING, list(values))

    t = g.TOKENS
    return [
        case(
            "vocab/one-more",
            "33 tokens, 32 embedding rows",
            "tensor token_embd.weight has 32 rows, expected 33, one for each entry of tokenizer.ggml.tokens",
            _one_token_more,
        ),
        case(
            "vocab/one-less",
            "31 tokens, 32 token types",
            "key tokenizer.ggml.token_type has 32 entries, expected 31",
            tokens(*t[:-1]),
        ),
        case(
            "vocab/no-tokens",
            "tokenizer.ggml.tokens missing",
            "key tokenizer.ggml.tokens is missing, expected an array",
            lambda m: m.without("tokenizer.ggml.tokens"),
        ),
        case(
            "vocab/empty",
            "tokenizer.ggml.tokens empty",
            "key tokenizer.ggml.token_type has 32 entries, expected 0",
            tokens(),
            "llama.cpp reads the first token without looking whether there is one",
        ),
        case(
            "vocab/numbers",
            "tokens an array of numbers",
            "key tokenizer.ggml.tokens is an array of 0 and the like, expected each entry to be a string",
            lambda m: m.array("tokenizer.ggml.tokens", U32, range(32)),
            "llama.cpp asserts the type of the entries",
        ),
        case(
            "vocab/text",
            "tokens a string",
            "key tokenizer.ggml.tokens is 'abc', expected an array",
            lambda m: m.key("tokenizer.ggml.tokens", STRING, "abc"),
        ),
        case(
            "vocab/twice",
            "token given twice",
            "key tokenizer.ggml.tokens has 'a' twice, expected distinct tokens",
            tokens(*t[:-1], "a"),
            "llama.cpp asserts that tokens are distinct",
        ),
        case(
            "vocab/not-utf-8",
            "token that is not UTF-8",
            "key tokenizer.ggml.tokens has entry 2 b'\\xff', expected UTF-8",
            tokens(*t[:2], b"\xff", *t[3:]),
            "llama.cpp keeps tokens as bytes; the engine could not find such a token by its text",
        ),
        case("vocab/empty-token", "token of no characters", None, tokens(*t[:2], "", *t[3:])),
        case(
            "vocab/types-short",
            "31 token types for 32 tokens",
            "key tokenizer.ggml.token_type has 31 entries, expected 32",
            lambda m: m.array("tokenizer.ggml.token_type", I32, [1] * 31),
        ),
        case(
            "vocab/types-floats",
            "token types stored as floats",
            "key tokenizer.ggml.token_type is an array of 1.0 and the like, expected each entry to be an integer",
            lambda m: m.array("tokenizer.ggml.token_type", F32, [1.0] * 32),
            "llama.cpp reads the bits of the floats as integers",
        ),
        case(
            "vocab/types-u8",
            "token types stored as bytes",
            None,
            lambda m: m.array("tokenizer.ggml.token_type", 0, [1] * 32),
        ),
        case(
            "vocab/no-merges",
            "merges missing",
            "key tokenizer.ggml.merges is missing, expected an array",
            lambda m: m.without("tokenizer.ggml.merges"),
        ),
        case(
            "vocab/merges-numbers",
            "merges an array of numbers",
            "key tokenizer.ggml.merges is an array of 1 and the like, expected each entry to be a string",
            lambda m: m.array("tokenizer.ggml.merges", U32, [1, 2]),
            "llama.cpp asserts the type of the entries",
        ),
        case(
            "vocab/merge-no-space",
            "merge without a space",
            None,
            lambda m: m.array("tokenizer.ggml.merges", STRING, ["ab"]),
        ),
        case(
            "vocab/merge-unknown",
            "merge of pieces that are no tokens",
            None,
            lambda m: m.array("tokenizer.ggml.merges", STRING, ["xx yy"]),
        ),
        case(
            "vocab/eos-out-of-range",
            "eos id 4,000,000,000",
            None,
            lambda m: m.key("tokenizer.ggml.eos_token_id", U32, 4_000_000_000),
        ),
        case(
            "vocab/eos-text",
            "eos id a string",
            "key tokenizer.ggml.eos_token_id is '31', expected an integer",
            lambda m: m.key("tokenizer.ggml.eos_token_id", STRING, "31"),
        ),
        case(
            "vocab/pre-unknown",
            "unknown pre-tokenizer",
            "key tokenizer.ggml.pre is 'later', expected qwen35",
            lambda m: m.key("tokenizer.ggml.pre", STRING, "later"),
        ),
        case(
            "vocab/model-unknown",
            "unknown tokenizer model",
            "key tokenizer.ggml.model is 'later', expected 'gpt2' (byte-level BPE)",
            lambda m: m.key("tokenizer.ggml.model", STRING, "later"),
        ),
        case(
            "vocab/no-model",
            "tokenizer.ggml.model missing",
            "key tokenizer.ggml.model is missing, expected a string",
            lambda m: m.without("tokenizer.ggml.model"),
        ),
    ]


def _one_token_more(model: Gguf) -> None:
    model.array("tokenizer.ggml.tokens", STRING, [*g.TOKENS, "more"])
    model.array("tokenizer.ggml.token_type", I32, [1] * (g.N_VOCAB + 1))


def _tensors() -> list[Case]:
    n_bytes = 4 * g.N_EMBD
    nextn = "qwen35.nextn_predict_layers"
    mtp = "b8763 has no multi-token prediction for qwen35 and takes the block for a layer; the engine does not read it"

    def with_mtp(n_blocks: int, n_nextn: int | None, n_present: int) -> Change:
        def change(model: Gguf) -> None:
            model.key("qwen35.block_count", U32, n_blocks)
            if n_nextn is not None:
                model.key(nextn, U32, n_nextn)
            model.tensors += g.mtp_block(2)[:n_present]

        return change

    return [
        case("head/tied", "no output.weight: tied to token_embd", None, lambda m: m.without("output.weight")),
        case(
            "head/both-differ",
            "output.weight of 31 rows beside token_embd of 32",
            "tensor output.weight has shape [32, 31], expected [32, 32]",
            lambda m: m.change("output.weight", shape=(32, 31), data=bytes(31 * n_bytes)),
        ),
        case(
            "tensors/no-embedding",
            "token_embd.weight missing",
            "tensor token_embd.weight is missing",
            lambda m: m.without("token_embd.weight"),
        ),
        case(
            "tensors/embedding-1-d",
            "token_embd.weight of one dimension",
            "tensor token_embd.weight has shape [1024], expected [n_embd, n_vocab]",
            lambda m: m.change("token_embd.weight", shape=(1024,)),
        ),
        case(
            "tensors/missing",
            "tensor of the recurrent layer missing",
            "tensor blk.0.ssm_a is missing",
            lambda m: m.without("blk.0.ssm_a"),
        ),
        case(
            "tensors/missing-norm",
            "output_norm.weight missing",
            "tensor output_norm.weight is missing",
            lambda m: m.without("output_norm.weight"),
        ),
        case(
            "tensors/unknown",
            "tensor that no layer has",
            "tensor blk.0.extra.weight is unknown in a qwen35 model of 2 layers",
            lambda m: m.tensors.append(g.tensor("blk.0.extra.weight", (32,))),
        ),
        case(
            "tensors/transposed",
            "matrix with its sizes exchanged",
            "tensor blk.0.attn_qkv.weight has shape [128, 32], expected [32, 128]",
            lambda m: m.change(_QKV, shape=(128, 32)),
        ),
        case(
            "tensors/vector-f16",
            "norm stored as F16",
            "tensor output_norm.weight has type F16, expected F32",
            lambda m: m.change("output_norm.weight", type=1, data=struct.pack("<32e", *[1.0] * 32)),
            "llama.cpp loads it and crashes in the product with the norm",
        ),
        case("mtp/counted-absent", "MTP block counted, not there", None, with_mtp(3, 1, 0), mtp),
        case("mtp/counted-present", "MTP block counted and there", None, with_mtp(3, 1, 99), mtp),
        case("mtp/counted-partly", "MTP block counted, half of it there", None, with_mtp(3, 1, 7), mtp),
        case(
            "mtp/present-uncounted",
            "MTP block there, not counted",
            "tensor blk.2.attn_norm.weight is unknown in a qwen35 model of 2 layers",
            with_mtp(2, None, 99),
        ),
        case(
            "mtp/all-blocks",
            "as many MTP blocks as blocks",
            "key qwen35.nextn_predict_layers is 2, expected less than block_count (2)",
            with_mtp(2, 2, 0),
            "llama.cpp has no multi-token prediction for qwen35 and does not read the key",
        ),
        case(
            "mtp/count-max",
            "2^32 - 1 MTP blocks",
            "key qwen35.nextn_predict_layers is 4294967295, expected less than block_count (2)",
            with_mtp(2, 2**32 - 1, 0),
            "llama.cpp has no multi-token prediction for qwen35 and does not read the key",
        ),
        case(
            "split/first-part",
            "split.count 2",
            "key split.count is 2, expected a single file: join the parts first",
            lambda m: m.key("split.count", 2, 2).key("split.no", 2, 0),
        ),
        case(
            "split/text",
            "split.count a string",
            "key split.count is '2', expected an integer",
            lambda m: m.key("split.count", STRING, "2"),
        ),
    ]


def _places() -> list[Case]:
    def directory(folder: Path) -> Path:
        (folder / FILE_NAME).mkdir()
        return folder / FILE_NAME

    def link(target: str) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            (folder / FILE_NAME).symlink_to(folder / target)
            return folder / FILE_NAME

        return make

    def pipe(folder: Path) -> Path:
        os.mkfifo(folder / FILE_NAME)
        return folder / FILE_NAME

    def named(name: str) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            model = g.sound().key("split.count", 2, 2)
            (folder / name).write_bytes(model.build())
            return folder / name

        return make

    return [
        Case("place/directory", "a directory", "cannot be opened: Is a directory", directory),
        Case(
            "place/absent", "no file", "cannot be opened: No such file or directory", lambda folder: folder / FILE_NAME
        ),
        Case(
            "place/dangling-link",
            "link to a file that is gone",
            "cannot be opened: No such file or directory",
            link("gone"),
        ),
        Case(
            "place/link-loop", "link to itself", "cannot be opened: Too many levels of symbolic links", link(FILE_NAME)
        ),
        Case(
            "place/pipe",
            "named pipe that nobody writes to",
            "is not a regular file, expected a GGUF file",
            pipe,
            "llama.cpp waits for a writer",
        ),
        Case(
            "place/zero-device",
            "link to /dev/zero",
            "is not a regular file, expected a GGUF file",
            lambda folder: _link_to(folder, "/dev/zero"),
        ),
        Case(
            "place/split-name",
            "`case-00001-of-00002.gguf` with split.count 2, alone",
            "key split.count is 2, expected a single file: join the parts first",
            named("case-00001-of-00002.gguf"),
        ),
    ]


def _link_to(folder: Path, target: str) -> Path:
    (folder / FILE_NAME).symlink_to(target)
    return folder / FILE_NAME


CASES: tuple[Case, ...] = (
    sound_case(),
    *_starts(),
    *_counts(),
    *_values(),
    *_alignments(),
    *_tensor_entries(),
    *_offsets(),
    *_cuts(),
    *_hyperparameters(),
    *_vocabularies(),
    *_tensors(),
    *_places(),
)
"""Every case; ids are GROUP/NAME."""
