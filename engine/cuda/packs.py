"""Launchers of the matrix kernels for two or more tokens: pack_tiles, pack_rows and pack_gate_up.

One compiled kernel serves every format, shape and number of tokens; the format is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import quants
from engine.cuda.buffers import DeviceActivation
from engine.cuda.gemv import PROJECT_PARTS, DeviceMatrix
from engine.cuda.streams import SMALLEST_SHARED_N_BYTES, Target

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels

TILES_THREADS = 256
FORMATS = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "Q8_0", "F32", "F16", "BF16")
"""Formats by the number that the kernels know them by (mma_rows.cuh)."""
TILE_TOKENS = 8
DECODE_COST = 3
"""Instructions of a block that do not depend on its tokens, in those of a tile: about 140 to 44 a sub-block."""
N_ROW_TILES, TILE_ROWS, STEP_SUBS = 1, 32, 4
"""Tiles of rows of a block; rows of one; sub-blocks that a block takes at a time, one for each warp of a tile."""
BLOCK_ROWS, FLOAT_ROWS = N_ROW_TILES * TILE_ROWS, N_ROW_TILES * STEP_SUBS
"""Rows of a block, of a quantised and of a float matrix."""
PACK_THREADS = N_ROW_TILES * STEP_SUBS * 32
SUB_BLOCK_TILE_N_BYTES = TILE_TOKENS * (32 + 8)
"""Bytes of one sub-block of a tile: int8 values, and a scale and a sum a token."""
Q8_0_SUB_BLOCK_N_BYTES, WEIGHTS_PAD_N_BYTES, BARRIER_N_BYTES = 34, 8 * 32, 16
"""Of a stage: bytes of the widest format, those between the parts of its rows (StagePart in fragments.cuh), the end."""

RESERVED_N_BYTES = 1024
"""Shared memory that the device keeps of each block."""


@dataclass(frozen=True)
class Limits:
    """What a block has room for: the constants MAX_TOKEN_TILES and N_STAGES of mma_rows.cuh."""

    token_tiles: int
    n_stages: int

    @staticmethod
    def of(target: Target) -> Limits:
        """Return the limits that the kernels were compiled with for a device like `target`."""
        return Limits(3, 2) if target.shared_n_bytes == SMALLEST_SHARED_N_BYTES else Limits(5, 3)

    @property
    def shared_n_bytes(self) -> int:
        """Shared memory of a block: its sums, and its stages of activations, weights and a barrier."""
        sums_n_bytes = 2 * STEP_SUBS * self.token_tiles * TILE_TOKENS * BLOCK_ROWS * 4
        activations_n_bytes = STEP_SUBS * self.token_tiles * SUB_BLOCK_TILE_N_BYTES
        weights_n_bytes = STEP_SUBS * BLOCK_ROWS * Q8_0_SUB_BLOCK_N_BYTES + WEIGHTS_PAD_N_BYTES
        return sums_n_bytes + self.n_stages * (activations_n_bytes + weights_n_bytes + BARRIER_N_BYTES)

    def n_resident(self, target: Target) -> int:
        """Return the blocks that the device holds at a time; shared memory limits them."""
        return target.n_sm * (target.shared_n_bytes // (self.shared_n_bytes + RESERVED_N_BYTES))


def expressions() -> list[str]:
    """Return the kernels needed, whatever the model."""
    return ["pack_tiles", "pack_rows", "pack_gate_up"]


def tiles_n_bytes(n_tokens: int, n_in: int) -> int:
    """Return the size of the tiles of n_tokens vectors of n_in values; only whole groups of 32 have any."""
    return n_tiles(n_tokens) * (n_in // 32) * SUB_BLOCK_TILE_N_BYTES


def n_tiles(n_tokens: int) -> int:
    """Return the tiles of a pack."""
    return -(-n_tokens // TILE_TOKENS)


def n_groups(n_row_blocks: int, n_tokens: int, target: Target) -> int:
    """Return the groups of tokens whose blocks do n_row_blocks times BLOCK_ROWS rows soonest.

    Blocks with fewer tokens decode weights more often, but may fill the last wave better.
    """

    limits = Limits.of(target)

    def cost(n: int) -> int:
        n_waves = -(-n_row_blocks * n // limits.n_resident(target))
        return n_waves * (DECODE_COST + -(-n_tiles(n_tokens) // n))

    return min(range(-(-n_tiles(n_tokens) // limits.token_tiles), n_tiles(n_tokens) + 1), key=cost)


def n_row_blocks(matrices: Sequence[DeviceMatrix]) -> int:
    """Return the blocks for a group of tokens of the quantised ones among `matrices`."""
    return sum(-(-matrix.n_out // BLOCK_ROWS) for matrix in matrices if quants.is_quantized(matrix.type_name))


def n_float_blocks(matrices: Sequence[DeviceMatrix], n_tokens: int) -> int:
    """Return the blocks of the float ones among `matrices`."""
    n = sum(-(-matrix.n_out // FLOAT_ROWS) for matrix in matrices if not quants.is_quantized(matrix.type_name))
    return n * n_tiles(n_tokens)


def project(
    kernels: Kernels,
    matrices: Sequence[DeviceMatrix],
    h: DeviceActivation,
    outs: Sequence[cupy.ndarray],
    tiles: cupy.ndarray,
    *,
    add: bool = False,
) -> tuple[cupy.ndarray, ...]:
    """Write W h of each matrix, or add it, to its place in `outs`, each (n_tokens, n_out) f32.

    tiles: u8 scratch, at least `tiles_n_bytes`. The blocks of the last matrix come first: models put small float
    matrices there, whose rows take longest.
    """
    n_tokens, n_rows = h.x.shape[0], n_row_blocks(matrices)
    groups = n_groups(n_rows, n_tokens, kernels.target)
    _tile(kernels, matrices, h, groups, tiles)
    parts = list(zip(matrices, outs, strict=True))[::-1]
    arguments = [argument for matrix, out in parts for argument in (*_matrix(matrix), np.int32(matrix.n_out), out)]
    arguments += [outs[0], np.int32(0), np.int32(0), outs[0]] * (PROJECT_PARTS - len(parts))
    kernels["pack_rows"](
        (n_rows * groups + n_float_blocks(matrices, n_tokens),),
        (PACK_THREADS,),
        (*arguments, *_vectors(h, tiles), np.int32(groups), np.int32(add)),
        Limits.of(kernels.target).shared_n_bytes,
    )
    return tuple(outs)


def gate_up_silu(
    kernels: Kernels,
    gate: DeviceMatrix,
    up: DeviceMatrix,
    h: DeviceActivation,
    out: DeviceActivation,
    tiles: cupy.ndarray,
    *,
    fault: cupy.ndarray,
    op: int,
) -> DeviceActivation:
    """Write silu(gate h) * (up h), quantised, to `out` and return it; `tiles` as for `project`."""
    rows = -(-gate.n_out // BLOCK_ROWS)
    groups = n_groups(rows, h.x.shape[0], kernels.target)
    _tile(kernels, (gate, up), h, groups, tiles)
    matrices = (*_matrix(gate), *_matrix(up), np.int32(gate.n_out))
    results = (out.x, out.q, out.scales, np.uint32(op), fault)
    kernels["pack_gate_up"](
        (rows * groups,),
        (PACK_THREADS,),
        (*matrices, *_vectors(h, tiles), np.int32(groups), *results),
        Limits.of(kernels.target).shared_n_bytes,
    )
    return out


def _tile(
    kernels: Kernels, matrices: Sequence[DeviceMatrix], h: DeviceActivation, groups: int, tiles: cupy.ndarray
) -> None:
    """Arrange the int8 activations for the matrices that read them, in groups of tokens."""
    if not any(quants.is_quantized(matrix.type_name) for matrix in matrices):
        return
    n_tokens, n_in = h.x.shape
    n_pieces = n_tiles(n_tokens) * TILE_TOKENS * n_in // 16
    kernels["pack_tiles"](
        (-(-n_pieces // TILES_THREADS),),
        (TILES_THREADS,),
        (h.q, h.scales, np.int32(n_in), np.int32(n_tokens), np.int32(groups), tiles),
    )


def _matrix(matrix: DeviceMatrix) -> tuple[cupy.ndarray, np.int32]:
    return matrix.data, np.int32(FORMATS.index(matrix.type_name))


def _vectors(h: DeviceActivation, tiles: cupy.ndarray) -> tuple[object, ...]:
    n_tokens, n_in = h.x.shape
    return h.x, h.q, h.scales, tiles, np.int32(n_in), np.int32(n_tokens)
