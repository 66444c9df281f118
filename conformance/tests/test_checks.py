from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance import checks
from conformance.checks import Comparison, Reference
from conformance.scenario import (
    FinalGreedyTokenId,
    FinalLogitsBitwiseEqual,
    FinalLogitsHash,
    GeneratedTokenIdsEqual,
    GeneratedTokenIdsHash,
    LowestIdOnTie,
    OracleNmse,
    SameHashAtBothNCtx,
    SmallestTop2Gap,
)
from engine.generate import logits_le32_sha256, token_ids_le64_sha256

BITWISE = FinalLogitsBitwiseEqual(check="final_logits_bitwise_equal", against="token_major", because="a")
NMSE = OracleNmse(check="oracle_nmse", against="llama.cpp", max_ratio=1.0, because="a")


def _rows(*rows: list[float]) -> NDArray[np.float32]:
    return np.array(rows, dtype=np.float32)


def test_finite_names_the_first_bad_logit() -> None:
    good, bad = _rows([0, 1], [2, 3]), _rows([0, 1], [np.inf, np.nan])
    assert checks.finite(good).passed is True
    result = checks.finite(bad)
    assert (result.value, result.passed, result.detail) == (2, False, "first at position 1, id 0")


def test_bitwise_equal_sees_the_last_bit_and_the_sign_of_zero() -> None:
    a = np.array([0.0, 1.0, 5.0], dtype=np.float32)
    assert checks.final_logits_bitwise_equal(BITWISE, a, a.copy()).passed is True
    b = np.array([-0.0, 1.0, np.nextafter(np.float32(5), np.float32(6))], dtype=np.float32)
    result = checks.final_logits_bitwise_equal(BITWISE, a, b)
    assert (result.name, result.value, result.limit) == ("final_logits_bitwise_equal token_major", 2, 0)
    assert result.detail == "worst at id 2: 5.0 here, 5.0000005 in token_major"
    assert result.because == "a"


def test_hashes_and_ids_are_compared_with_the_golden_ones() -> None:
    logits, ids = np.array([1, 3, 2], dtype=np.float32), [1, 0, 2]
    golden = FinalLogitsHash(check="final_logits_le32_sha256", expected=logits_le32_sha256(logits), because="a")
    assert checks.final_logits_le32_sha256(golden, logits).passed is True
    assert checks.final_logits_le32_sha256(golden, logits[::-1]).passed is False
    first = FinalGreedyTokenId(check="final_greedy_token_id", expected=1, because="a")
    assert checks.final_greedy_token_id(first, 1).passed is True
    assert checks.final_greedy_token_id(first, 2).passed is False
    digest = token_ids_le64_sha256(ids)
    all_ids = GeneratedTokenIdsHash(check="generated_token_ids_le64_sha256", expected=digest, because="a")
    assert checks.generated_token_ids_le64_sha256(all_ids, ids).passed is True
    assert checks.generated_token_ids_le64_sha256(all_ids, [1, 0, 3]).value == token_ids_le64_sha256([1, 0, 3])
    same = SameHashAtBothNCtx(check="same_hash_at_both_n_ctx", against="other", because="a")
    assert checks.same_hash_at_both_n_ctx(same, ids, digest).passed is True
    assert checks.same_hash_at_both_n_ctx(same, ids[::-1], digest).passed is False


def test_lowest_id_on_tie() -> None:
    spec = LowestIdOnTie(check="lowest_id_on_tie", because="a")
    assert checks.lowest_id_on_tie(spec, 3, 3).passed is True
    assert checks.lowest_id_on_tie(spec, 7, 3).passed is False


def test_smallest_gap_names_its_position() -> None:
    spec = SmallestTop2Gap(check="smallest_top2_gap", min=0.25, because="a")
    assert checks.smallest_top2_gap(spec, [1.0, 0.25]).passed is True
    result = checks.smallest_top2_gap(spec, [1.0, 0.125, 2.0])
    assert (result.value, result.passed, result.detail) == (0.125, False, "smallest at position 1")


def test_top2_gap() -> None:
    rows = _rows([1, 5, 3.5], [2, 2, -1])
    assert checks.top2_gap(rows).tolist() == [1.5, 0.0]


