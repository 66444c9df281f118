"""A whole decode step in one launch, against the NumPy backend, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import NonFiniteError, RequestError
from engine.generate import load_engine
from engine.tests.gpu.arrays import assert_same_bits, cupy
from engine.tests.models import SHAPES, Shape, write_model

pytestmark = pytest.mark.gpu

SHAPE = Shape(n_v_heads=8, d_state=128, head_dim=256, n_embd=1024, n_ff=2048, n_vocab=777)
PROMPT = [1, 5, 9]
N_CTX = 96


@pytest.fixture(scope="module", params=[0, 1])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with all formats between them, the rows of one matrix long enough for two pieces."""
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", SHAPE, seed=request.param)


@pytest.mark.parametrize("mode", ["layer_major", "token_major"])
def test_steps_are_those_of_the_numpy_backend(path: Path, mode: str) -> None:
    n_predict = 40 if mode == "layer_major" else 6  # 40: two splits of the cache
    expected = load_engine(path, n_ctx=N_CTX).run(PROMPT, n_predict, keep_logits=True)
    engine = load_engine(path, n_ctx=N_CTX, backend="cuda", step="persistent")
    found = engine.run(PROMPT, n_predict, prefill=mode, keep_logits=True)  # type: ignore[arg-type]
    assert found.generated_token_ids == expected.generated_token_ids
    assert found.logits is not None
    assert expected.logits is not None
    assert_same_bits(found.logits, expected.logits)
    assert_same_bits(found.final_logits, expected.final_logits)


def test_a_fault_is_found_and_the_next_sequence_is_none_the_worse(path: Path) -> None:
    engine = load_engine(path, n_ctx=N_CTX, backend="cuda", step="persistent")
    expected = engine.run(PROMPT, 3, keep_logits=True)
    state, logits = engine.prefill(PROMPT)
    decoder = engine.decoder(state)
    state.layers[1].ssm[0, 0, 0] = cupy.nan  # type: ignore[union-attr]
    with pytest.raises(NonFiniteError, match="layer 1: op gated_delta produced NaN"):
        decoder.step(engine.greedy(logits))
    again = engine.run(PROMPT, 3, keep_logits=True)
    assert again.logits is not None
    assert expected.logits is not None
    assert_same_bits(again.logits, expected.logits)


def test_a_model_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", next(iter(SHAPES.values())))
    with pytest.raises(RequestError, match="step persistent needs a model whose matrices can all be streamed"):
        load_engine(path, n_ctx=N_CTX, backend="cuda", step="persistent")
