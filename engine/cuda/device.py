"""The CUDA device: is there one, what is it, and how the host waits for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from engine.errors import NoDeviceError

MODULE_LOADING = "CUDA_MODULE_LOADING"


@dataclass(frozen=True)
class Device:
    """One device: name, architecture such as "sm_90", multiprocessors, and the memory free at the start."""

    name: str
    arch: str
    n_sm: int
    free_n_bytes: int


def open_device(scheduling: str = "spin") -> Device:
    """Return device 0, its primary context set to `scheduling`; NoDeviceError says what is missing.

    "spin" makes the host poll while it waits for a step, which saves the wake-up from a sleep (about 210 us a
    step under WSL2, according to the report that this engine follows); "auto" lets the driver choose. The flag
    must be set before anything else makes the context.
    """
    # Kernels loaded lazily would load inside a graph capture, where that is not allowed.
    os.environ.setdefault(MODULE_LOADING, "EAGER")
    try:
        from cuda.bindings import driver
        from cupy.cuda import runtime
    except ImportError as error:
        raise NoDeviceError(f"backend cuda needs CuPy ({error}): install the extra cuda12 or cuda13") from None
    try:
        status = driver.cuInit(0)
    except (RuntimeError, OSError):
        raise NoDeviceError("backend cuda finds no NVIDIA driver on this machine") from None
    _call(driver, status)
    if _call(driver, driver.cuDeviceGetCount()) < 1:
        raise NoDeviceError("backend cuda finds no CUDA device")
    set_scheduling(scheduling)
    properties = runtime.getDeviceProperties(0)
    return Device(
        name=properties["name"].decode(),
        arch=f"sm_{properties['major']}{properties['minor']}",
        n_sm=properties["multiProcessorCount"],
        free_n_bytes=int(runtime.memGetInfo()[0]),
    )


def set_scheduling(scheduling: str) -> None:
    """Set how the host waits for device 0 from now on, "spin" or "auto"; NoDeviceError if the driver refuses."""
    from cuda.bindings import driver

    flags = driver.CUctx_flags
    flag = flags.CU_CTX_SCHED_SPIN if scheduling == "spin" else flags.CU_CTX_SCHED_AUTO
    handle = _call(driver, driver.cuDeviceGet(0))
    _call(driver, driver.cuDevicePrimaryCtxSetFlags(handle, flag.value))


def _call(driver: Any, result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call; NoDeviceError with the driver's own name of the problem."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise NoDeviceError(f"backend cuda finds no usable CUDA driver: {status.name}")
    return values[0] if values else None
