"""Does the method say the right thing? The engine against itself, and against itself slowed by a known part."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from baselines.llama_cpp.progress import Progress
from conformance.bench.bench import turn
from conformance.bench.stats import Ratio, Verdict, bootstrap_ratio, verdict_of
from conformance.bench.subjects import EngineSubject
from conformance.fixtures import ensure_model
from conformance.runner import subject_request
from conformance.scenario import find_scenario

_SCENARIO = "tiny-c512"
_N_PROMPT, _N_DECODE = 1, 4
"""Short runs: the speed of a shared machine changes within seconds, and both sides of a round must see the same."""
_ROUNDS_PER_LOOK = 24
"""A multiple of 6, after which all three have stood in every place after every other."""
SLOWED_BY = 0.1
_REFERENCE = "as it is"
_SLOWED = {_REFERENCE: 0.0, "the same": 0.0, "slowed": SLOWED_BY}
_RIGHT: dict[float, tuple[Verdict, ...]] = {0.0: ("SAME", "UNDECIDED"), SLOWED_BY: ("SLOWER",)}


@dataclass(frozen=True)
class TrialResult:
    """One trial: the verdict on an engine slowed by a part of its step, against the engine as it is."""

    slowed_by: float
    n_rounds: int
    ratio: Ratio
    verdict: Verdict

    @property
    def is_right(self) -> bool:
        """Whether that is what must be said."""
        return self.verdict in _RIGHT[self.slowed_by]

    def line(self) -> str:
        """Return one line that says so."""
        what = f"itself slowed by {self.slowed_by:.0%}" if self.slowed_by else "itself"
        interval = f"{self.ratio.value:.3f} ({self.ratio.low:.3f} to {self.ratio.high:.3f})"
        return f"{'right' if self.is_right else 'WRONG'}: {what}: {self.verdict}, {interval}, {self.n_rounds} rounds"


def run_selftest(n_trials: int, max_rounds: int, cache: Path | None, progress: Progress) -> list[TrialResult]:
    """Run n_trials of each kind with the order and the statistics of a bench; raises BaselineError, FixtureError.

    A trial goes on, as a user would with -r, until the slowed engine is decided on, for max_rounds at most; the engine
    itself is judged by the same rounds. The three processes stay up for all trials.
    """
    file = find_scenario(_SCENARIO)
    whole = subject_request(file.scenario, ensure_model(file, cache, progress), "numpy")
    request = replace(whole, prompt_ids=whole.prompt_ids[:_N_PROMPT], n_predict=_N_DECODE + 1, n_threads=1)
    subjects = {name: EngineSubject(request, file.scenario.deadline_s, part) for name, part in _SLOWED.items()}
    progress.step("self-test")
    results: list[TrialResult] = []
    with ExitStack() as stack:
        for subject in subjects.values():
            stack.callback(subject.close)
            subject.open()
        for number in range(1, n_trials + 1):
            results += _trial(subjects, max_rounds)
            progress.update(number, n_trials)
    return results


def _trial(subjects: dict[str, EngineSubject], max_rounds: int) -> list[TrialResult]:
    """Time all three in each round; return the verdicts on the same and on the slowed engine."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    while True:
        for number in range(1, _ROUNDS_PER_LOOK + 1):
            for name in turn(list(subjects), number):
                run = subjects[name].run("layer_major", _N_DECODE + 1)
                times[name].append(sum(run["decode_time_ns"]))
        results = [_result(times, name) for name in subjects if name != _REFERENCE]
        if results[-1].verdict != "UNDECIDED" or results[-1].n_rounds >= max_rounds:
            return results


def _result(times: dict[str, list[float]], name: str) -> TrialResult:
    ratio = bootstrap_ratio(times[name], times[_REFERENCE])
    return TrialResult(_SLOWED[name], len(times[name]), ratio, verdict_of(ratio)[0])
