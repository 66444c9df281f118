"""The one form that every quantised block format unpacks to: integers, a scale and a minimum per 32 weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QK_K = 256
"""Weights in a super-block of the K and IQ formats (ggml's name)."""
SUB_BLOCKS = 8
"""Groups of 32 weights in a super-block."""


@dataclass(frozen=True)
class QuantPlanes:
    """A quantised matrix taken apart; weight k of a row is scale[k // 32] * q[k] - minimum[k // 32].

    q: (n_rows, n) int8, or int16 where a format has scales for 16 weights and they are multiplied into q;
    scale: (n_rows, n / 32) f32; minimum: (n_rows, n / 32) f32 or None where the format has none.
    All three are exact: an f16 scale times an integer scale of at most 8 bits fits into 24 bits. The sum of
    q * activation over 32 weights stays below 2^24 in magnitude for every format, so it is exact in f32 too.
    """

    q: NDArray[np.int8] | NDArray[np.int16]
    scale: NDArray[np.float32]
    minimum: NDArray[np.float32] | None

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weights (n_rows, n) f32: one rounding where there is a minimum, none elsewhere."""
        weights = self.q.reshape(*self.scale.shape, 32).astype(np.float32)
        weights *= self.scale[..., None]
        if self.minimum is not None:
            weights -= self.minimum[..., None]
        return weights.reshape(self.q.shape)


def scale_min_k4(
    scales: NDArray[np.uint8],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unpack the 6-bit scales and minima that Q4_K and Q5_K share.

    scales: (..., 12) u8 -> two arrays (..., 8) f32 with values 0..63. Bytes 0-3 and 4-7 hold the first four
    scales and minima in their low six bits; bytes 8-11 hold the low nibbles of the last four, whose upper two
    bits sit on top of bytes 0-7.
    """
    first_scale, first_min, low = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    last_scale = (low & 0x0F) | ((first_scale >> 6) << 4)
    last_min = (low >> 4) | ((first_min >> 6) << 4)
    scale = np.concatenate([first_scale & 0x3F, last_scale], axis=-1)
    minimum = np.concatenate([first_min & 0x3F, last_min], axis=-1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def nibbles(packed: NDArray[np.uint8], run: int) -> NDArray[np.uint8]:
    """Split bytes into 4-bit values: per `run` bytes first all low nibbles, then all high ones.

    packed: (..., m) u8 -> (..., 2 m) u8.
    """
    groups = packed.reshape(*packed.shape[:-1], -1, 1, run)
    halves = np.concatenate([groups & 0x0F, groups >> 4], axis=-2)
    return halves.reshape(*packed.shape[:-1], -1)


def bits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Split bytes into single bits, lowest first: (..., m) u8 -> (..., 8 m) u8 of 0 or 1."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def half(value: NDArray[np.float16]) -> NDArray[np.float32]:
    """Widen the f16 field of each block to f32 with a trailing axis, (..., 1)."""
    return value.astype(np.float32)[..., None]
