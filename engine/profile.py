"""Where the time of a decode step goes: each launch, held against the bytes that it must move and the read ceiling.

A launch in the middle of a graph has no time of its own: with programmatic dependent launch it begins while the one
before still runs. Two differences are taken instead. What a launch adds: the step cut off behind it, less the step cut
off before it; these add up to the whole step, but each is noisy by a few us. What a kernel costs: the whole step, less
the step without all launches of this kernel with these shapes; steadier, but what overlaps is in no kernel's cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from tabulate import tabulate

from engine.cuda.plan import Node, step

if TYPE_CHECKING:
    from engine.cuda.ops import CudaOps
    from engine.generate import Engine

Launch: TypeAlias = tuple[str, tuple[int, ...]]
TimeStep: TypeAlias = Callable[[Callable[[int], bool]], list[float]]
"""Returns times in us of the step with only the launches of the numbers for which the function is true."""
N_REPETITIONS = 12
N_PROMPT = 70
"""Tokens of the prompt that fills the state before a step is profiled, at most."""


@dataclass(frozen=True)
class NodeTime:
    """One launch of the step; time_us: what it adds, gb_per_s and ceiling_fraction None where that is not above 0."""

    op: str
    expression: str
    layer: int | None
    kind: str
    tensors: list[str]
    shape: str
    types: str
    grid: list[int]
    n_bytes: int
    weights_n_bytes: int
    time_us: float
    gb_per_s: float | None
    ceiling_fraction: float | None


@dataclass(frozen=True)
class GroupTime:
    """Launches of one kernel with the same shapes; time_us: what they add, alone_us: what the step lacks without."""

    op: str
    shape: str
    types: str
    n_launches: int
    n_bytes: int
    time_us: float
    alone_us: float
    gb_per_s: float | None
    ceiling_fraction: float | None


@dataclass(frozen=True)
class Setting:
    """What is profiled: the decode step for the token at `position`, on which device; n_nodes of its graph."""

    model: str
    n_ctx: int
    position: int
    device: dict[str, Any]
    read_ceiling_gb_per_s: float
    n_nodes: int


@dataclass(frozen=True)
class Samples:
    """Times of replays, us: the step cut off behind 0, 1, ... launches, whole, and without each group of launches."""

    cut: list[list[float]]
    whole: list[float]
    without: dict[str, list[float]]


@dataclass(frozen=True)
class Profile:
    """A decode step; all times are medians, in us.

    step_us: the replayed graph, measured apart from the differences; empty_us: a graph without launches;
    overhead_us: step_us less empty_us and all that the launches add.
    """

    setting: Setting
    step_us: float
    empty_us: float
    overhead_us: float
    nodes: list[NodeTime]
    groups: list[GroupTime]
    samples_us: Samples

    @property
    def without_weights_us(self) -> float:
        """The step less what the launches add that read matrices."""
        return self.step_us - sum(node.time_us for node in self.nodes if node.weights_n_bytes)

    @property
    def floor_us(self) -> float:
        """The time that all bytes would take at the read ceiling."""
        return sum(node.n_bytes for node in self.nodes) / (self.setting.read_ceiling_gb_per_s * 1e3)

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data, for JSON."""
        sums = {"without_weights_us": self.without_weights_us, "floor_us": self.floor_us}
        return {**asdict(self), **sums, "by_op_us": self.by("op"), "by_kind_us": self.by("kind")}

    def by(self, key: str) -> dict[str, float]:
        """Return what the launches add, summed by `key`: op, kind or another attribute of a node."""
        sums: dict[str, float] = {}
        for node in self.nodes:
            name = str(getattr(node, key))
            sums[name] = sums.get(name, 0.0) + node.time_us
        return sums


def profile_step(engine: Engine, position: int, n_repetitions: int = N_REPETITIONS) -> Profile:
    """Profile the decode step for the token at `position` of an engine with the backend cuda."""
    from engine.bench import default_prompt_ids
    from engine.cuda.ceiling import read_ceiling
    from engine.cuda.timing import StepTimer
    from engine.model.forward import forward

    ops = cast("CudaOps", engine.ops)
    state, _ = engine.prefill(default_prompt_ids(engine.config.n_vocab, max(1, min(position, N_PROMPT))))
    state.n_past = position
    timer = StepTimer(ops, lambda tokens: forward(ops, engine.weights, state, tokens), state, position)
    planned = list(step(engine.config, engine.model.tensors, ops.dispatch, position))
    samples = measure(planned, timer.launches, lambda keeps: timer.time_us(keeps, n_repetitions))
    setting = Setting(engine.model.name, engine.n_ctx, position, ops.describe(), read_ceiling(), timer.n_nodes)
    return make_profile(setting, planned, timer.launches, samples)


def measure(planned: Sequence[Node], launches: Sequence[Launch], time_step: TimeStep) -> Samples:
    """Time the step whole and with launches left out.

    Raises RuntimeError if the step does not launch what was planned: its bytes would be those of another kernel.
    """
    if [expression for expression, _ in launches] != [node.expression for node in planned]:
        raise RuntimeError(f"the step launches {launches}, planned was {[node.expression for node in planned]}")
    keys = [_group(node) for node in planned]
    cut = [time_step(k.__gt__) for k in range(len(planned) + 1)]
    without = {key: time_step(partial(_is_other, keys, key)) for key in dict.fromkeys(keys)}
    return Samples(cut, time_step(lambda i: True), without)


def _is_other(keys: Sequence[str], key: str, i: int) -> bool:
    return keys[i] != key


