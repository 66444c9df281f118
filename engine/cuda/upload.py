"""Move weights from the memory-mapped file to the device while the next slice is still being read.

Two pinned slices alternate: while the device copies and repacks one, the host fills the other. What is as small as
rows of the embedding table is not copied: kernels read and write it in pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from engine import quants
from engine.cuda import gemv
from engine.cuda.kernels import Kernels
from engine.cuda.memory import DeviceMemory
from engine.gguf.inventory import RESIDENT_ALIGNMENT_N_BYTES, padded_n_bytes

SLICE_N_BYTES = 16 << 20
"""Most bytes on the way at a time: enough for full bus speed."""
N_SLICES = 2


class Uploader:
    """Copies rows to strips (formats.cuh); block formats pass through a device slice, float ones go straight.

    The device slices fit into room_n_bytes together: they make way for the working buffers, so that loading never
    needs more memory than running.
    """

    def __init__(self, kernels: Kernels, memory: DeviceMemory, room_n_bytes: int) -> None:
        self._kernels = kernels
        self._stream = cupy.cuda.Stream(non_blocking=True)
        aligned = room_n_bytes // N_SLICES // RESIDENT_ALIGNMENT_N_BYTES * RESIDENT_ALIGNMENT_N_BYTES
        self._slice_n_bytes = min(SLICE_N_BYTES, aligned)
        self._host = [pinned(self._slice_n_bytes) for _ in range(N_SLICES)]
        self._memory = memory
        self._device = [memory.array((self._slice_n_bytes,), np.uint8) for _ in range(N_SLICES)]
        self._free: list[cupy.cuda.Event | None] = [None] * N_SLICES
        self._next = 0

    def matrix(self, type_name: str, raw: NDArray[np.uint8], out: cupy.ndarray) -> gemv.DeviceMatrix:
        """Fill `out` (n_bytes) u8 from raw (n_out, row_n_bytes) u8 and return the matrix it now is."""
        n_out, n_in = raw.shape[0], gemv.n_in_of_row(type_name, raw.shape[1])
        flat = raw.reshape(-1)
        if quants.is_quantized(type_name):
            self._blocks(type_name, flat, out)
        else:
            self._bytes(flat, out)
        return gemv.DeviceMatrix(type_name, n_in, n_out, out)

    def finish(self) -> None:
        """Wait until everything has arrived, and give the device slices back."""
        self._stream.synchronize()
        for slice_ in self._device:
            self._memory.release(slice_)
        self._device = []

    def _blocks(self, type_name: str, flat: NDArray[np.uint8], out: cupy.ndarray) -> None:
        form = quants.QUANT_FORMATS[type_name]
        block_n_bytes, subs = form.block.itemsize, form.n_weights // 32
        n_sub = flat.size // block_n_bytes * subs
        step = self._slice_n_bytes // block_n_bytes * block_n_bytes
        for begin in range(0, flat.size, step):
            part = flat[begin : begin + step]
            slot = self._send(part, None)
            first, n = begin // block_n_bytes * subs, part.size // block_n_bytes * subs
            with _using(self._stream):
                gemv.repack(self._kernels, type_name, self._device[slot], out, n_sub, first, n)
            self._free[slot] = self._stream.record()

    def _bytes(self, flat: NDArray[np.uint8], out: cupy.ndarray) -> None:
        for begin in range(0, flat.size, self._slice_n_bytes):
            part = flat[begin : begin + self._slice_n_bytes]
            slot = self._send(part, out[begin : begin + part.size])
            self._free[slot] = self._stream.record()

    def _send(self, part: NDArray[np.uint8], target: cupy.ndarray | None) -> int:
        """Start copying `part` to `target`, or to the slot's device slice; return the slot."""
        slot, self._next = self._next, (self._next + 1) % N_SLICES
        free = self._free[slot]
        if free is not None:
            free.synchronize()
        self._host[slot][: part.size] = part
        device = self._device[slot] if target is None else target
        copy_in(device, self._host[slot], part.size, self._stream)
        return slot


@contextmanager
def _using(stream: cupy.cuda.Stream) -> Iterator[None]:
    """Launch on `stream`, then on the stream that was in use; `with stream` would go back to the null stream."""
    before = cupy.cuda.get_current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()


def pinned(n_bytes: int) -> NDArray[np.uint8]:
    """Return page-locked host memory, which the device can read without the driver's own staging."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(n_bytes), np.uint8, n_bytes)


@dataclass(frozen=True)
class Mapped:
    """Pinned memory as the host sees it, and the same bytes as kernels address them, over the bus.

    What one side writes the other one sees behind the next launch, or after the stream has been waited for.
    """

    host: NDArray[Any]
    device: cupy.ndarray


def mapped(shape: tuple[int, ...], dtype: type[np.generic]) -> Mapped:
    """Return page-locked host memory for both sides; it is padded, so that it may be read in words of 16 bytes."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    whole = pinned(padded_n_bytes(n_bytes))
    memory = cupy.cuda.UnownedMemory(whole.ctypes.data, whole.nbytes, whole)
    device = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
    return Mapped(whole[:n_bytes].view(dtype).reshape(shape), device)


def copy_in(device: cupy.ndarray, host: NDArray[np.generic], n_bytes: int, stream: cupy.cuda.Stream) -> None:
    """Copy n_bytes of pinned host memory to the device, asynchronously."""
    runtime = cupy.cuda.runtime
    runtime.memcpyAsync(device.data.ptr, host.ctypes.data, n_bytes, runtime.memcpyHostToDevice, stream.ptr)
