"""The compiled kernels of a model, callable by name expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import cupy
import numpy as np

from engine.cuda.compile import Cubin, compile_kernels
from engine.cuda.whole_step import Launch

Kernel = Callable[..., None]
"""Called as kernel(grid, block, args, shared_n_bytes=0): launches on CuPy's current stream."""

_FIRST_ARCH_WITH_OVERLAP = 90


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
        for kernel in self._kernels.values():
            _allow_shared_memory(kernel.ptr)
        self.n_sm = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._can_overlap = int(arch.removeprefix("sm_")) >= _FIRST_ARCH_WITH_OVERLAP
        self._overlapping = False
        self._recorded: list[Launch] | None = None

    def __getitem__(self, expression: str) -> Kernel:
        kernel: Kernel = self._kernels[expression]
        if self._recorded is not None:
            return partial(_record, self._recorded, expression)
        return self._overlapped(kernel) if self._overlapping else kernel

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Let each kernel launched inside, after the first, start while the one before it still runs.

        That is programmatic dependent launch: the kernels themselves wait (`dependency_wait` in numerics.cuh) before
        they touch what another kernel writes. The first kernel follows copies, which it must wait for as a whole.
        Architectures before sm_90 launch as always.
        """
        if not self._can_overlap:
            yield
            return
        self._overlapping, self._is_first = True, True
        try:
            yield
        finally:
            self._overlapping = False

    @contextmanager
    def recording(self) -> Iterator[list[Launch]]:
        """Collect launches made inside in the list given, instead of making them."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def launch_cooperative(
        self, expression: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_n_bytes: int
    ) -> None:
        """Launch with all blocks resident at the same time, or not at all: RuntimeError."""
        _launch(self._kernels[expression].ptr, grid, block, args, shared_n_bytes, _cooperative())

    def _overlapped(self, kernel: Any) -> Kernel:
        if self._is_first:
            self._is_first = False
            plain: Kernel = kernel
            return plain
        return partial(_launch_overlapped, kernel.ptr)

    def write_global(self, name: str, values: Any) -> None:
        """Copy a NumPy array to the __device__ variable behind the expression `&NAME`."""
        address = self._module.get_global_var(self.cubin.lowered[f"&{name}"])
        runtime = cupy.cuda.runtime
        runtime.memcpy(int(address), values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice)


def _allow_shared_memory(function: int) -> None:
    """Let a kernel ask for as much dynamic shared memory as the device has; without this, 48 KiB are the limit."""
    from cuda.bindings import driver

    attributes = driver.CUfunction_attribute
    device = cupy.cuda.Device().attributes
    static = _call(driver.cuFuncGetAttribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
    most = device["MaxSharedMemoryPerBlockOptin"] - static
    _call(driver.cuFuncSetAttribute(function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most))


def _call(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call; RuntimeError with the driver's name of the problem."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


def _record(
    launches: list[Launch],
    expression: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared_n_bytes: int = 0,
) -> None:
    launches.append(Launch(expression, tuple(grid), tuple(args)))


def _launch_overlapped(
    function: int, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_n_bytes: int = 0
) -> None:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    _launch(function, grid, block, args, shared_n_bytes, attribute)


def _cooperative() -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    return attribute


def _launch(
    function: int,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    shared_n_bytes: int,
    attribute: Any,
) -> None:
    """Launch on CuPy's current stream with an attribute that CuPy's own launch cannot set."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
    config.sharedMemBytes = shared_n_bytes
    config.hStream = cupy.cuda.get_current_stream().ptr
    config.attrs, config.numAttrs = [attribute], 1
    values = [np.asarray(arg.data.ptr if isinstance(arg, cupy.ndarray) else arg) for arg in args]
    pointers = np.array([value.ctypes.data for value in values], dtype=np.uint64)
    _call(driver.cuLaunchKernelEx(config, driver.CUfunction(function), pointers.ctypes.data, 0))
