"""A profile of a small model on a device: parts of a step can be replayed, and leave no fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.generate import load_engine
from engine.profile import profile_step, render
from engine.tests.models import SHAPES, write_model

pytestmark = pytest.mark.gpu


def test_every_launch_of_a_step_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.ceiling.read_ceiling", lambda: 1000.0)
    path = write_model(tmp_path / "model.gguf", next(iter(SHAPES.values())), seed=1)
    engine = load_engine(path, n_ctx=64, backend="cuda")
    before = engine.run([1, 2, 3], 4)
    profile = profile_step(engine, 40, 2)
    assert len(profile.nodes) == 34
    assert len(profile.samples_us.cut) == 35
    assert profile.setting.n_nodes == 34
    assert sum(node.time_us for node in profile.nodes) == pytest.approx(
        profile.step_us - profile.empty_us - profile.overhead_us
    )
    assert "attention_split" in render(profile)
    assert engine.run([1, 2, 3], 4).generated_token_ids == before.generated_token_ids
