"""A baseline that goes wrong, a folder that cannot be written, two runs at once: what is seen, and what is kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from baselines.llama_cpp import worker
from baselines.tests.fakes import fake_build
from conformance import cli
from conformance.bench import commands
from conformance.errors import RecordError
from conformance.llama_builds import LlamaCpp
from conformance.records import claimed, read_records, remove_records
from conformance.runner import Runner
from conformance.scenario import ScenarioFile, load_scenario
from conformance.subject import ReportProgress, SubjectRequest, SubjectResult
from conformance.tests.bench_fakes import right_ids
from conformance.tests.fakes import BASELINE_NAME, FakeLlama, Silent, run_here, write_scenario

ROOT = Path(__file__).parents[2]
Start = Callable[..., Result]


@pytest.fixture
def plain(short: ScenarioFile) -> ScenarioFile:
    """The short scenario for one backend, without controls and oracle, that gives up after 3 s."""
    values = short.scenario.model_dump(mode="json")
    values |= {"name": "plain", "backends": ["numpy"], "controls": False, "deadline_s": 3}
    values["checks"] = [check for check in values["checks"] if check["check"] != "oracle_nmse"]
    return load_scenario(write_scenario(short.path.parent / "plain.yaml", values))


@pytest.fixture
def start(plain: ScenarioFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return what runs a command line with a fake of llama.cpp that has a fault."""

    def run(fault: str, *argv: str | Path) -> Result:
        build = fake_build(tmp_path / "llama.cpp", fault, right_ids(plain), 2048)
        builds = SimpleNamespace(open=lambda device: LlamaCpp(build))
        monkeypatch.setattr(cli, "LlamaBuilds", lambda *options: builds)
        monkeypatch.setattr(commands, "LlamaBuilds", lambda *options: builds)
        monkeypatch.setattr(cli, "select_scenarios", lambda names: [plain])
        monkeypatch.setattr(cli, "Runner", partial(Runner, subject=run_here))
        return CliRunner().invoke(cli.app, [str(part) for part in argv])

    return run


def one_text(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("fault", "exit_code", "verdict", "says"),
    [
        ("none", 0, "pass", ""),
        ("hangs", 2, "not measured", "timeout: not finished after 3 s"),
        ("floods_log", 2, "not measured", "timeout: not finished after 3 s"),
        ("refuses", 2, "not measured", "crashed: ended with exit code 1: error: failed to load model"),
        ("crashes", 2, "not measured", "crashed: ended by SIGSEGV"),
        ("odd_signal", 2, "not measured", "crashed: ended by signal 40"),
        ("killed", 2, "not measured", "ended by SIGKILL, not by this suite: most likely because memory ran out"),
        ("loses_gpu", 2, "not measured", "ended by SIGABRT: CUDA error: unspecified launch failure"),
        ("not_utf8", 2, "not measured", r"error: �� \x1b[31mcannot read \x00 the model"),
        ("exits", 2, "not measured", "failed: llama-worker ended well, but wrote no out.json"),
        ("comma_text", 2, "not measured", "failed: llama-worker gave an answer that cannot be read: prefill_time_ns"),
        ("omits_tokens", 2, "not measured", "failed: llama-worker gave an answer that cannot be read: token_ids"),
        ("no_tokens", 2, "not measured", "failed: llama-worker gave 0 of 4 tokens"),
        ("too_few", 2, "not measured", "failed: llama-worker gave 2 of 4 tokens"),
        ("full_disk", 2, "not measured", "bytes of logits, expected 32768: is the disk full?"),
        ("huge_ids", 2, "not measured", "failed: llama-worker gave an answer that cannot be read: token_ids.0"),
        ("other_vocabulary", 2, "pass", f"{BASELINE_NAME} has 2049 tokens in the vocabulary, the engine has 2048"),
        ("lies", 2, "not measured", "failed: llama-worker gave tokens that are not those of its own logits"),
        ("repeats_eos", 1, "pass", "FAIL: plain, engine-numpy: generated_token_ids_equal llama.cpp: found 0, limit 4"),
    ],
)
def test_the_table_says_what_happened(
    start: Start, tmp_path: Path, fault: str, exit_code: int, verdict: str, says: str
) -> None:
    result = start(fault, "run", "--out", tmp_path / "out")
    assert result.exit_code == exit_code, result.output
    assert re.search(rf"^plain +{BASELINE_NAME} .*{verdict}$", result.output, re.MULTILINE)
    assert says in one_text(result)
    assert "Traceback" not in result.output
    kept = {record.engine: record for record in read_records(tmp_path / "out")}
    assert set(kept) == {BASELINE_NAME, "engine-numpy"}
    assert kept["engine-numpy"].output is not None


def test_another_build_ends_the_run(start: Start, tmp_path: Path) -> None:
    result = start("build_0", "run", "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert re.fullmatch(
        r"(.*\n)*error: the worker loaded .*libllama\.so\.0\.0\.0, expected build 8763\n", result.output
    )


def test_logits_that_are_not_finite_fail(plain: ScenarioFile, tmp_path: Path) -> None:
    noise = np.zeros(2048, dtype=np.float32)
    noise[7] = np.nan
    runner = Runner(FakeLlama(noise=noise).open, tmp_path, Silent(), subject=run_here)
    found = {record.engine: record for record in runner.run([plain])}
    failed = {check.name: check.detail for check in found[BASELINE_NAME].checks if check.passed is False}
    assert failed["finite"] == "first at position 0, id 7"
    assert failed["smallest_top2_gap"] == "position 0 has a logit that is not finite"
    assert len(read_records(tmp_path)) == 2


