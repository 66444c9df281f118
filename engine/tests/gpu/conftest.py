"""The device of these tests; a run that asks for them without one ends with exit code 3, never as passed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

from engine.cuda.device import Device, open_device
from engine.errors import NoDeviceError

if TYPE_CHECKING:
    from engine.cuda.kernels import Kernels

Compile = Callable[[Iterable[str]], "Kernels"]


@pytest.fixture(scope="session", autouse=True)
def device() -> Device:
    try:
        return open_device()
    except NoDeviceError as error:
        pytest.exit(f"not measured: {error}", returncode=3)


@pytest.fixture(autouse=True)
def null_stream(device: Device) -> None:
    """Start on the null stream: the engine of an earlier test may have left its own in use."""
    import cupy

    cupy.cuda.Stream.null.use()


@pytest.fixture(scope="session")
def compile_all(device: Device) -> Compile:
    """Return what compiles name expressions for the device."""
    from engine.cuda.kernels import Kernels

    return lambda expressions: Kernels(expressions, device.arch)
