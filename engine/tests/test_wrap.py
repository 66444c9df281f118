"""Wrapped ops: nothing changes when every op passes through, and a subclass changes just its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from engine.generate import load_engine
from engine.ops import Array, Ops
from engine.tests.models import Shape, write_model
from engine.tests.scalar_twin import assert_same_bits
from engine.wrap import WrappedOps

SHAPE = Shape(n_v_heads=4, n_vocab=256)
PROMPT = [1, 2, 3, 4, 5]


class CountedOps(WrappedOps):
    """Counts the ops called."""

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return super().__getattr__(name)


class SilentGate(WrappedOps):
    """Leaves the attention output ungated."""

    def sigmoid_gate(self, o: Array, gate: Array) -> Any:
        return self.inner.sigmoid_gate(o, gate * 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", SHAPE)


def test_passing_every_op_through_changes_no_bit(path: Path) -> None:
    plain = load_engine(path, n_ctx=16, n_threads=1).run(PROMPT, 4, keep_logits=True)
    wrapped = load_engine(path, n_ctx=16, n_threads=1, wrap_ops=lambda ops: cast(Ops, WrappedOps(ops)))
    result = wrapped.run(PROMPT, 4, keep_logits=True)
    assert result.generated_token_ids == plain.generated_token_ids
    assert_same_bits(result.logits, plain.logits)


def test_a_wrapper_sees_every_op_of_the_forward_pass(path: Path) -> None:
    engine = load_engine(path, n_ctx=16, n_threads=1, wrap_ops=lambda ops: cast(Ops, CountedOps(ops)))
    counts = cast(CountedOps, engine.ops).counts
    counts.clear()
    engine.prefill([1, 2, 3, 4])  # one pack, 3 recurrent layers and 1 of attention
    expected = {"embed": 1, "begin_layer": 4, "rms_norm": 9, "project": 4, "project_add": 8, "gate_up_silu": 4}
    expected |= {"conv_silu": 3, "gated_delta": 3, "gated_norm": 3}
    expected |= {"qk_norm_rope": 1, "attention": 1, "sigmoid_gate": 1, "head": 1}
    assert {name: counts[name] for name in expected} == expected


def test_a_wrapper_sees_the_ops_of_decoding_too(path: Path) -> None:
    engine = load_engine(path, n_ctx=16, n_threads=1, wrap_ops=lambda ops: cast(Ops, CountedOps(ops)))
    counts = cast(CountedOps, engine.ops).counts
    counts.clear()
    engine.run([1, 2, 3, 4], 3)
    assert (counts["embed"], counts["head"], counts["argmax"], counts["attention"]) == (3, 3, 3, 3)


def test_an_overridden_op_takes_effect(path: Path) -> None:
    _, plain = load_engine(path, n_ctx=16, n_threads=1).prefill(PROMPT)
    wrapped = load_engine(path, n_ctx=16, n_threads=1, wrap_ops=lambda ops: cast(Ops, SilentGate(ops)))
    assert (wrapped.prefill(PROMPT)[1] != plain).mean() > 0.9
