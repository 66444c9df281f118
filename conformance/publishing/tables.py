"""Tables in Markdown, made from records alone.

A ratio comes from within one record, which is one machine and one run: rows of different machines stand beside each
other, and nothing is ever computed from two of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from tabulate import tabulate

from baselines.published import Published, Table, all_published, published_rows
from conformance.bench.records import BenchComparison, BenchRecord, Figure
from conformance.bench.report import FIRST_TOKENS, METRIC_LABELS
from conformance.publishing.rows import BenchRow, Results, Row, machine_name
from conformance.records import Record
from conformance.scenario import ScenarioFile, all_scenarios

NONE = "not measured"
_UNITS = {
    "tok_per_s": "tok/s",
    "ms_per_token": "ms/token",
    "gb_per_s": "GB/s",
    "n_bytes": "bytes",
    "mib": "MiB",
    "us": "µs",
    "percent": "%",
}


def markdown(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table, or that there is nothing to put into it."""
    if not rows:
        return f"{NONE.capitalize()}."
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    text = tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)
    return re.sub(r" {2,}", " ", re.sub(r"-{4,}", "---", text))  # columns that line up would make long lines of links


def by_machine(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table per machine, which is the first cell of each row and becomes the line above its table."""
    parts = []
    for machine, found in groupby(rows, key=lambda row: row[0]):
        parts += [f"**{machine}**", markdown([row[1:] for row in found], headers)]
    return "\n\n".join(parts) or markdown([], headers)


def link(text: str, path: str, depth: str) -> str:
    """Return a link to a file of the project; depth: from the page's folder up to the project's."""
    return f"[{text}]({depth}{path})"


def tokens_table(results: Results, depth: str) -> str:
    """Return one row per machine, scenario and engine: are the tokens llama.cpp's, and how close was it?"""
    rows = []
    for row in results.rows:
        record = row.record
        output = record.output
        rows.append(
            (
                machine_name(record.machine),
                link(record.scenario, row.path, depth),
                record.engine,
                _equal(record),
                "-" if output is None else f"`{output.generated_token_ids_le64_sha256[:12]}`",
                _gap(record),
                verdict(record),
            )
        )
    return by_machine(rows, ("scenario", "engine", "tokens", "token hash", "smallest gap", "verdict"))


def verdict(record: Record) -> str:
    """Return pass, FAIL or what was not measured, by the checks in the record."""
    if record.status == "not_measured":
        return NONE
    if record.status != "ok" or any(check.passed is False for check in record.checks):
        return "FAIL"
    return "pass" if all(check.passed for check in record.checks) else NONE


def _equal(record: Record) -> str:
    if record.output is None:
        return "-"
    n_ids = len(record.output.generated_token_ids)
    if record.role == "baseline":
        return f"{n_ids} generated"
    return "-" if record.comparison is None else f"{record.comparison.n_equal}/{n_ids} equal"


def _gap(record: Record) -> str:
    gap = record.output.smallest_top2_gap if record.output else None
    return "-" if gap is None else f"{gap:.4f}"


def steps_table(results: Results, depth: str) -> str:
    """Return times in the conformance records of GPUs: one run each, not in alternation, so without any ratio."""
    rows = []
    for row in on_gpu(results):
        record = row.record
        assert record.timings is not None
        step_ns = median(record.timings.decode_time_ns)
        rows.append(
            (
                machine_name(record.machine),
                link(record.scenario, row.path, depth),
                record.engine,
                _equal(record),
                f"{step_ns * 1e-6:.3f}",
                f"{1e9 / step_ns:.1f}",
                _size(record.effective.get("resident_weights_n_bytes")),
                _size(record.effective.get("arena_n_bytes")),
                _size(record.peak_device_memory_n_bytes),
            )
        )
    headers = ("scenario", "engine", "tokens", "median step, ms", "tok/s", "weights", "buffers", "peak")
    return by_machine(rows, headers)


def on_gpu(results: Results) -> Iterator[Row]:
    """Yield the runs of the largest models that ran on a GPU: on the small ones a step measures the launches."""
    for row in results.rows:
        is_gpu = row.record.engine.endswith("-cuda") and row.record.scenario.startswith("27b")
        if is_gpu and row.record.timings is not None and row.record.timings.decode_time_ns:
            yield row


def _size(n_bytes: object) -> str:
    return f"{n_bytes:,} bytes" if isinstance(n_bytes, int) else "-"


def speed_table(results: Results, depth: str) -> str:
    """Return the speeds of every program in the newest bench record of each machine and scenario."""
    rows = [
        (*_where(row, depth), figure.subject, METRIC_LABELS[figure.metric], *_speeds(figure), str(figure.n_samples))
        for row in results.bench
        for figure in row.record.figures
    ]
    headers = ("scenario", "program", "what", "tok/s", "ms/token", "GB/s", "of ceiling", "rounds")
    return by_machine(rows, headers)


def _where(row: BenchRow, depth: str) -> tuple[str, str]:
    return machine_name(row.record.machine), link(row.record.scenario, row.path, depth)


def _speeds(figure: Figure) -> tuple[str, str, str, str]:
    rate = "-" if figure.metric in FIRST_TOKENS else f"{figure.tok_per_s:.2f}"
    bandwidth = "-" if figure.gb_per_s is None else f"{figure.gb_per_s:.1f}"
    share = "-" if figure.ceiling_fraction is None else f"{figure.ceiling_fraction:.1%}"
    return rate, f"{figure.ms_per_token:.3f}", bandwidth, share


def comparisons_table(results: Results, depth: str) -> str:
    """Return what may be said of two programs; both sides of a row were measured in one run on one machine."""
    rows = [
        (*_where(row, depth), METRIC_LABELS[found.metric], found.engine, found.baseline, *_ratio(found))
        for row in results.bench
        for found in row.record.comparisons
    ]
    headers = ("scenario", "what", "ours", "theirs", "times as fast", "95 % interval", "verdict")
    return by_machine(rows, headers)


def _ratio(found: BenchComparison) -> tuple[str, str, str]:
    if found.ratio is None:
        return "-", "-", f"{found.verdict}: {found.reason}"
    return f"{found.ratio:.3f}", f"{found.interval_low:.3f} to {found.interval_high:.3f}", found.verdict


def cold_table(results: Results, depth: str) -> str:
    """Return cold starts, one sample each, and memory."""
    rows = []
    for row in results.bench:
        for subject in row.record.subjects:
            cold, memory = subject.cold_start, subject.memory
            times = (cold.ready_time_ns, cold.compile_time_ns, cold.first_token_time_ns) if cold else (None,) * 3
            rows.append(
                (
                    *_where(row, depth),
                    subject.name,
                    *("-" if time is None else f"{time * 1e-9:.2f} s" for time in times),
                    _size(memory.peak_n_bytes),
                    _size(memory.device_peak_n_bytes),
                )
            )
    headers = ("scenario", "program", "ready", "of it compiling", "first token", "peak RSS", "device peak")
    return by_machine(rows, headers)


def measured_table(results: Results, depth: str) -> str:
    """Return the short table of the README: decode and prompt of both programs, and the verdict of the same run."""
    rows = []
    for row in results.bench:
        for found in row.record.comparisons:
            if found.metric in ("decode", "prefill_layer_major") and found.baseline.startswith("llama.cpp"):
                speeds = [_rate(row.record, name, found.metric) for name in (found.engine, found.baseline)]
                labels = (*_where(row, depth), METRIC_LABELS[found.metric])
                rows.append((*labels, found.engine, *speeds, *_ratio(found)))
    headers = ("scenario", "what", "engine", "tok/s", "llama.cpp b8763", "times as fast", "95 % interval", "verdict")
    return by_machine(rows, headers)


def _rate(record: BenchRecord, subject: str, metric: str) -> str:
    found = [figure for figure in record.figures if (figure.subject, figure.metric) == (subject, metric)]
    return f"{found[0].tok_per_s:.1f}" if found else "-"


def missing_list(results: Results) -> str:
    """Return what the suite asks and no published record answers, as a list."""
    lines = [*_missing_rows(results, all_scenarios())]
    if not any(record.backend == "cuda" for record in results.ops):
        lines.append("bandwidth by op against the ceiling: of the CUDA backend no record is published")
    return "\n".join(f"- {NONE.capitalize()}: {line}." for line in lines) or "Nothing."


def _missing_rows(results: Results, files: Sequence[ScenarioFile]) -> Iterator[str]:
    ran = {(row.record.scenario, row.record.engine) for row in results.rows if row.record.status == "ok"}
    benched = {(row.record.scenario, row.record.backend) for row in results.bench}
    for file in files:
        for backend in file.scenario.backends:
            where = f"{file.scenario.name} on the {backend} backend"
            if (file.scenario.name, f"engine-{backend}") not in ran:
                yield f"{where}, tokens and logits"
            is_timed = file.scenario.model.kind is not None  # a bench is made of fixtures
            if is_timed and (file.scenario.name, backend) not in benched:
                yield f"{where}, speed (bench)"
    for row in results.bench:
        if not any(found.metric == "client_first_token" for found in row.record.comparisons):
            where = f"{row.record.scenario}, {row.record.subjects[0].name} on {machine_name(row.record.machine)}"
            yield f"{where}, first token by a client's clock against llama-server"


def claims_table() -> str:
    """Return the headline figures of others: claimed, not measured here."""
    rows = [
        (row.engine, row.what, f"{row.value:g} {_UNITS.get(row.unit, row.unit)}", row.machine)
        for row in published_rows()
        if row.headline
    ]
    return markdown(rows, ("engine", "what", "claimed, not measured here", "machine"))


def all_claims() -> str:
    """Return every table of every published source, each under its own heading."""
    return "\n\n".join(part for published in all_published() for part in _claims_of(published))


def _claims_of(published: Published) -> Iterator[str]:
    source = published.source
    yield f"## {source.title}"
    where = f"Source: {source.publisher or 'publisher not stated'}, {source.url or 'no address at hand'}."
    yield f"**Claimed, not measured here.** {where} Machine: {published.machine}. Model: {published.model}."
    for table in published.tables:
        yield f"### {table.title}"
        yield _claim_table(table)
        if table.note:
            yield table.note


def _claim_table(table: Table) -> str:
    headers = [
        column.name if column.unit is None else f"{column.name}, {_UNITS.get(column.unit, column.unit)}"
        for column in table.columns
    ]
    return markdown([["-" if cell is None else f"{cell}" for cell in row] for row in table.rows], headers)
