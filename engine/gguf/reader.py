"""Open a GGUF file: memory-mapped, every header field and tensor extent checked before anything is used."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from engine.errors import ModelFileError

__all__ = ["SUPPORTED_TYPES", "Metadata", "ModelFile", "TensorInfo", "open_model"]

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S")

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_HEADER_N_BYTES = 24
_ARRAY_HEADER_N_BYTES = 12
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
        return int(number) if prefix == "blk" and number.isascii() and number.isdigit() else None


class Metadata(Mapping[str, Any]):
    """The file's key-value pairs, each decoded only when it is asked for.

    Scalars come as Python int, float, bool or str, arrays as lists. Bytes that are not UTF-8 become lone
    surrogates (`surrogateescape`), so that nothing is lost.
    """

    def __init__(self, fields: Mapping[str, ReaderField]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        entry = self._fields[key]
        payload = entry.parts[entry.data[0]]
        if entry.types[0] == GGUFValueType.STRING:
            return _text(payload.tobytes())
        if entry.types[0] != GGUFValueType.ARRAY:
            return payload.tolist()[0]
        if entry.types[1] == GGUFValueType.STRING:
            return _strings(payload.tobytes())
        return payload.tolist()

    def __contains__(self, key: object) -> bool:
        return key in self._fields  # the inherited method would decode the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def array_length(self, key: str) -> int | None:
        """Return the length of the array `key` without decoding it; None if there is no such array."""
        entry = self._fields.get(key)
        if entry is None or entry.types[0] != GGUFValueType.ARRAY:
            return None
        return int(entry.parts[entry.data[0] - 1][0])

    def value_type(self, key: str) -> tuple[GGUFValueType, GGUFValueType | None]:
        """Return the GGUF type of `key` and, for an array, the type of its entries."""
        types = self._fields[key].types
        return types[0], types[1] if len(types) > 1 else None


@dataclass(frozen=True, eq=False)
class ModelFile:
    """An open GGUF file: metadata, the tensor directory in file order, and views of the tensor bytes."""

    path: Path
    n_bytes: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    _bytes: npt.NDArray[np.uint8] = field(repr=False)

    @property
    def name(self) -> str:
        """Base name of the file, as error messages give it."""
        return self.path.name

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor as (n_rows, row_n_bytes) u8, a read-only view into the memory map."""
        info = self.tensor(name)
        return self._bytes[info.offset : info.offset + info.n_bytes].reshape(info.n_rows, info.row_n_bytes)

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
            raise self.error(f"key {key} is an array of {values[0]!r} and the like, not of {kind.__name__}")
        if kind is str and not _is_utf8(values):
            raise self.error(f"key {key} has an entry that is not UTF-8")
        return values

    def error(self, problem: str) -> ModelFileError:
        """Build the error that reports `problem` about this file."""
        return ModelFileError(f"{self.name}: {problem}")

    def _of_kind(self, key: str, kind: type[T]) -> T:
        value = self.metadata[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            shown = f"an array of {len(value)}" if isinstance(value, list) else repr(value)
            raise self.error(f"key {key} is {shown}, expected {_KIND_NAMES[kind]}")
        return value


def open_model(path: str | Path) -> ModelFile:
    """Open a GGUF file and check its header; only header pages are read, tensor bytes stay on disk.

    Raises ModelFileError, one line naming the file and the tensor or key, when the file cannot be read, is
    not a little-endian GGUF of version 2 or 3, is cut short, is one part of a split model, or holds a tensor
    of an unsupported type, a row that is not whole blocks, a duplicate or a misplaced tensor.
    """
    path = Path(path)
    n_bytes = _check_start(path)
    try:
        header = _Header(path)
    except _HeaderError as error:
        raise ModelFileError(f"{path.name}: {error}") from None
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path.name}: header cannot be read: {error.args[0]}") from None
    metadata = Metadata({key: entry for key, entry in header.fields.items() if not key.startswith("GGUF.")})
    view = np.asarray(header.data)
    model = ModelFile(path, n_bytes, int(header.alignment), metadata, header.directory, view)
    _check_extents(model, int(header.data_offset))
    n_parts = model.optional("split.count", int, 1)
    if n_parts > 1:
        raise model.error(f"key split.count is {n_parts}, expected a single file: join the parts first")
    return model


class _HeaderError(Exception):
    """A header field that cannot be used; the message lacks only the file name."""


