"""Rows of every format whose scales, or all of whose bits, are at an edge: for both backends and the `gguf` package."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine import quants

FORMATS = (*quants.QUANT_FORMATS, *quants.FLOAT_FORMATS)
FILLS = {"all zeros": 0x00, "all ones": 0xFF}
SCALES = {
    "NaN": np.nan,
    "infinity": np.inf,
    "minus infinity": -np.inf,
    "smallest denormal": 6e-8,
    "largest denormal": 6.0976e-05,
    "largest": 65504.0,
    "minus largest": -65504.0,
    "minus zero": -0.0,
}
EDGES = (*FILLS, *SCALES)
"""What rows may be: all bits alike, or random blocks with one value for all scales (all weights, in a float format)."""


def edge_rows(type_name: str, edge: str, n_rows: int = 3, n: int = 1024) -> NDArray[np.uint8]:
    """Return rows (n_rows, row_n_bytes) u8 of n weights."""
    n_bytes = quants.QUANT_FORMATS[type_name].block.itemsize if type_name in quants.QUANT_FORMATS else 0
    row_n_bytes = n // quants.QUANT_FORMATS[type_name].n_weights * n_bytes if n_bytes else n * _width(type_name)
    if edge in FILLS:
        return np.full((n_rows, row_n_bytes), FILLS[edge], dtype=np.uint8)
    rows = np.random.default_rng(len(edge)).integers(0, 256, (n_rows, row_n_bytes), dtype=np.uint8)
    if type_name in quants.QUANT_FORMATS:
        for values in quants.scales(type_name, rows).values():
            values[...] = SCALES[edge]
        return rows
    return _floats(type_name, np.full((n_rows, n), SCALES[edge], dtype=np.float32))


def _width(type_name: str) -> int:
    return 4 if type_name == "F32" else 2


def _floats(type_name: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    if type_name == "F32":
        return values.view(np.uint8)
    if type_name == "F16":
        return values.astype(np.float16).view(np.uint8)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
