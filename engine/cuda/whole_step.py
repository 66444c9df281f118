"""A decode step in one launch: the launches that a pass would make, as a table that whole_step.cu walks.

`Kernels.recording` collects the launches of a pass of one token; `table` turns each into a row of the table, and
`expression` names the kernel that knows how to run them all. Nothing here needs CuPy or a device.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine import quants
from engine.cuda import streams
from engine.errors import RequestError
from engine.numerics import KV_SPLIT

if TYPE_CHECKING:
    from engine.cuda.kernels import Kernels
    from engine.cuda.memory import DeviceMemory

MOST_STAGES = 4
"""Pieces of rows that a warp has on the way, where the device has room; more are shorter ones."""
MAX_PARTS = 4
ARGUMENTS_N_BYTES = 160
OP_N_BYTES = 16 + 2 * (MAX_PARTS * 32 + 16) + ARGUMENTS_N_BYTES
"""Bytes of a StepOp of whole_step.cu."""
FLOAT_STRIP = 128
"""Weights of F32 in a strip: four a lane."""
FLOAT_STRIP_N_BYTES = 4 * FLOAT_STRIP
ASKED_N_BYTES = 32
"""Shared memory beside its stages in which a warp keeps what it asks for next."""
STATIC_N_BYTES = 4096
"""Room for the kernel's static shared memory."""
BARRIER_SHAPE = (2,)
"""u32 words of the barrier, zero before the first launch."""

Name: TypeAlias = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Launch:
    """A kernel launch that was recorded instead of made."""

    expression: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Cut:
    """How a block's shared memory is divided: a warp's stages and the bytes of one, and those of the whole block."""

    n_stages: int
    stage_n_bytes: int
    shared_n_bytes: int


@dataclass(frozen=True)
class Rows:
    """A matrix as it is streamed: its address, its type and its rows."""

    address: int
    type_name: str
    n_rows: int


def qualifies(expressions: Iterable[str]) -> bool:
    """Return whether whole_step can run a pass of these kernels: all matrices streamed, floats only F32."""
    names = {_parse(e) for e in expressions}
    heads = [parameters for name, parameters in names if name == "gemv"]
    return (
        all(name in _KINDS for name, _ in names)
        and all(mode == "2" and streams.takes(int(n_in), type_name) for type_name, n_in, mode in heads)
        and not any({"F16", "BF16"} & set(parameters) for _, parameters in names)
    )


def expression(expressions: Iterable[str], target: streams.Target) -> str:
    """Return the name expression of the kernel that runs a pass of these kernels."""
    names = sorted(set(expressions))
    own = cut(names, target)
    return f"whole_step<{own.n_stages}, {own.stage_n_bytes}, {', '.join(_kinds(names, own.stage_n_bytes))}>"


