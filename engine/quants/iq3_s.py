"""IQ3_S: 256 weights in 110 bytes, 9-bit indices to groups of four magnitudes, sign bits, a 4-bit scale per 32."""

from __future__ import annotations

from typing import Any

import gguf.quants
import numpy as np
from numpy.typing import NDArray

from engine.quants.planes import QK_K, QuantPlanes, bits, half, nibbles

BLOCK = np.dtype(
    [
        ("d", "<f2"),
        ("qs", "u1", QK_K // 4),
        ("qh", "u1", QK_K // 32),
        ("signs", "u1", QK_K // 8),
        ("scales", "u1", QK_K // 64),
    ]
)


def _grid() -> NDArray[np.int8]:
    gguf.quants.IQ3_S.init_grid()  # type: ignore[no-untyped-call]
    return np.asarray(gguf.quants.IQ3_S.grid).reshape(512, 4).astype(np.int8)


GRID = _grid()
"""(512, 4) int8: the magnitudes (odd, 1..15) of each index, from the gguf package."""


def unpack(blocks: NDArray[Any]) -> QuantPlanes:
    """Take blocks (n_rows, n / 256) of dtype BLOCK apart; q is a signed magnitude, scale is d (1 + 2 s)."""
    n_rows = blocks.shape[0]
    index = blocks["qs"].astype(np.uint16) | (bits(blocks["qh"]).astype(np.uint16) << np.uint16(8))
    magnitude = GRID[index].reshape(*blocks.shape, QK_K)
    sign = np.int8(1) - np.int8(2) * bits(blocks["signs"]).view(np.int8)
    scale = np.float32(1.0) + np.float32(2.0) * nibbles(blocks["scales"], run=1).astype(np.float32)
    return QuantPlanes((magnitude * sign).reshape(n_rows, -1), (half(blocks["d"]) * scale).reshape(n_rows, -1), None)
