"""Q4_K: 256 weights in 144 bytes, 4-bit values with a 6-bit scale and minimum per 32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.quants.planes import QK_K, QuantPlanes, half, nibbles, scale_min_k4

BLOCK = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", QK_K // 2)])


def unpack(blocks: NDArray[Any]) -> QuantPlanes:
    """Take blocks (n_rows, n / 256) of dtype BLOCK apart; q is 0..15."""
    n_rows = blocks.shape[0]
    scale, minimum = scale_min_k4(blocks["scales"])
    q = nibbles(blocks["qs"], run=32).view(np.int8)
    return QuantPlanes(
        q.reshape(n_rows, -1),
        (half(blocks["d"]) * scale).reshape(n_rows, -1),
        (half(blocks["dmin"]) * minimum).reshape(n_rows, -1),
    )
