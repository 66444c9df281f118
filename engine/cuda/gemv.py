"""Launchers of the matrix kernels for one token, gemv, project and gate_up_silu, and of repack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine import quants
from engine.cuda.buffers import DeviceActivation, activation_n_bytes

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels

GEMV_WARPS = 4
GATE_UP_WARPS = 4
REPACK_THREADS = 256
PROJECT_PARTS = 4
"""Most matrices that one project launch takes."""
STORE, ADD_RESIDUAL, LOGITS = 0, 1, 2
PAIR_BLOCKS_PER_SM = 4
"""Blocks of gate_up_silu that a multiprocessor holds (gate_up_silu.cu)."""


def blocks_per_sm(n_in: int) -> int:
    """Return the blocks that a multiprocessor holds of a kernel for rows of n_in weights (row_dot.cuh)."""
    return 7 if n_in <= 5120 else 6 if n_in <= 6144 else 3


def input_n_bytes(type_names: Sequence[str], n_in: int) -> int:
    """Return the bytes of one token that matrices of these types read: int8 and scales, f32, or both."""
    quantized = [quants.is_quantized(name) for name in type_names]
    return (n_in + n_in // 4 if any(quantized) else 0) + (0 if all(quantized) else 4 * n_in)


def project_bytes_moved(type_names: Sequence[str], n_in: int, n_outs: Sequence[int], weights_n_bytes: int) -> int:
    """Return the bytes that gemv or project must read and write: weights once, the token, the results."""
    return weights_n_bytes + input_n_bytes(type_names, n_in) + 4 * sum(n_outs)


def add_bytes_moved(type_name: str, n_in: int, n_out: int, weights_n_bytes: int) -> int:
    """Return the same for a result that is added to the residual, which is read as well."""
    return project_bytes_moved([type_name], n_in, [n_out], weights_n_bytes) + 4 * n_out


def gate_up_bytes_moved(type_names: Sequence[str], n_in: int, n_ff: int, weights_n_bytes: int) -> int:
    """Return the same for gate_up_silu, whose results are f32 and quantised."""
    return weights_n_bytes + input_n_bytes(type_names, n_in) + activation_n_bytes(n_ff)


@dataclass(frozen=True)
class DeviceMatrix:
    """A weight matrix on the device: strips (formats.cuh) for block formats, file bytes for float ones."""

    type_name: str
    n_in: int
    n_out: int
    data: cupy.ndarray  # (n_bytes) u8


def gemv_expression(type_name: str, n_in: int, mode: int) -> str:
    """Return the name expression of the gemv kernel."""
    return f"gemv<{type_name}, {n_in}, {mode}>"


def project_expression(type_names: Sequence[str], n_in: int) -> str:
    """Return the name expression of the project kernel for up to PROJECT_PARTS matrices, in the caller's order."""
    absent = ["Absent"] * (PROJECT_PARTS - len(type_names))
    return f"project<{n_in}, {', '.join([*reversed(type_names), *absent])}>"


def gate_up_expression(gate: str, up: str, n_in: int) -> str:
    """Return the name expression of the gate_up_silu kernel."""
    return f"gate_up_silu<{gate}, {up}, {n_in}>"


def repack_expression(type_name: str) -> str:
    """Return the name expression of the repack kernel."""
    return f"repack<{type_name}>"


def gemv(
    kernels: Kernels,
    matrix: DeviceMatrix,
    h: DeviceActivation,
    out: cupy.ndarray,
    *,
    fault: cupy.ndarray,
    mode: int,
    op: int = 0,
) -> cupy.ndarray:
    """Write W h, or out + W h with ADD_RESIDUAL, to `out` (1, n_out) f32 and return it."""
    kernel = kernels[gemv_expression(matrix.type_name, matrix.n_in, mode)]
    kernel(
        (-(-matrix.n_out // GEMV_WARPS),),
        (32 * GEMV_WARPS,),
        (
            matrix.data,
            np.int32(matrix.n_out),
            h.x,
            h.q,
            h.scales,
            out,
            out,
            np.uint32(op),
            fault,
        ),
    )
    return out


def project(
    kernels: Kernels, matrices: Sequence[DeviceMatrix], h: DeviceActivation, outs: Sequence[cupy.ndarray]
) -> tuple[cupy.ndarray, ...]:
    """Write W h of each matrix to its place in `outs`, each (1, n_out) f32, in one launch.

    The blocks of the last matrix come first: models put small float matrices there, whose rows take longest.
    """
    parts = list(zip(matrices, outs, strict=True))[::-1]
    arguments = [argument for matrix, out in parts for argument in (matrix.data, np.int32(matrix.n_out), out)]
    arguments += [outs[0], np.int32(0), outs[0]] * (PROJECT_PARTS - len(parts))
    types = [matrix.type_name for matrix in matrices]
    kernels[project_expression(types, matrices[0].n_in)](
        (sum(-(-matrix.n_out // GEMV_WARPS) for matrix in matrices),),
        (32 * GEMV_WARPS,),
        (*arguments, h.x, h.q, h.scales),
    )
    return tuple(outs)


def gate_up_silu(
    kernels: Kernels,
    gate: DeviceMatrix,
    up: DeviceMatrix,
    h: DeviceActivation,
    out: DeviceActivation,
    *,
    done: cupy.ndarray,
    fault: cupy.ndarray,
    op: int,
) -> DeviceActivation:
    """Write silu(gate h) * (up h), quantised, to `out` and return it.

    done: u32 counters, one per 32 rows, zero before the first call; the kernel leaves them zero.
    """
    kernel = kernels[gate_up_expression(gate.type_name, up.type_name, gate.n_in)]
    kernel(
        (-(-gate.n_out // GATE_UP_WARPS),),
        (32 * GATE_UP_WARPS,),
        (
            gate.data,
            up.data,
            np.int32(gate.n_out),
            h.x,
            h.q,
            h.scales,
            out.x,
            out.q,
            out.scales,
            done,
            np.uint32(op),
            fault,
        ),
    )
    return out


def repack(
    kernels: Kernels, type_name: str, raw: cupy.ndarray, strips: cupy.ndarray, n_sub: int, first: int, n: int
) -> None:
    """Move n sub-blocks from file order in `raw` to the strips, the first being sub-block `first` of n_sub."""
    kernels[repack_expression(type_name)](
        (-(-n // REPACK_THREADS),),
        (REPACK_THREADS,),
        (raw, strips, np.int64(n_sub), np.int64(first), np.int64(n)),
    )


def n_in_of_row(type_name: str, row_n_bytes: int) -> int:
    """Return the weights in a row of row_n_bytes."""
    if quants.is_quantized(type_name):
        form = quants.QUANT_FORMATS[type_name]
        return row_n_bytes // form.block.itemsize * form.n_weights
    return row_n_bytes // (4 if type_name == "F32" else 2)


def iq3s_grid_words() -> NDArray[np.uint32]:
    """Return the table behind IQ3_S, 512 words of four magnitudes, for the device variable iq3s_grid."""
    from engine.quants.iq3_s import GRID

    return np.ascontiguousarray(GRID).view("<u4").reshape(512)
