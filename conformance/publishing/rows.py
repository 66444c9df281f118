"""The published records that pages are made of: the newest of each machine, scenario and program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conformance.bench.ops import OpsRecord
from conformance.bench.records import SCHEMA_NAME, BenchRecord, load_json, parse_bench_record
from conformance.errors import RecordError
from conformance.machine import Machine
from conformance.records import SCHEMA_VERSION, Record, read_record


@dataclass(frozen=True)
class Row:
    """A conformance record and its file, relative to the project's folder."""

    record: Record
    path: str


@dataclass(frozen=True)
class BenchRow:
    """A bench record and its file, relative to the project's folder."""

    record: BenchRecord
    path: str


@dataclass(frozen=True)
class Results:
    """Everything published, controls left out: newest records only, ordered by machine, scenario and program."""

    rows: list[Row]
    bench: list[BenchRow]
    ops: list[OpsRecord]


def read_results(root: Path) -> Results:
    """Read what is published below root/results; raises RecordError for a record that cannot be read."""
    folder = root / "results"
    found = [_row(path, root) for path in sorted(folder.glob(f"v{SCHEMA_VERSION}/*/*/*.json"))]
    rows = _newest(
        [row for row in found if row.record.role != "control"],
        key=lambda row: (machine_name(row.record.machine), _size(row.record.scenario), row.record.engine),
        age=lambda row: (row.record.status == "ok", row.record.time_utc),
    )
    benches, ops = _bench_rows(sorted(folder.glob(f"{SCHEMA_NAME}/*/*/*.json")), root)
    bench = _newest(
        benches,
        key=lambda row: (machine_name(row.record.machine), _size(row.record.scenario), row.record.backend),
        age=lambda row: row.record.time_utc,
    )
    return Results(rows, bench, ops)


def machine_name(machine: Machine) -> str:
    """Return what a table calls a machine: its GPU, or its processor."""
    return machine.gpu.name if machine.gpu else f"{machine.cpu}, {machine.n_cores} cores, no GPU"


def _size(scenario: str) -> tuple[int, str, int]:
    """Order scenarios by model, then by context; others come last, by name."""
    kind, _, n_ctx = scenario.rpartition("-c")
    known = ("tiny", "small", "27b")
    return (known.index(kind) if kind in known else len(known), kind, int(n_ctx) if n_ctx.isdigit() else 0)


def _row(path: Path, root: Path) -> Row:
    return Row(read_record(path), path.relative_to(root).as_posix())


def _bench_rows(paths: Iterable[Path], root: Path) -> tuple[list[BenchRow], list[OpsRecord]]:
    bench, ops = [], []
    for path in paths:
        data = load_json(path)
        kind = data.get("kind") if isinstance(data, dict) else None
        if kind == "ops":
            ops.append(OpsRecord.model_validate_json(path.read_bytes()))
        elif kind == "bench":
            bench.append(BenchRow(parse_bench_record(path, data), path.relative_to(root).as_posix()))
        else:
            raise RecordError(f"{path}: kind is {kind!r}, expected bench or ops")
    return bench, ops


R = TypeVar("R", Row, BenchRow)


def _newest(rows: Iterable[R], key: Callable[[R], tuple[Any, ...]], age: Callable[[R], Any]) -> list[R]:
    """Return the newest row for each key, ordered by key."""
    by_age = {key(row): row for row in sorted(rows, key=age)}
    return [by_age[name] for name in sorted(by_age)]
