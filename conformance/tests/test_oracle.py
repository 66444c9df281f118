"""The float64 oracle: the engine is close to it, and engines that break one rule of the model are far from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from conformance.controls import CONTROLS
from conformance.oracle import F64, Oracle, nmse
from engine.generate import Engine, load_engine
from engine.tests.models import SHAPES, Shape, is_float, write_model

N_PROMPT, N_PREDICT = 40, 3

LIMIT_QUANTISED = 5e-3
"""NMSE that rounding activations to int8 and the KV cache to f16 may cause; measured 2e-4 to 2.7e-3."""
LIMIT_FLOAT = 1e-8
"""NMSE without int8 activations, where f16 keys and values are what is left; measured 2e-10 to 4e-10."""

FLOAT, TILED = "4 layers, float formats", "4 layers, 2 key heads, 3x value heads"
FAULTS = {control.name: control for control in CONTROLS}


@dataclass(frozen=True)
class Case:
    """A model, the ids fed to it, and the oracle's logits after the prompt and after each further id."""

    shape: Shape
    path: Path
    ids: list[int]
    expected: F64

    def error(self, engine: Engine) -> float:
        """Return the NMSE of the engine's logits."""
        run = engine.run(self.ids[:N_PROMPT], N_PREDICT, force_ids=self.ids[N_PROMPT:], keep_logits=True)
        assert run.logits is not None
        return nmse(run.logits, self.expected)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> Case:
        shape = SHAPES[name]
        path = write_model(folder / f"{list(SHAPES).index(name)}.gguf", shape, seed=11)
        ids = [int(t) for t in np.random.default_rng(4).integers(0, shape.n_vocab, N_PROMPT + N_PREDICT - 1)]
        return Case(shape, path, ids, Oracle(path).logits(ids, range(N_PROMPT - 1, len(ids))))

    return make


@pytest.mark.parametrize("name", SHAPES)
def test_engine_is_close_to_the_oracle(name: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(name)
    limit = LIMIT_FLOAT if is_float(case.shape) else LIMIT_QUANTISED
    assert limit * 1e-3 < case.error(load_engine(case.path, n_ctx=64, n_threads=1)) < limit


@pytest.mark.parametrize("fault", ["grouped_value_heads", "rope_off_by_one", "forgetful_kv_cache"])
def test_wrong_engines_are_far_from_the_oracle(fault: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(FLOAT)
    assert case.error(FAULTS[fault].load(case.path, 64)) > 1000 * LIMIT_FLOAT


def test_grouped_heads_are_far_from_the_oracle_in_a_quantised_model_too(case_of: Callable[[str], Case]) -> None:
    case = case_of(TILED)
    assert case.error(FAULTS["grouped_value_heads"].load(case.path, 64)) > 10 * LIMIT_QUANTISED


def test_positions_select_rows_and_later_ids_do_not_matter(case_of: Callable[[str], Case]) -> None:
    case = case_of(FLOAT)
    oracle = Oracle(case.path)
    whole = oracle.logits([5, 6, 7, 8], [1, 3])
    assert whole.shape == (2, case.shape.n_vocab)
    assert whole.dtype == np.float64
    np.testing.assert_allclose(whole[0], oracle.logits([5, 6], [1])[0], rtol=1e-9, atol=1e-9)


def test_nmse_of_equal_constant_and_stretched_logits() -> None:
    reference = np.random.default_rng(0).standard_normal((3, 50))
    means = reference.mean(axis=1, keepdims=True)
    assert nmse(reference, reference) == 0.0
    assert nmse(np.broadcast_to(means, reference.shape), reference) == pytest.approx(1.0)
    assert nmse(means + 1.1 * (reference - means), reference) == pytest.approx(0.01)
