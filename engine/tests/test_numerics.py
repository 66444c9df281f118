"""`engine.numerics` against the scalar twin, bit for bit, and against float64, in ulp."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import numerics
from engine.tests import scalar_twin as twin
from engine.tests.scalar_twin import assert_same_bits

F32_MAX = np.finfo(np.float32).max


def bits(x: Any) -> np.ndarray[Any, Any]:
    """Return f32 values as their bit patterns, so that signs of zero count."""
    return np.asarray(x, dtype=np.float32).view(np.uint32)


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return numbers of very different sizes, so that every order of a sum gives other bits."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)


# The order of a sum


@pytest.mark.parametrize("n_lanes", [32, 256])
@pytest.mark.parametrize("n", [1, 2, 4, 5, 31, 32, 128, 129, 256, 1000, 1024, 1025, 2500])
def test_row_sum_follows_the_order_of_the_contract(n: int, n_lanes: int) -> None:
    terms = normal(3, n, seed=n)
    expected = [twin.row_sum(list(row), n_lanes) for row in terms]
    assert_same_bits(numerics.row_sum(terms, n_lanes), expected)


def test_row_sum_of_the_worked_example_in_the_docs() -> None:
    terms = np.array([1.0] + [2.0**-24] * 7, dtype=np.float32)
    assert bits(numerics.row_sum(terms)) == 0x3F800002
    left_to_right = np.float32(0)
    for term in terms:
        left_to_right += term
    assert left_to_right == 1


def test_row_sum_of_negative_zeros_is_positive_zero() -> None:
    assert bits(numerics.row_sum(np.full(256, -0.0, dtype=np.float32))) == 0


def test_row_sum_does_not_see_zeros_past_the_end() -> None:
    terms = normal(200)
    padded = np.concatenate([terms, np.zeros(312, dtype=np.float32)])
    assert_same_bits(numerics.row_sum(padded), numerics.row_sum(terms))


def test_row_sum_over_other_lanes_or_from_left_to_right_has_other_bits() -> None:
    terms = normal(64, 1024)
    ours = numerics.row_sum(terms)
    left_to_right = np.add.accumulate(terms, axis=1)[:, -1]
    assert (ours != numerics.row_sum(terms, 256)).mean() > 0.3
    assert (ours != left_to_right).mean() > 0.3


def test_row_sum_keeps_denormals() -> None:
    terms = np.full(128, 2.0**-149, dtype=np.float32)
    assert bits(numerics.row_sum(terms)) == 128


def test_row_sum_error_against_float64() -> None:
    terms = normal(200, 5120)
    exact = terms.astype(np.float64).sum(axis=1)
    scale = np.abs(terms).astype(np.float64).sum(axis=1)
    assert (np.abs(numerics.row_sum(terms) - exact) / scale).max() < 3e-8


def test_tree_folds_by_halves() -> None:
    values = normal(7, 32)
    assert_same_bits(numerics.tree(values), [twin.tree(list(row)) for row in values])
    assert_same_bits(numerics.tree(values.T.copy(), axis=0), numerics.tree(values))


# Elementary functions

SATURATED = [-1e30, -105.1, -105.0, -104.0, -103.9, -88.73, -88.7, -87.4, -87.33654, 88.72283, 88.72284, 90.0, 90.1]
THRESHOLDS = [-20.0, 19.999998, 20.0, 20.000002, -1.0, 1.0, -0.34657359, 0.34657359, 0.34657362, 1e30, F32_MAX]
NEAR_ZERO = [0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-25, -(2.0**-24)]
SPECIAL = np.array([*SATURATED, *THRESHOLDS, *NEAR_ZERO], dtype=np.float32)
"""Ends of branches, of the normal range and of f32, and halves of ln 2, where the reduction of exp turns over."""


def sample(low: float, high: float, n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return f32 numbers spread evenly over low..high, and as many whose exponents are spread evenly."""
    rng = np.random.default_rng(3)
    linear = np.linspace(low, high, n, dtype=np.float64)
    sign = -1.0 if high <= 0 else rng.choice([-1.0, 1.0], n) if low < 0 else 1.0
    wide = sign * np.exp2(rng.uniform(-30, np.log2(max(abs(low), abs(high))), n))
    return np.concatenate([linear, np.clip(wide, low, high)]).astype(np.float32)


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "exp": (numerics.exp, twin.exp),
    "softplus": (numerics.softplus, twin.softplus),
    "sigmoid": (numerics.sigmoid, twin.sigmoid),
    "silu": (numerics.silu, twin.silu),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_follow_the_steps_of_the_contract(name: str) -> None:
    ours, scalar = FUNCTIONS[name]
    x = np.concatenate([sample(-110, 95, 4000), SPECIAL])
    assert_same_bits(ours(x), [scalar(value) for value in x])


