from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from conformance import subject
from conformance.scenario import ScenarioFile
from conformance.subject import SubjectRequest, explain, load_subject, measure, run_subject
from engine.decoder import Decoder, Run
from engine.ops import Ops
from engine.wrap import WrappedOps


@pytest.fixture
def request_(short: ScenarioFile) -> SubjectRequest:
    scenario = short.scenario
    return SubjectRequest(
        model=short.path.parent / "tiny.gguf",
        backend="numpy",
        prompt_ids=scenario.prompt_token_ids,
        n_predict=3,
        n_ctx=256,
        n_threads=1,
        prefill=scenario.prefill,
    )


def test_a_process_of_its_own_measures_the_same(request_: SubjectRequest) -> None:
    seen: list[tuple[int, int]] = []
    there = run_subject(request_, 60, lambda done, total: seen.append((done, total)))
    assert (there.status, there.reason) == ("ok", None)
    assert there.measurement is not None
    here = measure(load_subject(request_), request_, lambda done, total: None)
    assert there.measurement.token_ids == here.token_ids
    np.testing.assert_array_equal(there.measurement.logits, here.logits)
    assert there.measurement.logits.shape == (3, 2048)
    assert set(there.measurement.final_logits) == {"token_major", "second_run"}
    for name, logits in here.final_logits.items():
        np.testing.assert_array_equal(there.measurement.final_logits[name], logits)
    assert there.measurement.tie == here.tie == (2048 // 3, 2048 // 3)
    assert len(there.measurement.decode_time_ns) == 2
    assert 10_000_000 < there.measurement.peak_memory_n_bytes < 500_000_000
    assert all(total in (0, 3 * 38 + 3) for _, total in seen)


def test_progress_ends_at_its_total(request_: SubjectRequest) -> None:
    seen: list[tuple[int, int]] = []
    measure(load_subject(request_), request_, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (117, 117)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


class _Launched:
    """A decoder that says how long each launch took."""

    def __init__(self, decoder: Decoder) -> None:
        self.prepare_time_ns = [30, 10, 20]
        self.step, self.logits = decoder.step, decoder.logits


class _Launching(WrappedOps):
    def decoder(self, run: Run, state: object) -> Any:
        return _Launched(super().decoder(run, state))


def test_the_median_time_to_launch_a_step_is_kept(request_: SubjectRequest) -> None:
    engine = load_subject(request_)
    plain = measure(engine, request_, lambda done, total: None)
    assert (plain.prepare_time_ns, plain.versions) == (None, {})
    assert plain.effective["n_threads"] == 1
    launching = replace(engine, ops=cast(Ops, _Launching(engine.ops)))
    found = measure(launching, request_, lambda done, total: None)
    assert found.prepare_time_ns == 20
    assert found.token_ids == plain.token_ids


def test_the_budget_reaches_the_engine(request_: SubjectRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(subject, "load_engine", lambda model, **options: given.update(options))
    load_subject(replace(request_, backend="cuda", vram_budget_n_bytes=123))
    assert (given["backend"], given["vram_budget"]) == ("cuda", 123)


def test_the_versions_of_cuda_libraries_are_those_loaded() -> None:
    cupy = pytest.importorskip("cupy")
    versions = subject.backend_versions("cuda")
    assert versions["cupy"] == cupy.__version__
    assert re.fullmatch(r"\d+\.\d+", versions["nvrtc"])


def test_an_engine_that_refuses_is_failed(request_: SubjectRequest) -> None:
    result = run_subject(replace(request_, n_ctx=8), 60, lambda done, total: None)
    assert (result.status, result.measurement) == ("failed", None)
    assert result.reason == "38 prompt tokens and 0 decode steps need -c 38, the context has 8"
    assert "Traceback" not in result.log_tail


def test_an_engine_that_is_too_slow_is_a_timeout(request_: SubjectRequest) -> None:
    result = run_subject(request_, 0.05, lambda done, total: None)
    assert (result.status, result.reason) == ("timeout", "not finished after 0.05 s")


def test_a_missing_device_is_not_measured(request_: SubjectRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run_subject(replace(request_, backend="cuda"), 60, lambda done, total: None)
    assert result.status == "not_measured"
    assert "cuda" in str(result.reason)


@pytest.mark.parametrize(
    ("error", "says"),
    [(MemoryError("8 GiB"), "error: out of memory: 8 GiB"), (ValueError("odd"), "error: ValueError: odd")],
)
def test_an_unexpected_error_is_a_line_and_no_traceback(
    request_: SubjectRequest,
    error: Exception,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(request: SubjectRequest) -> None:
        raise error

    monkeypatch.setattr(subject, "load_subject", fail)
    (tmp_path / "r.json").write_text(json.dumps({**vars(request_), "model": str(request_.model)}))
    assert subject.main([str(tmp_path / "r.json"), str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [says]


def test_outcomes_are_explained_in_one_line() -> None:
    assert explain("ok", 0, "a\nb", 9) is None
    assert explain("timeout", -9, "a", 9) == "not finished after 9 s"
    assert explain("out_of_memory", 1, "a\nno room", 9) == "ran out of memory: no room"
    assert explain("crashed", 2, "a\nbad flag", 9) == "ended with exit code 2: bad flag"
    assert explain("crashed", 2, "", 9) == "ended with exit code 2: no output"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_a_signal_is_named() -> None:
    assert explain("crashed", -4, "", 9) == "ended by SIGILL"
    assert explain("crashed", -40, "", 9) == "ended by signal 40"
    killed = "ended by SIGKILL, not by this suite: most likely because memory ran out"
    assert explain("crashed", -9, "loading", 9) == killed


def test_the_line_that_tells_of_a_failure_is_shown_and_not_the_last_one() -> None:
    log = "loading\nCUDA error: device lost\n  current device: 0\n  ggml-cuda.cu:97"
    assert explain("crashed", -6, log, 9) == "ended by SIGABRT: CUDA error: device lost"
    assert explain("crashed", 1, log, 9) == "ended with exit code 1: CUDA error: device lost"
    assert explain("crashed", 1, "a\n\x1b[31merror \x00", 9) == r"ended with exit code 1: \x1b[31merror \x00"
