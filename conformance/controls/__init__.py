"""Deliberately wrong engines that the checks must catch; a check that lets one pass is broken.

Each control is the real engine with one op replaced, so it differs from the right one in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from conformance.controls.wrong_ops import (
    FlippedScaleBit,
    ForgetfulCache,
    GroupedValueHeads,
    HighestIdOnTie,
    RopeOffByOne,
)
from engine.generate import Engine, load_engine
from engine.ops import Ops

__all__ = ["CONTROLS", "Control"]


@dataclass(frozen=True)
class Control:
    """A wrong engine: its name, what is wrong with it, and the wrapper that makes it so."""

    name: str
    what: str
    wrap: Callable[[Ops], object]

    def load(self, model: Path, n_ctx: int, n_threads: int | None = None) -> Engine:
        """Load `model` on the NumPy backend with the fault in it."""
        return load_engine(model, n_ctx=n_ctx, n_threads=n_threads, wrap_ops=lambda ops: cast(Ops, self.wrap(ops)))


CONTROLS: tuple[Control, ...] = (
    Control("flipped_scale_bit", "one bit of one block scale of one tensor is flipped", FlippedScaleBit),
    Control(
        "grouped_value_heads",
        "value head v reads key head v // r instead of v % n_k_heads",
        GroupedValueHeads,
    ),
    Control("rope_off_by_one", "queries are rotated for the position after their own", RopeOffByOne),
    Control("forgetful_kv_cache", "attention does not see one position of the prompt", ForgetfulCache),
    Control("highest_id_on_tie", "argmax takes the highest instead of the lowest id on a tie", HighestIdOnTie),
)
