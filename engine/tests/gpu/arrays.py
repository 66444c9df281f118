"""Arrays on the device, and their comparison with the NumPy backend bit by bit.

Everything goes through plain copies: CuPy's own kernels would be compiled first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import numerics
from engine.cuda.buffers import DeviceActivation

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: CUDA ops not measured", exc_type=ImportError)
from engine.cuda import upload as upload  # noqa: E402 - it imports CuPy

POISON = 0xFF
"""Byte that results are filled with before a launch: NaN as f32 and f16, -1 as an integer."""


def random_f32(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    """Return normal values of standard deviation `scale`."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def poison(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return a host array full of POISON."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(n_bytes, POISON, dtype=np.uint8).view(dtype).reshape(shape)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a device array full of POISON."""
    return cupy.asarray(poison(shape, dtype))


def poisoned_activation(n_tokens: int, n: int) -> DeviceActivation:
    """Return an activation to be written."""
    return DeviceActivation(
        poisoned((n_tokens, n), np.float32),
        poisoned((n_tokens, n), np.int8),
        poisoned((n_tokens, -(-n // numerics.SUB_BLOCK), 2), np.int32),
    )


def activation_on_device(h: numerics.Activation) -> DeviceActivation:
    """Copy an activation to the device."""
    if h.q8 is None:
        empty = cupy.zeros(1, np.int8)
        return DeviceActivation(cupy.asarray(h.x), empty, empty)
    scales = np.stack([h.q8.d.view(np.int32), h.q8.total], axis=-1)
    return DeviceActivation(cupy.asarray(h.x), cupy.asarray(h.q8.q.reshape(h.x.shape)), cupy.asarray(scales))


def no_fault() -> Any:
    """Return a fault word that nothing has been written to."""
    return cupy.zeros(1, np.uint32)


def control_words(position: int, token: int = -1) -> Any:
    """Return what tells a kernel where a pack begins: token id, position of the first token."""
    return cupy.asarray(np.array([token, position], dtype=np.int32))


def assert_same_bits(found: Any, expected: NDArray[Any]) -> None:
    """Fail unless shape, type and every bit are equal; of a NaN, only that it is one (its bits are free)."""
    ours = cupy.asnumpy(found)
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    bits = f"u{expected.dtype.itemsize}"
    differ = np.ascontiguousarray(ours).view(bits) != np.ascontiguousarray(expected).view(bits)
    if expected.dtype.kind == "f":
        differ &= ~(np.isnan(ours) & np.isnan(expected))
    wrong = np.argwhere(differ)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        pytest.fail(f"{len(wrong)} of {differ.size} differ, first {at}: {ours[at]!r}, expected {expected[at]!r}")


def assert_same_activation(found: DeviceActivation, expected: numerics.Activation) -> None:
    """Compare f32, int8, scales and sums; where n is no multiple of 32, the last three must be untouched."""
    assert_same_bits(found.x, expected.x)
    q, scales = cupy.asnumpy(found.q), cupy.asnumpy(found.scales)
    if expected.q8 is None:
        assert (q.view(np.uint8) == POISON).all()
        assert (scales.view(np.uint8) == POISON).all()
        return
    assert_same_bits(np.ascontiguousarray(scales[..., 0]).view(np.float32), expected.q8.d)
    kept = np.isfinite(expected.q8.d)  # the int8 values of any other group are free
    assert_same_bits(q.reshape(expected.q8.q.shape)[kept], expected.q8.q[kept])
    assert_same_bits(scales[..., 1][kept], expected.q8.total[kept])
