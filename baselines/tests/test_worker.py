from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baselines.errors import BaselineError, BaselineRequestError
from baselines.llama_cpp.build import LlamaBuild
from baselines.llama_cpp.worker import WorkerRequest, WorkerResult, run_worker, tokenize
from baselines.tests.tiny_model import N_VOCAB

PROMPT = list(range(1, 40))
N_PREDICT = 12
NO_BUILD = LlamaBuild(Path("none"), Path("none"), 0, {}, (), "", Path("none"))

baseline = pytest.mark.baseline


def request(model: Path, **changes: Any) -> WorkerRequest:
    return dataclasses.replace(WorkerRequest(model, PROMPT, N_PREDICT, 512, deadline_s=60), **changes)


def run_ok(build: LlamaBuild, wanted: WorkerRequest) -> WorkerResult:
    result = run_worker(build, wanted)
    assert result.status == "ok", result.log_tail
    return result


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "no token id"),
        ({"n_predict": 0}, "n_predict is 0"),
        ({"n_ctx": 49}, "needs 50 context cells, -c is 49"),
        ({"force_ids": [1] * 10}, "10 forced ids, expected at least 11"),
    ],
)
def test_request_that_cannot_work(tiny_model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BaselineRequestError, match=message):
        run_worker(NO_BUILD, request(tiny_model, **changes))


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(BaselineRequestError, match=r"gone\.gguf is not a file"):
        run_worker(NO_BUILD, request(tmp_path / "gone.gguf"))


def test_every_setting_is_passed_explicitly(tmp_path: Path) -> None:
    flags = request(tmp_path, override_tensor="ssm=CPU").flags()
    assert set(flags) == {
        "-c",
        "-n",
        "-b",
        "-ub",
        "--threads",
        "-ngl",
        "-sm",
        "-fa",
        "-ctk",
        "-ctv",
        "--prefill",
        "-ot",
    }


@baseline
def test_ids_are_the_argmax_of_the_logits(llama_build: LlamaBuild, tiny_model: Path) -> None:
    result = run_ok(llama_build, request(tiny_model))
    assert result.logits is not None
    assert result.logits.shape == (N_PREDICT, N_VOCAB)
    assert result.logits.argmax(axis=1).tolist() == result.token_ids
    top2 = np.sort(result.logits, axis=1)[:, -2:]
    assert np.array_equal(top2[:, 1] - top2[:, 0], np.asarray(result.top2_gap, np.float32))
    assert result.n_non_finite == 0
    assert len(result.decode_time_ns) == N_PREDICT - 1
    assert min(result.prefill_time_ns, result.load_time_ns, *result.decode_time_ns) > 0


@baseline
def test_same_request_gives_the_same_bits(llama_build: LlamaBuild, tiny_model: Path) -> None:
    first, second = (run_ok(llama_build, request(tiny_model, warmup=warmup)) for warmup in (False, True))
    assert first.token_ids == second.token_ids
    assert np.array_equal(first.logits, second.logits)  # type: ignore[arg-type]


@baseline
def test_prefill_one_by_one_agrees_with_batched(llama_build: LlamaBuild, tiny_model: Path) -> None:
    batched, single = (run_ok(llama_build, request(tiny_model, prefill=p)) for p in ("batched", "single"))
    assert np.allclose(batched.logits[0], single.logits[0], atol=5e-3)  # type: ignore[index]


@baseline
def test_small_batches_give_the_same_tokens(llama_build: LlamaBuild, tiny_model: Path) -> None:
    whole, cut = (run_ok(llama_build, request(tiny_model, n_batch=n, n_ubatch=n)) for n in (512, 16))
    assert np.allclose(whole.logits[0], cut.logits[0], atol=5e-3)  # type: ignore[index]
    assert (cut.effective["n_batch"], cut.effective["n_ubatch"]) == (16, 16)


@baseline
def test_forced_ids_replace_the_chosen_ones(llama_build: LlamaBuild, tiny_model: Path) -> None:
    free = run_ok(llama_build, request(tiny_model))
    same = run_ok(llama_build, request(tiny_model, force_ids=free.token_ids))
    assert np.array_equal(free.logits, same.logits)  # type: ignore[arg-type]
    other_ids = [(free.token_ids[0] + 1) % N_VOCAB, *free.token_ids[1:]]
    other = run_ok(llama_build, request(tiny_model, force_ids=other_ids))
    assert np.array_equal(free.logits[0], other.logits[0])  # type: ignore[index]
    assert not np.array_equal(free.logits[1], other.logits[1])  # type: ignore[index]
    assert other.requested["teacher_forced"] is True


