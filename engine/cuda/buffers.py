"""The arrays that ops hand to each other on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import RequestError
from engine.numerics import SUB_BLOCK

if TYPE_CHECKING:
    import cupy

MAX_PACK = 72
"""Most tokens that a pack may have: nine tiles of eight, in 18 MB of buffers with the sizes of the 27B model."""


def activation_n_bytes(n: int) -> int:
    """Return the bytes of one token's DeviceActivation of n values: f32, int8, and 8 bytes a group of 32."""
    return 5 * n + 8 * (n // SUB_BLOCK)


@dataclass(frozen=True)
class DeviceActivation:
    """Vectors as the matrix kernels take them.

    x: (n_tokens, n) f32; q: (n_tokens, n) int8; scales: (n_tokens, n / 32, 2) 32-bit words, an f32 scale and an
    int32 sum. q and scales hold nothing where n is not a multiple of 32.
    """

    x: cupy.ndarray
    q: cupy.ndarray
    scales: cupy.ndarray

    def first(self, n_tokens: int) -> DeviceActivation:
        """Return the part that holds `n_tokens` tokens; RequestError if there is no room for them."""
        room = self.x.shape[0]
        if n_tokens > room:
            raise RequestError(f"a pack of {n_tokens} tokens is asked for, the CUDA backend takes up to {room}")
        return DeviceActivation(self.x[:n_tokens], self.q[:n_tokens], self.scales[:n_tokens])
