"""Launchers of the stream_* kernels: matrices times one token, by one block a multiprocessor, through shared memory.

They take quantised rows of whole strips of 1024 weights, such as 5120, 6144 and 17408; `takes` tells. For everything
else there are the kernels of `engine.cuda.gemv`, which give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine import quants
from engine.cuda.buffers import DeviceActivation, activation_n_bytes
from engine.cuda.gemv import PROJECT_PARTS, DeviceMatrix
from engine.numerics import SUB_BLOCK
from engine.quants import QUANT_FORMATS

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels

STREAM_WARPS = 16
"""Warps of a block that take rows; one more asks for them."""
STREAM_BLOCK = 32 * (STREAM_WARPS + 1)
STRIP = 1024
"""Weights in a strip: 32 sub-blocks of 32, one a lane."""
IQ3S_GRID_N_BYTES = 2048
LINE_N_BYTES = 128
RESERVED_N_BYTES = 1024 + 128
"""Shared memory of a block beside the dynamic part: what the device keeps, and the static part."""
SHARED_N_BYTES = {80: 164 << 10, 87: 164 << 10, 90: 228 << 10, 100: 228 << 10, 103: 228 << 10, 110: 228 << 10}
"""Shared memory of a multiprocessor by compute capability (CUDA C++ Programming Guide, technical specifications)."""
SMALLEST_SHARED_N_BYTES = 100 << 10
MOST_STAGES = 16
STEP_N_BYTES = 9_700
"""Bytes of a stage from which on asking for the stages one by one costs nothing."""


@dataclass(frozen=True)
class Target:
    """What a launch must know of the device."""

    n_sm: int
    shared_n_bytes: int

    @staticmethod
    def of(arch: str, n_sm: int) -> Target:
        """Return the target of an architecture such as "sm_90" with n_sm multiprocessors."""
        return Target(n_sm, SHARED_N_BYTES.get(int(arch.removeprefix("sm_")), SMALLEST_SHARED_N_BYTES))


@dataclass(frozen=True)
class Shape:
    """How a kernel takes rows: rows in a stage, groups of warps, stages on the way; and its shared memory."""

    n_of_stage: int
    n_groups: int
    n_stages: int
    shared_n_bytes: int

    @property
    def template_arguments(self) -> str:
        """The part of a name expression that says so."""
        return f"{self.n_of_stage}, {self.n_groups}, {self.n_stages}"


def takes(n_in: int, *type_names: str) -> bool:
    """Return whether rows of n_in weights of these types can be streamed."""
    return n_in % STRIP == 0 and all(map(quants.is_quantized, type_names))


def takes_gate_up(n_in: int, n_ff: int, gate: str, up: str) -> bool:
    """Return whether `gate_up_silu` serves n_ff rows of n_in weights of these types."""
    return takes(n_in, gate, up) and n_ff % SUB_BLOCK == 0


def takes_any(n_in: int, type_names: Sequence[str]) -> bool:
    """Return whether `project` serves matrices of these types: with a quantised one, others may be of floats."""
    return any(takes(n_in, name) for name in type_names)


def shape(n_in: int, copied: Sequence[Sequence[str]], n_warps: int, beside_n_bytes: int, target: Target) -> Shape:
    """Return how up to n_warps take rows of n_in weights: as many as there is room for, by stages that are long enough.

    copied: the types whose rows may lie in each copy of a stage; beside_n_bytes: what the block keeps in shared memory
    besides. Raises ValueError where two rows have no room.
    """
    room = target.shared_n_bytes - RESERVED_N_BYTES - beside_n_bytes
    cuts = [_cut(n_in, n, n_warps, copied, room) for n in range(1, n_warps + 1)]
    best = max(cuts, key=lambda cut: (cut.n_warps, cut.stage_n_bytes >= STEP_N_BYTES, -cut.n_of_stage))
    if best.n_stages < 2:
        raise ValueError(f"rows of {n_in} weights do not fit into {target.shared_n_bytes} bytes of shared memory")
    n_bytes = best.n_stages * best.stage_n_bytes + beside_n_bytes
    return Shape(best.n_of_stage, best.n_groups, best.n_stages, n_bytes)


@dataclass(frozen=True)
class _Cut:
    n_of_stage: int
    n_groups: int
    n_stages: int
    stage_n_bytes: int

    @property
    def n_warps(self) -> int:
        """Warps with a row to take while another stage is on its way; none where only one stage fits."""
        return self.n_of_stage * self.n_groups if self.n_stages > 1 else 0


def _cut(n_in: int, n_of_stage: int, n_warps: int, copied: Sequence[Sequence[str]], room_n_bytes: int) -> _Cut:
    """Return what stages of n_of_stage rows, each with two barriers, come to: every group has as many of them."""
    copies = [max(_rows_n_bytes(name, n_in, n_of_stage) for name in types) for types in copied]
    stage_n_bytes = sum(copies) + 16
    n_fit = min(room_n_bytes // stage_n_bytes, MOST_STAGES)
    n_groups = max(1, min(n_warps // n_of_stage, n_fit))
    return _Cut(n_of_stage, n_groups, n_fit // n_groups * n_groups, stage_n_bytes)


def _rows_n_bytes(type_name: str, n_in: int, n_rows: int) -> int:
    """Return the room for rows of a stage, wherever in a line of 128 bytes they begin, and for their tail likewise."""
    n_strips, tail = n_rows * n_in // STRIP, strip_n_bytes(type_name) % 16
    strips = _whole_lines(n_strips * (strip_n_bytes(type_name) - tail) + LINE_N_BYTES - 16)
    return strips + (_whole_lines(n_strips * tail + LINE_N_BYTES) if tail else 0)


def _whole_lines(n_bytes: int) -> int:
    return -(-n_bytes // LINE_N_BYTES) * LINE_N_BYTES


def strip_n_bytes(type_name: str) -> int:
    """Return the bytes of 1024 weights."""
    form = QUANT_FORMATS[type_name]
    return STRIP // form.n_weights * form.block.itemsize


def gemv_shape(type_name: str, n_in: int, target: Target) -> Shape:
    """Return the shape of stream_gemv."""
    return shape(n_in, [[type_name]], STREAM_WARPS, _beside(n_in, [type_name]), target)


def normed_input_n_bytes(n_in: int) -> int:
    """Return the bytes of one token that a kernel normalises itself: x and the weight of the norm, f32."""
    return 8 * n_in


def project_bytes_moved(n_in: int, n_outs: Sequence[int], weights_n_bytes: int) -> int:
    """Return the bytes that stream_project must read and write: weights once, the token, the results."""
    return weights_n_bytes + normed_input_n_bytes(n_in) + 4 * sum(n_outs)


def gate_up_bytes_moved(n_in: int, n_ff: int, weights_n_bytes: int) -> int:
    """Return the same for stream_gate_up, whose results are f32 and quantised."""
    return weights_n_bytes + normed_input_n_bytes(n_in) + activation_n_bytes(n_ff)


def gemv_expression(type_name: str, n_in: int, target: Target) -> str:
    """Return the name expression of stream_gemv."""
    return f"stream_gemv<{type_name}, {n_in}, {gemv_shape(type_name, n_in, target).template_arguments}>"


def gate_up_shape(gate: str, up: str, n_in: int, target: Target) -> Shape:
    """Return the shape of stream_gate_up."""
    return shape(n_in, [[gate], [up]], STREAM_WARPS, _beside(n_in, [gate, up]), target)


def gate_up_expression(gate: str, up: str, n_in: int, target: Target) -> str:
    """Return the name expression of stream_gate_up."""
    return f"stream_gate_up<{gate}, {up}, {n_in}, {gate_up_shape(gate, up, n_in, target).template_arguments}>"


def project_shape(type_names: Sequence[str], n_in: int, target: Target) -> Shape:
    """Return the shape of stream_project."""
    streamed = [name for name in type_names if quants.is_quantized(name)]
    has_float = len(streamed) < len(type_names)
    beside = _beside(n_in, type_names) + (4 * n_in if has_float else 0)
    return shape(n_in, [streamed], STREAM_WARPS - has_float, beside, target)


def project_expression(type_names: Sequence[str], n_in: int, target: Target) -> str:
    """Return the name expression of stream_project for up to PROJECT_PARTS matrices, in the caller's order."""
    types = [*type_names, *["Absent"] * (PROJECT_PARTS - len(type_names))]
    return f"stream_project<{n_in}, {', '.join(types)}, {project_shape(type_names, n_in, target).template_arguments}>"


