"""The table at the end of a run: what was measured, what was not, and which check caught each control."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tabulate import tabulate

from conformance.gate import Judgement, Outcome
from conformance.records import Record
from conformance.runner import baseline_name, engine_name, subject_name
from conformance.scenario import Scenario, ScenarioFile

_HEADERS = ("scenario", "engine", "tokens", "token hash", "logits hash", "smallest gap", "verdict")
_N_HASH = 12
_WIDTH = 100
_WRAPPED: dict[str, Any] = {
    "width": _WIDTH,
    "subsequent_indent": "    ",
    "break_long_words": False,
    "break_on_hyphens": False,
}
_VERDICTS = {Outcome.MATCH: "pass", Outcome.MISMATCH: "FAIL", Outcome.NOT_MEASURED: "not measured"}


def render(records: Sequence[Record], files: Sequence[ScenarioFile], judgement: Judgement) -> str:
    """Return the tables of engines and of controls, then what is behind the verdicts.

    Records of other scenarios, and of other versions of these, are left out.
    """
    versions = {file.scenario.name: file.version for file in files}
    records = [record for record in records if versions.get(record.scenario) == record.scenario_version]
    by_key = {(record.scenario, record.engine): record for record in records}
    engines = [(file, name, by_key.get((file.scenario.name, name))) for file in files for name in _names(file.scenario)]
    rows = [_engine_row(file, name, record, judgement) for file, name, record in engines]
    controls = [record for record in records if record.role == "control"]
    parts = [
        tabulate(rows, headers=_HEADERS, disable_numparse=True),
        *_notes([record for _, _, record in engines if record], judgement),
    ]
    if controls:
        rows = [_control_row(record, judgement) for record in controls]
        parts += ["", tabulate(rows, headers=("negative control", "verdict", "caught by"))]
    return "\n".join([*parts, *_of_other_source(judgement), *_findings(judgement)])


def _names(scenario: Scenario) -> Iterator[str]:
    yield baseline_name(scenario.baseline)
    yield from map(engine_name, scenario.backends)
    yield from (subject_name(subject.name) for subject in scenario.subjects)


def _engine_row(file: ScenarioFile, name: str, record: Record | None, judgement: Judgement) -> list[str]:
    verdict = _verdict(record, name, file.scenario.name, judgement)
    if record is None or record.output is None:
        return [file.scenario.name, name, "-", "-", "-", "-", verdict]
    output, n_predict = record.output, file.scenario.n_predict
    n_equal = len(output.generated_token_ids)
    if record.role != "baseline":
        n_equal = record.comparison.n_equal if record.comparison else 0
    gap = "-" if output.smallest_top2_gap is None else f"{output.smallest_top2_gap:.4f}"
    hashes = (output.generated_token_ids_le64_sha256, output.final_logits_le32_sha256)
    return [
        file.scenario.name,
        name,
        f"{n_equal}/{n_predict}",
        *("-" if text is None else text[:_N_HASH] for text in hashes),
        gap,
        verdict,
    ]


def _verdict(record: Record | None, engine: str, scenario: str, judgement: Judgement) -> str:
    findings = judgement.of(scenario, engine)
    if not findings and (record is None or record.status == "not_measured"):
        return _VERDICTS[Outcome.NOT_MEASURED]
    return _VERDICTS[min((finding.outcome for finding in findings), default=Outcome.MATCH)]


def _control_row(record: Record, judgement: Judgement) -> list[str]:
    caught_by = record.caught_by or []
    # a name is kept on one line: its blank is no place to break at
    whole = ", ".join(name.replace(" ", "\xa0") for name in caught_by)
    names = textwrap.fill(whole, width=_WIDTH - 40, break_long_words=False).replace("\xa0", " ")
    outcomes = {finding.outcome for finding in judgement.of(record.scenario, record.engine)}
    verdict = "caught" if not outcomes else "NOT CAUGHT" if Outcome.MISMATCH in outcomes else "not measured"
    return [record.engine, verdict, names or "-"]


def _notes(records: Sequence[Record], judgement: Judgement) -> Iterator[str]:
    """Say once why an engine that nobody asked for was not measured."""
    reasons = {
        f"{record.engine} was not measured: {record.reason}"
        for record in records
        if record.status == "not_measured" and not judgement.of(record.scenario, record.engine)
    }
    yield from (textwrap.fill(reason, width=_WIDTH) for reason in sorted(reasons))


def _of_other_source(judgement: Judgement) -> Iterator[str]:
    """Say which records count although they say nothing of the engine as it is here."""
    if judgement.of_other_source:
        names = "; ".join(f"{scenario}, {engine}" for scenario, engine in judgement.of_other_source)
        yield ""
        yield textwrap.fill(f"measured with other engine source: {names}", **_WRAPPED)


def _findings(judgement: Judgement) -> Iterator[str]:
    if judgement.findings:
        yield ""
    for finding in judgement.findings:
        text = f"{_VERDICTS[finding.outcome]}: {finding.scenario}, {finding.engine}: {finding.text}"
        yield textwrap.fill(text, **_WRAPPED)
