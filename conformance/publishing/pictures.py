"""Pictures made from records, as SVG with a description for those who cannot see them. Needs the extra `docs`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

import matplotlib
import matplotlib.patches
from matplotlib.figure import Figure

from conformance.bench.derive import samples_of
from conformance.bench.records import BenchRecord
from conformance.bench.stats import MIN_SAMPLES, Ratio, bootstrap_ratio
from conformance.publishing.rows import BenchRow, Results, Row, machine_name
from conformance.publishing.tables import on_gpu
from conformance.records import Record

_MIB, _GIB = 1 << 20, 1 << 30
_OURS, _THEIRS, _LIMIT = "#0b6e99", "#c2571a", "#444444"
_WEIGHTS, _STATE, _KV, _ARENA = "weights", "state", "KV", "arena (work)"
_SUM, _REST, _FREE = "state, KV and arena in one sum", "context and kernels", "free"
_PARTS = {
    _WEIGHTS: "#0b6e99",
    _STATE: "#8fb996",
    _KV: "#8b5fbf",
    _ARENA: "#c2571a",
    _SUM: "#e0a458",
    _REST: "#888888",
    _FREE: "#dddddd",
}
"""What device memory holds, in the order in which it is drawn, and its colour."""
_WIDTH = 6.4


@dataclass(frozen=True)
class Picture:
    """One picture: its file name, its content, what it shows in words, and the line below it."""

    name: str
    svg: bytes
    alt: str
    caption: str


def pictures_of(group: str, results: Results) -> list[Picture]:
    """Return the pictures of a group: speed, steps, memory or gaps; none where no record has what they need."""
    return list(_GROUPS[group](results))


def speed_pictures(results: Results) -> Iterator[Picture]:
    """Yield decode speed with its interval, by program and scenario: one picture for each machine."""
    for machine, rows in groupby(results.bench, key=lambda row: machine_name(row.record.machine)):
        points = [point for row in rows for point in _speeds(row)]
        if points:
            yield _speed_picture(machine, points)


def _speeds(row: BenchRow) -> Iterator[tuple[str, bool, Ratio]]:
    """Yield label, whether it is ours, and tok/s of the median round for the programs that have a speed."""
    record: BenchRecord = row.record
    with_speed = {figure.subject for figure in record.figures if figure.metric == "decode"}
    for subject in record.subjects:
        times_ns = list(samples_of(record, subject, "decode").values())
        if subject.name in with_speed and len(times_ns) >= MIN_SAMPLES:
            rate = bootstrap_ratio(times_ns, [1e9] * len(times_ns))
            yield f"{record.scenario}, {subject.name}", subject.role == "engine", rate


def _speed_picture(machine: str, points: Sequence[tuple[str, bool, Ratio]]) -> Picture:
    figure = Figure(figsize=(_WIDTH, 1.0 + 0.32 * len(points)), layout="constrained")
    axes = figure.subplots()
    for at, (_, is_ours, rate) in enumerate(points):
        bars = [[rate.value - rate.low], [rate.high - rate.value]]
        axes.errorbar([rate.value], [at], xerr=bars, fmt="o", capsize=3, color=_OURS if is_ours else _THEIRS)
    axes.set_yticks(range(len(points)), [label for label, _, _ in points])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("decode, tok/s (logarithmic)")
    axes.grid(axis="x", alpha=0.3)
    said = "; ".join(f"{label} {rate.value:.1f} ({rate.low:.1f} to {rate.high:.1f})" for label, _, rate in points)
    return Picture(
        f"speed-{_slug(machine)}.svg",
        _svg(figure),
        f"Decode speed on {machine} in tok/s, median round and 95 % interval: {said}.",
        f"Decode on {machine}: median over the rounds, 95 % bootstrap interval.",
    )


def step_pictures(results: Results) -> Iterator[Picture]:
    """Yield the time of each decode step, one picture for each machine and scenario of the largest model."""
    for machine, scenario, records in _by_scenario(on_gpu(results)):
        figure = Figure(figsize=(_WIDTH, 2.6), layout="constrained")
        axes = figure.subplots()
        said = []
        for record in records:
            assert record.timings is not None
            steps_ms = [time_ns * 1e-6 for time_ns in record.timings.decode_time_ns]
            color = _OURS if record.role == "engine" else _THEIRS
            axes.plot(range(1, len(steps_ms) + 1), steps_ms, ".", markersize=4, color=color, label=record.engine)
            said.append(f"{record.engine} median {median(steps_ms):.2f}, largest {max(steps_ms):.2f}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("decode step")
        axes.set_ylabel("ms")
        axes.legend(frameon=False)
        yield Picture(
            f"steps-{_slug(machine)}-{scenario}.svg",
            _svg(figure),
            f"Time of every decode step of {scenario} on {machine}, in ms: {'; '.join(said)}.",
            f"Every decode step of {scenario} on {machine}: one run of each program, one after the other.",
        )


def memory_pictures(results: Results) -> Iterator[Picture]:
    """Yield what takes the card's memory, one picture for each machine with all scenarios of the largest model."""
    for machine, found in groupby(on_gpu(results), key=lambda row: machine_name(row.record.machine)):
        bars = [(f"{row.record.scenario}, {row.record.engine}", memory_parts(row.record)) for row in found]
        if bars:
            yield _memory_picture(machine, bars)