def test_log_follows_the_steps_of_the_contract() -> None:
    u = np.concatenate([1 + np.abs(sample(0, 1, 3000)), sample(1, 1e9, 3000)])
    assert_same_bits(numerics.log(u), [twin.log(value) for value in u])


def float64_softplus(x: Any) -> Any:
    return np.logaddexp(0.0, x)


def float64_sigmoid(x: Any) -> Any:
    return np.exp(-np.logaddexp(0.0, -x))


@pytest.mark.parametrize(
    ("ours", "exact", "low", "high", "limit"),
    [
        (numerics.exp, np.exp, -105.0, 88.722, 1.03),
        (numerics.log, np.log, 1.0, F32_MAX, 1.97),
        (numerics.softplus, float64_softplus, -105.0, 100.0, 3.34),
        (numerics.sigmoid, float64_sigmoid, -87.0, 105.0, 2.5),
        (numerics.silu, lambda x: x * float64_sigmoid(x), -87.0, 105.0, 2.5),
    ],
    ids=["exp", "log", "softplus", "sigmoid", "silu"],
)
def test_error_in_ulp_stays_below_the_documented_maximum(
    ours: Callable[[Any], Any], exact: Callable[[Any], Any], low: float, high: float, limit: float
) -> None:
    x = sample(low, high, 300_000)
    error = twin.ulps(ours(x), exact(x.astype(np.float64)))
    assert limit / 2 < error.max() < limit


def test_exp_of_special_values() -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, 88.72284, -103.97206, -103.9721], dtype=np.float32)
    assert numerics.exp(x).tolist() == [1.0, 1.0, np.inf, 0.0, np.inf, 2.0**-149, 0.0]


def test_exp_of_the_whole_denormal_range_is_within_one_ulp() -> None:
    x = np.linspace(-103.9, -87.4, 100_000).astype(np.float32)
    assert twin.ulps(numerics.exp(x), np.exp(x.astype(np.float64))).max() < 0.76


def test_exp_overflows_exactly_where_the_largest_f32_ends() -> None:
    last = np.float32(88.72283)
    assert np.isfinite(numerics.exp(np.array([last])))
    assert np.isinf(numerics.exp(np.nextafter(np.array([last]), np.float32(np.inf))))


def test_softplus_on_both_sides_of_its_threshold() -> None:
    x = np.array([20.0, 20.000002, 1e30, -200.0, 0.0], dtype=np.float32)
    y = numerics.softplus(x)
    assert y[0] == np.float32(20.0)  # 20 + 2e-9, by the logarithm
    assert y[1] == x[1]
    assert y[2] == x[2]
    assert y[3] == 0.0
    assert y[4] == np.float32(np.log(2.0))


def test_softplus_of_very_negative_numbers_is_the_exponential() -> None:
    x = np.linspace(-100, -17.5, 5000).astype(np.float32)
    assert_same_bits(numerics.softplus(x), numerics.exp(x))


def test_sigmoid_and_silu_saturate_without_nan() -> None:
    x = np.array([-1e30, -89.0, 89.0, 1e30], dtype=np.float32)
    assert_same_bits(numerics.sigmoid(x), [0.0, 0.0, 1.0, 1.0])
    assert_same_bits(numerics.silu(x), [-0.0, -0.0, 89.0, 1e30])


def test_check_values_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (\S+)[^|]* \| ([0-9A-F]{8}) \| ([0-9A-F]{8}) \| ([0-9A-F]{8}) \| ([0-9A-F]{8}) \|", page)
    assert [row[0] for row in rows] == ["1", "-1", "0.1", "-88"]
    for x, *expected in rows:
        argument = np.array([x], dtype=np.float32)
        got = [f"{int(bits(ours(argument))[0]):08X}" for ours, _ in FUNCTIONS.values()]
        assert got == expected


@pytest.mark.parametrize("function", [numerics.exp, numerics.softplus, numerics.sigmoid, numerics.silu])
def test_nan_stays_nan(function: Callable[[Any], Any]) -> None:
    assert np.isnan(function(np.array([np.nan], dtype=np.float32))[0])