@baseline
def test_effective_settings_stand_beside_the_requested(llama_build: LlamaBuild, tiny_model: Path) -> None:
    wanted = request(tiny_model, n_ctx=300, flash_attn="off", type_k="f32", n_threads=2, override_tensor="ssm_=CPU")
    result = run_ok(llama_build, wanted)
    assert result.requested["flags"]["-c"] == "300"
    expected = {"n_ctx": 512, "flash_attn": "disabled", "type_k": "f32", "type_v": "f16", "n_threads": 2}
    assert {key: result.effective[key] for key in expected} == expected
    assert result.effective["overridden_tensors"] == {"CPU": 3 * 7}
    assert result.effective["layer_devices"] == {"CPU": 5}
    assert result.build_number == 8763


@baseline
def test_thread_policy_is_recorded_and_left_to_the_user(
    llama_build: LlamaBuild, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GGML_SCHED_DEBUG", "0")
    passive = run_ok(llama_build, request(tiny_model, n_threads=2)).effective["environment"]
    assert (passive["OMP_WAIT_POLICY"], passive["GGML_SCHED_DEBUG"]) == ("passive", "0")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    active = run_ok(llama_build, request(tiny_model)).effective["environment"]
    assert active["OMP_WAIT_POLICY"] == "active"


@baseline
def test_a_run_without_layers_on_a_gpu_sees_none(
    llama_build: LlamaBuild, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    on_cpu = run_ok(llama_build, request(tiny_model)).effective["environment"]
    assert on_cpu["CUDA_VISIBLE_DEVICES"] == ""
    offloaded = run_ok(llama_build, request(tiny_model, n_gpu_layers=99)).effective["environment"]
    assert offloaded["CUDA_VISIBLE_DEVICES"] == "0"


@baseline
def test_logits_are_left_out_on_request(llama_build: LlamaBuild, tiny_model: Path) -> None:
    result = run_ok(llama_build, request(tiny_model, want_logits=False))
    assert result.logits is None
    assert len(result.token_ids) == N_PREDICT


@baseline
def test_damaged_model_is_a_crash_with_a_log(llama_build: LlamaBuild, tiny_model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_model.read_bytes()[:100_000])
    result = run_worker(llama_build, request(damaged))
    assert (result.status, result.token_ids, result.logits) == ("crashed", [], None)
    assert "could not load" in result.log_tail


@baseline
def test_id_outside_the_vocabulary_is_named(llama_build: LlamaBuild, tiny_model: Path) -> None:
    result = run_worker(llama_build, request(tiny_model, prompt_ids=[1, N_VOCAB]))
    assert result.status == "crashed"
    assert f"id {N_VOCAB} is outside 0..{N_VOCAB - 1}" in result.log_tail


@baseline
def test_deadline_is_a_status(llama_build: LlamaBuild, tiny_model: Path) -> None:
    assert run_worker(llama_build, request(tiny_model, deadline_s=0.001)).status == "timeout"


@baseline
def test_tokenize_takes_any_bytes(llama_build: LlamaBuild, tiny_text_model: Path) -> None:
    ids = tokenize(llama_build, tiny_text_model, ["abc", b"x\0y\n", "", "<|filler_300|>"])
    assert ids == [[256, 99], [120, 0, 121, 10], [], [300]]


@baseline
def test_special_tokens_are_text_on_request(llama_build: LlamaBuild, tiny_text_model: Path) -> None:
    [ids] = tokenize(llama_build, tiny_text_model, ["<|filler_300|>"], parse_special=False)
    assert bytes(ids) == b"<|filler_300|>"


@baseline
def test_model_without_a_tokenizer_is_an_error(llama_build: LlamaBuild, tiny_model: Path) -> None:
    with pytest.raises(BaselineError, match="has no tokenizer"):
        tokenize(llama_build, tiny_model, ["abc"])
