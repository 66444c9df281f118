"""How the streaming kernels cut rows: pure functions of shapes, formats and the device."""

from __future__ import annotations

import re

import pytest

from engine import quants
from engine.cuda.compile import KERNELS_DIR
from engine.cuda.streams import (
    LINE_N_BYTES,
    RESERVED_N_BYTES,
    STEP_N_BYTES,
    STREAM_WARPS,
    Target,
    gate_up_shape,
    gemv_shape,
    project_expression,
    project_shape,
    strip_n_bytes,
    takes,
    takes_any,
    takes_gate_up,
)

H200 = Target.of("sm_90", n_sm=132)
CARD = Target.of("sm_120", n_sm=36)


def lines(n_bytes: int) -> int:
    """Round up to whole lines of 128 bytes."""
    return (n_bytes + 127) // 128 * 128


def test_shared_memory_is_that_of_the_architecture() -> None:
    assert H200.shared_n_bytes == 228 * 1024
    assert Target.of("sm_80", 108).shared_n_bytes == 164 * 1024
    assert CARD.shared_n_bytes == Target.of("sm_86", 82).shared_n_bytes == 100 * 1024


@pytest.mark.parametrize(
    ("type_name", "n_bytes"),
    [("Q4_K", 576), ("Q5_K", 704), ("Q6_K", 840), ("IQ4_XS", 544), ("IQ3_S", 440), ("Q8_0", 1088)],
)
def test_bytes_of_a_strip(type_name: str, n_bytes: int) -> None:
    assert strip_n_bytes(type_name) == n_bytes


@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_strips_have_a_tail_where_the_kernels_give_them_one(type_name: str) -> None:
    text = (KERNELS_DIR / "formats.cuh").read_text()
    sizes = re.search(rf"struct {type_name} {{.*?STRIP_N_BYTES = (\d+), TAIL_N_BYTES = (\d+);", text, re.DOTALL)
    assert sizes is not None
    strip, tail = int(sizes[1]), int(sizes[2])
    assert strip + tail == strip_n_bytes(type_name)
    assert (strip % 16, tail) in ((0, 0), (0, 8))  # so a tail is where the sum is no multiple of 16


def test_kernels_and_launcher_agree_on_a_line() -> None:
    assert f"constexpr int LINE_N_BYTES = {LINE_N_BYTES};" in (KERNELS_DIR / "stream.cuh").read_text()


def test_only_whole_strips_of_quantised_weights_are_streamed() -> None:
    assert takes(5120, "Q4_K")
    assert not takes(5120 + 256, "Q4_K")
    assert not takes(5120, "Q4_K", "F16")
    assert takes_any(5120, ["F32", "Q4_K"])
    assert not takes_any(5120, ["F32", "BF16"])
    assert takes_gate_up(5120, 17408, "Q4_K", "Q6_K")
    assert not takes_gate_up(5120, 17408 + 16, "Q4_K", "Q6_K")


@pytest.mark.parametrize("target", [H200, CARD, Target.of("sm_80", 108)])
@pytest.mark.parametrize("n_in", [1024, 5120, 6144, 17408])
@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_every_shape_fits_and_every_group_has_stages_of_its_own(type_name: str, n_in: int, target: Target) -> None:
    cut = gemv_shape(type_name, n_in, target)
    n_strips, tail = cut.n_of_stage * n_in // 1024, 8 if type_name in ("Q6_K", "IQ3_S") else 0
    stage = 16 + lines(n_strips * (strip_n_bytes(type_name) - tail) + 112)  # 112: the last place in a line
    if tail:
        stage += lines(n_strips * tail + 128)  # as much, and the 16 bytes round its ends
    activations = n_in * 5 // 4 + (2048 if type_name == "IQ3_S" else 0)
    assert cut.n_stages >= 2
    assert cut.n_stages % cut.n_groups == 0
    assert cut.n_of_stage * cut.n_groups <= STREAM_WARPS
    assert cut.shared_n_bytes == cut.n_stages * stage + activations
    assert cut.shared_n_bytes <= target.shared_n_bytes - RESERVED_N_BYTES


def test_all_warps_have_rows_where_the_device_has_room() -> None:
    assert gemv_shape("Q4_K", 6144, H200).template_arguments == "4, 4, 16"
    assert gemv_shape("Q4_K", 17408, H200).template_arguments == "1, 16, 16"
    assert gate_up_shape("Q4_K", "Q4_K", 5120, H200).template_arguments == "2, 8, 16"
    assert gemv_shape("Q6_K", 17408, CARD).template_arguments == "1, 5, 5"


def test_stages_are_long_enough_to_be_asked_for_one_by_one() -> None:
    cut = project_shape(["Q4_K", "Q4_K", "F32", "F32"], 5120, H200)
    assert (cut.n_of_stage, cut.n_groups) == (5, 3)
    assert cut.n_of_stage * 5 * 576 >= STEP_N_BYTES


def test_a_float_matrix_takes_a_warp_and_its_own_activations() -> None:
    plain, beside = project_shape(["Q4_K", "Q4_K"], 5120, H200), project_shape(["Q4_K", "F32"], 5120, H200)
    assert plain.n_of_stage * plain.n_groups == STREAM_WARPS
    assert beside.n_of_stage * beside.n_groups == STREAM_WARPS - 1
    assert beside.shared_n_bytes == 12 * (lines(5 * 5 * 576 + 112) + 16) + 4 * 5120 + 6400


def test_the_expression_names_absent_places() -> None:
    assert project_expression(["Q4_K", "F32"], 5120, H200).startswith(
        "stream_project<5120, Q4_K, F32, Absent, Absent, "
    )


def test_rows_that_no_device_has_room_for() -> None:
    with pytest.raises(ValueError, match="rows of 65536 weights do not fit"):
        gemv_shape("Q6_K", 65536, CARD)
