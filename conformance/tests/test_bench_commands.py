from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baselines.llama_cpp.build import LlamaBuild
from conformance import cli
from conformance.bench import commands, plan, selftest
from conformance.bench.plan import BenchRequest, baseline_flags, bench_files, make_subjects, own_scenarios
from conformance.bench.selftest import TrialResult
from conformance.bench.stats import Ratio
from conformance.bench.subjects import BASELINES, EngineSubject, WorkerSubject
from conformance.bench.verify import verify_paths
from conformance.errors import ConformanceError
from conformance.scenario import ScenarioFile, find_scenario
from conformance.tests.bench_fakes import OPTIONS, FakeSubject, pair
from conformance.tests.fakes import Silent

NO_BUILD = LlamaBuild(Path("none"), Path("none"), 8763, {}, (), "", Path("none"))


def _invoke(*argv: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in argv])


@pytest.fixture
def fakes(short: ScenarioFile, monkeypatch: pytest.MonkeyPatch) -> list[FakeSubject]:
    """Let the short scenario be measured twice, with fakes."""
    subjects, other = pair(short), replace(short, scenario=short.scenario.model_copy(update={"name": "other"}))
    builds = SimpleNamespace(open=lambda device: SimpleNamespace(build=NO_BUILD))
    monkeypatch.setattr(commands, "LlamaBuilds", lambda *args: builds)
    monkeypatch.setattr(commands, "bench_files", lambda request, progress: [short, other])
    monkeypatch.setattr(commands, "make_subjects", lambda *args: subjects)
    monkeypatch.setattr(BenchRequest, "options", lambda self, scenario: OPTIONS)
    return subjects


@pytest.mark.usefixtures("fakes")
def test_bench_prints_verdicts_and_records_every_scenario(tmp_path: Path) -> None:
    result = _invoke("bench", "--backend", "numpy", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    row = r"^(?:short|other) +decode +engine-numpy / llama\.cpp-b8763-cpu +0\.(?:49|50)\d +0\.\d+ to 0\.\d+ +SLOWER$"
    assert len(re.findall(row, result.output, re.MULTILINE)) == 2
    assert verify_paths([tmp_path]) == ([], 2)
    assert _invoke("verify", tmp_path).output == "2 rows verified, 0 findings\n"


def test_wrong_tokens_end_with_1(fakes: list[FakeSubject], tmp_path: Path) -> None:
    fakes[0].token_ids = [1, 2, 3, 4]
    result = _invoke("bench", "--backend", "numpy", "--out", tmp_path)
    assert result.exit_code == 1
    assert "INVALID: correctness failed: engine-numpy" in " ".join(result.output.split())
    assert _invoke("verify", tmp_path).exit_code == 0


def test_what_could_not_be_compared_ends_with_2(fakes: list[FakeSubject], tmp_path: Path) -> None:
    fakes[0].settings = fakes[0].settings.model_copy(update={"n_threads": 1})
    assert _invoke("bench", "--backend", "numpy", "--out", tmp_path).exit_code == 2


def test_ctrl_c_keeps_what_is_complete(fakes: list[FakeSubject], tmp_path: Path) -> None:
    fakes[0].fails, fakes[0].fails_at = KeyboardInterrupt, 17  # a scenario has 13 runs of each
    result = _invoke("bench", "--backend", "numpy", "--out", tmp_path)
    assert result.exit_code == 130
    assert "stopped: 1 of 2 scenarios are measured and recorded" in result.output
    assert verify_paths([tmp_path]) == ([], 1)
    assert not any(subject.is_open for subject in fakes)


def test_a_gpu_that_is_not_there_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "why_unavailable", lambda backend: "no CUDA device")
    result = _invoke("bench", "--backend", "cuda", "--quick")
    assert (result.exit_code, result.output) == (2, "not measured: no CUDA device\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--baseline", "vllm"), "--baseline is 'vllm', expected one of: llama.cpp, llama-bench, llama-server"),
        (("--backend", "metal"), "--backend is 'metal', expected one of: numpy, cuda"),
    ],
)
def test_what_does_not_exist_is_one_line(argv: tuple[str, ...], says: str) -> None:
    result = _invoke("bench", *argv)
    assert (result.exit_code, result.output) == (3, f"error: {says}\n")


def test_an_edited_row_ends_verify_with_1(fakes: list[FakeSubject], tmp_path: Path) -> None:
    _invoke("bench", "--backend", "numpy", "--out", tmp_path)
    path = next(path for path in tmp_path.rglob("numpy-*.json"))
    path.write_text(path.read_text().replace('"verdict": "SLOWER"', '"verdict": "SAME"', 1))
    result = _invoke("verify", path)
    assert result.exit_code == 1
    assert "verdict" in result.output
    assert _invoke("verify", tmp_path / "none").exit_code == 3
    (tmp_path / "empty").mkdir()
    assert _invoke("verify", tmp_path / "empty").exit_code == 2


