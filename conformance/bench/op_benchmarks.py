"""Benchmarks of the single ops of the NumPy backend, for pytest-benchmark; run by `python -m conformance bench-ops`.

Every op is timed with the arguments that it has in a decode step of the tiny model, first layer of its kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from conformance.bench.ops import MODEL_VARIABLE
from engine.generate import load_engine
from engine.ops import Ops
from engine.wrap import WrappedOps

OPS = (
    "embed",
    "rms_norm",
    "project",
    "project_add",
    "gate_up_silu",
    "conv_silu",
    "gated_delta",
    "gated_norm",
    "qk_norm_rope",
    "attention",
    "sigmoid_gate",
    "head",
    "argmax",
)
_PROMPT_IDS = (1, 2, 3)

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Capture(WrappedOps):
    """Passes every op on, and keeps the first call of each."""

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner)
        self.calls: dict[str, Call] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.inner, name)
        if name not in OPS:
            return function

        def kept(*arguments: Any) -> Any:
            self.calls.setdefault(name, (function, arguments))
            return function(*arguments)

        return kept


def capture_calls(model: Path) -> dict[str, Call]:
    """Return every op with its arguments in a decode step of `model` on the NumPy backend."""
    engine = load_engine(model, n_ctx=256)
    state, logits = engine.prefill(_PROMPT_IDS)
    capture = Capture(engine.ops)
    replace(engine, ops=cast(Ops, capture)).decoder(state).step(engine.greedy(logits))
    return capture.calls


@pytest.fixture(scope="module")
def calls() -> dict[str, Call]:
    """Every op with its arguments."""
    return capture_calls(Path(os.environ[MODEL_VARIABLE]))


@pytest.mark.parametrize("op", OPS)
def test_op(op: str, calls: dict[str, Call], benchmark: Any) -> None:
    """Time one op."""
    function, arguments = calls[op]
    benchmark(function, *arguments)
