"""Find weights that are NaN or infinite in a file, before anything is computed with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine import quants
from engine.gguf.reader import ModelFile
from engine.model.config import ModelConfig, expected_tensors

__all__ = ["check_finite"]

_SLICE_N_BYTES = 1 << 24


def check_finite(model: ModelFile, config: ModelConfig) -> None:
    """Read every tensor of the trunk; raise ModelFileError naming the first one with a weight that is not finite.

    Of a block format only the f16 scales are looked at: integers times a finite scale are finite.
    """
    for name in expected_tensors(config):
        info = model.tensor(name)
        raw = model.raw(name)
        n_rows = max(1, _SLICE_N_BYTES // info.row_n_bytes)
        for begin in range(0, info.n_rows, n_rows):
            found = _first_non_finite(info.type, raw[begin : begin + n_rows])
            if found is not None:
                row, field, value = found
                raise model.error(f"tensor {name} row {begin + row} has a {field} of {value}, expected finite weights")


def _first_non_finite(type_name: str, raw: NDArray[np.uint8]) -> tuple[int, str, float] | None:
    """Return row, name of the field and value of the first non-finite number in raw (n_rows, row_n_bytes) u8."""
    for field, values in quants.scales(type_name, raw).items():
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            at = tuple(bad[0])
            return int(at[0]), field, float(values[at])
    return None
