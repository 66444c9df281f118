"""How the streaming kernels cut rows: pure functions of shapes, formats and the device."""

from __future__ import annotations

import pytest

from engine import quants
from engine.cuda.streams import (
    IN_FLIGHT_N_BYTES,
    RESERVED_N_BYTES,
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
def test_every_shape_fits_and_keeps_two_pieces_on_the_way(type_name: str, n_in: int, target: Target) -> None:
    cut = gemv_shape(type_name, n_in, target)
    late_tail = 16 if type_name in ("Q6_K", "IQ3_S") else 0
    stage = STREAM_WARPS * (16 + late_tail + -(-cut.n_strips * strip_n_bytes(type_name) // 16) * 16)
    activations = n_in * 5 // 4 + (2048 if type_name == "IQ3_S" else 0)
    assert cut.n_stages >= 2
    assert cut.shared_n_bytes == cut.n_stages * stage + activations
    assert cut.shared_n_bytes <= target.shared_n_bytes - RESERVED_N_BYTES


def test_whole_rows_where_the_device_has_room() -> None:
    assert (gemv_shape("Q4_K", 5120, H200).n_strips, gemv_shape("Q4_K", 6144, H200).n_strips) == (6, 6)
    assert gemv_shape("Q6_K", 17408, CARD).n_strips == 1
    assert gate_up_shape("Q4_K", "Q4_K", 5120, H200).n_stages == 2


def test_pieces_are_cut_until_enough_is_on_the_way() -> None:
    cut = gate_up_shape("Q5_K", "Q6_K", 5120, H200)
    strip = STREAM_WARPS * (704 + 840)
    n_pieces = -(-5 // cut.n_strips)
    assert (cut.n_stages - 1) * 5 / n_pieces * strip >= IN_FLIGHT_N_BYTES


def test_a_float_matrix_takes_a_warp_and_its_own_activations() -> None:
    plain, beside = project_shape(["Q4_K", "Q4_K"], 5120, H200), project_shape(["Q4_K", "F32"], 5120, H200)
    assert beside.shared_n_bytes > 4 * 5120
    assert (beside.shared_n_bytes - 4 * 5120 - 6400) % (STREAM_WARPS - 1) == 0
    assert (plain.shared_n_bytes - 6400) % STREAM_WARPS == 0


def test_the_expression_names_absent_places() -> None:
    assert project_expression(["Q4_K", "F32"], 5120, H200).startswith(
        "stream_project<5120, Q4_K, F32, Absent, Absent, "
    )


def test_rows_that_no_device_has_room_for() -> None:
    with pytest.raises(ValueError, match="rows of 65536 weights do not fit"):
        gemv_shape("Q6_K", 65536, CARD)
