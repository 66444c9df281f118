"""Which family of matrix kernels a device gets; needs no device."""

from __future__ import annotations

import re

import pytest

from engine.cuda import compile as compiler
from engine.cuda import gemv
from engine.cuda.dispatch import Dispatch, n_row_slots
from engine.cuda.streams import Target

N_SMS = (36, 132, 170)  # a desktop card, the H200, the largest of sm_120


def dispatch(n_sm: int) -> Dispatch:
    return Dispatch(Target.of("sm_90", n_sm))


@pytest.mark.parametrize(
    ("n_rows", "rows_per_sm", "n_sm", "expected"),
    [(5120, 16, 36, 5184), (5120, 16, 132, 6336), (5120, 16, 170, 5440), (2112, 16, 132, 2112), (2113, 16, 132, 4224)],
)
def test_rounds_are_whole(n_rows: int, rows_per_sm: int, n_sm: int, expected: int) -> None:
    assert n_row_slots(n_rows, rows_per_sm, n_sm) == expected


@pytest.mark.parametrize("n_sm", N_SMS)
def test_every_matrix_of_the_27b_model_is_streamed(n_sm: int) -> None:
    found = dispatch(n_sm)
    assert found.streams_project(5120, ["Q5_K", "Q4_K", "F32", "F32"], [10240, 6144, 48, 48])
    assert found.streams_project(5120, ["Q4_K", "Q5_K", "Q6_K"], [12288, 1024, 1024])
    assert found.streams_add(6144, "Q5_K", 5120)
    assert found.streams_add(17408, "Q6_K", 5120)
    assert found.streams_gate_up(5120, 17408, "IQ4_XS", "IQ4_XS")


@pytest.mark.parametrize(("n_sm", "streamed"), [(36, False), (132, False), (170, True)])
def test_a_last_round_that_is_nearly_empty_goes_to_the_rows(n_sm: int, streamed: bool) -> None:
    """A round of streams is 576, 2112 or 2720 rows, one of rows of 1024 weights 1008, 3696 or 4760."""
    n_out = {36: 577, 132: 2113, 170: 2720}[n_sm]
    assert dispatch(n_sm).streams_add(1024, "Q4_K", n_out) is streamed


def test_what_cannot_be_streamed_is_not() -> None:
    everything = Dispatch(Target.of("sm_90", 132), "streams")
    assert not everything.streams_add(5121, "Q4_K", 5120)
    assert not everything.streams_add(5120, "F16", 5120)
    assert not everything.streams_project(5120, ["F32", "F32"], [5120, 5120])
    assert not everything.streams_gate_up(5120, 17409, "Q4_K", "Q4_K")


def test_a_policy_overrules_the_rounds() -> None:
    target = Target.of("sm_90", 132)
    assert Dispatch(target, "streams").streams_add(1024, "Q4_K", 2113)
    assert not Dispatch(target, "rows").streams_add(17408, "Q6_K", 5120)
    assert not Dispatch(target, "rows").streams_gate_up(5120, 17408, "Q4_K", "Q4_K")


def test_blocks_per_multiprocessor_are_those_of_the_kernels() -> None:
    text = (compiler.KERNELS_DIR / "row_dot.cuh").read_text()
    found = re.search(
        r"blocks_per_sm\(int n_in\) \{ return n_in <= (\d+) \? (\d+) : n_in <= (\d+) \? (\d+) : (\d+)", text
    )
    assert found
    short, many, middle, some, few = map(int, found.groups())
    lengths = (short, short + 1, middle, middle + 1)
    assert [gemv.blocks_per_sm(n) for n in lengths] == [many, some, some, few]
    pairs = re.search(r"PAIR_BLOCKS_PER_SM = (\d+);", (compiler.KERNELS_DIR / "gate_up_silu.cu").read_text())
    assert pairs
    assert int(pairs[1]) == gemv.PAIR_BLOCKS_PER_SM
