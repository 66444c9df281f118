"""IQ4_XS: 256 weights in 136 bytes, 4-bit indices into a fixed table with a 6-bit scale per 32."""

from __future__ import annotations

from typing import Any

import gguf.quants
import numpy as np
from numpy.typing import NDArray

from engine.quants.planes import QK_K, SUB_BLOCKS, QuantPlanes, half, nibbles

BLOCK = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", QK_K // 64), ("qs", "u1", QK_K // 2)])
VALUES: NDArray[np.int8] = np.array(gguf.quants.IQ4_NL.kvalues, dtype=np.int8)
"""The 16 values of the table, from the gguf package."""


def unpack(blocks: NDArray[Any]) -> QuantPlanes:
    """Take blocks (n_rows, n / 256) of dtype BLOCK apart; q is the table's value, -127..113."""
    n_rows = blocks.shape[0]
    shifts = np.arange(0, 2 * SUB_BLOCKS, 2, dtype=np.uint16)
    high = (blocks["scales_h"][..., None] >> shifts) & np.uint16(3)
    low = nibbles(blocks["scales_l"], run=1)
    scale = (low | (high.astype(np.uint8) << np.uint8(4))).astype(np.float32) - np.float32(32.0)
    q = VALUES[nibbles(blocks["qs"], run=16)]
    return QuantPlanes(q.reshape(n_rows, -1), (half(blocks["d"]) * scale).reshape(n_rows, -1), None)
