"""Write a copy of a model without its multi-token-prediction (MTP) blocks, which llama.cpp b8763 cannot load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from engine.errors import RequestError
from engine.gguf.reader import ModelFile, TensorInfo

__all__ = ["write_trunk"]

# Keys that may hold one entry a block, MTP blocks included.
_PER_BLOCK_KEYS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


def write_trunk(
    model: ModelFile, out: Path, *, overwrite: bool = False, progress: Callable[[int], None] = lambda n: None
) -> None:
    """Write the trunk of `model` to `out`: block_count reduced, the MTP key and the MTP tensors left out.

    All other keys and tensors keep their order and bytes. The file appears under its name only when it is
    complete. progress is called with the number of bytes of each tensor once it is written. Raises
    ModelFileError if the model has no MTP block, RequestError if `out` exists and overwrite is false, is the
    model itself, or cannot be written.
    """
    architecture = model.require("general.architecture", str)
    count_key, nextn_key = f"{architecture}.block_count", f"{architecture}.nextn_predict_layers"
    n_nextn = model.optional(nextn_key, int, 0)
    n_layer = model.require(count_key, int) - n_nextn
    if n_nextn < 1 or n_layer < 1:
        raise model.error(f"key {nextn_key} is {n_nextn}, expected 1 or more MTP blocks to leave out")
    _check_target(model, out, overwrite)
    tensors = [info for info in model.tensors.values() if info.block is None or info.block < n_layer]
    per_block = {f"{architecture}.{key}" for key in _PER_BLOCK_KEYS}
    with _replacing(out) as temporary:
        writer = GGUFWriter(temporary, architecture)
        writer.data_alignment = model.alignment
        writer.kv_data = [{}]  # the writer put the architecture first; the model's own order is kept instead
        for key in model.metadata:
            if key != nextn_key:
                value = n_layer if key == count_key else model.metadata[key]
                kept = value[:n_layer] if key in per_block and isinstance(value, list) else value
                _add_key(writer, model, key, kept)
        _write(writer, model, tensors, progress)


def _check_target(model: ModelFile, out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if out.samefile(model.path):
        raise RequestError(f"{out.name}: is the model itself, expected another file to write to")
    if not overwrite:
        raise RequestError(f"{out.name}: exists already, expected a new file unless told to overwrite (--force)")


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a temporary name beside `out`; rename it to `out` at the end, or remove it on failure."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        yield temporary
        temporary.replace(out)
    except OSError as error:
        raise RequestError(f"{out.name}: cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _add_key(writer: GGUFWriter, model: ModelFile, key: str, value: Any) -> None:
    """Add one key with its own GGUF type; an empty array, which the writer refuses, is left out."""
    kind, item_kind = model.metadata.value_type(key)
    if value == []:
        return
    if GGUFValueType.STRING in (kind, item_kind):
        value = [_bytes(text) for text in value] if isinstance(value, list) else _bytes(value)
    writer.add_key_value(key, value, kind, item_kind)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _write(writer: GGUFWriter, model: ModelFile, tensors: list[TensorInfo], progress: Callable[[int], None]) -> None:
    """Write header, keys and directory, then each tensor straight from the memory map."""
    for info in tensors:
        byte_shape = (*reversed(info.shape[1:]), info.row_n_bytes)
        kind = GGMLQuantizationType[info.type]
        writer.add_tensor_info(info.name, byte_shape, np.dtype(np.uint8), info.n_bytes, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for info in tensors:
            writer.write_tensor_data(model.raw(info.name))
            progress(info.n_bytes)
    finally:
        writer.close()
