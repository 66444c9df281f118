"""Matrix kernels with weights that no cache holds: launches in one graph, each with other copies of its matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import cupy
import numpy as np
from numpy.typing import NDArray

from engine import quants
from engine.cuda import gemv
from engine.cuda.buffers import DeviceActivation
from engine.cuda.build import Build
from engine.cuda.device import Device
from engine.cuda.gemv import DeviceMatrix
from engine.cuda.ops import CudaOps
from engine.cuda.plan import Node
from engine.cuda.random_weights import random_rows
from engine.cuda.variants import Variant
from engine.gguf.reader import ModelFile, TensorInfo
from engine.model.config import ModelConfig

Launch: TypeAlias = Callable[[int], object]
"""Launches with the copies of that number."""
_L2_TIMES = 4
"""Bytes of all copies together, in sizes of the L2 cache, at least."""
_N_LAUNCHES = 24
_SCALE = 0.01


@dataclass(frozen=True)
class ColdNode:
    """One launch of a step with copies of its matrices; n_copies of them are beyond the L2 cache."""

    launch: Launch
    n_copies: int


class ColdBench:
    """Times launches of a model's step one by one; of the model, only the header is read."""

    def __init__(self, model: ModelFile, config: ModelConfig, device: Device) -> None:
        self._ops = CudaOps(model, config, device, 1, None)
        self._ops.end_loading()
        self._rng = np.random.default_rng(0)
        self._l2_n_bytes = int(cupy.cuda.runtime.getDeviceProperties(0)["l2CacheSize"])

    def build(self, variant: Variant) -> Build:
        """Return the kernels of a variant."""
        return self._ops.build(variant)

    def describe(self) -> dict[str, object]:
        """Return the device."""
        return self._ops.describe()

    def node(self, node: Node) -> ColdNode:
        """Put copies of a node's matrices on the device, with random weights; CuPy's pool holds them."""
        n_copies = max(1, -(-_L2_TIMES * self._l2_n_bytes // node.weights_n_bytes))
        copies = list(zip(*(self._copies(tensor, n_copies) for tensor in node.tensors), strict=True))
        return ColdNode(self._launch_of(node, copies), n_copies)

    def time_us(self, node: ColdNode, build: Build, *, dependent: bool, n_repetitions: int) -> list[float]:
        """Return times of one launch, us: each of a graph of some tens, divided by their number.

        The norm ahead of a kernel that does not do its own is left out: it is another kernel. dependent: each launch
        may start while the one before it runs. NonFiniteError if one left a fault.
        """
        ops, stream = self._ops, self._ops.stream
        ops.use(build)
        n_launches = -(-_N_LAUNCHES // node.n_copies) * node.n_copies
        for i in range(node.n_copies):
            node.launch(i)
        stream.synchronize()
        stream.begin_capture()
        try:
            with ops.kernels.watched(_is_no_norm), ops.kernels.overlapping() if dependent else nullcontext():
                for i in range(n_launches):
                    node.launch(i % node.n_copies)
        finally:
            graph = stream.end_capture()
        graph.upload(stream)
        times_us = self._replay_us(graph, n_repetitions)
        ops.check_fault()
        return [us / n_launches for us in times_us]

    def _replay_us(self, graph: cupy.cuda.Graph, n_repetitions: int) -> list[float]:
        stream = self._ops.stream
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(n_repetitions)]
        graph.launch(stream)  # the host gets ahead of the device, and the clocks rise
        for start, end in events:
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
        stream.synchronize()
        return [1e3 * float(cupy.cuda.get_elapsed_time(start, end)) for start, end in events]

    def _copies(self, info: TensorInfo, n_copies: int) -> list[DeviceMatrix]:
        first = self._strips(info)
        copies = [first, *(cupy.empty(info.n_bytes, np.uint8) for _ in range(n_copies - 1))]
        for copy in copies[1:]:
            copy.data.copy_from_device(first.data, info.n_bytes)
        return [DeviceMatrix(info.type, info.shape[0], info.n_rows, data) for data in copies]

    def _strips(self, info: TensorInfo) -> cupy.ndarray:
        raw = cupy.asarray(random_rows(info.type, info.n_bytes, self._rng))
        if not quants.is_quantized(info.type):
            return raw
        strips = cupy.empty(info.n_bytes, np.uint8)
        n_sub = info.n_elements // 32
        gemv.repack(self._ops.kernels, info.type, raw, strips, n_sub, 0, n_sub)
        self._ops.stream.synchronize()
        return strips

    def _launch_of(self, node: Node, copies: Sequence[tuple[DeviceMatrix, ...]]) -> Launch:
        ops, n_in = self._ops, node.tensors[0].shape[0]
        if node.layer is not None and len(node.tensors) == 1:
            h, residual = self._activation(n_in), cupy.asarray(np.zeros((1, node.tensors[0].n_rows), np.float32))
            return lambda i: ops.project_add(copies[i][0], h, residual)
        normed = ops.rms_norm(cupy.asarray(self._normal(1, n_in)), cupy.asarray(np.ones(n_in, np.float32)))
        if node.layer is None:
            return lambda i: ops.head(copies[i][0], normed)
        if node.stems == "ffn_gate+ffn_up":
            return lambda i: ops.gate_up_silu(copies[i][0], copies[i][1], normed)
        return lambda i: ops.project(copies[i], normed)

    def _normal(self, *shape: int) -> NDArray[np.float32]:
        return self._rng.standard_normal(shape, dtype=np.float32)

    def _activation(self, n: int) -> DeviceActivation:
        q = self._rng.integers(-127, 128, (1, n), dtype=np.int8)
        scales = np.zeros((1, n // 32, 2), np.int32)
        scales[..., 0] = np.float32(_SCALE).view(np.int32)
        scales[..., 1] = q[:, : n // 32 * 32].reshape(1, -1, 32).sum(axis=2, dtype=np.int32)
        return DeviceActivation(*(cupy.asarray(part) for part in (self._normal(1, n), q, scales)))


def _is_no_norm(expression: str, grid: tuple[int, ...]) -> bool:
    return not expression.startswith("rms_norm<")
