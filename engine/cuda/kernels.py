"""The compiled kernels of a model, callable by name expression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import cupy
import numpy as np

from engine.cuda.compile import Cubin, Parts, compile_kernels
from engine.cuda.streams import Target

Kernel = Callable[..., None]
"""Called as kernel(grid, block, args, shared_n_bytes=0): launches on CuPy's current stream."""
Watch = Callable[[str, tuple[int, ...]], bool]
"""Gets the name expression and the grid of a launch that is about to be made; returns whether to make it."""

_FIRST_ARCH_WITH_OVERLAP = 90


class Kernels:
    """Maps a name expression such as "gemv<Q4_K, 5120, 1, 0>" to its kernel on the current device."""

    def __init__(self, expressions: Iterable[str], arch: str, parts: Parts = (), *, overlaps: bool = True) -> None:
        self.cubin: Cubin = compile_kernels(sorted(set(expressions)), arch, parts=parts)
        self._module = cupy.cuda.function.Module()
        self._module.load(self.cubin.code)
        self._kernels = {
            name: self._module.get_function(symbol)
            for name, symbol in self.cubin.lowered.items()
            if not name.startswith("&")
        }
        for kernel in self._kernels.values():
            _allow_shared_memory(kernel.ptr)
        self.target = Target.of(arch, int(cupy.cuda.Device().attributes["MultiProcessorCount"]))
        self._can_overlap = overlaps and int(arch.removeprefix("sm_")) >= _FIRST_ARCH_WITH_OVERLAP
        self._overlapping, self._is_first = False, True
        self._watch: Watch | None = None

    def __getitem__(self, expression: str) -> Kernel:
        return partial(self._launch, expression, self._kernels[expression])

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Let each kernel launched inside, after the first, start while the one before it still runs.

        That is programmatic dependent launch: the kernels themselves wait (`dependency_wait` in numerics.cuh) before
        they touch what another kernel writes. The first kernel waits for all that came before it.
        Architectures before sm_90 launch as always, and so does everything without `overlaps`.
        """
        self._overlapping = self._can_overlap
        self.begin_overlap()
        try:
            yield
        finally:
            self._overlapping = False

    def begin_overlap(self) -> None:
        """Let the next kernel wait for all that came before it."""
        self._is_first = True

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Ask `watch` before each launch inside; one that it refuses is left out, as if the pass did not have it."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def _launch(
        self,
        expression: str,
        kernel: Any,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_n_bytes: int = 0,
    ) -> None:
        if self._watch is not None and not self._watch(expression, tuple(grid)):
            return
        if self._overlapping and not self._is_first:
            _launch_overlapped(kernel.ptr, grid, block, args, shared_n_bytes)
        else:
            kernel(grid, block, args, shared_mem=shared_n_bytes)
        self._is_first = False

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


def _launch_overlapped(
    function: int, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_n_bytes: int = 0
) -> None:
    """Launch on CuPy's current stream with the attribute that CuPy's own launch cannot set."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
    config.sharedMemBytes = shared_n_bytes
    config.hStream = cupy.cuda.get_current_stream().ptr
    config.attrs, config.numAttrs = [attribute], 1
    values = [np.asarray(arg.data.ptr if isinstance(arg, cupy.ndarray) else arg) for arg in args]
    pointers = np.array([value.ctypes.data for value in values], dtype=np.uint64)
    _call(driver.cuLaunchKernelEx(config, driver.CUfunction(function), pointers.ctypes.data, 0))