def test_functions_give_the_same_bits_for_any_shape() -> None:
    x = sample(-20, 20, 500)
    for ours, _ in FUNCTIONS.values():
        assert_same_bits(ours(x.reshape(8, 125)).ravel(), ours(x))
        assert_same_bits(ours(x[::2]), ours(x)[::2])


# Norms


@pytest.mark.parametrize(("n", "n_lanes"), [(64, 32), (128, 32), (256, 32), (256, 256), (1056, 256), (5120, 256)])
def test_rms_norm_follows_the_contract(n: int, n_lanes: int) -> None:
    x, weight = normal(2, n, seed=n), normal(n, seed=1)
    expected = [twin.rms_norm(list(row), list(weight), 1e-6, n_lanes) for row in x]
    assert_same_bits(numerics.rms_norm(x, weight, 1e-6, n_lanes), expected)


def test_rms_norm_of_zeros_is_zero_and_of_a_constant_is_the_weight() -> None:
    weight = normal(128)
    assert not numerics.rms_norm(np.zeros((1, 128), dtype=np.float32), weight, 1e-6, 32).any()
    assert_same_bits(numerics.rms_norm(np.full((1, 128), 4096.0, dtype=np.float32), weight, 1e-6, 32)[0], weight)


def test_rms_norm_error_against_float64() -> None:
    x = normal(100, 5120).astype(np.float64)
    exact = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    ours = numerics.rms_norm(x.astype(np.float32), np.ones(5120, dtype=np.float32), 1e-6, 256)
    assert np.abs(ours[exact != 0] / exact[exact != 0] - 1).max() < 4 * 2.0**-24


@pytest.mark.parametrize("d", [64, 128])
def test_l2_norm_follows_the_contract(d: int) -> None:
    x = normal(5, d)
    x[1] = 0.0
    x[2] = 1e-9  # shorter than eps
    assert_same_bits(numerics.l2_norm(x, 1e-6), [twin.l2_norm(list(row), 1e-6) for row in x])


def test_l2_norm_gives_length_one() -> None:
    y = numerics.l2_norm(normal(50, 128), 1e-6).astype(np.float64)
    assert np.abs(np.linalg.norm(y, axis=1) - 1).max() < 2e-7


# Activations


def quantized(x: Any) -> numerics.Q8:
    q8 = numerics.quantize(np.asarray(x, dtype=np.float32).reshape(1, -1)).q8
    assert q8 is not None
    return q8


@pytest.mark.parametrize("seed", range(4))
def test_quantize_follows_the_contract(seed: int) -> None:
    x = normal(3, 256, seed=seed)
    q8 = numerics.quantize(x).q8
    assert q8 is not None
    for t in range(3):
        groups = twin.quantize(list(x[t]))
        assert q8.q[t].tolist() == [group.q for group in groups]
        assert q8.total[t].tolist() == [group.total for group in groups]
        assert_same_bits(q8.d[t], [group.d for group in groups])


def test_quantize_keeps_the_vector_for_float_matrices() -> None:
    x = normal(2, 64)
    assert numerics.quantize(x).x is x
    assert numerics.quantize(normal(2, 48)).q8 is None


def test_quantize_of_zeros_and_of_tiny_groups() -> None:
    below = np.nextafter(np.float32(2.0**-100), np.float32(0))
    for value in (0.0, -0.0, 2.0**-149, below):
        q8 = quantized([value] * 32)
        assert not q8.q.any()
        assert_same_bits(q8.d, [[0.0]])
        assert not q8.total.any()
    q8 = quantized([2.0**-100] * 32)
    assert (q8.q == 127).all()
    assert_same_bits(q8.d, [[np.float32(2.0**-100) / np.float32(127)]])


def test_quantize_takes_halves_to_even() -> None:
    x = np.zeros(32)
    x[:7] = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]  # amax 127: the factor is exactly 1
    q8 = quantized(x)
    assert q8.q[0, 0, :7].tolist() == [127, 0, 2, 2, 0, -2, 126]
    assert_same_bits(q8.d, [[1.0]])
    assert q8.total.tolist() == [[127 + 2 + 2 - 2 + 126]]


