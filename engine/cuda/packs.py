"""Launchers of the matrix kernels for two or more tokens: pack_tiles, pack_rows and pack_gate_up.

One compiled kernel serves every format, shape and number of tokens; the format is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
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
MAX_TOKEN_TILES = 3
"""Most tiles of tokens that a block takes."""
MOST_BLOCKS_PER_SM = 4
DECODE_COST = 3
"""Instructions of a block that do not depend on its tokens, in those of a tile: about 120 to 40 a sub-block."""
N_ROW_TILES, TILE_ROWS, STEP_SUBS = 1, 32, 4
"""Tiles of rows of a block; rows of one; sub-blocks that a block takes at a time, one for each warp of a tile."""
BLOCK_ROWS, FLOAT_ROWS = N_ROW_TILES * TILE_ROWS, N_ROW_TILES * STEP_SUBS
"""Rows of a block, of a quantised and of a float matrix."""
PACK_THREADS = N_ROW_TILES * STEP_SUBS * 32
SUB_BLOCK_TILE_N_BYTES = TILE_TOKENS * (32 + 8)
"""Bytes of one sub-block of a tile: int8 values, and a scale and a sum a token."""
WEIGHTS_PAD_N_BYTES = 8 * 32
"""Bytes of a stage between the parts of the widest format, Q8_0 (StagePart in fragments.cuh)."""
RESERVED_N_BYTES = 1024
"""Shared memory that the device keeps of each block."""


def n_stages(target: Target) -> int:
    """Return the steps of a block that shared memory holds (N_STAGES in mma_rows.cuh)."""
    return 3 if target.shared_n_bytes > SMALLEST_SHARED_N_BYTES else 2


def shared_n_bytes(n_stages: int) -> int:
    """Return the shared memory of a block: its sums, and its stages with their barriers."""
    sums_n_bytes = N_ROW_TILES * 2 * STEP_SUBS * MAX_TOKEN_TILES * TILE_ROWS * TILE_TOKENS * 4
    activations_n_bytes = STEP_SUBS * MAX_TOKEN_TILES * SUB_BLOCK_TILE_N_BYTES
    weights_n_bytes = BLOCK_ROWS * STEP_SUBS * 34 + WEIGHTS_PAD_N_BYTES
    return sums_n_bytes + n_stages * (activations_n_bytes + weights_n_bytes + 16)


def n_resident(target: Target) -> int:
    """Return the blocks that the device holds at a time."""
    room = target.shared_n_bytes // (shared_n_bytes(n_stages(target)) + RESERVED_N_BYTES)
    return target.n_sm * min(MOST_BLOCKS_PER_SM, room)


def expressions() -> list[str]:
    """Return the kernels needed, whatever the model."""
    return ["pack_tiles", "pack_rows", "pack_gate_up"]


def tiles_n_bytes(n_tokens: int, n_in: int) -> int:
    """Return the size of the tiles of n_tokens vectors of n_in values; only whole groups of 32 have any."""
    return n_tiles(n_tokens) * (n_in // 32) * SUB_BLOCK_TILE_N_BYTES


def n_tiles(n_tokens: int) -> int:
    """Return the tiles of a pack."""
    return -(-n_tokens // TILE_TOKENS)


def n_groups(n_row_blocks: int, n_tokens: int, n_resident: int) -> int:
    """Return the groups of tokens whose blocks do n_row_blocks times BLOCK_ROWS rows soonest, n_resident at a time.

    Blocks with fewer tokens decode weights more often, but may fill the last wave better.
    """

    def cost(n: int) -> int:
        n_waves = -(-n_row_blocks * n // n_resident)
        return n_waves * (DECODE_COST + -(-n_tiles(n_tokens) // n))

    return min(range(-(-n_tiles(n_tokens) // MAX_TOKEN_TILES), n_tiles(n_tokens) + 1), key=cost)


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
    groups = n_groups(n_rows, n_tokens, n_resident(kernels.target))
    _tile(kernels, matrices, h, groups, tiles)
    parts = list(zip(matrices, outs, strict=True))[::-1]
    arguments = [argument for matrix, out in parts for argument in (*_matrix(matrix), np.int32(matrix.n_out), out)]
    arguments += [outs[0], np.int32(0), np.int32(0), outs[0]] * (PROJECT_PARTS - len(parts))
    kernels["pack_rows"](
        (n_rows * groups + n_float_blocks(matrices, n_tokens),),
        (PACK_THREADS,),
        (*arguments, *_vectors(h, tiles), np.int32(groups), np.int32(add)),
        shared_n_bytes(n_stages(kernels.target)),
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
    groups = n_groups(rows, h.x.shape[0], n_resident(kernels.target))
    _tile(kernels, (gate, up), h, groups, tiles)
    matrices = (*_matrix(gate), *_matrix(up), np.int32(gate.n_out))
    results = (out.x, out.q, out.scales, np.uint32(op), fault)
    kernels["pack_gate_up"](
        (rows * groups,),
        (PACK_THREADS,),
        (*matrices, *_vectors(h, tiles), np.int32(groups), *results),
        shared_n_bytes(n_stages(kernels.target)),
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
