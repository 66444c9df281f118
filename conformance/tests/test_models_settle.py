from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from conformance.models import PRESETS, ModelSpec, write_model
from conformance.models.planted import plant_groups
from conformance.models.settle import settle
from conformance.models.streams import RandomStream
from conformance.models.vocabulary import build_vocabulary

SPEC = replace(PRESETS["tiny"], redraws=())
BAND = (0.3, 0.5)


def _logits(model: Path, states: NDArray[np.float64]) -> NDArray[np.float32]:
    output = next(tensor for tensor in GGUFReader(model).tensors if tensor.name == "output.weight")
    logits: NDArray[np.float32] = (states @ dequantize(output.data, output.tensor_type).T).astype(np.float32)
    return logits


def _states(spec: ModelSpec, n: int) -> NDArray[np.float64]:
    """Final states of n steps along the ring, each a code under as much noise."""
    groups = plant_groups(spec, build_vocabulary(spec.n_vocab).speakable_ids)
    codes = groups.signs(np.arange(n)).astype(np.float64) * 2 - 1
    noise = RandomStream(3, "states").symmetric(n * spec.n_embd).reshape(n, -1) * np.sqrt(3.0)
    states: NDArray[np.float64] = 0.6 * codes + 0.8 * noise
    return states


def _lead(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    top = np.partition(logits, -2, axis=1)[:, -2:]
    return top[:, 1] - top[:, 0]


def test_settle_puts_every_lead_into_the_band_and_keeps_the_path(tmp_path: Path) -> None:
    states = _states(SPEC, 12)
    before = _logits(write_model(SPEC, tmp_path / "before.gguf").path, states)
    path = before.argmax(axis=1).tolist()
    assert _lead(before).min() < BAND[0] / 2
    redraws = settle(SPEC, tmp_path / "before.gguf", path, before, BAND)
    after = _logits(write_model(replace(SPEC, redraws=redraws), tmp_path / "after.gguf").path, states)
    assert after.argmax(axis=1).tolist() == path
    assert BAND[0] - 0.01 < _lead(after).min()
    assert _lead(after).max() < BAND[1] + 0.01
    assert len(redraws) == int(((_lead(before) < BAND[0]) | (_lead(before) > BAND[1])).sum())


def test_settle_makes_a_given_fault_change_the_winner(tmp_path: Path) -> None:
    states = _states(SPEC, 3)
    faulty = states + 0.3 * np.roll(states, 1, axis=1)
    model = write_model(SPEC, tmp_path / "before.gguf").path
    before = _logits(model, states)
    path = before.argmax(axis=1).tolist()
    redraws = settle(SPEC, model, path, before, BAND, _logits(model, faulty))
    settled = write_model(replace(SPEC, redraws=redraws), tmp_path / "after.gguf").path
    assert _logits(settled, states).argmax(axis=1).tolist() == path
    n_changed = int((_logits(settled, faulty).argmax(axis=1) != path).sum())
    assert n_changed >= 2


def test_settle_refuses_a_path_that_meets_a_group_twice(tmp_path: Path) -> None:
    states = _states(SPEC, 2)[[0, 1, 0]]
    logits = _logits(write_model(SPEC, tmp_path / "model.gguf").path, states)
    with pytest.raises(ValueError, match="meets one twice"):
        settle(SPEC, tmp_path / "model.gguf", logits.argmax(axis=1).tolist(), logits, BAND)
