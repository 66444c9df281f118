"""Passes of the model as captured graphs: the host writes rows and positions, then launches.

All buffers are fixed; kernels read token rows and positions in pinned memory and write the outcome there. So a pass of
n tokens is the same graphs at every position and in every sequence; they are captured once and kept by `CudaOps`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from numpy.typing import NDArray

from engine.decoder import Run

if TYPE_CHECKING:
    from engine.cuda.ops import CudaOps


class PassGraph:
    """One pass of n_tokens through all layers, up to the logits and the greedy choice after the last token.

    The first layer is a graph of its own: to launch some hundred nodes takes the host tens of microseconds, in which
    the device already works on it.
    """

    def __init__(self, ops: CudaOps, run: Run, state: Any, n_tokens: int) -> None:
        self._ops = ops
        self._graphs: list[cupy.cuda.Graph] = []
        ops.stream.synchronize()
        ops.stream.begin_capture()
        try:
            with ops.kernels.overlapping(), ops.behind_first_layer(self._cut):
                self.logits = run([0] * n_tokens)
                ops.choose(self.logits)
        finally:
            self._end_graph()
        state.n_past -= n_tokens  # the captured pass has not run
        for graph in self._graphs:
            graph.upload(ops.stream)

    def _cut(self) -> None:
        """Let the launches that follow be another graph."""
        self._end_graph()
        self._ops.stream.begin_capture()
        self._ops.kernels.begin_overlap()

    def _end_graph(self) -> None:
        self._graphs.append(self._ops.stream.end_capture())

    def launch(self, tokens: Sequence[int], first_position: int) -> None:
        """Start the pass for `tokens`, the first of which stands at first_position."""
        self._ops.stage(tokens, first_position)
        self.replay()

    def replay(self) -> None:
        """Start the pass for the tokens that are staged."""
        for graph in self._graphs:
            graph.launch(self._ops.stream)
        self._ops.staged.record(self._ops.stream)

    def finish(self) -> int:
        """Wait for the pass and return the greedy id; NonFiniteError if it left a fault."""
        return self._ops.wait_for_choice()

    @property
    def n_nodes(self) -> int:
        """Count the nodes."""
        return sum(map(_n_nodes, self._graphs))


def _n_nodes(graph: cupy.cuda.Graph) -> int:
    from cuda.bindings import runtime

    status, _, n_nodes = runtime.cudaGraphGetNodes(graph.graph, 0)
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaGraphGetNodes: {status.name}")
    return int(n_nodes)


class GraphDecoder:
    """Decodes by replaying the pass of one token."""

    def __init__(self, ops: CudaOps, graph: PassGraph, state: Any) -> None:
        self._ops, self._graph, self._state = ops, graph, state
        self.prepare_time_ns: list[int] = []

    def step(self, token: int) -> int:
        """Append `token` and return the next greedy id; NonFiniteError instead of an id from a faulty step."""
        start = time.perf_counter_ns()
        self._graph.launch([token], self._state.n_past)
        self.prepare_time_ns.append(time.perf_counter_ns() - start)
        self._state.n_past += 1
        return self._graph.finish()

    def logits(self) -> NDArray[np.float32]:
        """Return the logits (n_vocab) f32 behind the last id."""
        return self._ops.to_host(self._graph.logits)[-1]

    @property
    def n_nodes(self) -> int:
        """Count the nodes of a step's graph."""
        return self._graph.n_nodes


def append_in_packs(graph_of: Callable[[int], PassGraph], state: Any, tokens: Sequence[int], pack: int) -> cupy.ndarray:
    """Append `tokens` in packs of at most `pack`, each a replay of graph_of(its width); return the last logits."""
    for begin in range(0, len(tokens), pack):
        part = tokens[begin : begin + pack]
        graph = graph_of(len(part))
        graph.launch(part, state.n_past)
        state.n_past += len(part)
    return graph.logits
