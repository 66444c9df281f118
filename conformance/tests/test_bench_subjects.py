from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baselines.errors import ProcessError
from baselines.llama_cpp.worker import WorkerRequest
from conformance.bench import subjects
from conformance.bench.bench import BenchOptions
from conformance.bench.engine_process import SlowedOps, generate
from conformance.bench.subjects import EngineRunError, EngineSubject, layers_on_gpu, llama_settings
from conformance.runner import subject_request
from conformance.scenario import ScenarioFile
from conformance.tests.bench_fakes import bench_of, golden_logits, right_ids
from engine.generate import load_engine, token_ids_le64_sha256


class Says:
    """A process of the engine that says these lines."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = iter(lines)

    def ask(self, line: str, deadline_s: float) -> str:
        return next(self._lines)

    def read(self, deadline_s: float) -> str:
        return next(self._lines)


@pytest.fixture
def engine(short: ScenarioFile) -> EngineSubject:
    request = subject_request(short.scenario, short.path.parent / "tiny.gguf", "numpy")
    return EngineSubject(request, deadline_s=60)


def test_the_engine_s_process_gives_the_right_tokens_in_both_modes(engine: EngineSubject, short: ScenarioFile) -> None:
    cold = engine.open()
    try:
        answers = [engine.run("layer_major", 4), engine.run("token_major", 1)]
        peak = engine.peak_n_bytes()
    finally:
        engine.close()
    ids = right_ids(short)
    assert [answer["token_ids"] for answer in answers] == [ids, ids[:1]]
    assert {answer["final_logits_le32_sha256"] for answer in answers} == {golden_logits(short)}
    assert answers[0]["generated_token_ids_le64_sha256"] == token_ids_le64_sha256(ids)
    assert (len(answers[0]["decode_time_ns"]), answers[0]["n_decoded"]) == (3, 3)
    for answer in answers:
        assert 0 < answer["prefill_time_ns"] <= answer["first_token_time_ns"] <= answer["wall_time_ns"]
        assert answer["first_token_time_ns"] <= answer["client_first_token_time_ns"]
    assert 0 < (cold.load_time_ns or 0) < cold.ready_time_ns
    assert cold.compile_time_ns is None
    assert peak is not None
    assert peak > 1 << 20
    settings = engine.describe()["settings"]
    assert (settings.n_ctx, settings.n_prompt_passes, settings.layers_on_gpu, settings.n_threads) == (256, 1, "none", 1)


def test_an_engine_that_refuses_says_why(engine: EngineSubject, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    broken = EngineSubject(replace(engine.request, model=tmp_path / "m.gguf"), deadline_s=60)
    with pytest.raises(ProcessError, match=r"ended with exit code 4: error: .*m\.gguf"):
        broken.open()
    broken.close()


def test_a_generation_that_fails_leaves_the_process_up(engine: EngineSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = '{"error": "layer 3: NaN"}'
    for said in ([nan], ['{"first_token_id": 5}', nan]):
        monkeypatch.setattr(engine, "_process", Says(said))
        with pytest.raises(EngineRunError, match="layer 3: NaN"):
            engine.run("layer_major", 4)


def test_a_first_id_that_is_not_in_the_answer_ends_the_run(
    engine: EngineSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_process", Says(['{"first_token_id": 5}', '{"token_ids": [6, 5]}']))
    with pytest.raises(ProcessError, match=r"engine-numpy gave 5 as its first id, and \[6\] in its answer"):
        engine.run("layer_major", 2)


def test_the_engine_is_measured_against_itself_end_to_end(engine: EngineSubject, short: ScenarioFile) -> None:
    record = bench_of(short, [engine], BenchOptions(n_repetitions=2, n_decode=2, warm_up_s=0.0))
    ours = record.subjects[0]
    assert {run.error for run in ours.runs} == {None}
    assert {figure.n_samples for figure in record.figures} == {2}
    assert ours.programs["engine_source"] == record.versions.engine_source_sha256
    assert ours.cold_start is not None


def test_a_slowed_engine_is_slower_by_that_part_and_has_the_same_tokens(
    short: ScenarioFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(short.path.parent / "tiny.gguf", n_ctx=256, n_threads=1)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    wrapped: Any = SlowedOps(engine.ops, 0.5)
    slowed = replace(engine, ops=wrapped)
    firsts: list[int] = []
    answer = generate(slowed, short.scenario.prompt_token_ids, "layer_major", 4, firsts.append)
    assert answer["token_ids"] == right_ids(short)
    assert firsts == right_ids(short)[:1]
    steps_s = [time_ns * 1e-9 for time_ns in answer["decode_time_ns"]]
    assert slept == pytest.approx([step / 2 for step in steps_s], rel=0.2)


@pytest.mark.parametrize(
    ("effective", "where"),
    [
        ({"layers_offloaded": "65/65"}, "all"),
        ({"layers_offloaded": "0/65"}, "none"),
        ({"layers_offloaded": "12/65"}, "12/65"),
        ({"layers_offloaded": None, "buffers_mib": {"model CPU_Mapped": 4.4, "model AMX": 1.0, "KV CPU": 1.0}}, "none"),
        ({"buffers_mib": {"model CUDA0": 4.4}}, None),
        ({}, None),
    ],
)
def test_where_the_layers_are(effective: dict[str, Any], where: str | None) -> None:
    assert layers_on_gpu(effective) == where


def test_settings_that_a_log_does_not_state_are_unknown() -> None:
    request = WorkerRequest(Path("m.gguf"), [1] * 70, 2, 512)
    assert set(llama_settings({}, request).model_dump().values()) == {None}
    stated = llama_settings({"n_batch": 512, "n_ubatch": 32}, request)
    assert stated.n_prompt_passes == 3


def test_only_a_gpu_has_a_read_ceiling() -> None:
    assert subjects.measure_read_ceiling("numpy") == (None, "only a GPU's is measured")
