"""Times of a decode step on the device, whole or with some of its launches left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import cupy

from engine.cuda.decoder import PassGraph
from engine.cuda.ops import CudaOps
from engine.decoder import Run

Keeps: TypeAlias = Callable[[int], bool]
"""Whether the launch of that number, from 0 in the order of the step, is made."""
_TOKEN = 0


class StepTimer:
    """Replays the decode step for the token at `position` of one sequence, over and over.

    The state is not rewound: times do not depend on what it holds, as long as that is finite.
    """

    def __init__(self, ops: CudaOps, run: Run, state: Any, position: int) -> None:
        self._ops, self._run, self._state = ops, run, state
        self.launches: list[tuple[str, tuple[int, ...]]] = []
        """Name expression and grid of every launch of the whole step."""
        with ops.kernels.watched(self._note):
            self._whole = PassGraph(ops, run, state, 1)
        self._whole.launch([_TOKEN], position)
        self._whole.finish()

    @property
    def n_nodes(self) -> int:
        """Count the nodes of the whole step's graph."""
        return self._whole.n_nodes

    def time_us(self, keeps: Keeps, n_repetitions: int) -> list[float]:
        """Return the times of replays with only the launches that `keeps` says; NonFiniteError if one left a fault.

        They are queued behind a whole step, so that the host is ahead of the device and its own time does not show.
        """
        graph, stream = self._part(keeps), self._ops.stream
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(n_repetitions)]
        self._whole.replay()
        for start, end in events:
            start.record(stream)
            graph.replay()
            end.record(stream)
        self._ops.check_fault()  # also where argmax, which reports it to the host, is left out
        return [1e3 * float(cupy.cuda.get_elapsed_time(start, end)) for start, end in events]

    def _part(self, keeps: Keeps) -> PassGraph:
        seen = 0

        def watch(expression: str, grid: tuple[int, ...]) -> bool:
            nonlocal seen
            seen += 1
            return keeps(seen - 1)

        with self._ops.kernels.watched(watch):
            return PassGraph(self._ops, self._run, self._state, 1)

    def _note(self, expression: str, grid: tuple[int, ...]) -> bool:
        self.launches.append((expression, grid))
        return True
