"""Device memory with a hard limit: every array of the backend is counted, and asked for before it is taken.

The CUDA context, the loaded kernels and captured graphs come on top, as for any CUDA program."""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from engine.errors import PlacementError
from engine.gguf.inventory import padded_n_bytes


class DeviceMemory:
    """Hands out 256-byte aligned blocks until the budget is used up.

    `n_allocations` and `n_bytes` count what was taken, so a test can show that decoding takes nothing more.
    """

    def __init__(self, budget_n_bytes: int | None = None) -> None:
        self.budget_n_bytes = budget_n_bytes
        self.n_bytes = 0
        self.n_allocations = 0

    def allocate(self, n_bytes: int) -> cupy.cuda.MemoryPointer:
        """Return a block of at least n_bytes; PlacementError when the budget or the device has no room."""
        padded = padded_n_bytes(max(n_bytes, 1))
        if self.budget_n_bytes is not None and self.n_bytes + padded > self.budget_n_bytes:
            raise PlacementError(
                f"device memory budget of {self.budget_n_bytes:,} bytes is exceeded: {self.n_bytes:,} in use, "
                f"{padded:,} more wanted"
            )
        try:
            memory = cupy.cuda.Memory(padded)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise PlacementError(f"the device has no {padded:,} bytes left after {self.n_bytes:,}: {error}") from None
        self.n_bytes += padded
        self.n_allocations += 1
        return cupy.cuda.MemoryPointer(memory, 0)

    def array(self, shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
        """Return a zeroed array of its own block."""
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        pointer = self.allocate(n_bytes)
        pointer.memset(0, max(n_bytes, 1))
        # It ran on the null stream, for which the engine's own streams do not wait.
        cupy.cuda.Stream.null.synchronize()
        return cupy.ndarray(shape, dtype, pointer)

    def release(self, array: cupy.ndarray) -> None:
        """Take a block that `array` returned off the count; it is freed when the caller drops it."""
        self.n_bytes -= padded_n_bytes(array.nbytes)


class Pool:
    """Blocks cut from one allocation, in order: the weights of a model."""

    def __init__(self, memory: DeviceMemory, n_bytes: int) -> None:
        self._pointer = memory.allocate(n_bytes)
        self._n_bytes = n_bytes
        self.used_n_bytes = 0

    def take(self, n_bytes: int) -> cupy.ndarray:
        """Return the next block as (n_bytes) u8, 256-byte aligned; PlacementError past the end."""
        begin, end = self.used_n_bytes, self.used_n_bytes + padded_n_bytes(n_bytes)
        if end > self._n_bytes:
            raise PlacementError(f"the weights need {end:,} bytes, {self._n_bytes:,} were planned")
        self.used_n_bytes = end
        return cupy.ndarray((n_bytes,), np.uint8, self._pointer + begin)
