"""Greedy decoding one token at a time, as a backend does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.ops import Array, Ops

Run = Callable[[Sequence[int]], Array]
"""Appends tokens to a sequence's state and returns the logits after the last, (1, n_vocab)."""


class Decoder(Protocol):
    """Feeds tokens to one sequence."""

    def step(self, token: int) -> int:
        """Append `token` and return the next greedy id, the lowest among the largest logits."""

    def logits(self) -> NDArray[np.float32]:
        """Return the logits (n_vocab) f32 behind the id that the last step returned."""


class EagerDecoder:
    """Runs the forward pass op by op."""

    def __init__(self, ops: Ops, run: Run) -> None:
        self._ops, self._run = ops, run
        self._logits: Array = None

    def step(self, token: int) -> int:
        """Append `token` and return the next greedy id."""
        self._logits = self._run([token])
        return self._ops.argmax(self._logits)

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step."""
        return self._ops.to_host(self._logits)[-1]
