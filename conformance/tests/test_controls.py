"""Every negative control must be caught, and a harmless one must be reported as not caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.controls import CONTROLS
from conformance.gate import Outcome, judge
from conformance.records import Record
from conformance.runner import Runner, control_name
from conformance.scenario import ScenarioFile
from conformance.subject import ReportProgress, SubjectRequest, SubjectResult
from conformance.tests.fakes import FakeLlama, Silent, run_harmless, run_here

NAMES = [control.name for control in CONTROLS]
LOGITS = "final_logits_le32_sha256"
# What each fault must show in, besides the golden hash, which every change of a bit shows in.
CAUGHT_BY = {
    "flipped_scale_bit": {LOGITS},
    "grouped_value_heads": {LOGITS, "oracle_nmse llama.cpp"},
    "rope_off_by_one": {LOGITS, "oracle_nmse llama.cpp"},
    "forgetful_kv_cache": {LOGITS, "oracle_nmse llama.cpp"},
    "highest_id_on_tie": {"lowest_id_on_tie"},
}


def _caught_by(records: list[Record], control: str) -> set[str]:
    record = next(record for record in records if record.engine == control_name(control))
    assert record.role == "control"
    assert record.caught_by is not None
    return set(record.caught_by)


def test_the_controls_are_those_expected_here() -> None:
    assert set(NAMES) == set(CAUGHT_BY)


@pytest.mark.parametrize("control", NAMES)
def test_the_control_is_caught(records: list[Record], control: str) -> None:
    assert _caught_by(records, control) >= CAUGHT_BY[control]


def test_a_run_whose_controls_are_caught_passes(records: list[Record], short: ScenarioFile) -> None:
    judgement = judge(records, [short], ["numpy"])
    assert judgement.findings == ()
    assert judgement.outcome is Outcome.MATCH


@pytest.mark.parametrize("control", NAMES)
def test_the_control_made_harmless_is_not_caught(short: ScenarioFile, tmp_path: Path, control: str) -> None:
    runner = Runner(FakeLlama().open, tmp_path, Silent(), subject=run_harmless, controls=[control])
    records = runner.run([short])
    assert _caught_by(records, control) == set()
    judgement = judge(records, [short], ["numpy"], controls=[control])
    assert [(f.engine, f.outcome) for f in judgement.findings] == [(control_name(control), Outcome.MISMATCH)]
    assert "NOT CAUGHT" in judgement.findings[0].text


def test_a_check_that_the_right_engine_fails_catches_nothing(short: ScenarioFile, tmp_path: Path) -> None:
    checks = [
        check.model_copy(update={"expected": "0" * 64}) if check.check == LOGITS else check
        for check in short.scenario.checks
    ]
    stale = ScenarioFile(short.path, short.scenario.model_copy(update={"checks": tuple(checks)}))
    runner = Runner(FakeLlama().open, tmp_path, Silent(), subject=run_harmless, controls=["flipped_scale_bit"])
    assert _caught_by(runner.run([stale]), "flipped_scale_bit") == set()


def test_a_control_that_cannot_run_shows_nothing(short: ScenarioFile, tmp_path: Path) -> None:
    def crash(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
        if request.control:
            return SubjectResult("crashed", "exit code 1: TypeError", "", None)
        return run_here(request, deadline_s, report)

    runner = Runner(FakeLlama().open, tmp_path, Silent(), subject=crash, controls=["rope_off_by_one"])
    records = runner.run([short])
    assert _caught_by(records, "rope_off_by_one") == set()
    assert judge(records, [short], ["numpy"], controls=["rope_off_by_one"]).outcome is Outcome.NOT_MEASURED


def test_a_control_without_a_record_is_not_measured(records: list[Record], short: ScenarioFile) -> None:
    others = [record for record in records if record.engine != control_name(NAMES[0])]
    judgement = judge(others, [short], ["numpy"])
    assert [(f.engine, f.outcome) for f in judgement.findings] == [(control_name(NAMES[0]), Outcome.NOT_MEASURED)]
