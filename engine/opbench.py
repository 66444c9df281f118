"""The matrix kernels of a model one by one, weights cold: time, bandwidth, and time above the bytes.

A table row is a kernel with the formats and shapes of some matrices of the model, a column a variant of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeAlias

from tabulate import tabulate

from engine.cuda import plan
from engine.cuda.device import open_device
from engine.cuda.dispatch import Dispatch
from engine.cuda.plan import Node
from engine.cuda.streams import Target
from engine.cuda.variants import FULL, variant
from engine.gguf.reader import ModelFile
from engine.model.config import ModelConfig

TimeNode: TypeAlias = Callable[[Node, str, bool], list[float]]
"""Returns times in us of a node by a variant, with dependent launch or without."""
VARIANT_NAMES = (FULL.name, "norm-two-pass", "rows", "rows-shared", "half-loop")
"""The variants that change a matrix kernel."""
N_REPETITIONS = 12


@dataclass(frozen=True)
class ColdTime:
    """A kernel by one variant: the median time of a launch, and how far it is above its bytes at the read ceiling."""

    variant: str
    dependent: bool
    time_us: float
    gb_per_s: float
    ceiling_fraction: float
    above_floor_us: float
    samples_us: list[float]


@dataclass(frozen=True)
class OpRow:
    """One kernel with its matrices; floor_us: its bytes at the read ceiling."""

    tensors: str
    shape: str
    types: str
    n_bytes: int
    floor_us: float
    times: list[ColdTime]


@dataclass(frozen=True)
class OpBench:
    """All matrix kernels of a model on one device."""

    model: str
    device: dict[str, Any]
    read_ceiling_gb_per_s: float
    rows: list[OpRow]

    def to_dict(self) -> dict[str, Any]:
        """Return the times as plain data, for JSON."""
        return asdict(self)


def bench_ops(
    model: ModelFile, variant_names: Sequence[str], n_repetitions: int, progress: Callable[[int], None]
) -> OpBench:
    """Time every matrix kernel of the model by each variant on device 0; progress gets 1 after each row.

    Raises RequestError for an unknown variant, NoDeviceError, PlacementError.
    """
    variants = [variant(name) for name in variant_names]
    device = open_device()
    from engine.cuda.ceiling import read_ceiling
    from engine.cuda.cold import ColdBench

    config = ModelConfig.from_model(model)
    bench = ColdBench(model, config, device)
    builds = {one.name: bench.build(one) for one in variants}
    ceiling = read_ceiling()
    rows = []
    for node in bench_nodes(model, device.arch, device.n_sm):
        cold = bench.node(node)

        def time_node(node: Node, name: str, dependent: bool, cold: Any = cold) -> list[float]:
            return bench.time_us(cold, builds[name], dependent=dependent, n_repetitions=n_repetitions)

        rows.append(make_row(node, variant_names, ceiling, time_node))
        progress(1)
    return OpBench(model.name, bench.describe(), ceiling, rows)


def bench_nodes(model: ModelFile, arch: str = "sm_90", n_sm: int = 1) -> list[Node]:
    """Return the launches to time: one of each shape and formats of matrices, the same for every device."""
    dispatch = Dispatch(Target.of(arch, n_sm))
    return plan.matrix_nodes(list(plan.step(ModelConfig.from_model(model), model.tensors, dispatch)))


def make_row(node: Node, variant_names: Sequence[str], ceiling_gb_per_s: float, time_node: TimeNode) -> OpRow:
    """Time one kernel by each variant, with plain launches and with dependent ones."""
    floor_us = node.n_bytes / (ceiling_gb_per_s * 1e3)
    times = []
    for name in variant_names:
        for dependent in (False, True):
            samples = time_node(node, name, dependent)
            time_us = median(samples)
            speed = (node.n_bytes / time_us * 1e-3, floor_us / time_us, time_us - floor_us)
            times.append(ColdTime(name, dependent, time_us, *speed, samples))
    return OpRow(node.stems, node.shape, node.types, node.n_bytes, floor_us, times)


def render(bench: OpBench) -> str:
    """Return a table for plain launches and one for dependent ones; a variant's columns are us, GB/s, % and + us."""
    names = list(dict.fromkeys(time.variant for row in bench.rows for time in row.times))
    title = f"{bench.model}, {bench.device['device']}, read ceiling {bench.read_ceiling_gb_per_s:.0f} GB/s"
    parts = [title, "each variant: us, GB/s, % of the ceiling, us above the bytes at the ceiling"]
    for dependent, what in ((False, "plain launches"), (True, "dependent launches")):
        headers = ["tensors", "shape", "types", "MB", "floor us"]
        headers += [header for name in names for header in (name, "GB/s", "%", "+ us")]
        rows = [_row(row, dependent) for row in bench.rows]
        align = ["left"] * 3 + ["right"] * (len(headers) - 3)
        parts.append(what + "\n" + tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align))
    return "\n\n".join(parts)


def _row(row: OpRow, dependent: bool) -> list[str]:
    cells = [row.tensors, row.shape, row.types, f"{row.n_bytes * 1e-6:.2f}", f"{row.floor_us:.1f}"]
    for time in row.times:
        if time.dependent == dependent:
            fraction = f"{time.ceiling_fraction:.1%}"
            cells += [f"{time.time_us:.1f}", f"{time.gb_per_s:.0f}", fraction, f"{time.above_floor_us:.1f}"]
    return cells
