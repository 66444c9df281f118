"""Random weights in the form of a file's rows, finite and of ordinary size: speeds must not depend on odd values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine import quants
from engine.quants import QUANT_FORMATS

_N_DRAWN = 4096
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-11, 2.0**-10


def random_rows(type_name: str, n_bytes: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return n_bytes u8 of weights of a type; some thousand blocks or values are drawn and repeated.

    Random bytes alone would not do: of the f16 scales, one in 32 would be NaN or infinite.
    """
    drawn = _random_blocks(type_name, rng) if quants.is_quantized(type_name) else _random_values(type_name, rng)
    return np.resize(drawn, n_bytes)


def _random_blocks(type_name: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    block = QUANT_FORMATS[type_name].block
    blocks = rng.integers(0, 256, _N_DRAWN * block.itemsize, dtype=np.uint8).view(block)
    for field in quants.scales(type_name, blocks.view(np.uint8)):
        scales = rng.uniform(_SMALLEST_SCALE, _LARGEST_SCALE, blocks[field].shape)
        blocks[field] = scales.astype(np.float16).view(block[field].base).reshape(blocks[field].shape)
    return blocks.view(np.uint8)


def _random_values(type_name: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    values = rng.standard_normal(_N_DRAWN, dtype=np.float32)
    if type_name == "F16":
        return values.astype(np.float16).view(np.uint8)
    if type_name == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)
