"""The compiled kernels of a model, callable by name expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import cupy

from engine.cuda.compile import Cubin, compile_kernels

Kernel = Callable[..., None]
"""Called as kernel(grid, block, args): launches on CuPy's current stream."""


class Kernels:
    """Maps a name expression such as "gemv<Q4_K, 5120, 1, 0>" to its kernel on the current device."""

    def __init__(self, expressions: Iterable[str], arch: str) -> None:
        self.cubin: Cubin = compile_kernels(sorted(set(expressions)), arch)
        self._module = cupy.cuda.function.Module()
        self._module.load(self.cubin.code)
        self._kernels = {
            name: self._module.get_function(symbol)
            for name, symbol in self.cubin.lowered.items()
            if not name.startswith("&")
        }

    def __getitem__(self, expression: str) -> Kernel:
        kernel: Kernel = self._kernels[expression]
        return kernel

    def write_global(self, name: str, values: Any) -> None:
        """Copy a NumPy array to the __device__ variable behind the expression `&NAME`."""
        address = self._module.get_global_var(self.cubin.lowered[f"&{name}"])
        runtime = cupy.cuda.runtime
        runtime.memcpy(int(address), values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice)
