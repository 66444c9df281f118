from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from baselines.errors import BuildError
from conformance import cli, fixtures, llama_builds
from conformance.controls import CONTROLS
from conformance.gate import Outcome
from conformance.models import ModelSummary
from conformance.records import Record, read_records, write_record
from conformance.runner import Runner
from conformance.scenario import ScenarioFile, load_scenario
from conformance.subject import ReportProgress, SubjectRequest, SubjectResult
from conformance.tests.fakes import BASELINE_NAME, FakeLlama, content, on_gpu, run_here, write_scenario

ROOT = Path(__file__).resolve().parents[2]


def _invoke(*argv: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in argv])


@pytest.fixture
def only_short(short: ScenarioFile, monkeypatch: pytest.MonkeyPatch) -> ScenarioFile:
    """Let the short scenario be all there is in the suite."""
    monkeypatch.setattr(cli, "select_scenarios", lambda names: [short])
    monkeypatch.setattr(cli, "find_scenario", lambda name: short)
    return short


def _subject(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
    if request.backend == "cuda":
        return SubjectResult("not_measured", "no CUDA device", "", None)
    return run_here(request, deadline_s, report)


@pytest.fixture
def with_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine stand in for llama.cpp, and measure in this process."""
    monkeypatch.setattr(cli, "LlamaBuilds", lambda options, architectures, progress: FakeLlama())
    monkeypatch.setattr(cli, "Runner", partial(Runner, subject=_subject))


@pytest.mark.usefixtures("with_fakes", "only_short")
def test_run_prints_the_table_and_ends_with_0(tmp_path: Path) -> None:
    result = _invoke("run", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert re.search(r"^short +engine-numpy +4/4 +\w{12} +\w{12} +[\d.]+ +pass$", result.output, re.MULTILINE)
    assert re.search(r"^control-rope_off_by_one +caught ", result.output, re.MULTILINE)
    assert len(read_records(tmp_path)) == 8
    assert _invoke("gate", tmp_path).exit_code == 0


@pytest.mark.usefixtures("with_fakes", "only_short")
def test_run_ends_with_2_when_a_backend_asked_for_cannot_run(tmp_path: Path) -> None:
    result = _invoke("run", "--out", tmp_path, "--backend", "numpy", "--backend", "cuda")
    assert result.exit_code == 2
    assert "not measured: short, engine-cuda: not_measured: no CUDA device" in result.output


def test_run_ends_with_3_and_one_line_when_llama_cpp_cannot_be_built(
    only_short: ScenarioFile, records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object, progress: object) -> None:
        raise BuildError("no C++ compiler found")

    for record in records:
        write_record(record, tmp_path)
    monkeypatch.setattr(llama_builds, "ensure_build", fail)
    result = _invoke("run", "--out", tmp_path)
    assert (result.exit_code, result.output) == (3, "error: no C++ compiler found\n")
    assert _invoke("gate", tmp_path).exit_code == 2


def test_run_ends_with_3_for_a_scenario_that_is_none(tmp_path: Path) -> None:
    path = write_scenario(tmp_path / "s.yaml", content("m.gguf", "ab" * 32) | {"n_ctx": 300})
    result = _invoke("run", path)
    assert result.exit_code == 3
    assert re.fullmatch(r"error: .*s\.yaml:\d+: n_ctx is 300, expected a multiple of 256\n", result.output)


@pytest.mark.parametrize("command", ["run", "gate"])
def test_a_backend_that_does_not_exist_is_one_line(command: str) -> None:
    result = _invoke(command, "--backend", "metal")
    assert (result.exit_code, result.output) == (3, "error: --backend is 'metal', expected one of: numpy, cuda\n")


def test_a_scenario_for_a_gpu_gives_2_without_one(
    only_short: ScenarioFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "select_scenarios", lambda names: [on_gpu(only_short)])
    monkeypatch.setattr(llama_builds, "this_gpu", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = _invoke("run", "gpu", "--out", tmp_path, "--backend", "cuda", "--cuda-arch", "90")
    assert result.exit_code == 2, result.output
    assert "not measured: gpu, llama.cpp-b8763-cuda: not_measured: llama.cpp on CUDA needs an NVIDIA" in result.output
    assert "not measured: gpu, engine-cuda: not_measured: backend cuda" in result.output
    assert _invoke("gate", tmp_path, "--backend", "cuda").exit_code == 2


def test_an_own_build_takes_no_architecture(tmp_path: Path) -> None:
    result = _invoke("run", "27b-c512", "--llama-cpp", tmp_path, "--cuda-arch", "90", "--out", tmp_path)
    says = "error: --llama-cpp takes a build as it is: --cuda-arch does not apply to it\n"
    assert (result.exit_code, result.output) == (3, says)


def test_run_offers_no_way_around_the_controls() -> None:
    assert "no-controls" not in _invoke("run", "--help").output


def test_gate_exit_codes(only_short: ScenarioFile, records: list[Record], tmp_path: Path) -> None:
    empty = _invoke("gate", tmp_path / "nothing")
    assert empty.exit_code == 2
    assert "not measured" in empty.output
    for record in records:
        write_record(record, tmp_path)
    assert _invoke("gate", tmp_path).exit_code == 0
    assert _invoke("gate", tmp_path, "--backend", "numpy", "--backend", "cuda").exit_code == 2
    ours = next(record for record in records if record.engine == "engine-numpy")
    path = write_record(ours.model_copy(update={"status": "failed", "reason": "NaN"}), tmp_path)
    assert _invoke("gate", tmp_path).exit_code == 1
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    unreadable = _invoke("gate", tmp_path)
    assert unreadable.exit_code == 3
    assert unreadable.output == f"error: {path}: schema_version is 9, expected 1\n"


def test_gate_on_records_of_other_source_is_2_unless_told_otherwise(
    only_short: ScenarioFile, records: list[Record], tmp_path: Path
) -> None:
    for record in records:
        versions = record.versions.model_copy(update={"backend_source_sha256": {"numpy": "0" * 64}})
        write_record(record.model_copy(update={"versions": versions}), tmp_path)
    stale = _invoke("gate", tmp_path)
    assert stale.exit_code == 2
    says = "\nnot measured: short, engine-numpy: stale: measured with other engine source\n"
    assert says in stale.output
    assert stale.output.count("stale: ") == 1 + len(CONTROLS)
    anyhow = _invoke("gate", tmp_path, "--any-source")
    assert anyhow.exit_code == 0
    assert "stale" not in anyhow.output
    assert "\nmeasured with other engine source: short, engine-numpy; short, control-" in anyhow.output


def test_the_published_records_pass_as_history(tmp_path: Path) -> None:
    published = ROOT / "results" / "v1" / "xeon-2-cores-2026-11-30-gaps"
    asked = [part for folder in published.iterdir() for part in ("--scenario", folder.name)]
    assert _invoke("gate", published, *asked, "--any-source").exit_code == 0


def test_gate_without_the_suite_s_records_is_2(records: list[Record], out: Path) -> None:
    result = _invoke("gate", out)
    assert result.exit_code == 2
    assert f"not measured: tiny-c512, {BASELINE_NAME}: there is no record" in result.output


def test_list_names_every_scenario_with_its_question() -> None:
    lines = _invoke("list").output.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["tiny-c512", "default"],
        ["tiny-c2048", "default"],
        ["small-c512", "default"],
        ["small-c2048", "default"],
        ["27b-c512", "by"],
        ["27b-c2048", "by"],
        *(
            [f"pydoc-{topic}-c{n}", "default"]
            for topic in ("import", "objects", "strings", "try", "with")
            for n in (512, 2048)
        ),
    ]
    assert all(line.endswith("?") for line in lines)


def test_schema_prints_json() -> None:
    assert json.loads(_invoke("schema").output)["title"] == "Record"


@pytest.mark.parametrize(("flags", "says"), [((), "sha256 tiny 7"), (("--sparse",), "weights left out")])
def test_make_model_passes_its_options_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], says: str
) -> None:
    def make(kind: str, out: Path, seed: int | None, *, sparse: bool, progress: object) -> SimpleNamespace:
        return SimpleNamespace(path=out, n_bytes=1234, n_tensors=5, sha256=None if sparse else f"{kind} {seed}")

    monkeypatch.setattr(cli, "make_model", make)
    result = _invoke("make-model", "tiny", tmp_path / "m.gguf", "--seed", "7", *flags)
    assert result.output.endswith(f"m.gguf: 1,234 bytes, 5 tensors, {says}\n")


def test_make_model_refuses_an_unknown_kind(tmp_path: Path) -> None:
    result = _invoke("make-model", "huge", tmp_path / "m.gguf")
    assert result.exit_code == 3
    assert "error: " in result.output
    assert "tiny, small, 27b" in result.output


def test_golden_agrees_with_the_file_and_repairs_it(short: ScenarioFile, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").symlink_to(short.path.parent / "tiny.gguf")
    path = tmp_path / "short.yaml"
    right = "# kept\n" + short.path.read_text()
    path.write_text(right)
    fine = _invoke("golden", path)
    assert fine.exit_code == 0, fine.output
    assert "now" not in fine.output
    wrong = re.sub(r'"expected": "\w+"', f'"expected": "{"1" * 64}"', right)
    path.write_text(re.sub(r'"expected": \d+', '"expected": 1', wrong))
    different = _invoke("golden", path)
    assert different.exit_code == 1
    assert different.output.count("now") == 3
    assert _invoke("golden", path, "--write").exit_code == 0
    assert path.read_text() == right


def test_golden_of_a_scenario_for_a_gpu_makes_no_model_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(fixtures, "make_model", lambda *args, **options: pytest.fail("a model is made"))
    result = _invoke("golden", "27b-c512")
    assert result.exit_code == 3
    assert re.fullmatch(r"error: backend cuda .*\n", result.output)


def test_golden_makes_a_fixture_anew(short: ScenarioFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(kind: str, out: Path, seed: int | None, *, progress: object) -> ModelSummary:
        out.write_bytes((short.path.parent / "tiny.gguf").read_bytes())
        return SimpleNamespace(path=out, sha256="cd" * 32)  # type: ignore[return-value]

    monkeypatch.setattr(fixtures, "make_model", make)
    values = short.scenario.model_dump(mode="json") | {"model": {"kind": "tiny", "seed": 3, "sha256": "ab" * 32}}
    path = write_scenario(tmp_path / "short.yaml", values)
    result = _invoke("golden", path, "--write")
    assert result.exit_code == 0, result.output
    assert load_scenario(path).scenario.model.sha256 == "cd" * 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no command; python -m conformance --help lists them"),
        (("run", "--fly"), "No such option: --fly"),
        (("gate", "a", "b"), "Got unexpected extra argument"),
    ],
)
def test_wrong_arguments_are_one_line_and_not_taken_for_not_measured(arguments: tuple[str, ...], message: str) -> None:
    done = subprocess.run([sys.executable, "-m", "conformance", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == Outcome.CANNOT_RUN
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