def memory_parts(record: Record) -> dict[str, float | None]:
    """Return bytes of device memory by what they are for, None for what the record does not have.

    What the peak has beyond what the program states is its context and kernels; free is what the peak leaves of the
    card, if nothing else is on it.
    """
    peak, gpu = record.peak_device_memory_n_bytes, record.machine.gpu
    card = None if gpu is None else gpu.memory_n_bytes
    parts = _ours(record.effective) if record.role == "engine" else _theirs(record.effective)
    stated = sum(n_bytes for n_bytes in parts.values() if n_bytes is not None)
    rest = None if peak is None or parts[_WEIGHTS] is None else max(0.0, peak - stated)
    free = None if peak is None or card is None else max(0.0, card - peak)
    return parts | {_REST: rest, _FREE: free}


def _ours(effective: Mapping[str, Any]) -> dict[str, float | None]:
    """Return our engine's memory; older records have all but the weights as one sum."""
    weights, arena = effective.get("resident_weights_n_bytes"), effective.get("arena_n_bytes")
    state, kv = effective.get("state_n_bytes"), effective.get("kv_cache_n_bytes")
    if arena is None or state is None or kv is None:
        return {_WEIGHTS: weights, _STATE: None, _KV: None, _ARENA: None, _SUM: arena}
    return {_WEIGHTS: weights, _STATE: state, _KV: kv, _ARENA: arena - state - kv}


def _theirs(effective: Mapping[str, Any]) -> dict[str, float | None]:
    """Return llama.cpp's buffers on the device, which its log names by kind and place."""
    names = {"model": _WEIGHTS, "RS": _STATE, "KV": _KV, "compute": _ARENA}
    parts: dict[str, float | None] = dict.fromkeys(names.values())
    for name, n_mib in (effective.get("buffers_mib") or {}).items():
        kind, _, place = name.partition(" ")
        if place.startswith("CUDA") and not place.endswith("Host") and kind in names:
            parts[names[kind]] = (parts[names[kind]] or 0.0) + n_mib * _MIB
    return parts


def _memory_picture(machine: str, bars: Sequence[tuple[str, dict[str, float | None]]]) -> Picture:
    """Draw what each program takes, and below it the same on the whole card: a large one leaves no room for parts."""
    figure = Figure(figsize=(_WIDTH, 3.0 + 0.75 * len(bars)), layout="constrained")
    taken, card = figure.subplots(2)
    _draw_bars(taken, [(label, {k: v for k, v in parts.items() if k != _FREE}) for label, parts in bars])
    taken.set_xlabel("taken at the peak, GiB")
    _draw_bars(card, bars)
    card.set_xlabel("the whole card, GiB")
    handles = [matplotlib.patches.Patch(color=_PARTS[name]) for name in _drawn(bars)]
    figure.legend(handles, _drawn(bars), loc="outside upper center", ncols=2, frameon=False)
    said = "; ".join(
        f"{label}: " + ", ".join(f"{name} {_mib(n_bytes)}" for name, n_bytes in parts.items()) for label, parts in bars
    )
    return Picture(
        f"memory-{_slug(machine)}.svg",
        _svg(figure),
        f"Device memory at the peak on {machine}, in MiB: {said}.",
        f"Device memory at the peak on {machine}. Context and kernels: what the peak has beyond what the program "
        f"states. Free: what it leaves of the card.{_unmeasured(bars)}",
    )


