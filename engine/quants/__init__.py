"""Tensor formats: one module per block format, and the table that finds it by GGUF's type name.

A quantised format unpacks to `QuantPlanes`, which defines its weights and its dot product alike; the float
formats widen to f32. Nothing outside this package knows the layout of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.quants import floats, iq3_s, iq4_xs, q4_k, q5_k, q6_k, q8_0
from engine.quants.planes import QK_K, QuantPlanes

__all__ = [
    "FLOAT_FORMATS",
    "QK_K",
    "QUANT_FORMATS",
    "QuantFormat",
    "QuantPlanes",
    "dequantize",
    "is_quantized",
    "scales",
]


@dataclass(frozen=True)
class QuantFormat:
    """A block format: `n_weights` per block laid out as `block`, and the function that takes blocks apart."""

    n_weights: int
    block: np.dtype[Any]
    unpack: Callable[[NDArray[Any]], QuantPlanes]

    def planes(self, raw: NDArray[np.uint8]) -> QuantPlanes:
        """Unpack rows as they lie in the file, raw (n_rows, row_n_bytes) u8."""
        return self.unpack(np.ascontiguousarray(raw).view(self.block))


QUANT_FORMATS: dict[str, QuantFormat] = {
    "Q4_K": QuantFormat(QK_K, q4_k.BLOCK, q4_k.unpack),
    "Q5_K": QuantFormat(QK_K, q5_k.BLOCK, q5_k.unpack),
    "Q6_K": QuantFormat(QK_K, q6_k.BLOCK, q6_k.unpack),
    "IQ4_XS": QuantFormat(QK_K, iq4_xs.BLOCK, iq4_xs.unpack),
    "IQ3_S": QuantFormat(QK_K, iq3_s.BLOCK, iq3_s.unpack),
    "Q8_0": QuantFormat(32, q8_0.BLOCK, q8_0.unpack),
}

FLOAT_FORMATS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": floats.f32,
    "F16": floats.f16,
    "BF16": floats.bf16,
}


def is_quantized(type_name: str) -> bool:
    """Tell whether `type_name` (GGUF's name, such as Q4_K) is a block format."""
    return type_name in QUANT_FORMATS


def dequantize(type_name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the weights (n_rows, n) f32 of rows raw (n_rows, row_n_bytes) u8; KeyError on an unknown type."""
    if type_name in FLOAT_FORMATS:
        return FLOAT_FORMATS[type_name](np.ascontiguousarray(raw))
    return QUANT_FORMATS[type_name].planes(raw).dequantize()


def scales(type_name: str, raw: NDArray[np.uint8]) -> dict[str, NDArray[np.floating[Any]]]:
    """Return what decides whether the weights of raw (n_rows, row_n_bytes) u8 are finite, a row in front each.

    Those are the f16 scales d and dmin of a block format, and the weights themselves of a float format.
    """
    if type_name in FLOAT_FORMATS:
        return {"weight": FLOAT_FORMATS[type_name](np.ascontiguousarray(raw))}
    blocks = np.ascontiguousarray(raw).view(QUANT_FORMATS[type_name].block)
    return {field: blocks[field] for field in ("d", "dmin") if field in (blocks.dtype.names or ())}
