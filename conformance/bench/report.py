"""The tables of a bench: speeds of each program, what may be said of two of them, cold starts, others' claims."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from baselines.published import published_rows
from conformance.bench.derive import tokens_verdict
from conformance.bench.records import BenchComparison, BenchRecord, Figure, Metric, SubjectRecord

METRIC_LABELS: dict[Metric, str] = {
    "decode": "decode",
    "prefill_layer_major": "prompt, batched",
    "prefill_token_major": "prompt, token by token",
    "first_token": "first token",
    "client_first_token": "first token, client's clock",
    "end_to_end": "end to end",
}
FIRST_TOKENS: tuple[Metric, ...] = ("first_token", "client_first_token")
"""Of these only the wait means something, not a rate."""
_WIDTH = 100


def render_bench(records: Sequence[BenchRecord]) -> str:
    """Return the tables of `records`, one run each; rows of different machines only stand beside each other."""
    parts = [
        _table(
            [row for record in records for row in _speed_rows(record)],
            ("scenario", "program", "what", "tok/s", "ms/token", "GB/s", "of ceiling", "rounds"),
        ),
        _table(
            [_comparison_row(record, row) for record in records for row in record.comparisons],
            ("scenario", "what", "ours / theirs", "ratio", "95% interval", "verdict"),
        ),
        _table(
            [row for record in records for row in _cold_rows(record)],
            ("scenario", "program", "cold start", "load", "compile", "first token", "peak RSS", "device peak"),
        ),
        *(text for record in records for text in _notes(record)),
    ]
    if any(record.backend == "cuda" for record in records):
        parts.append(render_claims())
    return "\n\n".join(dict.fromkeys(parts))


def render_claims() -> str:
    """Return what others have published: claimed, not measured here, and part of no ratio."""
    headlines = [row for row in published_rows() if row.headline]
    rows = [(row.engine, row.what, f"{row.value:g} {row.unit}", row.machine) for row in headlines]
    sources = "\n".join(dict.fromkeys(f"Source: {row.source}" for row in headlines))
    table = _table(rows, ("engine", "what", "claim", "machine"))
    return f"Claimed by others, not measured here, part of no ratio:\n{table}\n{sources}"


def _table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers=headers, disable_numparse=True)


def _speed_rows(record: BenchRecord) -> Iterator[tuple[str, ...]]:
    for subject in record.subjects:
        figures = [figure for figure in record.figures if figure.subject == subject.name]
        for figure in figures:
            yield (record.scenario, subject.name, METRIC_LABELS[figure.metric], *_speeds(figure), str(figure.n_samples))
        if not figures:
            yield (record.scenario, subject.name, "no speed: see below", *("-",) * 5)


def _speeds(figure: Figure) -> tuple[str, str, str, str]:
    """Return tok/s, ms/token, GB/s and share of the ceiling; of a first token only the wait means something."""
    rate = "-" if figure.metric in FIRST_TOKENS else f"{figure.tok_per_s:.2f}"
    bandwidth = "-" if figure.gb_per_s is None else f"{figure.gb_per_s:.1f}"
    share = "-" if figure.ceiling_fraction is None else f"{figure.ceiling_fraction:.1%}"
    return rate, f"{figure.ms_per_token:.3f}", bandwidth, share


def _comparison_row(record: BenchRecord, row: BenchComparison) -> tuple[str, ...]:
    names = f"{row.engine} / {row.baseline}"
    if row.ratio is None:
        return record.scenario, METRIC_LABELS[row.metric], names, "-", "-", row.verdict
    interval = f"{row.interval_low:.3f} to {row.interval_high:.3f}"
    return record.scenario, METRIC_LABELS[row.metric], names, f"{row.ratio:.3f}", interval, row.verdict


def _cold_rows(record: BenchRecord) -> Iterator[tuple[str, ...]]:
    for subject in record.subjects:
        cold, memory = subject.cold_start, subject.memory
        times = (
            (cold.ready_time_ns, cold.load_time_ns, cold.compile_time_ns, cold.first_token_time_ns)
            if cold
            else (None,) * 4
        )
        sizes = (memory.peak_n_bytes, memory.device_peak_n_bytes)
        yield (
            record.scenario,
            subject.name,
            *("-" if time is None else f"{time * 1e-9:.2f} s" for time in times),
            *("-" if size is None else f"{size * 1e-6:,.0f} MB" for size in sizes),
        )


def _notes(record: BenchRecord) -> Iterator[str]:
    """Say why a verdict is INVALID or UNDECIDED, what was not measured, and how the programs were loaded."""
    lines = [f"{record.scenario}: programs loaded {record.plan.residency}: {record.plan.because}"]
    whys: dict[tuple[str, str, str], list[str]] = {}
    for row in record.comparisons:
        if row.verdict in ("INVALID", "UNDECIDED"):
            whys.setdefault((row.baseline, row.verdict, row.reason), []).append(METRIC_LABELS[row.metric])
    for (baseline, verdict, reason), metrics in whys.items():
        lines.append(f"{record.scenario}, {'; '.join(metrics)} against {baseline}: {verdict}: {reason}")
    lines += [f"{record.scenario}: {what} not measured: {why}" for what, why in record.not_measured.items()]
    lines += [f"{record.scenario}: {line}" for subject in record.subjects for line in _token_notes(record, subject)]
    yield "\n".join(textwrap.fill(line, width=_WIDTH, subsequent_indent="    ") for line in lines)


def _token_notes(record: BenchRecord, subject: SubjectRecord) -> Iterator[str]:
    verdict, why = tokens_verdict(record, subject)
    if verdict in ("wrong", "failed"):
        yield f"{subject.name}: no speed is given: {why}"
