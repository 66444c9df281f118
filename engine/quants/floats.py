"""F32, F16 and BF16: formats without blocks, widened exactly to f32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """View raw (n_rows, 4 n) u8 as (n_rows, n) f32."""
    return raw.view("<f4")


def f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Widen raw (n_rows, 2 n) u8 to (n_rows, n) f32."""
    return raw.view("<f2").astype(np.float32)


def bf16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Widen raw (n_rows, 2 n) u8 to (n_rows, n) f32: bf16 is the upper half of an f32."""
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