def _draw_bars(axes: Any, bars: Sequence[tuple[str, dict[str, float | None]]]) -> None:
    for at, (_, parts) in enumerate(bars):
        left = 0.0
        for name, n_bytes in parts.items():
            axes.barh(at, (n_bytes or 0.0) / _GIB, left=left, color=_PARTS[name])
            left += (n_bytes or 0.0) / _GIB
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()


def _drawn(bars: Sequence[tuple[str, dict[str, float | None]]]) -> list[str]:
    return [name for name in _PARTS if any(parts.get(name) is not None for _, parts in bars)]


def _unmeasured(bars: Sequence[tuple[str, dict[str, float | None]]]) -> str:
    """Return a sentence on each program of which the record lacks parts."""
    lacking = [(label, [name for name, n_bytes in parts.items() if n_bytes is None]) for label, parts in bars]
    return "".join(f" Not measured, {label}: {', '.join(names)}." for label, names in lacking if names)


def _mib(n_bytes: float | None) -> str:
    return "not measured" if n_bytes is None else f"{n_bytes / _MIB:,.0f}"


def gap_pictures(results: Results) -> Iterator[Picture]:
    """Yield how far the two best logits lie apart over all positions, one picture for each machine and scenario."""
    rows = [row for row in results.rows if row.record.output and row.record.output.top2_gaps]
    for machine, scenario, records in _by_scenario(rows):
        margin = _margin(records)
        figure = Figure(figsize=(_WIDTH, 2.6), layout="constrained")
        axes = figure.subplots()
        gaps = [record.output.top2_gaps or [] for record in records if record.output]
        colors = [_THEIRS if record.role == "baseline" else _OURS for record in records]
        axes.hist(gaps, bins=30, color=colors, label=[record.engine for record in records])
        if margin is not None:
            axes.axvline(margin, color=_LIMIT, linestyle="--", label=f"margin {margin:g}")
        axes.set_xlim(left=0)
        axes.set_xlabel("gap between the two best logits")
        axes.set_ylabel("positions")
        axes.legend(frameon=False)
        pairs = zip(records, gaps, strict=True)
        said = "; ".join(f"{r.engine} smallest {min(g):.3f}, median {median(g):.3f}" for r, g in pairs)
        yield Picture(
            f"gaps-{_slug(machine)}-{scenario}.svg",
            _svg(figure),
            f"Histogram of the gap between the two best logits in {scenario} on {machine}: {said}; margin {margin}.",
            f"Gaps of {scenario} on {machine}: llama.cpp's must stay above the margin at every position.",
        )


def _margin(records: Sequence[Record]) -> float | None:
    """Return the declared margin, the limit of llama.cpp's own check."""
    checks = [check for record in records for check in record.checks if check.name == "smallest_top2_gap"]
    limit = checks[0].limit if checks else None
    return limit if isinstance(limit, float) else None


def _by_scenario(rows: Iterator[Row] | Sequence[Row]) -> Iterator[tuple[str, str, list[Record]]]:
    """Yield machine, scenario and the records of its programs, in the order of `rows`."""
    for (machine, scenario), found in groupby(
        rows, key=lambda row: (machine_name(row.record.machine), row.record.scenario)
    ):
        yield machine, scenario, [row.record for row in found]


def _svg(figure: Figure) -> bytes:
    """Return the file; the same records give the same bytes: no date, no random ids."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "conformance", "font.size": 10}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


_GROUPS = {"speed": speed_pictures, "steps": step_pictures, "memory": memory_pictures, "gaps": gap_pictures}
