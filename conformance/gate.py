"""Judge records: does every engine asked for match, and was everything measured?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from conformance.checks import labels_for
from conformance.machine import Versions, these_versions
from conformance.records import Output, Record
from conformance.runner import CONTROL_NAMES, baseline_name, control_name, engine_name, subject_name
from conformance.scenario import CONTROL_BACKEND, Scenario, ScenarioFile
from engine.generate import BACKENDS, token_ids_le64_sha256

STALE = "stale: measured with other engine source"


class Outcome(IntEnum):
    """What a run or a set of records comes to; the value is the exit code."""

    MATCH = 0
    MISMATCH = 1
    NOT_MEASURED = 2
    CANNOT_RUN = 3


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be, in one record."""

    scenario: str
    engine: str
    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Judgement:
    """All findings; no finding means that everything asked for was measured and matches.

    asked: scenario and engine of every record that was asked for. of_other_source: those of them that count although
    other engine source made them.
    """

    findings: tuple[Finding, ...]
    asked: tuple[tuple[str, str], ...]
    of_other_source: tuple[tuple[str, str], ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The outcome of the whole: a mismatch outweighs what was not measured."""
        found = {finding.outcome for finding in self.findings}
        return min(found, default=Outcome.MATCH)

    def of(self, scenario: str, engine: str) -> list[Finding]:
        """Return the findings in one record."""
        return [f for f in self.findings if (f.scenario, f.engine) == (scenario, engine)]


def judge(
    records: Sequence[Record],
    files: Sequence[ScenarioFile],
    backends: Sequence[str],
    controls: Sequence[str] = CONTROL_NAMES,
    subjects: Collection[str] = (),
    any_source: bool = False,
) -> Judgement:
    """Judge the records of `files` on the backends and of the subjects asked for; other records have no say.

    Every scenario needs a record of llama.cpp and of each backend asked for that it is for; those with `controls` one
    of each control, too, and of the backend they are compared with. One that is for none of the backends asked for
    needs records of all its own. A record of another version of its scenario counts as none, and so does one that other
    engine source made, unless any_source is set.
    """
    by_key = {(record.scenario, record.engine): record for record in records}
    here = these_versions()
    stale = {key for key, record in by_key.items() if _is_stale(record, here)}
    findings: list[Finding] = []
    asked: list[tuple[str, str]] = []
    for file in files:
        wanted = file.scenario.backends_to_run(backends, controls) or file.scenario.backends
        llama_cpp = baseline_name(file.scenario.baseline)
        names = [llama_cpp, *map(engine_name, wanted)]
        names += map(control_name, controls) if file.scenario.controls else []
        names += [subject_name(subject.name) for subject in file.scenario.subjects if subject.name in subjects]
        baseline = by_key.get((file.scenario.name, llama_cpp))
        asked += [(file.scenario.name, name) for name in names]
        for name in names:
            record = by_key.get((file.scenario.name, name))
            is_stale = (file.scenario.name, name) in stale and not any_source
            for outcome, text in _judge_record(record, file, baseline, is_stale):
                findings.append(Finding(file.scenario.name, name, outcome, text))
    counted = tuple(key for key in asked if key in stale) if any_source else ()
    return Judgement(tuple(findings), tuple(asked), counted)


def _is_stale(record: Record, here: Versions) -> bool:
    """Say whether other source of our engine made a record; one of another engine has none of ours in it.

    Where an older record does not say what its backend's source was, that of the whole engine decides.
    """
    backends = {engine_name(backend): backend for backend in BACKENDS}
    backend = CONTROL_BACKEND if record.role == "control" else backends.get(record.engine)
    if backend is None:
        return False
    made, now = record.versions.backend_source_sha256, here.backend_source_sha256
    if made is None or now is None:
        return record.versions.engine_source_sha256 != here.engine_source_sha256
    return made.get(backend) != now[backend]


def _judge_record(
    record: Record | None, file: ScenarioFile, baseline: Record | None, is_stale: bool
) -> Iterator[tuple[Outcome, str]]:
    if record is None:
        yield Outcome.NOT_MEASURED, "there is no record"
    elif record.scenario_version != file.version:
        yield Outcome.NOT_MEASURED, "the record is of another version of the scenario"
    elif is_stale:
        yield Outcome.NOT_MEASURED, STALE
    elif record.role == "control":
        yield from _judge_control(record)
    elif record.status != "ok":
        is_fault = record.role in ("engine", "subject") and record.status != "not_measured"
        yield Outcome.MISMATCH if is_fault else Outcome.NOT_MEASURED, f"{record.status}: {record.reason}"
    else:
        yield from _judge_checks(record, file.scenario)
        yield from _judge_output(record, baseline)


def _judge_control(record: Record) -> Iterator[tuple[Outcome, str]]:
    """A control must be caught; one that did not run to its end, or was stopped by itself, showed nothing."""
    if record.caught_by:
        return
    if record.status == "ok":
        yield Outcome.MISMATCH, "NOT CAUGHT: this wrong engine passes every check that the right one passes"
    else:
        yield Outcome.NOT_MEASURED, f"{record.status}: {record.reason}"


def _judge_checks(record: Record, scenario: Scenario) -> Iterator[tuple[Outcome, str]]:
    for check in record.checks:
        if check.passed is None:
            yield Outcome.NOT_MEASURED, f"{check.name}: {check.detail}"
        elif not check.passed:
            found = f"{check.name}: found {check.value}, limit {check.limit} {check.unit}"
            yield Outcome.MISMATCH, f"{found}; {check.detail}" if check.detail else found
    for label in sorted(labels_for(scenario.checks, record.role) - {check.name for check in record.checks}):
        yield Outcome.NOT_MEASURED, f"{label}: not in the record"


def _judge_output(record: Record, baseline: Record | None) -> Iterator[tuple[Outcome, str]]:
    """Compare ids and hash within the record, and the ids with those in llama.cpp's record."""
    if record.output is None:
        yield Outcome.NOT_MEASURED, "the record has no tokens"
    elif token_ids_le64_sha256(record.output.generated_token_ids) != _token_hash(record.output):
        yield Outcome.MISMATCH, "generated_token_ids_le64_sha256 is not the hash of generated_token_ids"
    elif not all(check.passed for check in record.checks) or baseline is None or baseline.output is None:
        return  # said already, here or for llama.cpp
    elif _token_hash(record.output) != _token_hash(baseline.output):
        yield Outcome.MISMATCH, f"the token hash differs from that of {baseline.engine}"


def _token_hash(output: Output) -> str:
    return output.generated_token_ids_le64_sha256
