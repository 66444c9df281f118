from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from conformance.bench.ablation import AblationRecord
from conformance.bench.ops import OpsRecord
from conformance.bench.records import (
    BenchRecord,
    bench_path,
    digests_of,
    machine_slug,
    read_bench_record,
    write_bench_record,
)
from conformance.bench.verify import verify_paths, verify_row
from conformance.errors import RecordError
from conformance.records import Record, record_path, write_record
from conformance.scenario import ScenarioFile
from conformance.tests.bench_fakes import FakeSensor, FakeSubject, bench_of, pair

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def bench_record(short: ScenarioFile) -> BenchRecord:
    ours, theirs = pair(short)
    server = FakeSubject("llama-server-b8763-cpu", "baseline", theirs.token_ids, (1500, 1490))
    return bench_of(short, [ours, theirs, server], sensor=FakeSensor(), backend="cuda", ceiling=4530.0)


def findings(path: Path, short: ScenarioFile) -> list[str]:
    return list(verify_row(path, {short.version: short.scenario}))


def edited(data: Any, keys: list[Any], change: Callable[[Any], Any]) -> None:
    for key in keys[:-1]:
        data = data[key]
    data[keys[-1]] = change(data[keys[-1]])


def bump(value: Any) -> Any:
    """Change one digit, one letter or one flag."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    assert isinstance(value, str)
    last = value[-1]
    return value[:-1] + ("1" if last == "0" else "0" if last.isdigit() else "b" if last == "a" else "a")


EDITS: list[tuple[list[Any], str]] = [
    (["comparisons", 0, "ratio"], "record.comparisons[0].ratio"),
    (["comparisons", 0, "interval_low"], "record.comparisons[0].interval_low"),
    (["comparisons", 1, "interval_high"], "record.comparisons[1].interval_high"),
    (["comparisons", 0, "n_rounds"], "record.comparisons[0].n_rounds"),
    (["comparisons", 0, "parity", 0, "engine"], "record.comparisons[0].parity[0].engine"),
    (["comparisons", 0, "parity", 2, "equal"], "record.comparisons[0].parity[2].equal"),
    (["figures", 0, "tok_per_s"], "record.figures[0].tok_per_s"),
    (["figures", 0, "ms_per_token"], "record.figures[0].ms_per_token"),
    (["figures", 0, "gb_per_s"], "record.figures[0].gb_per_s"),
    (["figures", 0, "ceiling_fraction"], "record.figures[0].ceiling_fraction"),
    (["subjects", 0, "runs", 3, "decode_time_ns", 1], "record.subjects[0].runs[3]"),
    (["subjects", 1, "runs", 1, "prefill_time_ns"], "record.subjects[1].runs[1]"),
    (["subjects", 2, "runs", 1, "client_first_token_time_ns"], "record.subjects[2].runs[1]"),
    (["subjects", 0, "runs", 2, "order"], "record.subjects[0].runs[2]"),
    (["subjects", 0, "runs", 5, "telemetry", "sm_mhz"], "record.subjects[0].runs[5].telemetry"),
    (["subjects", 0, "runs", 5, "generated_token_ids_le64_sha256"], "record.subjects[0].runs[5]"),
    (["subjects", 0, "token_ids", 2], "record.subjects[0].token_ids"),
    (["subjects", 1, "settings", "n_threads"], "record.subjects[1].settings"),
    (["subjects", 1, "settings", "flash_attn"], "record.subjects[1].settings"),
    (["subjects", 0, "memory", "peak_n_bytes"], "record.subjects[0].memory"),
    (["subjects", 0, "cold_start", "ready_time_ns"], "record.subjects[0].cold_start"),
    (["prompt_token_ids", 7], "record.prompt_token_ids"),
    (["expected", "generated_token_ids_le64_sha256"], "record.expected.generated_token_ids_le64_sha256"),
    (["expected", "final_logits_le32_sha256"], "record.expected.final_logits_le32_sha256"),
    (["model", "sha256"], "record.model.sha256"),
    (["resident_weights_n_bytes"], "record.figures[0].gb_per_s"),
    (["read_ceiling_gb_per_s"], "record.figures[0].ceiling_fraction"),
    (["versions", "engine_source_sha256"], "record.versions"),
    (["machine", "memory_n_bytes"], "record.machine"),
    (["n_ctx"], "record.n_ctx"),
    (["plan", "n_decode"], "record.plan"),
    (["run_id"], "record.run_id"),
]


def test_an_untouched_row_has_no_findings(bench_record: BenchRecord, short: ScenarioFile, tmp_path: Path) -> None:
    path = write_bench_record(bench_record, tmp_path)
    assert findings(path, short) == []
    assert verify_paths([tmp_path]) == ([], 1)


@pytest.mark.parametrize(("keys", "place"), EDITS, ids=[".".join(map(str, keys)) for keys, _ in EDITS])
def test_every_single_edit_is_found_and_named(
    bench_record: BenchRecord, short: ScenarioFile, tmp_path: Path, keys: list[Any], place: str
) -> None:
    path = write_bench_record(bench_record, tmp_path)
    data = json.loads(path.read_text())
    edited(data, keys, bump)
    path.write_text(json.dumps(data))
    found = findings(path, short)
    assert any(text.startswith(place) for text in found), found


def test_an_edit_under_new_seals_still_contradicts_the_samples(
    bench_record: BenchRecord, short: ScenarioFile, tmp_path: Path
) -> None:
    path = write_bench_record(bench_record, tmp_path)
    for keys, place in [edit for edit in EDITS if edit[0][0] in ("comparisons", "figures", "expected")]:
        data = json.loads(path.read_text())
        edited(data, keys, bump)
        data["digests"] = digests_of(data)
        copy = path.with_name("edited.json")
        copy.write_text(json.dumps(data))
        assert any(text.startswith(place) for text in findings(copy, short)), place


def test_no_client_has_the_first_token_before_the_program(
    bench_record: BenchRecord, short: ScenarioFile, tmp_path: Path
) -> None:
    path = write_bench_record(bench_record, tmp_path)
    data = json.loads(path.read_text())
    run = data["subjects"][0]["runs"][2]
    run["client_first_token_time_ns"] = run["first_token_time_ns"] - 1
    data["digests"] = digests_of(data)
    path.write_text(json.dumps(data))
    place = "record.subjects[0].runs[2].client_first_token_time_ns"
    assert f"{place}: before the program itself had its first token" in findings(path, short)


def test_a_row_from_before_clients_were_timed_has_no_such_figure(
    bench_record: BenchRecord, short: ScenarioFile, tmp_path: Path
) -> None:
    path = write_bench_record(bench_record, tmp_path)
    data = json.loads(path.read_text())
    for subject in data["subjects"]:
        subject["metrics"].remove("client_first_token")
        for run in subject["runs"]:
            del run["client_first_token_time_ns"]
    for key in ("figures", "comparisons"):
        data[key] = [row for row in data[key] if row["metric"] != "client_first_token"]
    data["digests"] = digests_of(data)
    path.write_text(json.dumps(data))
    assert findings(path, short) == []


def test_a_verdict_cannot_be_turned(bench_record: BenchRecord, short: ScenarioFile, tmp_path: Path) -> None:
    path = write_bench_record(bench_record, tmp_path)
    path.write_text(path.read_text().replace('"verdict": "SLOWER"', '"verdict": "FASTER"', 1))
    assert any('verdict: "FASTER" in the row, "SLOWER" from its samples' in text for text in findings(path, short))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "not a record"),
        ('{"kind": "bench", "schema_version": 2, "digests": {}}', "schema_version is 2, not comparable with 1"),
        ('{"kind": "bench", "schema_version": 1, "digests": {}}', "run_id: Field required"),
        ('{"kind": "bench", "schema_version": 1}', "record.digests: missing"),
    ],
)
def test_what_is_no_row_is_a_finding(short: ScenarioFile, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "row.json"
    path.write_text(text)
    assert any(says in found for found in findings(path, short))


def test_a_moved_row_or_another_machine_is_found(
    bench_record: BenchRecord, short: ScenarioFile, tmp_path: Path
) -> None:
    path = write_bench_record(bench_record, tmp_path)
    machine = path.parents[1] / "machine.json"
    machine.write_text(machine.read_text().replace('"n_cores": ', '"n_cores": 1'))
    assert "record.machine: is another one than in machine.json" in findings(path, short)


def test_every_published_row_passes() -> None:
    found, n_rows = verify_paths([RESULTS])
    assert found == []
    assert n_rows >= 38


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["output", "generated_token_ids", 3], "output.generated_token_ids: have the hash"),
        (["output", "final_greedy_token_id"], "output.final_greedy_token_id"),
        (["output", "final_logits_le32_sha256"], "checks, final_logits_le32_sha256: value is"),
        (["output", "generated_token_ids_le64_sha256"], "output.generated_token_ids: have the hash"),
        (["comparison", "n_equal"], "comparison.n_equal"),
        (["checks", 1, "value"], "checks, final_logits_bitwise_equal token_major: passed is True"),
        (["checks", 3, "limit"], "checks, final_logits_le32_sha256: limit is"),
        (["checks", 3, "passed"], "checks, final_logits_le32_sha256: passed is False"),
        (["model", "sha256"], "model.sha256: not that of the scenario"),
        (["scenario"], "scenario: shora"),
    ],
)
def test_a_conformance_record_that_contradicts_itself_is_found(
    records: list[Record], short: ScenarioFile, tmp_path: Path, keys: list[Any], says: str
) -> None:
    record = next(record for record in records if record.engine == "engine-numpy")
    path = write_record(record, tmp_path)
    assert findings(path, short) == []
    data = json.loads(path.read_text())
    edited(data, keys, bump)
    path.write_text(json.dumps(data))
    assert any(text.startswith(says) for text in findings(path, short)), findings(path, short)


def test_a_control_caught_by_what_it_passed_is_found(
    records: list[Record], short: ScenarioFile, tmp_path: Path
) -> None:
    record = next(record for record in records if record.engine == "control-rope_off_by_one")
    path = write_record(record.model_copy(update={"caught_by": ["finite"]}), tmp_path)
    assert path == record_path(tmp_path, "short", record.engine)
    assert findings(path, short) == ["caught_by names finite, which did not fail"]


def test_two_runs_on_one_folder_are_two_files(short: ScenarioFile, tmp_path: Path) -> None:
    benches = [bench_of(short, pair(short)) for _ in range(2)]
    threads = [threading.Thread(target=write_bench_record, args=(record, tmp_path)) for record in benches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify_paths([tmp_path]) == ([], 2)
    assert {read_bench_record(bench_path(tmp_path, record)).run_id for record in benches} == {
        record.run_id for record in benches
    }
    assert not list(tmp_path.rglob("*.partial"))


def test_a_folder_that_cannot_be_written_is_one_line(bench_record: BenchRecord, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        write_bench_record(bench_record, tmp_path / "file")


def test_the_folder_of_a_machine_names_it(bench_record: BenchRecord) -> None:
    machine = bench_record.machine
    other = machine.model_copy(update={"memory_n_bytes": 1})
    assert machine_slug(machine) != machine_slug(other)
    assert machine_slug(machine).split("-")[-3:-1] == [str(machine.n_cores), "cores"]


@pytest.mark.parametrize(
    ("model", "file"),
    [(BenchRecord, "bench-v1.json"), (OpsRecord, "ops-v1.json"), (AblationRecord, "ablation-v1.json")],
)
def test_the_bench_schemas_on_disk_are_current(model: type[BaseModel], file: str) -> None:
    assert json.loads((RESULTS / "schema" / file).read_text()) == model.model_json_schema()


def test_every_key_of_a_bench_record_is_documented() -> None:
    keys = set(re.findall(r"`(\w+)`", (RESULTS / "README.md").read_text()))
    for model in (BenchRecord, OpsRecord, AblationRecord):
        schema = model.model_json_schema()
        for part in (schema, *schema["$defs"].values()):
            assert set(part.get("properties", {})) <= keys, part["title"]
