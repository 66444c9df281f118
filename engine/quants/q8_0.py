"""Q8_0: 32 weights in 34 bytes, 8-bit values with one scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.quants.planes import QuantPlanes

BLOCK = np.dtype([("d", "<f2"), ("qs", "i1", 32)])


def unpack(blocks: NDArray[Any]) -> QuantPlanes:
    """Take blocks (n_rows, n / 32) of dtype BLOCK apart; q is -128..127."""
    n_rows = blocks.shape[0]
    return QuantPlanes(blocks["qs"].reshape(n_rows, -1), blocks["d"].astype(np.float32), None)