class _Header(GGUFReader):
    """GGUFReader that checks every read against the end of the file, and takes an array as one block.

    The base class makes several NumPy views per array entry, which takes many seconds for a vocabulary of
    248,320 tokens, and builds data views without checking that the file has the bytes.
    """

    directory: dict[str, TensorInfo]

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: str | None = None
    ) -> npt.NDArray[Any]:
        item = np.dtype(dtype)
        if offset + item.itemsize * int(count) > self.data.nbytes:
            after = f" after {self._last_text!r}" if self._last_text else ""
            raise _HeaderError(f"truncated: the file ends at byte {self.data.nbytes}, in the header{after}")
        return np.frombuffer(self.data, item, int(count), int(offset))

    _last_text = ""

    def _get_str(self, offset: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        length, text = super()._get_str(offset)
        self._last_text = _text(text[:64].tobytes())
        return length, text

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if self._value_type(raw_type) != GGUFValueType.ARRAY:
            size, parts, indexes, types = super()._get_field_parts(orig_offs, raw_type)
            return size, parts, indexes, types
        item_type = self._value_type(self._get(orig_offs, np.uint32)[0])
        length = self._get(orig_offs + 4, np.uint64)
        payload = self._array(orig_offs + _ARRAY_HEADER_N_BYTES, item_type, int(length[0]))
        n_bytes = _ARRAY_HEADER_N_BYTES + payload.nbytes
        return n_bytes, [length, payload], [1], [GGUFValueType.ARRAY, item_type]

    def _value_type(self, raw_type: int) -> GGUFValueType:
        try:
            return GGUFValueType(int(raw_type))
        except ValueError:
            raise _HeaderError(f"key {self._last_text} has value type {raw_type}, expected 0 to 12") from None

    def _array(self, start: int, item_type: GGUFValueType, length: int) -> npt.NDArray[Any]:
        scalar = self.gguf_scalar_to_np.get(item_type)
        if scalar is not None:
            return self._get(start, scalar, length)
        if item_type != GGUFValueType.STRING:
            raise _HeaderError(f"key {self._last_text} is an array of arrays, expected numbers or strings")
        return self._get(start, np.uint8, self._strings_end(start, length) - start)

    def _strings_end(self, start: int, length: int) -> int:
        """Return the offset just past `length` strings; a plain loop over the map, 0.1 us a string."""
        read, end, n_bytes = struct.Struct("<Q").unpack_from, start, self.data.nbytes
        buffer = self.data.data
        for _ in range(length):
            if end + 8 > n_bytes:
                break
            end += 8 + read(buffer, end)[0]
        return end if end <= n_bytes else n_bytes + 1

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.directory = {}
        for entry in fields:
            if entry.name in self.directory:
                raise _HeaderError(f"tensor {entry.name} occurs twice in the directory")
            self.directory[entry.name] = _tensor_info(entry, int(start_offs))


def _check_start(path: Path) -> int:
    """Return the size of the file in bytes after checking magic, byte order, version and counts."""
    try:
        n_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_HEADER_N_BYTES)
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be opened: {error.strerror}") from None
    if start[:4] != b"GGUF":
        raise ModelFileError(f"{path.name}: not a GGUF file: starts with {start[:4]!r}, expected b'GGUF'")
    if len(start) < _HEADER_N_BYTES:
        raise ModelFileError(f"{path.name}: truncated: the file ends at byte {len(start)}, in the header")
    version, n_tensors, n_kv = struct.unpack("<IQQ", start[4:])
    if version & 0xFFFF == 0:
        raise ModelFileError(f"{path.name}: big-endian GGUF, expected little-endian")
    if version not in _VERSIONS:
        raise ModelFileError(f"{path.name}: GGUF version {version}, expected 2 or 3")
    if n_tensors + n_kv > n_bytes:
        raise ModelFileError(f"{path.name}: {n_tensors} tensors and {n_kv} keys cannot fit into {n_bytes} bytes")
    return n_bytes


def _tensor_info(entry: ReaderField, data_start: int) -> TensorInfo:
    """Check one directory entry and compute its extent."""
    _, _, _, dims, raw_type, offset = entry.parts
    shape = tuple(int(n) for n in dims)
    try:
        type_name = GGMLQuantizationType(int(raw_type[0])).name
    except ValueError:
        type_name = f"number {int(raw_type[0])}"
    if type_name not in SUPPORTED_TYPES:
        supported = ", ".join(SUPPORTED_TYPES)
        raise _HeaderError(f"tensor {entry.name} has type {type_name}, expected one of {supported}")
    if not 1 <= len(shape) <= _MAX_DIMS or min(shape) < 1:
        raise _HeaderError(f"tensor {entry.name} has shape {list(shape)}, expected 1 to 4 positive sizes")
    block, block_n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if shape[0] % block:
        raise _HeaderError(f"tensor {entry.name} ({type_name}) has rows of {shape[0]}, not a multiple of {block}")
    n_bytes = math.prod(shape) // block * block_n_bytes
    return TensorInfo(entry.name, shape, type_name, data_start + int(offset[0]), n_bytes)


def _check_extents(model: ModelFile, data_start: int) -> None:
    """Check that tensors follow each other without gap or overlap and lie within the file."""
    expected = data_start
    for info in model.tensors.values():
        if info.offset != expected:
            raise model.error(f"tensor {info.name} starts at byte {info.offset}, expected {expected}")
        expected += -(-info.n_bytes // model.alignment) * model.alignment
    for info in model.tensors.values():
        missing = info.offset + info.n_bytes - model.n_bytes
        if missing > 0:
            found = f"ends at byte {info.offset + info.n_bytes}, the file at {model.n_bytes}"
            raise model.error(f"truncated: tensor {info.name} {found}: {missing} bytes are missing")


def _is_utf8(texts: list[str]) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _strings(data: bytes) -> list[str]:
    """Decode the payload of a GGUF string array: a u64 length and the bytes, repeated."""
    read, start, texts = struct.Struct("<Q").unpack_from, 0, []
    while start < len(data):
        end = start + 8 + read(data, start)[0]
        texts.append(data[start + 8 : end].decode("utf-8", "surrogateescape"))
        start = end
    return texts
