"""The header of a GGUF file, read field by field; every count and length is checked before it is followed.

Nothing here is memory-mapped: what is kept are copies, so a file that changes afterwards cannot change them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType

__all__ = ["NUMBERS", "Header", "HeaderError", "TensorEntry", "Value", "read_header"]

NUMBERS: dict[GGUFValueType, npt.DTypeLike] = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
"""How the values of a type lie in the file; strings and arrays are not among them."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_START_N_BYTES = 24
_MAX_DIMS = 4
_MAX_KEY_N_BYTES = 65535
_MAX_TENSOR_NAME_N_BYTES = 63
_MAX_HEADER_N_BYTES = 1 << 26  # a vocabulary of 248,320 tokens with its merges takes 12 MB
_READ_AHEAD_N_BYTES = 1 << 16


class HeaderError(Exception):
    """A header that cannot be used; the message lacks only the file name."""


@dataclass(frozen=True)
class Value:
    """One value as it lies in the file: data has no type and, for strings and arrays, no length in front.

    item_type and length are those of an array, None for anything else.
    """

    type: GGUFValueType
    data: bytes
    item_type: GGUFValueType | None = None
    length: int | None = None


@dataclass(frozen=True)
class TensorEntry:
    """One entry of the tensor directory, numbers as they are in the file; offset counts from the data's start."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


@dataclass(frozen=True)
class Header:
    """All keys and tensor entries in file order; n_bytes is where the header ends, before any padding."""

    values: dict[str, Value]
    tensors: list[TensorEntry]
    n_bytes: int


def read_header(file: BinaryIO, n_bytes: int) -> Header:
    """Read the header of an open file of n_bytes; raises HeaderError naming key or tensor, found and expected."""
    n_tensors, n_keys = _check_start(file.read(_START_N_BYTES), n_bytes)
    cursor = _Cursor(file, n_bytes)
    values: dict[str, Value] = {}
    for number in range(n_keys):
        key = _key(cursor, number)
        if key in values:
            raise HeaderError(f"key {key} occurs twice, expected once")
        values[key] = _value(cursor, key)
    tensors: dict[str, TensorEntry] = {}
    for number in range(n_tensors):
        entry = _tensor_entry(cursor, number)
        if entry.name in tensors:
            raise HeaderError(f"tensor {entry.name} occurs twice in the directory, expected once")
        tensors[entry.name] = entry
    return Header(values, list(tensors.values()), cursor.position)


class _Cursor:
    """A position in the header; reads ahead in small pieces and never past the end of the file."""

    def __init__(self, file: BinaryIO, n_bytes: int) -> None:
        self._file, self._n_bytes = file, n_bytes
        self._data = bytearray()  # what follows the fixed start
        self._at = 0
        self.last_text = ""

    @property
    def position(self) -> int:
        """Offset in the file of what comes next."""
        return _START_N_BYTES + self._at

    def take(self, n_bytes: int) -> bytes:
        """Return the next bytes and step over them."""
        end = self._at + n_bytes
        self._require(end)
        start, self._at = self._at, end
        return bytes(self._data[start:end])

    def u32(self) -> int:
        """Return the next four bytes as a number."""
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        """Return the next eight bytes as a number."""
        return int.from_bytes(self.take(8), "little")

    def take_strings(self, n_strings: int) -> bytes:
        """Return the next strings with their lengths, undivided; a plain loop, 0.1 us a string."""
        read, end = struct.Struct("<Q").unpack_from, self._at
        for _ in range(n_strings):
            if end + 8 > len(self._data):
                self._require(end + 8)
            end += 8 + read(self._data, end)[0]
        return self.take(end - self._at)

    def _require(self, end: int) -> None:
        """Read on until the data has `end` bytes."""
        if _START_N_BYTES + end > self._n_bytes:
            self._fail_truncated(self._n_bytes)
        if end > _MAX_HEADER_N_BYTES:
            raise HeaderError(f"the header has more than {_MAX_HEADER_N_BYTES} bytes{self.after()}, expected fewer")
        while len(self._data) < end:
            piece = self._file.read(max(end - len(self._data), _READ_AHEAD_N_BYTES))
            if not piece:
                self._fail_truncated(_START_N_BYTES + len(self._data))
            self._data += piece

    def _fail_truncated(self, n_bytes: int) -> None:
        raise HeaderError(f"truncated: the file ends at byte {n_bytes}, in the header{self.after()}")

    def after(self) -> str:
        """Say behind which name the cursor is."""
        return f" after {self.last_text!r}" if self.last_text else ""


def _check_start(start: bytes, n_bytes: int) -> tuple[int, int]:
    """Check magic, byte order, version and counts; return the number of tensors and of keys."""
    if start[:4] != _MAGIC:
        raise HeaderError(f"not a GGUF file: starts with {start[:4]!r}, expected {_MAGIC!r}")
    if len(start) < _START_N_BYTES:
        raise HeaderError(f"truncated: the file ends at byte {len(start)}, in the header")
    version, n_tensors, n_keys = struct.unpack("<IQQ", start[4:])
    if version and version & 0xFFFF == 0:
        raise HeaderError("big-endian GGUF, expected little-endian")
    if version not in _VERSIONS:
        raise HeaderError(f"GGUF version {version}, expected 2 or 3")
    if n_tensors + n_keys > n_bytes:
        raise HeaderError(f"{n_tensors} tensors and {n_keys} keys cannot fit into {n_bytes} bytes")
    return n_tensors, n_keys


def _key(cursor: _Cursor, number: int) -> str:
    n_bytes = cursor.u64()
    if not 1 <= n_bytes <= _MAX_KEY_N_BYTES:
        found = f"key number {number} has a name of {n_bytes} bytes{cursor.after()}"
        raise HeaderError(f"{found}, expected 1 to {_MAX_KEY_N_BYTES}")
    return _name(cursor, n_bytes, f"key number {number}")


def _name(cursor: _Cursor, n_bytes: int, what: str) -> str:
    data = cursor.take(n_bytes)
    try:
        cursor.last_text = data.decode()
    except UnicodeDecodeError:
        raise HeaderError(f"{what} is named {data[:64]!r}, expected UTF-8") from None
    return cursor.last_text


def _value(cursor: _Cursor, key: str) -> Value:
    kind = _value_type(cursor.u32(), key)
    if kind == GGUFValueType.STRING:
        return Value(kind, cursor.take(cursor.u64()))
    if kind != GGUFValueType.ARRAY:
        return Value(kind, cursor.take(np.dtype(NUMBERS[kind]).itemsize))
    item_kind, length = _value_type(cursor.u32(), key), cursor.u64()
    if item_kind == GGUFValueType.ARRAY:
        raise HeaderError(f"key {key} is an array of arrays, expected numbers or strings")
    if item_kind == GGUFValueType.STRING:
        return Value(kind, cursor.take_strings(length), item_kind, length)
    return Value(kind, cursor.take(length * np.dtype(NUMBERS[item_kind]).itemsize), item_kind, length)


def _value_type(number: int, key: str) -> GGUFValueType:
    try:
        return GGUFValueType(number)
    except ValueError:
        raise HeaderError(f"key {key} has value type {number}, expected 0 to 12") from None


def _tensor_entry(cursor: _Cursor, number: int) -> TensorEntry:
    n_bytes = cursor.u64()
    if not 1 <= n_bytes <= _MAX_TENSOR_NAME_N_BYTES:
        found = f"tensor number {number} has a name of {n_bytes} bytes{cursor.after()}"
        raise HeaderError(f"{found}, expected 1 to {_MAX_TENSOR_NAME_N_BYTES}")
    name = _name(cursor, n_bytes, f"tensor number {number}")
    n_dims = cursor.u32()
    if not 1 <= n_dims <= _MAX_DIMS:
        raise HeaderError(f"tensor {name} has {n_dims} dimensions, expected 1 to {_MAX_DIMS}")
    shape = tuple(cursor.u64() for _ in range(n_dims))
    return TensorEntry(name, shape, cursor.u32(), cursor.u64())