def test_the_backend_decides_what_is_measured() -> None:
    files = bench_files(BenchRequest((), "cuda", quick=True), Silent())
    assert [file.scenario.name for file in files] == ["27b-c512", "27b-c2048"]
    request = BenchRequest((), "cuda", quick=True)
    assert request.programs() == ("llama.cpp", "llama-bench", "llama-server")
    options = request.options(files[0].scenario)
    assert (options.n_repetitions, options.n_decode) == (5, 128)
    names = [file.scenario.name for file in bench_files(BenchRequest((), "numpy"), Silent())]
    assert names == ["tiny-c512", "tiny-c2048", "small-c512", "small-c2048"]
    quick = bench_files(BenchRequest((), "numpy", quick=True), Silent())
    assert [file.scenario.name for file in quick] == ["tiny-c512", "tiny-c2048"]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (BenchRequest(("27b-c512",), "numpy"), "27b-c512 is not for --backend numpy"),
        (BenchRequest(("tiny-c512",), "numpy", model=Path("m.gguf")), "name either a model or scenarios"),
        (BenchRequest((), "numpy", model=Path("m.gguf")), "--model m.gguf: no such file"),
    ],
)
def test_requests_that_make_no_sense_are_refused(request_: BenchRequest, says: str) -> None:
    with pytest.raises(ConformanceError, match=re.escape(says)):
        bench_files(request_, Silent())


def test_a_run_longer_than_the_scenario_is_refused() -> None:
    with pytest.raises(ConformanceError, match="--decode is 129, tiny-c512 has 1 to 128 steps"):
        BenchRequest((), "numpy", n_decode=129).options(find_scenario("tiny-c512").scenario)


def test_a_model_of_one_s_own_gets_the_article_s_scenarios(short: ScenarioFile) -> None:
    files = own_scenarios(short.path.parent / "tiny.gguf", "numpy", Silent())
    assert [(f.scenario.n_ctx, len(f.scenario.prompt_token_ids), f.scenario.n_predict) for f in files] == [
        (512, 70, 129),
        (2048, 70, 129),
    ]
    assert {f.scenario.model.sha256 for f in files} == {short.scenario.model.sha256}
    assert files[0].version != files[1].version


def test_both_sides_get_the_same_threads_and_context() -> None:
    file = find_scenario("tiny-c2048")
    ours, theirs = make_subjects(file, Path("m.gguf"), BenchRequest((), "numpy", threads=3), NO_BUILD)
    assert isinstance(ours, EngineSubject)
    assert isinstance(theirs, WorkerSubject)
    assert (ours.request.n_threads, ours.request.n_ctx) == (theirs.request.n_threads, theirs.request.n_ctx) == (3, 2048)
    assert theirs.request.repack
    on_gpu = baseline_flags(file.scenario, "cuda", 2)
    assert (on_gpu.n_gpu_layers, on_gpu.override_tensor) == (99, "token_embd.weight=CPU")


@pytest.mark.parametrize(
    ("slowed_by", "verdict", "is_right"),
    [
        (0.0, "SAME", True),
        (0.0, "UNDECIDED", True),
        (0.0, "SLOWER", False),
        (0.1, "SLOWER", True),
        (0.1, "SAME", False),
    ],
)
def test_the_self_test_judges_verdicts(slowed_by: float, verdict: Any, is_right: bool) -> None:
    result = TrialResult(slowed_by, 20, Ratio(0.9, 0.8, 0.95), verdict)
    assert result.is_right is is_right
    assert result.line().startswith("right" if is_right else "WRONG")


def test_a_self_test_with_a_wrong_verdict_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(verdict: Any, *args: Any) -> list[TrialResult]:
        return [TrialResult(0.0, 20, Ratio(1, 1, 1), verdict)]

    monkeypatch.setattr(commands, "run_selftest", partial(run, "SAME"))
    assert _invoke("bench-selftest").exit_code == 0
    monkeypatch.setattr(commands, "run_selftest", partial(run, "FASTER"))
    result = _invoke("bench-selftest")
    assert result.exit_code == 1
    assert "0 of 1 verdicts are right" in result.output


def test_the_self_test_runs_the_engine_against_itself(short: ScenarioFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "find_scenario", lambda name: short)
    monkeypatch.setattr(selftest, "_ROUNDS_PER_LOOK", 5)
    results = selftest.run_selftest(1, 5, None, Silent())
    assert [(result.slowed_by, result.n_rounds) for result in results] == [(0.0, 5), (0.1, 5)]
    assert all(0.1 < result.ratio.value < 10 for result in results)


def test_presets_name_programs_that_exist() -> None:
    assert {name for names in plan.PROGRAMS.values() for name in names} == set(BASELINES)
