"""Launchers of the matrix kernels: gemv, gate_up_silu and repack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine import quants
from engine.cuda.buffers import DeviceActivation
from engine.errors import RequestError
from engine.numerics import SUB_BLOCK

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels

GEMV_WARPS = 4
GATE_UP_WARPS = 8
REPACK_THREADS = 256
PACK_WIDTHS = (1, 4, 16)
"""Instantiated pack widths; a pack runs on the next wider one."""
STORE, ADD_RESIDUAL, LOGITS = 0, 1, 2


@dataclass(frozen=True)
class DeviceMatrix:
    """A weight matrix on the device: planes (formats.cuh) for block formats, file bytes for float ones."""

    type_name: str
    n_in: int
    n_out: int
    data: cupy.ndarray  # (n_bytes) u8


def pack_width(n_tokens: int) -> int:
    """Return the instantiated width that serves a pack of n_tokens; RequestError if there is none."""
    if n_tokens > PACK_WIDTHS[-1]:
        raise RequestError(f"a pack of {n_tokens} tokens is asked for, the CUDA backend takes up to {PACK_WIDTHS[-1]}")
    return next(width for width in PACK_WIDTHS if width >= n_tokens)


def gemv_expression(type_name: str, n_in: int, width: int, mode: int) -> str:
    """Return the name expression of the gemv kernel."""
    return f"gemv<{type_name}, {n_in}, {width}, {mode}>"


def gate_up_expression(gate: str, up: str, n_in: int, width: int) -> str:
    """Return the name expression of the gate_up_silu kernel."""
    return f"gate_up_silu<{gate}, {up}, {n_in}, {width}>"


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
    mode: int = STORE,
    op: int = 0,
) -> cupy.ndarray:
    """Write W h, or out + W h with ADD_RESIDUAL, to `out` (n_tokens, n_out) f32 and return it."""
    n_tokens = out.shape[0]
    kernel = kernels[gemv_expression(matrix.type_name, matrix.n_in, pack_width(n_tokens), mode)]
    kernel(
        (-(-matrix.n_out // GEMV_WARPS),),
        (32 * GEMV_WARPS,),
        (
            matrix.data,
            np.int32(matrix.n_out),
            h.x,
            h.q,
            h.scales,
            np.int32(n_tokens),
            out,
            out,
            np.uint32(op),
            fault,
        ),
    )
    return out


def gate_up_silu(
    kernels: Kernels,
    gate: DeviceMatrix,
    up: DeviceMatrix,
    h: DeviceActivation,
    out: DeviceActivation,
    *,
    fault: cupy.ndarray,
    op: int,
) -> DeviceActivation:
    """Write silu(gate h) * (up h), quantised, to `out` and return it."""
    n_tokens = out.x.shape[0]
    kernel = kernels[gate_up_expression(gate.type_name, up.type_name, gate.n_in, pack_width(n_tokens))]
    kernel(
        (-(-gate.n_out // SUB_BLOCK),),
        (32 * GATE_UP_WARPS,),
        (
            gate.data,
            up.data,
            np.int32(gate.n_out),
            h.x,
            h.q,
            h.scales,
            np.int32(n_tokens),
            out.x,
            out.q,
            out.scales,
            np.uint32(op),
            fault,
        ),
    )
    return out


def repack(
    kernels: Kernels, type_name: str, raw: cupy.ndarray, planes: cupy.ndarray, n_sub: int, first: int, n: int
) -> None:
    """Move n sub-blocks from file order in `raw` to the planes, the first being sub-block `first` of n_sub."""
    kernels[repack_expression(type_name)](
        (-(-n // REPACK_THREADS),),
        (REPACK_THREADS,),
        (raw, planes, np.int64(n_sub), np.int64(first), np.int64(n)),
    )


def gemv_bytes_moved(matrix: DeviceMatrix) -> int:
    """Return the bytes that one launch must read from device memory: the matrix, once."""
    return int(matrix.data.nbytes)


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
