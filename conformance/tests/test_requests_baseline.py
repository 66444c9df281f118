"""Requests at the edges, put to the engine and to the pinned llama.cpp: the same ids, or a refusal from both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baselines.errors import BaselineRequestError
from baselines.llama_cpp.build import BuildOptions, LlamaBuild, ensure_build
from baselines.llama_cpp.progress import PlainProgress
from baselines.llama_cpp.worker import WorkerRequest, run_worker
from conformance.hostile.cases import sound_case
from conformance.hostile.gguf_bytes import N_VOCAB
from engine.errors import RequestError
from engine.generate import load_engine

pytestmark = pytest.mark.baseline

N_CTX_TRAIN = 512  # of the model


@pytest.fixture(scope="session")
def llama_build() -> LlamaBuild:
    return ensure_build(BuildOptions(), PlainProgress(print))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_case().make(tmp_path_factory.mktemp("requests"))


def ours(model: Path, prompt: Sequence[int], n_predict: int, n_ctx: int) -> list[int]:
    return load_engine(model, n_ctx=n_ctx, n_threads=1).run(prompt, n_predict).generated_token_ids


def theirs(build: LlamaBuild, model: Path, prompt: Sequence[int], n_predict: int, n_ctx: int) -> list[int]:
    result = run_worker(build, WorkerRequest(model, prompt, n_predict, n_ctx, want_logits=False))
    if result.status != "ok":
        raise BaselineRequestError(result.log_tail)
    return result.token_ids


LONG = [n * 7 % N_VOCAB for n in range(256)]


@pytest.mark.parametrize(
    ("prompt", "n_predict", "n_ctx"),
    [
        pytest.param([0], 4, 256, id="one token"),
        pytest.param([0], 1, 1, id="c = 1, which llama.cpp makes 256"),
        pytest.param(LONG, 1, 256, id="prompt as long as c"),
        pytest.param(LONG[:250], 7, 256, id="prompt and steps just fit"),
        pytest.param([0, 28], 4, 300, id="c not a multiple of 256, which llama.cpp makes 512"),
        pytest.param([0, 28], 4, 2 * N_CTX_TRAIN, id="c above the training length"),
        pytest.param([N_VOCAB - 1, 0], 4, 256, id="largest id"),
    ],
)
def test_the_same_ids(llama_build: LlamaBuild, model: Path, prompt: Sequence[int], n_predict: int, n_ctx: int) -> None:
    found = ours(model, prompt, n_predict, n_ctx)
    assert len(found) == n_predict
    assert found == theirs(llama_build, model, prompt, n_predict, n_ctx)


@pytest.mark.parametrize(
    ("prompt", "n_predict", "n_ctx", "message"),
    [
        pytest.param([], 1, 256, "the prompt has no tokens, expected at least 1", id="empty prompt"),
        pytest.param([0], 0, 256, "-n is 0, expected at least 1", id="n = 0"),
        pytest.param([0], -1, 256, "-n is -1, expected at least 1", id="n negative"),
        pytest.param(
            [*LONG, 0], 1, 256, "257 prompt tokens and 0 decode steps need -c 257, the context has 256", id="prompt > c"
        ),
        pytest.param(
            LONG, 2, 256, "256 prompt tokens and 1 decode steps need -c 257, the context has 256", id="prompt + n > c"
        ),
        pytest.param([0, N_VOCAB], 1, 256, "token id 32 at position 1 is not in 0..31", id="id out of range"),
        pytest.param([-1], 1, 256, "token id -1 at position 0 is not in 0..31", id="id negative"),
    ],
)
def test_both_refuse(
    llama_build: LlamaBuild, model: Path, prompt: Sequence[int], n_predict: int, n_ctx: int, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ours(model, prompt, n_predict, n_ctx)
    assert str(caught.value) == message
    with pytest.raises(BaselineRequestError):
        theirs(llama_build, model, prompt, n_predict, n_ctx)


def test_generation_stops_behind_an_end_id_or_not_as_asked(llama_build: LlamaBuild, model: Path) -> None:
    ids = theirs(llama_build, model, [0, 28], 6, 256)
    engine = load_engine(model, n_ctx=256, n_threads=1)
    assert engine.run([0, 28], 6).generated_token_ids == ids
    end = ids[2]
    assert engine.run([0, 28], 6, end_ids=frozenset({end})).generated_token_ids == ids[: ids.index(end) + 1]
