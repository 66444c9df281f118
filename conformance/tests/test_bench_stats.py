from __future__ import annotations

import numpy as np
import pytest

from conformance.bench.stats import Ratio, bootstrap_ratio, verdict_of


def test_equal_times_give_a_ratio_without_width() -> None:
    assert bootstrap_ratio([2.0] * 5, [3.0] * 5) == Ratio(1.5, 1.5, 1.5)


def test_the_same_samples_give_the_same_interval_everywhere() -> None:
    ratio = bootstrap_ratio([10, 11, 10.5, 12, 10.2, 10.1, 11.5], [20, 21, 19, 22, 20.4, 20.2, 23])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 22 / 12, 2.0))


def test_a_slow_round_slows_both_sides_and_leaves_the_ratio() -> None:
    theirs = [1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 9.0]
    ratio = bootstrap_ratio([t / 2 for t in theirs], theirs)
    assert (ratio.low, ratio.high) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.031, 1.2, "FASTER"),
        (1.03, 1.2, "UNDECIDED"),
        (0.8, 0.969, "SLOWER"),
        (0.8, 0.97, "UNDECIDED"),
        (0.97, 1.03, "SAME"),
        (0.969, 1.02, "UNDECIDED"),
        (0.5, 2.0, "UNDECIDED"),
    ],
)
def test_verdicts_follow_from_the_interval_alone(low: float, high: float, verdict: str) -> None:
    found, reason = verdict_of(Ratio((low + high) / 2, low, high))
    assert found == verdict
    assert f"{low:.3f} to {high:.3f}" in reason


def test_intervals_hold_the_true_ratio_as_often_as_they_say() -> None:
    random = np.random.RandomState(1)
    held = 0
    for _ in range(200):
        ours, theirs = random.lognormal(0.0, 0.1, 15), 1.5 * random.lognormal(0.0, 0.1, 15)
        ratio = bootstrap_ratio(ours.tolist(), theirs.tolist())
        held += ratio.low <= 1.5 <= ratio.high
    assert held >= 180