def cut(expressions: Iterable[str], target: streams.Target) -> Cut:
    """Return how shared memory is divided: what the ops work in first, the rest in stages that a strip fits into."""
    parsed = [_parse(e) for e in expressions]
    beside = streams.IQ3S_GRID_N_BYTES + max(_scratch_n_bytes(*name) for name in parsed)
    room = (target.shared_n_bytes - streams.RESERVED_N_BYTES - STATIC_N_BYTES - beside) // streams.STREAM_WARPS
    least = max(_least_stage_n_bytes(*name) for name in parsed)
    n_stages = min(MOST_STAGES, (room - ASKED_N_BYTES) // (least + 16))
    if n_stages < 2:
        raise RequestError(f"two stages of {least} bytes for each warp do not fit into {target.shared_n_bytes} bytes")
    stage = (room - ASKED_N_BYTES) // n_stages // 16 * 16 - 16
    return Cut(n_stages, stage, streams.STREAM_WARPS * (n_stages * (stage + 16) + ASKED_N_BYTES) + beside)


def table(launches: Sequence[Launch], expressions: Iterable[str], target: streams.Target) -> NDArray[np.uint8]:
    """Return the ops of a pass, (n_ops, OP_N_BYTES) u8; `expressions` as for `expression`."""
    names = sorted(set(expressions))
    stage = cut(names, target).stage_n_bytes
    kinds = _kinds(names, stage)
    rows = []
    for launch in _with_heads(launches):
        name, parameters = _parse(launch.expression)
        kind = kinds.index(_kind(name, parameters, stage))
        rows.append(np.frombuffer(_op(kind, name, parameters, launch, stage), np.uint8))
    return np.stack(rows)


def n_ops(n_layer_recurrent: int, n_layer_attn: int) -> int:
    """Return the ops of a step: five or seven a layer, and the head and the choice."""
    return 5 * n_layer_recurrent + 7 * n_layer_attn + 2


class WholeStep:
    """The step's table on the device, and its launch."""

    def __init__(
        self, kernels: Kernels, expressions: Iterable[str], target: streams.Target, memory: DeviceMemory, n_ops: int
    ) -> None:
        self._kernels, self._names, self._target = kernels, sorted(expressions), target
        self._ops = memory.array((n_ops, OP_N_BYTES), np.uint8)
        self._barrier = memory.array(BARRIER_SHAPE, np.uint32)
        self._table: NDArray[np.uint8] | None = None

    def launch(self, launches: Sequence[Launch]) -> None:
        """Launch what stands for `launches`; the table must be uploaded before that runs."""
        self._table = table(launches, self._names, self._target)
        self._kernels.launch_cooperative(
            expression(self._names, self._target),
            (self._target.n_sm,),
            (32 * streams.STREAM_WARPS,),
            (self._ops, np.int32(len(self._table)), self._barrier),
            cut(self._names, self._target).shared_n_bytes,
        )

    def upload(self, stream: Any) -> None:
        """Copy the table of the last launch to the device, outside of a capture."""
        if self._table is not None:
            self._ops.set(self._table, stream=stream)
            self._table = None


def _parse(expression: str) -> Name:
    name, _, rest = expression.partition("<")
    return name, tuple(re.split(r",\s*", rest.rstrip(">"))) if rest else ()


def _kinds(names: Sequence[str], stage_n_bytes: int) -> list[str]:
    return sorted({_kind(*_parse(e), stage_n_bytes) for e in names})


def _kind(name: str, parameters: tuple[str, ...], stage_n_bytes: int) -> str:
    """Return the class of whole_step.cu that does what the kernel does."""
    return _KINDS[name](parameters, stage_n_bytes)


def _gemv_kind(p: tuple[str, ...], stage_n_bytes: int) -> str:
    return f"StepGemv<{p[0]}, {p[1]}, {n_strips(int(p[1]), [p[0]], stage_n_bytes)}>"


def _gate_up_kind(p: tuple[str, ...], stage_n_bytes: int) -> str:
    return f"StepGateUp<{p[0]}, {p[1]}, {p[2]}, {n_strips(int(p[2]), p[:2], stage_n_bytes)}>"


def _project_kind(p: tuple[str, ...], stage_n_bytes: int) -> str:
    n_in, types = int(p[0]), p[1 : 1 + MAX_PARTS]
    cuts = project_strips(n_in, types, stage_n_bytes), float_strips(n_in, stage_n_bytes)
    return f"StepProject<{n_in}, {', '.join(types)}, {cuts[0]}, {cuts[1]}>"


def _head_kind(p: tuple[str, ...], stage_n_bytes: int) -> str:
    return f"StepHead<{p[0]}, {p[1]}, {n_strips(int(p[1]), [p[0]], stage_n_bytes)}>"


def _same_kind(name: str) -> Callable[[tuple[str, ...], int], str]:
    return lambda p, stage_n_bytes: f"{name}<{', '.join(p)}>" if p else name


_KINDS: Mapping[str, Callable[[tuple[str, ...], int], str]] = {
    "stream_gemv": _gemv_kind,
    "stream_gate_up": _gate_up_kind,
    "stream_project": _project_kind,
    "gemv": _head_kind,
    "gated_delta": _same_kind("StepGatedDelta"),
    "qk_norm_rope_append": _same_kind("StepAppend"),
    "attention_split": _same_kind("StepSplit"),
    "attention_combine": _same_kind("StepCombine"),
    "argmax": _same_kind("StepArgmax"),
}


def n_strips(n_in: int, type_names: Sequence[str], stage_n_bytes: int) -> int:
    """Return the strips in a piece of a row of n_in weights, of all these matrices together in one stage."""
    sizes = [streams.strip_n_bytes(name) for name in type_names]
    of_row = n_in // streams.STRIP
    fits = [n for n in range(1, of_row + 1) if sum(streams.piece_n_bytes(n, s) for s in sizes) <= stage_n_bytes]
    if not fits:
        raise RequestError(f"a strip of {' and '.join(type_names)} does not fit into a stage of {stage_n_bytes} bytes")
    return -(-of_row // -(-of_row // fits[-1]))


def project_strips(n_in: int, type_names: Sequence[str], stage_n_bytes: int) -> int:
    """Return the same for matrices whose rows follow each other."""
    return min(n_strips(n_in, [name], stage_n_bytes) for name in type_names if quants.is_quantized(name))


def float_strips(n_in: int, stage_n_bytes: int) -> int:
    """Return the strips of 128 weights in a piece of a row of n_in F32."""
    of_row, most = n_in // FLOAT_STRIP, stage_n_bytes // FLOAT_STRIP_N_BYTES
    return -(-of_row // -(-of_row // most))


def _scratch_n_bytes(name: str, p: tuple[str, ...]) -> int:
    """Return what an op works in: the token, or what its kernel has as static shared memory."""
    match name:
        case "stream_gemv" | "gemv":
            return _token_n_bytes(int(p[1]))
        case "stream_gate_up":
            return _token_n_bytes(int(p[2]))
        case "stream_project":
            return _token_n_bytes(int(p[0])) + 4 * int(p[0])
        case "gated_delta":
            return 4 * 4 * int(p[0]) + 32
        case "qk_norm_rope_append":
            return 4 * streams.STREAM_WARPS * int(p[0])
        case "attention_split":
            return KV_SPLIT * (2 * int(p[0]) + 4 * (int(p[1]) // int(p[2])))
        case _:
            return 0


def _least_stage_n_bytes(name: str, p: tuple[str, ...]) -> int:
    """Return the bytes of the shortest piece of an op's rows, multiples of 16."""
    match name:
        case "stream_gemv" | "gemv":
            return streams.piece_n_bytes(1, streams.strip_n_bytes(p[0]))
        case "stream_gate_up":
            return sum(streams.piece_n_bytes(1, streams.strip_n_bytes(t)) for t in p[:2])
        case "stream_project":
            quantised = [streams.piece_n_bytes(1, streams.strip_n_bytes(t)) for t in p[1:5] if quants.is_quantized(t)]
            return max(*quantised, FLOAT_STRIP_N_BYTES)
        case _:
            return 0


def _token_n_bytes(n_in: int) -> int:
    return n_in + n_in // 4


def _with_heads(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches with the norm before the head as part of the head, which normalises its own input."""
    out: list[Launch] = []
    norm: Launch | None = None
    for launch in launches:
        name, _ = _parse(launch.expression)
        if name == "rms_norm":
            norm = launch
        elif name == "gemv":
            assert norm is not None, "the head follows its norm"
            out.append(Launch(launch.expression, launch.grid, (*launch.arguments, *norm.arguments[:3])))
        else:
            out.append(launch)
    return out


def _op(kind: int, name: str, p: tuple[str, ...], launch: Launch, stage_n_bytes: int) -> bytes:
    a = launch.arguments
    streamed, floats, is_pair, n_in, arguments = _streams_of(name, p, launch)
    strips = 1
    if streamed:
        types = [rows.type_name for rows in streamed]
        strips = n_strips(n_in, types, stage_n_bytes) if is_pair else project_strips(n_in, types, stage_n_bytes)
    n_streamed = streamed[0].n_rows if is_pair else sum(rows.n_rows for rows in streamed)
    head = struct.pack("<4i", kind, n_streamed, sum(rows.n_rows for rows in floats), 0)
    main = _stream([_part(rows, n_in // streams.STRIP) for rows in streamed], n_in // streams.STRIP, strips, is_pair)
    float_parts = [(rows.address, 0, rows.n_rows, FLOAT_STRIP_N_BYTES) for rows in floats]
    beside = _stream(float_parts, n_in // FLOAT_STRIP, float_strips(n_in, stage_n_bytes) if floats else 1, False)
    packed = _packed(a if arguments is None else arguments)
    if len(packed) > ARGUMENTS_N_BYTES:
        raise AssertionError(f"{name} has {len(packed)} bytes of arguments")
    return head + main + beside + packed.ljust(ARGUMENTS_N_BYTES, b"\0")


def _streams_of(
    name: str, p: tuple[str, ...], launch: Launch
) -> tuple[list[Rows], list[Rows], bool, int, Sequence[Any] | None]:
    """Return the quantised and the float matrices, whether they are a pair, n_in, and arguments if not the launch's."""
    a = launch.arguments
    if name == "stream_gemv":
        return [Rows(_address(a[0]), p[0], int(a[1]))], [], False, int(p[1]), None
    if name == "stream_gate_up":
        pair = [Rows(_address(w), t, int(a[2])) for w, t in zip(a[:2], p[:2], strict=True)]
        return pair, [], True, int(p[2]), None
    if name == "stream_project":
        parts = [
            Rows(_address(a[3 * i]), t, int(a[3 * i + 1])) for i, t in enumerate(p[1 : 1 + MAX_PARTS]) if t != "Absent"
        ]
        is_quantized = [quants.is_quantized(rows.type_name) for rows in parts]
        streamed = [rows for rows, q in zip(parts, is_quantized, strict=True) if q]
        floats = [rows for rows, q in zip(parts, is_quantized, strict=True) if not q]
        return streamed, floats, False, int(p[0]), None
    if name == "gemv":
        (w, n_out, *_, logits, op, fault), norm = a[:9], a[9:]  # `_with_heads` has put the norm's behind
        return [Rows(_address(w), p[0], int(n_out))], [], False, int(p[1]), (*norm, logits, op, fault)
    if name == "attention_split":
        return [], [], False, 0, (*a, np.int32(launch.grid[1]))
    return [], [], False, 0, None


def _part(rows: Rows, of_row: int) -> tuple[int, int, int, int]:
    """Return address, address of the tail or 0, rows, and bytes of a strip without its tail."""
    n_bytes = streams.strip_n_bytes(rows.type_name)
    run = n_bytes // 16 * 16
    return rows.address, rows.address + rows.n_rows * of_row * run if n_bytes > run else 0, rows.n_rows, run


def _stream(parts: Sequence[tuple[int, int, int, int]], of_row: int, strips: int, is_pair: bool) -> bytes:
    packed, at = b"", 0
    for w, tail, n_rows, run in parts:
        packed += struct.pack("<QQiiii", w, tail, n_rows, run, at, 0)
        if is_pair:
            at += streams.piece_n_bytes(strips, run + (8 if tail else 0))
    return packed.ljust(MAX_PARTS * 32, b"\0") + struct.pack("<4i", of_row, strips, is_pair, 0)


def _packed(arguments: Sequence[Any]) -> bytes:
    """Return kernel arguments as the members of a C struct."""
    out = b""
    for argument in arguments:
        value = argument if isinstance(argument, np.generic) else np.uint64(_address(argument))
        out = out.ljust(-(-len(out) // value.nbytes) * value.nbytes, b"\0") + value.tobytes()
    return out


def _address(array: Any) -> int:
    return int(array.data.ptr)
