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
_N_PROMPT, _N_DECODE = 4, 16
SLOWED_BY = 0.1
_RIGHT: dict[float, tuple[Verdict, ...]] = {0.0: ("SAME", "UNDECIDED"), SLOWED_BY: ("SLOWER",)}


@dataclass(frozen=True)
class TrialResult:
    """One trial: the verdict on an engine slowed by a part of its step, against the engine as it is."""

    slowed_by: float
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
        return f"{'right' if self.is_right else 'WRONG'}: {what}: {self.verdict}, {interval}"


def run_selftest(n_trials: int, n_rounds: int, cache: Path | None, progress: Progress) -> list[TrialResult]:
    """Run n_trials of each kind, with the rounds and the statistics of a bench; raises BaselineError, FixtureError."""
    file = find_scenario(_SCENARIO)
    whole = subject_request(file.scenario, ensure_model(file, cache, progress), "numpy")
    request = replace(whole, prompt_ids=whole.prompt_ids[:_N_PROMPT], n_predict=_N_DECODE + 1)
    as_it_is = EngineSubject(request, file.scenario.deadline_s)
    progress.step("self-test")
    results: list[TrialResult] = []
    with ExitStack() as stack:
        others = {part: EngineSubject(request, file.scenario.deadline_s, part) for part in _RIGHT}
        for subject in (as_it_is, *others.values()):
            stack.callback(subject.close)
            subject.open()
        for _ in range(n_trials):
            for part, other in others.items():
                results.append(_trial(other, as_it_is, part, n_rounds))
                progress.update(len(results), n_trials * len(others))
    return results


def _trial(ours: EngineSubject, theirs: EngineSubject, slowed_by: float, n_rounds: int) -> TrialResult:
    times: dict[int, list[float]] = {id(ours): [], id(theirs): []}
    for number in range(1, n_rounds + 1):
        for subject in turn((ours, theirs), number):
            times[id(subject)].append(sum(subject.run("layer_major", _N_DECODE + 1)["decode_time_ns"]))
    ratio = bootstrap_ratio(times[id(ours)], times[id(theirs)])
    return TrialResult(slowed_by, ratio, verdict_of(ratio)[0])
