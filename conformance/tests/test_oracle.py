"""The float64 oracle: the engine is close to it, llama.cpp's rules are in it, and wrong engines are far from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.controls import CONTROLS
from conformance.oracle import Oracle, nmse
from engine.generate import load_engine
from engine.tests.models import SHAPES, is_float, write_model

N_PROMPT, N_PREDICT = 40, 4

LIMIT_QUANTISED = 5e-3
"""NMSE that rounding activations to int8 and the KV cache to f16 may cause; measured 2e-4 to 1.1e-3."""
LIMIT_FLOAT = 1e-8
"""NMSE without int8 activations: f16 keys and values are what is left; measured 2e-10."""


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "_"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield the shape, the path, the ids fed, and the oracle's logits after the prompt and each id."""
    shape = SHAPES[request.param]
    path = write_model(tmp_path_factory.mktemp("model") / "model.gguf", shape, seed=11)
    ids = [int(t) for t in np.random.default_rng(4).integers(0, shape.n_vocab, N_PROMPT + N_PREDICT - 1)]
    expected = Oracle(path).logits(ids, range(N_PROMPT - 1, len(ids)))
    return shape, path, ids, expected


def our_logits(engine: Any, ids: list[int]) -> Any:
    return engine.run(ids[:N_PROMPT], N_PREDICT, force_ids=ids[N_PROMPT:], keep_logits=True).logits


def test_engine_is_close_to_the_oracle(case: Any) -> None:
    shape, path, ids, expected = case
    error = nmse(our_logits(load_engine(path, n_ctx=64, n_threads=1), ids), expected)
    limit = LIMIT_FLOAT if is_float(shape) else LIMIT_QUANTISED
    assert limit * 1e-3 < error < limit


def test_oracle_and_engine_choose_the_same_id_where_the_gap_is_wide(case: Any) -> None:
    _, path, ids, expected = case
    ours = our_logits(load_engine(path, n_ctx=64, n_threads=1), ids)
    top = np.sort(expected, axis=1)
    wide = top[:, -1] - top[:, -2] > 6 * np.sqrt(((ours - expected) ** 2).mean(axis=1))
    assert (ours.argmax(axis=1) == expected.argmax(axis=1))[wide].all()


FAULTS = {control.name: control for control in CONTROLS}


@pytest.mark.parametrize("name", ["grouped_value_heads", "rope_off_by_one", "forgetful_kv_cache"])
def test_wrong_engines_are_far_from_the_oracle(name: str, tmp_path: Path) -> None:
    shape = SHAPES["4 layers, float formats"]
    path = write_model(tmp_path / "model.gguf", shape, seed=11)
    ids = [int(t) for t in np.random.default_rng(4).integers(0, shape.n_vocab, N_PROMPT + N_PREDICT - 1)]
    expected = Oracle(path).logits(ids, range(N_PROMPT - 1, len(ids)))
    error = nmse(our_logits(FAULTS[name].load(path, 64), ids), expected)
    assert error > 1000 * LIMIT_FLOAT


def test_grouped_heads_are_far_from_the_oracle_in_a_quantised_model_too(tmp_path: Path) -> None:
    shape = SHAPES["4 layers, 2 key heads, 3x value heads"]
    path = write_model(tmp_path / "model.gguf", shape, seed=11)
    ids = [int(t) for t in np.random.default_rng(4).integers(0, shape.n_vocab, N_PROMPT + N_PREDICT - 1)]
    expected = Oracle(path).logits(ids, range(N_PROMPT - 1, len(ids)))
    error = nmse(our_logits(FAULTS["grouped_value_heads"].load(path, 64), ids), expected)
    assert error > 10 * LIMIT_QUANTISED


def test_positions_select_rows_and_later_ids_do_not_matter(tmp_path: Path) -> None:
    shape = SHAPES["8 layers, 2 value heads, Q8_0, tied"]
    oracle = Oracle(write_model(tmp_path / "model.gguf", shape))
    whole = oracle.logits([5, 6, 7, 8], [1, 3])
    assert whole.shape == (2, shape.n_vocab)
    assert whole.dtype == np.float64
    np.testing.assert_allclose(whole[0], oracle.logits([5, 6], [1])[0], rtol=1e-9, atol=1e-9)


def test_nmse_of_equal_shifted_and_constant_logits() -> None:
    reference = np.random.default_rng(0).standard_normal((3, 50))
    assert nmse(reference, reference) == 0.0
    assert nmse(np.broadcast_to(reference.mean(axis=1, keepdims=True), reference.shape), reference) == pytest.approx(1.0)
    assert nmse(1.1 * (reference - reference.mean(axis=1, keepdims=True)), reference - reference.mean(axis=1, keepdims=True)) == pytest.approx(0.01)
