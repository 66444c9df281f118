from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baselines.llama_cpp.build import BuildOptions, ensure_build
from baselines.llama_cpp.progress import PlainProgress
from conformance import runner as runner_module
from conformance.errors import BaselineUnavailableError, FixtureError
from conformance.gate import Outcome, judge
from conformance.llama_builds import LlamaCpp
from conformance.records import Record, read_records
from conformance.report import render
from conformance.runner import Runner
from conformance.scenario import ScenarioFile, find_scenario, load_scenario
from conformance.subject import ReportProgress, SubjectRequest, SubjectResult
from conformance.tests.fakes import (
    BASELINE_NAME,
    N_PREDICT,
    FakeLlama,
    Silent,
    content,
    on_gpu,
    run_gpu,
    run_here,
    write_scenario,
)
from engine.cuda.device import Device
from engine.errors import NoDeviceError


def _by_engine(records: list[Record]) -> dict[str, Record]:
    return {record.engine: record for record in records}


def _run(short: ScenarioFile, out: Path, llama: FakeLlama, **options: object) -> dict[str, Record]:
    runner = Runner(llama.open, out, Silent(), subject=run_here, controls=())
    for name, value in options.items():
        setattr(runner, name, value)
    return _by_engine(runner.run([short]))


def test_every_engine_has_one_record_on_disk(records: list[Record], out: Path) -> None:
    assert [record.engine for record in records][:3] == [BASELINE_NAME, "engine-numpy", "engine-cuda"]
    assert _by_engine(read_records(out)) == _by_engine(records)
    assert len({record.run_id for record in records}) == 1


def test_the_right_engine_passes_every_check(records: list[Record], short: ScenarioFile) -> None:
    record = _by_engine(records)["engine-numpy"]
    assert record.status == "ok"
    assert {check.name: check.passed for check in record.checks if not check.passed} == {}
    assert len(record.checks) == 9  # all of the scenario's but the gap of llama.cpp, and `finite`
    assert record.output is not None
    assert len(record.output.generated_token_ids) == N_PREDICT
    assert record.comparison is not None
    assert (record.comparison.n_equal, record.comparison.n_equal_teacher_forced) == (N_PREDICT, N_PREDICT)
    assert record.requested["n_ctx"] == record.effective["n_ctx"] == 256
    assert record.timings is not None
    assert len(record.timings.decode_time_ns) == N_PREDICT - 1
    assert record.model is not None
    assert record.model.file == "tiny.gguf"
    assert record.scenario_version == short.version


def test_llama_cpp_is_run_twice_and_compared_with_itself(short: ScenarioFile, tmp_path: Path) -> None:
    llama = FakeLlama()
    record = _run(short, tmp_path, llama)[BASELINE_NAME]
    assert [request.prefill for request in llama.requests] == ["batched", "single"]
    assert {check.name for check in record.checks} == {"finite", "settings_honoured", "smallest_top2_gap"}
    assert record.comparison is not None
    assert record.comparison.against == f"{BASELINE_NAME}, prompt token by token"
    assert record.versions.llama_cpp_build == 8763


def test_a_backend_that_cannot_run_here_is_named_and_never_passed(records: list[Record]) -> None:
    record = _by_engine(records)["engine-cuda"]
    assert record.status == "not_measured"
    assert record.reason
    assert record.output is None


def test_other_ids_are_reported_and_llama_cpp_is_fed_ours(short: ScenarioFile, tmp_path: Path) -> None:
    noise = np.zeros(2048, dtype=np.float32)
    noise[7] = 100.0
    llama = FakeLlama(noise=noise)
    record = _run(short, tmp_path, llama)["engine-numpy"]
    assert record.output is not None
    assert llama.requests[-1].force_ids == record.output.generated_token_ids
    failed = {check.name: check for check in record.checks if check.passed is False}
    assert list(failed) == ["generated_token_ids_equal llama.cpp"]
    assert failed["generated_token_ids_equal llama.cpp"].value == 0
    assert record.comparison is not None
    first = record.comparison.first_difference
    assert first is not None
    assert (first.position, first.reference_token_id, first.gap_under_margin) == (0, 7, False)
    assert record.comparison.n_equal_teacher_forced == 0
    assert record.comparison.largest_logit_difference == pytest.approx(100.0)