@pytest.mark.parametrize(
    ("fault", "exit_code", "says"),
    [
        ("hangs_later", 2, "no answer after 3 s"),
        ("dies_later", 2, "ended with exit code 1: error: worn out"),
        ("too_few", 2, "gave 2 of 4 tokens"),
        ("comma_text", 2, "gave an answer that cannot be read"),
        ("repeats_eos", 1, "its first run has other tokens than the scenario, from position 0 on"),
    ],
)
def test_a_bench_gives_no_speed(
    start: Start, plain: ScenarioFile, tmp_path: Path, fault: str, exit_code: int, says: str
) -> None:
    options = ("-r", "1", "--decode", "2", "--warm-up", "0", "--baseline", "llama.cpp", "--baseline", "llama-server")
    result = start(fault, "bench", plain.path, *options, "--out", tmp_path / "out")
    assert result.exit_code == exit_code, result.output
    for name in (BASELINE_NAME, "llama-server-b8763-cpu"):
        assert re.search(rf"^plain +{name} +no speed: see below", result.output, re.MULTILINE)
        assert f"plain: {name}: no speed is given: " in one_text(result)
    assert says in one_text(result)
    assert re.search("^plain +engine-numpy +decode +[0-9.]+", result.output, re.MULTILINE)


# Where the records go


def test_a_full_disk_keeps_the_table(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_text

    def no_room(self: Path, text: str) -> int:
        if "engine-numpy" in self.name:
            real(self, text[:100])
            raise OSError(28, "No space left on device")
        return real(self, text)

    monkeypatch.setattr(Path, "write_text", no_room)
    result = start("none", "run", "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert re.search(r"^plain +engine-numpy +4/4 .*pass$", result.output, re.MULTILINE)
    path = tmp_path / "out" / "plain" / "engine-numpy.json"
    assert result.output.endswith(f"error: {path}: cannot be written: No space left on device\n")
    assert [p.name for p in path.parent.iterdir()] == [f"{BASELINE_NAME}.json"]


def test_a_limit_on_the_size_of_files_is_one_line(plain: ScenarioFile, tmp_path: Path) -> None:
    """The system's own error, in a process of its own: no file may have more than 1 KB."""
    fake_build(tmp_path, "none", right_ids(plain), 2048)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)); "
        "from conformance.tests import fake_suite; sys.exit(fake_suite.main())"
    )
    argv = [sys.executable, "-c", code, str(tmp_path), "run", str(plain.path), "--out", str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "cannot be written: File too large" in done.stderr.splitlines()[-1]
    assert "not measured: plain, llama.cpp-b8763-cpu: " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert list((tmp_path / "out").rglob("*.json")) == []


@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_runs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(worker, "run_process", lambda *args, **options: pytest.fail("llama.cpp is run"))
    (tmp_path / "file").write_bytes(b"")
    out = tmp_path / "file" / "out"
    result = start("none", command, "--out", out)
    says = f"error: {out}: cannot be written: Not a directory: choose another --out\n"
    assert (result.exit_code, result.output) == (3, says)


def test_a_read_only_folder(start: Start, tmp_path: Path) -> None:
    out = Path("/proc/self/out") if os.geteuid() == 0 else tmp_path / "out"  # nothing is read-only for root
    if os.geteuid() != 0:
        out.mkdir(mode=0o555)
    result = start("none", "run", "--out", out)
    assert result.exit_code == 3
    assert re.fullmatch(rf"error: {out}: cannot be written: .+: choose another --out\n", result.output)


@pytest.mark.parametrize("command", ["run", "bench"])
def test_two_runs_do_not_share_a_folder(start: Start, tmp_path: Path, command: str) -> None:
    out = tmp_path / "out"
    with claimed(out):
        result = start("none", command, "--out", out)
    says = f"error: {out}: another run writes its records here: wait for it, or choose another --out\n"
    assert (result.exit_code, result.output) == (3, says)
    assert start("none", "run", "--out", out).exit_code == 0


def test_what_a_killed_run_left_half_written_goes(start: Start, tmp_path: Path) -> None:
    half = tmp_path / "out" / "plain" / "engine-numpy.json.0123.partial"
    half.parent.mkdir(parents=True)
    half.write_text("{")
    assert start("none", "run", "--out", tmp_path / "out").exit_code == 0
    assert not half.exists()


def test_a_record_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "short" / "engine-numpy.json"
    (blocked / "a folder").mkdir(parents=True)
    with pytest.raises(RecordError, match=f"^{re.escape(str(blocked))}: cannot be removed: "):
        remove_records(tmp_path, ["short"])


# Interrupted


def test_ctrl_c_keeps_what_was_made(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
        raise KeyboardInterrupt

    start("none", "list")  # puts the fakes in place
    monkeypatch.setattr(cli, "Runner", partial(Runner, subject=stop))
    result = CliRunner().invoke(cli.app, ["run", "--out", str(tmp_path / "out")])
    assert result.exit_code == 130
    assert re.search(rf"^plain +{BASELINE_NAME} +4/4 .*pass$", result.output, re.MULTILINE)
    assert "not measured: plain, engine-numpy: there is no record" in one_text(result)
    assert [record.engine for record in read_records(tmp_path / "out")] == [BASELINE_NAME]
