"""Decoding by replaying one captured graph a token: the host copies 20 KiB in, launches once, reads 8 bytes back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from numpy.typing import NDArray

from engine.cuda.upload import copy_out, pinned
from engine.decoder import Run

if TYPE_CHECKING:
    from engine.cuda.ops import CudaOps


class GraphDecoder:
    """One decode step as a graph; token row and position come from pinned memory, so every replay is the same."""

    def __init__(self, ops: CudaOps, run: Run, state: Any) -> None:
        self._ops, self._state = ops, state
        self._outcome = pinned(8).view(np.int32)
        self.prepare_time_ns: list[int] = []
        stream = ops.stream
        stream.synchronize()
        stream.begin_capture()
        try:
            self._logits = run([0])
            ops.choose(self._logits)
            copy_out(ops.outcome, self._outcome, self._outcome.nbytes, stream)
        finally:
            self._graph = stream.end_capture()
        state.n_past -= 1  # the captured step has not run
        self._graph.upload(stream)

    def step(self, token: int) -> int:
        """Append `token` and return the next greedy id; NonFiniteError instead of an id from a faulty step."""
        start = time.perf_counter_ns()
        self._ops.stage([token], self._state.n_past)
        self._graph.launch(self._ops.stream)
        self.prepare_time_ns.append(time.perf_counter_ns() - start)
        self._state.n_past += 1
        self._ops.stream.synchronize()
        self._ops.raise_fault(int(self._outcome[1]))
        return int(self._outcome[0])

    def logits(self) -> NDArray[np.float32]:
        """Return the logits (n_vocab) f32 behind the last id."""
        return self._ops.to_host(self._logits)[-1]

    @property
    def n_nodes(self) -> int:
        """Count the nodes of the graph."""
        return graph_n_nodes(self._graph)


def graph_n_nodes(graph: cupy.cuda.Graph) -> int:
    """Return the nodes of a graph: kernels and copies."""
    from cuda.bindings import runtime

    status, _, n_nodes = runtime.cudaGraphGetNodes(graph.graph, 0)
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaGraphGetNodes: {status.name}")
    return int(n_nodes)