def make_profile(setting: Setting, planned: Sequence[Node], launches: Sequence[Launch], samples: Samples) -> Profile:
    """Take the differences of what `measure` returned."""
    ceiling, step_us = setting.read_ceiling_gb_per_s, median(samples.whole)
    ends = [median(times) for times in samples.cut]
    added = [after - before for before, after in itertools.pairwise(ends)]
    nodes = [
        _node_time(node, grid, added_us, ceiling)
        for node, (_, grid), added_us in zip(planned, launches, added, strict=True)
    ]
    groups = []
    for key, times in samples.without.items():
        members = [time for node, time in zip(planned, nodes, strict=True) if _group(node) == key]
        groups.append(_group_time(members, step_us - median(times), ceiling))
    overhead_us = step_us - ends[0] - sum(added)
    return Profile(setting, step_us, ends[0], overhead_us, nodes, groups, samples)


def _group(node: Node) -> str:
    return f"{node.expression} {node.shape}"


def _node_time(node: Node, grid: tuple[int, ...], time_us: float, ceiling: float) -> NodeTime:
    names = [tensor.name for tensor in node.tensors]
    return NodeTime(
        node.op,
        node.expression,
        node.layer,
        node.kind,
        names,
        node.shape,
        node.types,
        list(grid),
        node.n_bytes,
        node.weights_n_bytes,
        time_us,
        *_speed(node.n_bytes, time_us, ceiling),
    )


def _group_time(members: Sequence[NodeTime], alone_us: float, ceiling: float) -> GroupTime:
    first, n_bytes = members[0], sum(node.n_bytes for node in members)
    time_us = sum(node.time_us for node in members)
    speed = _speed(n_bytes, time_us, ceiling)
    return GroupTime(first.op, first.shape, first.types, len(members), n_bytes, time_us, alone_us, *speed)


def _speed(n_bytes: int, time_us: float, ceiling: float) -> tuple[float | None, float | None]:
    if time_us <= 0:
        return None, None
    gb_per_s = n_bytes / time_us * 1e-3
    return gb_per_s, gb_per_s / ceiling


def render(profile: Profile, with_nodes: bool = False) -> str:
    """Return the profile as text: by kernel and shape, by op, by kind of layer, and what is left."""
    parts = [_table(_GROUP_HEADERS, map(_group_row, profile.groups), 3)]
    if with_nodes:
        parts.append(_table(_NODE_HEADERS, map(_node_row, profile.nodes), 4))
    for title, key in (("op", "op"), ("layers", "kind")):
        rows = [(name, f"{us:.1f}", f"{us / profile.step_us:.1%}") for name, us in profile.by(key).items()]
        parts.append(_table((title, "us", "of the step"), rows, 1))
    return "\n\n".join((*parts, _table(("step", ""), _total_rows(profile), 1)))


_GROUP_HEADERS = ("op", "shape", "types", "launches", "MB", "us", "us each", "alone us", "GB/s", "% of ceiling")
_NODE_HEADERS = ("op", "tensors", "shape", "types", "layer", "MB", "us", "GB/s", "% of ceiling")


def _group_row(group: GroupTime) -> tuple[str, ...]:
    times = (group.time_us, group.time_us / group.n_launches, group.alone_us)
    return (
        *(group.op, group.shape, group.types, str(group.n_launches), f"{group.n_bytes * 1e-6:.2f}"),
        *(f"{us:.1f}" for us in times),
        *_shown_speed(group.gb_per_s, group.ceiling_fraction),
    )


def _node_row(node: NodeTime) -> tuple[str, ...]:
    layer = "" if node.layer is None else str(node.layer)
    about = (node.op, " ".join(node.tensors), node.shape, node.types, layer, f"{node.n_bytes * 1e-6:.2f}")
    return *about, f"{node.time_us:.1f}", *_shown_speed(node.gb_per_s, node.ceiling_fraction)


def _shown_speed(gb_per_s: float | None, fraction: float | None) -> tuple[str, str]:
    if gb_per_s is None or fraction is None:
        return "-", "-"
    return f"{gb_per_s:.0f}", f"{fraction:.1%}"


def _total_rows(profile: Profile) -> list[tuple[str, str]]:
    added = sum(node.time_us for node in profile.nodes)
    alone = sum(group.alone_us for group in profile.groups)
    return [
        ("position, context", f"{profile.setting.position}, {profile.setting.n_ctx}"),
        ("nodes of the graph", f"{profile.setting.n_nodes}, {len(profile.nodes)} of them launches"),
        ("replayed graph", f"{profile.step_us:.1f} us"),
        ("added by the launches", f"{added:.1f} us"),
        ("a graph without launches", f"{profile.empty_us:.1f} us"),
        ("launch overhead: graph less both", f"{profile.overhead_us:.1f} us"),
        ("sum of all kernels alone", f"{alone:.1f} us"),
        ("launch overhead and overlap: graph less that", f"{profile.step_us - alone:.1f} us"),
        ("without weights: graph less what matrices add", f"{profile.without_weights_us:.1f} us"),
        ("read ceiling", f"{profile.setting.read_ceiling_gb_per_s:.0f} GB/s"),
        (
            "all bytes at the ceiling",
            f"{profile.floor_us:.1f} us, {profile.floor_us / profile.step_us:.1%} of the step",
        ),
    ]


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], n_text: int) -> str:
    align = ["left"] * n_text + ["right"] * (len(headers) - n_text)
    return tabulate(list(rows), headers, tablefmt="simple", disable_numparse=True, colalign=align)
