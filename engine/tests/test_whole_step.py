"""The table of a whole decode step: which kernels it can stand for, how it cuts rows, what a row of it says."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.cuda import whole_step
from engine.cuda.streams import RESERVED_N_BYTES, STREAM_WARPS, Target, piece_n_bytes, strip_n_bytes
from engine.cuda.whole_step import Launch
from engine.errors import RequestError

H200 = Target.of("sm_90", n_sm=132)
CARD = Target.of("sm_120", n_sm=36)
NAMES = [
    "argmax",
    "attention_combine<256, 24>",
    "attention_split<256, 24, 4>",
    "gated_delta<128, 4, 16, 48>",
    "gemv<Q6_K, 5120, 2>",
    "qk_norm_rope_append<256, 24, 4, 64>",
    "stream_gate_up<Q5_K, Q6_K, 5120, 4, 2>",
    "stream_gemv<IQ3_S, 17408, 6, 4>",
    "stream_project<5120, Q4_K, Q4_K, F32, F32, 6, 3>",
]


def array(address: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def stream_of(op: bytes, at: int) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the parts and the sizes of a Stream."""
    parts = [struct.unpack_from("<QQiiii", op, at + 32 * i) for i in range(4)]
    return parts, struct.unpack_from("<4i", op, at + 128)


def test_only_models_whose_matrices_are_all_streamed_qualify() -> None:
    assert whole_step.qualifies(NAMES)
    assert not whole_step.qualifies([*NAMES, "gemv<Q4_K, 5120, 1>"])
    assert not whole_step.qualifies([*NAMES, "gemv<Q6_K, 5376, 2>"])
    assert not whole_step.qualifies([*NAMES, "gemv<F16, 5120, 2>"])
    assert not whole_step.qualifies([*NAMES, "project<5376, Q4_K, Absent, Absent, Absent>"])
    assert not whole_step.qualifies([*NAMES, "stream_project<5120, Q4_K, F16, Absent, Absent, 6, 3>"])


@pytest.mark.parametrize("target", [H200, CARD, Target.of("sm_80", 108)])
def test_shared_memory_is_used_and_not_exceeded(target: Target) -> None:
    cut = whole_step.cut(NAMES, target)
    unused = target.shared_n_bytes - RESERVED_N_BYTES - whole_step.STATIC_N_BYTES - cut.shared_n_bytes
    assert 0 <= unused < STREAM_WARPS * (16 * cut.n_stages + 1)
    assert cut.n_stages == (2 if target is CARD else 4)
    assert cut.stage_n_bytes % 16 == 0


@pytest.mark.parametrize(
    ("n_in", "types", "stage_n_bytes", "n"),
    [
        (5120, ["Q4_K"], 3088, 5),
        (17408, ["Q4_K"], 3088, 5),
        (17408, ["Q6_K"], 3088, 3),
        (5120, ["Q4_K", "Q4_K"], 3088, 2),
    ],
)
def test_pieces_fit_a_stage_and_are_of_even_length(n_in: int, types: list[str], stage_n_bytes: int, n: int) -> None:
    assert whole_step.n_strips(n_in, types, stage_n_bytes) == n
    assert sum(piece_n_bytes(n, strip_n_bytes(name)) for name in types) <= stage_n_bytes


def test_a_stage_that_no_strip_fits() -> None:
    with pytest.raises(RequestError, match="a strip of Q5_K and Q6_K does not fit into a stage of 1024 bytes"):
        whole_step.n_strips(5120, ["Q5_K", "Q6_K"], 1024)


def test_a_device_without_room_for_two_stages() -> None:
    with pytest.raises(RequestError, match="two stages of 1568 bytes for each warp do not fit into 49152 bytes"):
        whole_step.cut(NAMES, Target(10, 48 << 10))


def test_the_kernel_names_each_class_once_in_order() -> None:
    name = whole_step.expression([*NAMES, NAMES[0]], H200)
    stage = whole_step.cut(NAMES, H200).stage_n_bytes
    assert name.startswith(f"whole_step<4, {stage}, StepAppend<256, 24, 4, 64>, StepArgmax, StepCombine<256, 24>, ")
    assert "StepProject<5120, Q4_K, Q4_K, F32, F32, 5, " in name


def test_a_matrix_with_a_tail() -> None:
    w, y = array(1 << 20), array(1 << 30)
    launch = Launch(NAMES[7], (132,), (w, np.int32(5120), array(3), array(4), y, y))
    op = bytes(whole_step.table([launch], NAMES, H200)[0])
    kind, n_streamed, n_float, _ = struct.unpack_from("<4i", op)
    parts, (strips_of_row, n_strips, is_pair, _) = stream_of(op, 16)
    assert (n_streamed, n_float, strips_of_row, is_pair) == (5120, 0, 17, 0)
    assert n_strips == whole_step.n_strips(17408, ["IQ3_S"], whole_step.cut(NAMES, H200).stage_n_bytes)
    assert parts[0][:4] == (1 << 20, (1 << 20) + 5120 * 17 * 432, 5120, 432)
    kinds = whole_step.expression(NAMES, H200).split(", Step")
    assert kinds[kind + 1].startswith("Gemv<IQ3_S, 17408, ")
    assert struct.unpack_from("<QixxxxQQQQ", op, 304) == (1 << 20, 5120, 3, 4, 1 << 30, 1 << 30)


def test_a_pair_lies_in_one_stage() -> None:
    arguments = (array(16), array(32), np.int32(17408), *[array(1)] * 2, np.float32(1e-6))
    launch = Launch(NAMES[6], (132,), (*arguments, *[array(1)] * 4, np.uint32(0), array(1)))
    op = bytes(whole_step.table([launch], NAMES, H200)[0])
    parts, (_, n_strips, is_pair, _) = stream_of(op, 16)
    assert is_pair == 1
    assert struct.unpack_from("<i", op, 4) == (17408,)
    assert (parts[0][0], parts[0][1], parts[0][4]) == (16, 0, 0)
    assert (parts[1][0], parts[1][1], parts[1][4]) == (32, 32 + 17408 * 5 * 832, piece_n_bytes(n_strips, 704))


def test_rows_of_floats_are_streams_of_their_own() -> None:
    sizes = (10240, 6144, 48, 48)
    parts_of = [value for i, n in enumerate(sizes) for value in (array(16 * (i + 1)), np.int32(n), array(1))]
    launch = Launch(NAMES[8], (132,), (*parts_of, array(1), array(1), np.float32(1e-6)))
    op = bytes(whole_step.table([launch], NAMES, H200)[0])
    assert struct.unpack_from("<ii", op, 4) == (16384, 96)
    parts, (strips_of_row, _, _, _) = stream_of(op, 160)
    assert strips_of_row == 40
    assert [part[0] for part in parts] == [48, 64, 0, 0]
    assert parts[0][1:4] == (0, 48, 512)


def test_the_norm_goes_into_the_head() -> None:
    norm = Launch("rms_norm<5120>", (1,), (array(7), array(8), np.float32(0.5), array(9), array(9), array(9)))
    head = Launch(
        NAMES[4],
        (62080,),
        (array(1), np.int32(248320), array(9), array(9), array(9), array(5), array(5), np.uint32(1024), array(6)),
    )
    table = whole_step.table([norm, head], NAMES, H200)
    assert table.shape == (1, whole_step.OP_N_BYTES)
    assert struct.unpack_from("<QQfxxxxQIxxxxQ", bytes(table[0]), 304) == (7, 8, 0.5, 5, 1024, 6)
