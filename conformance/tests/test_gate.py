from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.gate import STALE, Outcome, judge
from conformance.machine import engine_source_sha256
from conformance.records import Record
from conformance.scenario import ScenarioFile
from conformance.tests.fakes import BASELINE_NAME

Change = Callable[[Record], Record]


def _changed(records: list[Record], engine: str, change: Change | None) -> list[Record]:
    """Return the records with that of `engine` changed, or left out."""
    kept = [record for record in records if record.engine != engine]
    return kept + [change(record) for record in records if record.engine == engine and change]


def _update(**values: object) -> Change:
    return lambda record: record.model_copy(update=values)


def _other_ids(record: Record) -> Record:
    assert record.output is not None
    return record.model_copy(update={"output": record.output.model_copy(update={"generated_token_ids": [1, 2]})})


def _other_hash(record: Record) -> Record:
    from engine.generate import token_ids_le64_sha256

    assert record.output is not None
    ids = [0, *record.output.generated_token_ids[1:]]
    update = {"generated_token_ids": ids, "generated_token_ids_le64_sha256": token_ids_le64_sha256(ids)}
    return record.model_copy(update={"output": record.output.model_copy(update=update)})


def _check(name: str, passed: bool | None) -> Change:
    def change(record: Record) -> Record:
        checks = [
            check.model_copy(update={"passed": passed}) if check.name == name else check for check in record.checks
        ]
        return record.model_copy(update={"checks": checks})

    return change


def _without_check(name: str) -> Change:
    return lambda record: record.model_copy(update={"checks": [c for c in record.checks if c.name != name]})


@pytest.mark.parametrize(
    ("engine", "change", "outcome", "says"),
    [
        ("engine-numpy", _check("finite", False), Outcome.MISMATCH, "finite: found 0, limit 0 logits"),
        ("engine-numpy", _check("oracle_nmse llama.cpp", None), Outcome.NOT_MEASURED, "oracle_nmse"),
        (BASELINE_NAME, _check("smallest_top2_gap", False), Outcome.MISMATCH, "smallest_top2_gap"),
        ("engine-numpy", _without_check("lowest_id_on_tie"), Outcome.NOT_MEASURED, "not in the record"),
        (BASELINE_NAME, _without_check("smallest_top2_gap"), Outcome.NOT_MEASURED, "not in the record"),
        ("engine-numpy", _other_ids, Outcome.MISMATCH, "is not the hash of generated_token_ids"),
        ("engine-numpy", _other_hash, Outcome.MISMATCH, "differs from that of llama.cpp"),
        ("engine-numpy", _update(output=None), Outcome.NOT_MEASURED, "no tokens"),
        ("engine-numpy", _update(status="crashed", reason="x"), Outcome.MISMATCH, "crashed: x"),
        ("engine-numpy", _update(status="not_measured", reason="x"), Outcome.NOT_MEASURED, "not_measured: x"),
        (BASELINE_NAME, _update(status="timeout", reason="x"), Outcome.NOT_MEASURED, "timeout: x"),
        ("engine-numpy", _update(scenario_version="0" * 64), Outcome.NOT_MEASURED, "another version"),
        ("engine-numpy", None, Outcome.NOT_MEASURED, "there is no record"),
        (BASELINE_NAME, None, Outcome.NOT_MEASURED, "there is no record"),
    ],
)
def test_what_is_wrong_in_one_record_decides(
    records: list[Record], short: ScenarioFile, engine: str, change: Change | None, outcome: Outcome, says: str
) -> None:
    judgement = judge(_changed(records, engine, change), [short], ["numpy"])
    assert judgement.outcome is outcome
    assert [finding.engine for finding in judgement.findings] == [engine]
    assert says in judgement.findings[0].text


def test_everything_right_is_a_match(records: list[Record], short: ScenarioFile) -> None:
    assert judge(records, [short], ["numpy"]).outcome is Outcome.MATCH


def test_no_records_are_not_measured(short: ScenarioFile) -> None:
    assert judge([], [short], ["numpy"]).outcome is Outcome.NOT_MEASURED


def test_a_backend_that_is_asked_for_must_be_measured(records: list[Record], short: ScenarioFile) -> None:
    assert judge(records, [short], ["numpy", "cuda"]).outcome is Outcome.NOT_MEASURED


def test_a_mismatch_outweighs_what_was_not_measured(records: list[Record], short: ScenarioFile) -> None:
    failed = _changed(records, "engine-numpy", _check("finite", False))
    assert judge(failed, [short], ["numpy", "cuda"]).outcome is Outcome.MISMATCH


def test_records_of_other_scenarios_have_no_say(records: list[Record], short: ScenarioFile) -> None:
    broken = records[0].model_copy(update={"scenario": "other", "status": "crashed"})
    assert judge([*records, broken], [short], ["numpy"]).outcome is Outcome.MATCH


def _of_source(**values: object) -> Change:
    return lambda record: record.model_copy(update={"versions": record.versions.model_copy(update=values)})


OTHER, HERE, HERE_NUMPY = "0" * 64, engine_source_sha256(), engine_source_sha256("numpy")


@pytest.mark.parametrize(
    ("engine", "change", "is_stale"),
    [
        ("engine-numpy", _of_source(engine_source_sha256=OTHER), False),
        ("engine-numpy", _of_source(backend_source_sha256={"numpy": OTHER}), True),
        ("engine-numpy", _of_source(backend_source_sha256={"numpy": HERE_NUMPY, "cuda": OTHER}), False),
        ("engine-numpy", _of_source(backend_source_sha256={"cuda": OTHER}), True),
        ("engine-numpy", _of_source(backend_source_sha256=None, engine_source_sha256=OTHER), True),
        ("engine-numpy", _of_source(backend_source_sha256=None, engine_source_sha256=HERE), False),
        ("control-rope_off_by_one", _of_source(backend_source_sha256={"numpy": OTHER}), True),
        (BASELINE_NAME, _of_source(backend_source_sha256={"numpy": OTHER}, engine_source_sha256=OTHER), False),
    ],
)
def test_a_record_of_other_engine_source_is_stale(
    records: list[Record], short: ScenarioFile, engine: str, change: Change, is_stale: bool
) -> None:
    changed = _changed(records, engine, change)
    judgement = judge(changed, [short], ["numpy"])
    assert judgement.outcome is (Outcome.NOT_MEASURED if is_stale else Outcome.MATCH)
    assert [(found.engine, found.text) for found in judgement.findings] == [(engine, STALE)] * is_stale
    assert judgement.of_other_source == ()
    anyhow = judge(changed, [short], ["numpy"], any_source=True)
    assert anyhow.outcome is Outcome.MATCH
    assert anyhow.of_other_source == (((short.scenario.name, engine),) if is_stale else ())


def test_a_mismatch_of_other_source_is_no_mismatch_of_this_one(records: list[Record], short: ScenarioFile) -> None:
    failed = _changed(records, "engine-numpy", _check("finite", False))
    stale = _changed(failed, "engine-numpy", _of_source(backend_source_sha256={}))
    assert judge(stale, [short], ["numpy"]).outcome is Outcome.NOT_MEASURED
    assert judge(stale, [short], ["numpy"], any_source=True).outcome is Outcome.MISMATCH