def test_quantize_multiplies_by_127_over_amax_instead_of_dividing_by_d() -> None:
    amax = normal(200, 1, seed=9)
    x = (amax * ((np.arange(32) + 0.5) / 127)).astype(np.float32)  # near halves, where the two ways part
    x[:, 0] = amax[:, 0]
    q8 = numerics.quantize(x).q8
    assert q8 is not None
    divided = np.rint(x / q8.d).astype(np.int8)
    differs = (q8.q[:, 0] != divided).any(axis=1)
    assert differs.any()  # otherwise the next line says nothing
    for t in np.flatnonzero(differs):
        assert q8.q[t, 0].tolist() == twin.quantize(list(x[t]))[0].q


def test_quantize_reaches_127_and_never_more() -> None:
    x = normal(5000, 32)
    q8 = numerics.quantize(x).q8
    assert q8 is not None
    assert (np.abs(q8.q.astype(int)).max(axis=-1) == 127).all()


def test_quantize_of_huge_values_is_finite() -> None:
    q8 = quantized([F32_MAX] + [1.0] * 31)
    assert np.isfinite(q8.d).all()
    assert q8.q[0, 0, :2].tolist() == [127, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_quantize_passes_a_damaged_value_on_in_d(value: float) -> None:
    q8 = quantized([1.0] * 31 + [value])
    assert not np.isfinite(q8.d).any()


def test_to_f16_rounds_halves_to_even_and_keeps_denormals() -> None:
    x = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 65519.0, 65520.0, -65520.0])
    expected = [1.0, 1 + 2.0**-9, 2.0**-24, 0.0, 2.0**-23, 65504.0, np.inf, -np.inf]
    assert numerics.to_f16(x.astype(np.float32)).tolist() == expected


def test_to_f16_equals_rounding_by_integers() -> None:
    x = np.clip(normal(4000), -65000, 65000)
    assert_same_bits(numerics.to_f16(x).astype(np.float32), [twin.to_f16(value) for value in x])


# RoPE tables

SECTIONS = [(32, 1e7, (6, 5, 5, 0)), (64, 1e7, (11, 11, 10, 0)), (64, 1e4, (8, 8, 8, 8)), (16, 1e6, (3, 3, 2, 0))]


@pytest.mark.parametrize(("n_rot", "freq_base", "sections"), SECTIONS)
def test_rope_tables_follow_the_contract(n_rot: int, freq_base: float, sections: tuple[int, ...]) -> None:
    frequencies = numerics.rope_frequencies(n_rot, freq_base, sections)
    expected = [twin.rope_frequency(i, n_rot, freq_base, sections) for i in range(n_rot // 2)]
    assert frequencies.tolist() == expected
    positions = np.array([0, 1, 2, 3, 69, 2047, 131071, 262143, 1_500_000])
    cos, sin = numerics.rope_table(positions, frequencies)
    pairs = [[twin.rope_cos_sin(int(p), f) for f in expected] for p in positions]
    assert_same_bits(cos, [[c for c, _ in row] for row in pairs])
    assert_same_bits(sin, [[s for _, s in row] for row in pairs])


def test_pairs_of_the_fourth_section_do_not_turn() -> None:
    frequencies = numerics.rope_frequencies(64, 1e4, (8, 8, 8, 8))
    turning = [i for i in range(32) if frequencies[i]]
    assert turning == list(range(24))  # 3 * 8 pairs in turn t, h, w; then the fourth section
    cos, sin = numerics.rope_table(np.array([1000]), frequencies)
    assert_same_bits(cos[0, 24:], [1.0] * 8)
    assert_same_bits(sin[0, 24:], [0.0] * 8)


def test_rope_tables_are_correctly_rounded_but_for_rare_ties() -> None:
    frequencies = numerics.rope_frequencies(64, 1e7, (11, 11, 10, 0))
    positions = np.arange(0, 262144, 37)
    cos, sin = numerics.rope_table(positions, frequencies)
    theta = positions[:, None] * frequencies[None]
    for table, exact in ((cos, np.cos(theta)), (sin, np.sin(theta))):
        assert twin.ulps(table, exact).max() < 0.5001
        assert (table != exact.astype(np.float32)).mean() < 1e-6


def test_rope_table_in_other_company_has_the_same_bits() -> None:
    frequencies = numerics.rope_frequencies(64, 1e7, (11, 11, 10, 0))
    together = numerics.rope_table(np.arange(100), frequencies)
    alone = [numerics.rope_table(np.array([p]), frequencies) for p in range(100)]
    for i in range(2):
        assert_same_bits(together[i], np.concatenate([pair[i] for pair in alone]))