@dataclass(frozen=True)
class NormInput:
    """Rows that a kernel normalises itself: x (n_tokens, n_embd) f32, weight (n_embd) f32."""

    x: cupy.ndarray
    weight: cupy.ndarray
    eps: float


class Streams:
    """Launches the stream_* kernels on one device."""

    def __init__(self, kernels: Kernels, target: Target) -> None:
        self._kernels, self._target = kernels, target

    def gemv(self, matrix: DeviceMatrix, h: DeviceActivation, residual: cupy.ndarray) -> cupy.ndarray:
        """Add W h to `residual` (1, n_out) f32 in place and return it."""
        name, n_in = matrix.type_name, matrix.n_in
        arguments = (matrix.data, np.int32(matrix.n_out), h.q, h.scales, residual, residual)
        self._launch(gemv_expression(name, n_in, self._target), gemv_shape(name, n_in, self._target), arguments)
        return residual

    def project(
        self, matrices: Sequence[DeviceMatrix], h: NormInput, outs: Sequence[cupy.ndarray]
    ) -> tuple[cupy.ndarray, ...]:
        """Write W rms_norm(x) of each matrix to its place in `outs`, each (1, n_out) f32, in one launch."""
        types, n_in = [matrix.type_name for matrix in matrices], matrices[0].n_in
        parts = [part for m, out in zip(matrices, outs, strict=True) for part in (m.data, np.int32(m.n_out), out)]
        parts += [outs[0], np.int32(0), outs[0]] * (PROJECT_PARTS - len(matrices))
        arguments = (*parts, h.x, h.weight, np.float32(h.eps))
        self._launch(project_expression(types, n_in, self._target), project_shape(types, n_in, self._target), arguments)
        return tuple(outs)

    def gate_up_silu(
        self,
        gate: DeviceMatrix,
        up: DeviceMatrix,
        h: NormInput,
        out: DeviceActivation,
        *,
        done: cupy.ndarray,
        fault: cupy.ndarray,
        op: int,
    ) -> DeviceActivation:
        """Write silu(gate rms_norm(x)) * (up rms_norm(x)), quantised, to `out` and return it.

        done: u32 counters, one per 32 rows, zero before the first call; the kernel leaves them zero.
        """
        types = gate.type_name, up.type_name
        norm = (h.x, h.weight, np.float32(h.eps))
        outputs = (out.x, out.q, out.scales, done, np.uint32(op), fault)
        arguments = (gate.data, up.data, np.int32(gate.n_out), *norm, *outputs)
        expression = gate_up_expression(*types, gate.n_in, self._target)
        self._launch(expression, gate_up_shape(*types, gate.n_in, self._target), arguments)
        return out

    def _launch(self, expression: str, cut: Shape, arguments: tuple[Any, ...]) -> None:
        self._kernels[expression]((self._target.n_sm,), (STREAM_BLOCK,), arguments, cut.shared_n_bytes)


def _beside(n_in: int, type_names: Sequence[str]) -> int:
    """Return the shared memory of one token's activations, and of the IQ3_S table where a matrix needs it."""
    return n_in + n_in // 4 + (IQ3S_GRID_N_BYTES if "IQ3_S" in type_names else 0)