def test_a_crash_of_llama_cpp_is_a_status_with_its_last_lines(short: ScenarioFile, tmp_path: Path) -> None:
    records = _run(short, tmp_path, FakeLlama(status="crashed"))
    baseline, ours = records[BASELINE_NAME], records["engine-numpy"]
    assert (baseline.status, baseline.reason, baseline.output) == ("crashed", "ended by SIGSEGV", None)
    assert baseline.log_tail == ["llama_model_load: loading tiny.gguf"]
    unmeasured = {check.name: check.detail for check in ours.checks if check.passed is None}
    assert set(unmeasured) == {"generated_token_ids_equal llama.cpp", "oracle_nmse llama.cpp"}
    assert unmeasured["oracle_nmse llama.cpp"] == f"{BASELINE_NAME}: ended by SIGSEGV"
    assert judge(list(records.values()), [short], ["numpy"], controls=()).outcome is Outcome.NOT_MEASURED


def test_a_failure_of_the_engine_is_a_mismatch(short: ScenarioFile, tmp_path: Path) -> None:
    def fail(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
        return SubjectResult("failed", "layer 3: op head produced NaN", "error: layer 3", None)

    records = _run(short, tmp_path, FakeLlama(), subject=fail)
    assert records["engine-numpy"].reason == "layer 3: op head produced NaN"
    assert judge(list(records.values()), [short], ["numpy"], controls=()).outcome is Outcome.MISMATCH


def test_the_hash_at_another_capacity_is_compared(short: ScenarioFile, tmp_path: Path) -> None:
    values = short.scenario.model_dump(mode="json")
    check = {"check": "same_hash_at_both_n_ctx", "against": "short", "because": "a"}
    values |= {"name": "long", "n_ctx": 512, "controls": False, "checks": [*values["checks"], check]}
    longer = load_scenario(write_scenario(short.path.parent / "long.yaml", values))
    runner = Runner(FakeLlama().open, tmp_path, Silent(), subject=run_here, controls=())
    both = [record for record in runner.run([short, longer]) if record.engine == "engine-numpy"]
    assert [c.passed for c in both[1].checks if c.name == "same_hash_at_both_n_ctx short"] == [True]
    alone = Runner(FakeLlama().open, tmp_path, Silent(), subject=run_here, controls=()).run([longer])
    unmeasured = [c for c in _by_engine(alone)["engine-numpy"].checks if c.passed is None]
    assert [c.detail for c in unmeasured] == ["short gave no tokens on this backend"]


def test_records_of_an_earlier_run_do_not_survive_a_run_that_stops(short: ScenarioFile, tmp_path: Path) -> None:
    _run(short, tmp_path, FakeLlama())
    assert read_records(tmp_path)

    def stop(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(short, tmp_path, FakeLlama(), subject=stop)
    [kept] = read_records(tmp_path)
    assert kept.engine == BASELINE_NAME  # of this run: written before the engine was run


def test_another_model_than_the_pinned_one_is_an_error(short: ScenarioFile, tmp_path: Path) -> None:
    path = write_scenario(short.path.parent / "wrong.yaml", content("tiny.gguf", "ab" * 32))
    with pytest.raises(FixtureError, match=rf"tiny\.gguf has sha256 [0-9a-f]{{64}}, wrong\.yaml expects {'ab' * 32}"):
        Runner(FakeLlama().open, tmp_path, Silent()).run([load_scenario(path)])
    path = write_scenario(short.path.parent / "none.yaml", content("none.gguf", "ab" * 32))
    with pytest.raises(FixtureError, match=r"model\.file none\.gguf: no such file"):
        Runner(FakeLlama().open, tmp_path, Silent()).run([load_scenario(path)])


def _no_device() -> Device:
    raise NoDeviceError("backend cuda finds no CUDA device")


def _unavailable(device: str) -> FakeLlama:
    raise BaselineUnavailableError(f"llama.cpp cannot run on {device}")


def test_a_scenario_on_a_gpu_has_both_engines_there(short: ScenarioFile, tmp_path: Path) -> None:
    file, llama = on_gpu(short), FakeLlama(layers_offloaded="9/9")
    records = Runner(llama.open, tmp_path, Silent(), ["cuda"], subject=run_gpu).run([file])
    assert judge(records, [file], ["numpy", "cuda"]).findings == ()
    assert [record.engine for record in records] == ["llama.cpp-b8763-cuda", "engine-cuda"]
    baseline, ours = records
    assert llama.devices == ["cuda"]
    flags = llama.requests[0]
    assert (flags.n_gpu_layers, flags.override_tensor, flags.split_mode) == (99, "token_embd.weight=CPU", "none")
    assert (ours.requested["vram_budget_n_bytes"], ours.effective["vram_budget_n_bytes"]) == (1 << 30, 1 << 30)
    assert (ours.effective["device"], ours.versions.cupy, ours.versions.nvrtc) == ("Fake GPU", "14.2.0", "13.0")
    assert ours.timings is not None
    assert ours.timings.prepare_time_ns == 11_000
    assert ours.comparison is not None
    assert ours.comparison.against == baseline.engine
    assert baseline.timings is not None
    assert (baseline.timings.prepare_time_ns, baseline.versions.cupy) == (None, None)


def test_llama_cpp_that_left_layers_on_the_cpu_is_no_baseline(short: ScenarioFile, tmp_path: Path) -> None:
    file = on_gpu(short)
    llama = FakeLlama(layers_offloaded="8/9")
    records = Runner(llama.open, tmp_path, Silent(), ["cuda"], subject=run_gpu).run([file])
    findings = judge(records, [file], ["cuda"]).findings
    assert [(finding.engine, finding.outcome) for finding in findings] == [(records[0].engine, Outcome.MISMATCH)]
    assert "layers_offloaded: requested 9/9, effective 8/9" in findings[0].text


def test_the_controls_bring_the_backend_they_are_compared_with(short: ScenarioFile, tmp_path: Path) -> None:
    runner = Runner(
        FakeLlama().open,
        tmp_path,
        Silent(),
        ["cuda"],
        subject=run_gpu,
        controls=["rope_off_by_one", "highest_id_on_tie"],
    )
    records = runner.run([short])
    assert {record.engine: record.status for record in records if record.role != "control"} == {
        BASELINE_NAME: "ok",
        "engine-numpy": "ok",
        "engine-cuda": "ok",
    }
    assert judge(records, [short], ["cuda"], runner.controls).findings == ()
    without = [record for record in records if record.engine != "engine-numpy"]
    assert judge(without, [short], ["cuda"], runner.controls).outcome is Outcome.NOT_MEASURED


def test_numpy_is_not_measured_where_nobody_needs_it(short: ScenarioFile, tmp_path: Path) -> None:
    asked: list[str] = []

    def subject(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
        asked.append(request.backend)
        assert request.vram_budget_n_bytes == (1 << 30 if request.backend == "cuda" else None)
        return run_gpu(request, deadline_s, report)

    file = on_gpu(short, name="both", backends=["numpy", "cuda"])
    llama = FakeLlama(layers_offloaded="9/9")
    records = Runner(llama.open, tmp_path, Silent(), ["cuda"], subject=subject).run([file])
    assert asked == ["cuda"]
    assert _by_engine(records)["engine-numpy"].reason == "not asked for: add --backend numpy"
    assert judge(records, [file], ["cuda"]).outcome is Outcome.MATCH
    Runner(llama.open, tmp_path, Silent(), ["numpy"], subject=subject).run([file])
    assert asked == ["cuda", "numpy"]


def test_without_a_gpu_nothing_of_the_scenario_is_run_or_made(
    short: ScenarioFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "open_device", _no_device)
    monkeypatch.setattr(runner_module, "ensure_model", lambda *args: pytest.fail("a model is made"))
    file = on_gpu(short)
    records = Runner(_unavailable, tmp_path, Silent(), ["cuda"]).run([file])
    assert [(record.engine, record.status, record.reason, record.model) for record in records] == [
        ("llama.cpp-b8763-cuda", "not_measured", "llama.cpp cannot run on cuda", None),
        ("engine-cuda", "not_measured", "backend cuda finds no CUDA device", None),
    ]
    assert _by_engine(read_records(tmp_path)) == _by_engine(records)
    judgement = judge(records, [file], ["cuda"])
    assert judgement.outcome is Outcome.NOT_MEASURED
    assert "not measured" in render(records, [file], judgement)


def test_without_llama_cpp_the_engine_is_still_measured(
    short: ScenarioFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "open_device", lambda: Device("Fake GPU", "sm_90", 132, 1 << 29))
    file = on_gpu(short)
    records = Runner(_unavailable, tmp_path, Silent(), ["cuda"], subject=run_gpu).run([file])
    ours = _by_engine(records)["engine-cuda"]
    checks = {check.name: check.passed for check in ours.checks}
    assert checks["final_logits_le32_sha256"] is True
    assert checks["generated_token_ids_equal llama.cpp"] is None
    assert judge(records, [file], ["cuda"]).outcome is Outcome.NOT_MEASURED


def test_a_scenario_for_none_of_the_backends_asked_for_does_not_run(short: ScenarioFile, tmp_path: Path) -> None:
    file = on_gpu(short)
    records = Runner(FakeLlama().open, tmp_path, Silent(), ["numpy"], subject=run_gpu).run([file])
    assert {record.status for record in records} == {"not_measured"}
    assert records[0].reason == "no backend of this scenario was asked for: add --backend cuda"
    assert judge(records, [file], ["numpy"]).outcome is Outcome.NOT_MEASURED


def test_the_report_fits_100_columns_and_names_everything(records: list[Record], short: ScenarioFile) -> None:
    text = render(records, [short], judge(records, [short], ["numpy"]))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert next(line.split() for line in lines if " engine-numpy " in line)[2] == f"{N_PREDICT}/{N_PREDICT}"
    assert [line for line in lines if line.startswith("short") and line.endswith("not measured")]
    assert "engine-cuda was not measured: " in text
    for record in records:
        assert record.engine in text
    assert "FAIL" not in text


def test_the_report_shows_what_failed_and_where(records: list[Record], short: ScenarioFile, tmp_path: Path) -> None:
    noise = np.zeros(2048, dtype=np.float32)
    noise[7] = 100.0
    found = list(_run(short, tmp_path, FakeLlama(noise=noise)).values())
    text = " ".join(render(found, [short], judge(found, [short], ["numpy"], controls=())).split())
    assert f"0/{N_PREDICT}" in text
    assert "FAIL: short, engine-numpy: generated_token_ids_equal llama.cpp: found 0, limit 4 tokens; position 0" in text


def test_the_report_leaves_out_records_of_another_version(records: list[Record], short: ScenarioFile) -> None:
    old = [record.model_copy(update={"scenario_version": "0" * 64}) for record in records]
    text = render(old, [short], judge(old, [short], ["numpy"]))
    assert f"{N_PREDICT}/{N_PREDICT}" not in text
    assert "negative control" not in text
    assert "pass" not in text
    assert "the record is of another version of the scenario" in " ".join(text.split())


@pytest.mark.baseline
def test_llama_cpp_and_the_engine_agree_on_the_tiny_scenario(tmp_path: Path) -> None:
    progress = PlainProgress(print)
    file = find_scenario("tiny-c512")
    build = ensure_build(BuildOptions(), progress)
    records = Runner(lambda device: LlamaCpp(build), tmp_path, progress, controls=()).run([file])
    judgement = judge(records, [file], ["numpy"], controls=())
    assert judgement.findings == ()
    ours, theirs = (_by_engine(records)[name].output for name in ("engine-numpy", BASELINE_NAME))
    assert ours is not None
    assert theirs is not None
    assert ours.generated_token_ids == theirs.generated_token_ids
    assert len(ours.generated_token_ids) == 129


@pytest.mark.baseline
def test_a_deadline_that_llama_cpp_cannot_meet_is_a_status(tmp_path: Path) -> None:
    file = find_scenario("tiny-c512")
    hurried = replace(file, scenario=file.scenario.model_copy(update={"deadline_s": 0.001}))
    build = ensure_build(BuildOptions(), PlainProgress(print))
    records = _by_engine(
        Runner(lambda device: LlamaCpp(build), tmp_path, Silent(), subject=run_here, controls=()).run([hurried])
    )
    assert (records[BASELINE_NAME].status, records[BASELINE_NAME].reason) == ("timeout", "not finished after 0.001 s")
