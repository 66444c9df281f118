"""Q6_K: 256 weights in 210 bytes, 6-bit values with an 8-bit scale per 16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.quants.planes import QK_K, SUB_BLOCKS, QuantPlanes, half, nibbles

BLOCK = np.dtype([("ql", "u1", QK_K // 2), ("qh", "u1", QK_K // 4), ("scales", "i1", QK_K // 16), ("d", "<f2")])


def unpack(blocks: NDArray[Any]) -> QuantPlanes:
    """Take blocks (n_rows, n / 256) of dtype BLOCK apart; q is scale * (6-bit value - 32), int16.

    Each half of a block keeps 128 weights: 64 bytes of ql with 4 bits each and 32 bytes of qh with 2 bits each.
    """
    n_rows = blocks.shape[0]
    low = nibbles(blocks["ql"], run=64).reshape(*blocks.shape, SUB_BLOCKS, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks["qh"].reshape(*blocks.shape, 2, 1, 32) >> shifts) & np.uint8(3)
    q = (low | (high.reshape(low.shape) << np.uint8(4))).astype(np.int16) - np.int16(32)
    q = q.reshape(*blocks.shape, QK_K // 16, 16) * blocks["scales"].astype(np.int16)[..., None]
    scale = np.broadcast_to(half(blocks["d"]), (*blocks.shape, SUB_BLOCKS))
    return QuantPlanes(q.reshape(n_rows, -1), scale.reshape(n_rows, -1), None)
