"""Open a GGUF file: memory-mapped, every header field and tensor extent checked before anything is used."""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import ModelFileError, shown
from engine.gguf.header import NUMBERS, HeaderError, TensorEntry, Value, read_header

__all__ = ["SUPPORTED_TYPES", "Metadata", "ModelFile", "TensorInfo", "open_model"]

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S")

_DEFAULT_ALIGNMENT = 32
_MAX_BLOCK_DIGITS = 9
_KIND_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a float",
    str: "a string",
    bool: "a boolean",
    list: "an array",
}

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor directory.

    shape is in GGUF order: shape[0] = n_in is the row length, the product of the rest the number of rows.
    offset counts from the start of the file; n_bytes excludes padding.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    n_bytes: int

    @property
    def n_rows(self) -> int:
        """Number of rows: the product of all dimensions after the first."""
        return math.prod(self.shape[1:])

    @property
    def row_n_bytes(self) -> int:
        """Bytes of one row."""
        return self.n_bytes // self.n_rows

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def block(self) -> int | None:
        """N for a tensor named `blk.N.…`, None for any other."""
        prefix, _, rest = self.name.partition(".")
        number = rest.partition(".")[0]
        is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_BLOCK_DIGITS
        return int(number) if prefix == "blk" and is_number else None


class Metadata(Mapping[str, Any]):
    """The file's key-value pairs, each decoded only when it is asked for.

    Scalars come as Python int, float, bool or str, arrays as lists. Bytes that are not UTF-8 become lone
    surrogates (`surrogateescape`), so that nothing is lost.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if value.type == GGUFValueType.STRING:
            return _text(value.data)
        if value.item_type == GGUFValueType.STRING:
            return _strings(value.data)
        if value.item_type is None:
            return np.frombuffer(value.data, NUMBERS[value.type]).tolist()[0]
        return np.frombuffer(value.data, NUMBERS[value.item_type]).tolist()

    def __contains__(self, key: object) -> bool:
        return key in self._values  # the inherited method would decode the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array_length(self, key: str) -> int | None:
        """Return the length of the array `key` without decoding it; None if there is no such array."""
        value = self._values.get(key)
        return None if value is None else value.length

    def value_type(self, key: str) -> tuple[GGUFValueType, GGUFValueType | None]:
        """Return the GGUF type of `key` and, for an array, the type of its entries."""
        value = self._values[key]
        return value.type, value.item_type


@dataclass(frozen=True, eq=False)
class ModelFile:
    """An open GGUF file: metadata, the tensor directory in file order, and views of the tensor bytes."""

    path: Path
    n_bytes: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    _map: mmap.mmap = field(repr=False)

    @property
    def name(self) -> str:
        """Base name of the file, as error messages give it."""
        return self.path.name

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor as (n_rows, row_n_bytes) u8, a read-only view into the memory map.

        Raises ModelFileError if the file has none of that name or has become shorter.
        """
        info = self.tensor(name)
        self.check_whole()
        data = np.frombuffer(self._map, np.uint8, info.n_bytes, info.offset)
        return data.reshape(info.n_rows, info.row_n_bytes)

    def check_whole(self) -> None:
        """Raise ModelFileError if the file has become shorter: the system ends a process that reads what is gone."""
        n_bytes = self._map.size()
        if n_bytes < self.n_bytes:
            raise self.error(f"the file shrank to {n_bytes} bytes while it was in use, expected {self.n_bytes}")

    def tensor(self, name: str) -> TensorInfo:
        """Return the directory entry of a tensor; raises ModelFileError if the file has none of that name."""
        info = self.tensors.get(name)
        if info is None:
            raise self.error(f"tensor {name} is missing")
        return info

    def require(self, key: str, kind: type[T]) -> T:
        """Return the value of `key`; raises ModelFileError if it is missing or not of `kind`."""
        if key not in self.metadata:
            raise self.error(f"key {key} is missing, expected {_KIND_NAMES[kind]}")
        return self._of_kind(key, kind)

    @overload
    def optional(self, key: str, kind: type[T], default: T) -> T: ...
    @overload
    def optional(self, key: str, kind: type[T], default: None = None) -> T | None: ...
    def optional(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Return the value of `key`, or `default` if missing; raises ModelFileError if not of `kind`."""
        return self._of_kind(key, kind) if key in self.metadata else default

    def require_array(self, key: str, kind: type[T]) -> list[T]:
        """Return the array `key`, all of whose entries are of `kind`; raises ModelFileError otherwise."""
        values = self.require(key, list)
        if any(type(value) is not kind for value in values[:1]):  # GGUF arrays have one type throughout
            found = f"an array of {shown(values[0])} and the like"
            raise self.error(f"key {key} is {found}, expected each entry to be {_KIND_NAMES[kind]}")
        wrong = next((n for n, value in enumerate(values) if kind is str and not _is_utf8(value)), None)
        if wrong is not None:
            raise self.error(f"key {key} has entry {wrong} {shown(_bytes(values[wrong]))}, expected UTF-8")
        return values

    def error(self, problem: str) -> ModelFileError:
        """Build the error that reports `problem` about this file."""
        return ModelFileError(f"{self.name}: {problem}")

    def _of_kind(self, key: str, kind: type[T]) -> T:
        value = self.metadata[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            found = f"an array of {len(value)}" if isinstance(value, list) else shown(value)
            raise self.error(f"key {key} is {found}, expected {_KIND_NAMES[kind]}")
        return value


def open_model(path: str | Path) -> ModelFile:
    """Open a GGUF file and check its header; only the header is read, tensor bytes stay on disk.

    Raises ModelFileError, one line naming the file and the tensor or key, when the file cannot be read, is
    not a little-endian GGUF of version 2 or 3, is cut short, is one part of a split model, or holds a tensor
    of an unsupported type, a row that is not whole blocks, a duplicate or a misplaced tensor.
    """
    path = Path(path)
    try:
        # opening a named pipe would wait for a writer
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return _open(path, file)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or the file shrank to nothing just now
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"{path.name}: cannot be opened: {reason}") from None
    except HeaderError as error:
        raise ModelFileError(f"{path.name}: {error}") from None


def _open(path: Path, file: BinaryIO) -> ModelFile:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise HeaderError("is not a regular file, expected a GGUF file")
    header = read_header(file, status.st_size)
    metadata = Metadata(header.values)
    alignment = _alignment(metadata)
    data_start = -(-header.n_bytes // alignment) * alignment
    tensors = {entry.name: _tensor_info(entry, data_start) for entry in header.tensors}
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    model = ModelFile(path, status.st_size, alignment, metadata, tensors, mapped)
    _check_extents(model, data_start)
    n_parts = model.optional("split.count", int, 1)
    if n_parts > 1:
        raise model.error(f"key split.count is {n_parts}, expected a single file: join the parts first")
    return model


def _alignment(metadata: Metadata) -> int:
    """Return what tensors are aligned to, in bytes."""
    key = "general.alignment"
    if key not in metadata:
        return _DEFAULT_ALIGNMENT
    value, kind = metadata[key], metadata.value_type(key)[0]
    if kind != GGUFValueType.UINT32 or value < 1 or value & (value - 1):
        raise HeaderError(f"key {key} is {shown(value)} ({kind.name}), expected a power of two (UINT32)")
    return int(value)


def _tensor_info(entry: TensorEntry, data_start: int) -> TensorInfo:
    """Check one directory entry and compute its extent."""
    shape = entry.shape
    try:
        type_name = GGMLQuantizationType(entry.type_number).name
    except ValueError:
        type_name = f"number {entry.type_number}"
    if type_name not in SUPPORTED_TYPES:
        supported = ", ".join(SUPPORTED_TYPES)
        raise HeaderError(f"tensor {entry.name} has type {type_name}, expected one of {supported}")
    if min(shape) < 1:
        raise HeaderError(f"tensor {entry.name} has shape {list(shape)}, expected 1 to 4 positive sizes")
    block, block_n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if shape[0] % block:
        raise HeaderError(f"tensor {entry.name} ({type_name}) has rows of {shape[0]}, expected a multiple of {block}")
    n_bytes = math.prod(shape) // block * block_n_bytes
    return TensorInfo(entry.name, shape, type_name, data_start + entry.offset, n_bytes)


def _check_extents(model: ModelFile, data_start: int) -> None:
    """Check that tensors follow each other without gap or overlap and lie within the file."""
    expected = data_start
    for info in model.tensors.values():
        if info.offset != expected:
            raise model.error(f"tensor {info.name} starts at byte {info.offset}, expected {expected}")
        missing = info.offset + info.n_bytes - model.n_bytes
        if missing > 0:
            found = f"ends at byte {info.offset + info.n_bytes}, the file at {model.n_bytes}"
            raise model.error(f"truncated: tensor {info.name} {found}: {missing} bytes are missing")
        expected += -(-info.n_bytes // model.alignment) * model.alignment
    if model.n_bytes > expected:
        raise model.error(f"{model.n_bytes - expected} bytes follow the last tensor, expected the file to end there")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _strings(data: bytes) -> list[str]:
    """Decode the payload of a GGUF string array: a u64 length and the bytes, repeated."""
    read, start, texts = struct.Struct("<Q").unpack_from, 0, []
    while start < len(data):
        end = start + 8 + read(data, start)[0]
        texts.append(_text(data[start + 8 : end]))
        start = end
    return texts
