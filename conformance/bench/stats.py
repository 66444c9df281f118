"""From samples to a verdict: the ratio within each round, its median with a bootstrap interval, what may be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Verdict: TypeAlias = Literal["FASTER", "SLOWER", "SAME", "UNDECIDED", "INVALID"]

BAND = (0.97, 1.03)
"""Ratios that count as the same speed. The same program on the same machine differs by 1 to 2 % from one process to the
next (74.7 and 75.9 tok/s of llama.cpp on an H200 at two context sizes that cost it nothing), so less than 3 % is not a
difference between engines; and a claim of 3.4 %, which this suite was made to check, can still be told from it."""
MIN_SAMPLES = 5
"""Below five rounds, resampling cannot tell a slow round from a slow engine."""
CONFIDENCE = 0.95
N_RESAMPLES = 10_000
SEED = 8763


@dataclass(frozen=True)
class Ratio:
    """How many times faster ours is: the median ratio of a round, and its interval."""

    value: float
    low: float
    high: float


def bootstrap_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the median of theirs / ours over rounds, times taken in the same round each, with a bootstrap interval.

    What slows a whole round slows both sides alike and leaves its ratio: on two cores shared with other programs, where
    single times went from 12 to 36 ms, the interval of this over 100 rounds was 0.07 wide, that of the ratio of the two
    medians 0.25. The same input gives the same interval everywhere (NumPy freezes the stream of RandomState).
    """
    ratios = np.asarray(theirs, np.float64) / np.asarray(ours, np.float64)
    resampled = ratios[np.random.RandomState(SEED).randint(len(ratios), size=(N_RESAMPLES, len(ratios)))]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.median(resampled, axis=1), [tail, 100 - tail])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def verdict_of(ratio: Ratio) -> tuple[Verdict, str]:
    """Say what an interval allows to be said of two engines, and why."""
    low, high = BAND
    interval = f"the {CONFIDENCE:.0%} interval {ratio.low:.3f} to {ratio.high:.3f}"
    if ratio.low > high:
        return "FASTER", f"{interval} lies above {high}"
    if ratio.high < low:
        return "SLOWER", f"{interval} lies below {low}"
    if low <= ratio.low and ratio.high <= high:
        return "SAME", f"{interval} lies within {low} to {high}"
    return "UNDECIDED", f"{interval} crosses {low if ratio.low < low else high}: more repetitions may decide it"