OURS = _rows([0, 9, 1], [4, 0, 3.5], [0, 0, 8])
THEIRS = _rows([0, 9, 1], [4, 0, 4.125], [0, 7, 0])
FED = _rows([0, 9, 1], [4, 0, 4.125], [0, 1, 7.5])


def _compare(margin: float | None) -> Comparison:
    return checks.compare("llama.cpp", [1, 0, 2], OURS, Reference([1, 2, 1], THEIRS, FED), margin)


def test_a_difference_is_reported_with_both_gaps_and_the_margin() -> None:
    found = _compare(margin=0.25)
    assert (found.n_equal, found.n_equal_teacher_forced, found.largest_logit_difference) == (1, 2, 1.0)
    first = found.first_difference
    assert first is not None
    assert (first.position, first.token_id, first.reference_token_id) == (1, 0, 2)
    assert (first.top2_gap, first.reference_top2_gap) == (0.5, 0.125)
    assert (first.declared_margin, first.gap_under_margin) == (0.25, True)
    spec = GeneratedTokenIdsEqual(check="generated_token_ids_equal", against="llama.cpp", because="a")
    result = checks.generated_token_ids_equal(spec, [1, 0, 2], found)
    assert (result.value, result.limit, result.passed) == (1, 3, False)
    assert result.detail == (
        "position 1: id 0 here (top-2 gap 0.5), 2 in llama.cpp (top-2 gap 0.125, under the margin of 0.25)"
    )


def test_a_difference_at_a_wide_gap_is_no_near_tie() -> None:
    first = _compare(margin=0.1).first_difference
    assert first is not None
    assert first.gap_under_margin is False
    assert "not under the margin of 0.1" in checks.describe(first)
    undeclared = _compare(margin=None).first_difference
    assert undeclared is not None
    assert "no margin is declared" in checks.describe(undeclared)


def test_equal_runs_have_no_difference() -> None:
    found = checks.compare("llama.cpp", [1, 0, 2], OURS, Reference([1, 0, 2], OURS, OURS), 0.1)
    assert (found.n_equal, found.n_equal_teacher_forced, found.largest_logit_difference) == (3, 3, 0.0)
    assert found.first_difference is None


def test_a_comparison_of_nan_has_no_number() -> None:
    broken = OURS.copy()
    broken[1] = np.nan
    found = checks.compare("llama.cpp", [1, 0, 2], broken, Reference([1, 2, 1], THEIRS, FED), 0.25)
    assert found.largest_logit_difference is None
    assert found.first_difference is not None
    assert found.first_difference.top2_gap is None
    assert "top-2 gap ?" in checks.describe(found.first_difference)


def test_oracle_nmse_compares_distances() -> None:
    oracle = np.array([[0.0, 1.0, 2.0], [4.0, 2.0, 0.0]])
    near, far = (np.asarray(oracle + step, dtype=np.float32) for step in (0.01, 0.02))
    better = checks.oracle_nmse(NMSE, near, far, oracle)
    assert better.passed is True
    # squared error 6 * 1e-4 over the spread 2 + 8
    assert better.value == pytest.approx(6e-5, rel=1e-3)
    assert better.limit == pytest.approx(2.4e-4, rel=1e-3)
    worse = checks.oracle_nmse(NMSE, far, near, oracle)
    assert worse.passed is False
    assert "worst at position" in str(worse.detail)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_oracle_nmse_fails_before_the_metric_when_a_logit_is_not_finite(value: float) -> None:
    oracle = np.array([[0.0, 1.0, 2.0]])
    good = oracle.astype(np.float32)
    bad = good.copy()
    bad[0, 1] = value
    for ours, theirs in ((bad, good), (good, bad)):
        result = checks.oracle_nmse(NMSE, ours, theirs, oracle)
        assert (result.value, result.passed) == (None, False)
        assert "not finite" in str(result.detail)


def test_settings_that_llama_cpp_changed_are_named() -> None:
    requested = {"n_ctx": 512, "type_k": "f16"}
    assert checks.settings_honoured(requested, {"n_ctx": 512, "type_k": "f16", "more": 1}).passed is True
    result = checks.settings_honoured(requested, {"n_ctx": 768})
    assert (result.value, result.passed) == (2, False)
    assert result.detail == "n_ctx: requested 512, effective 768; type_k: requested f16, effective None"
