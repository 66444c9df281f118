"""Records of single ops, timed by pytest-benchmark: sealed, written and verified like those of whole models."""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, ValidationError
from tabulate import tabulate

from baselines.llama_cpp.process import run_process
from conformance.bench.records import SCHEMA_VERSION, Seconds, broken_seals, write_sealed
from conformance.errors import ConformanceError
from conformance.machine import Machine, Versions, these_versions, this_machine
from conformance.records import ModelIdentity
from conformance.scenario import Data
from conformance.subject import package_environment

MODEL_VARIABLE = "HYBRID_OPS_MODEL"
"""Names the model to the benchmarks, which pytest runs in a process of their own."""
_BENCHMARKS = Path(__file__).with_name("op_benchmarks.py")
_DEADLINE_S = 600.0
_FLAGS = ("-q", "-p", "no:cacheprovider", "--benchmark-max-time=0.05", "--benchmark-min-rounds=5")


class OpSamples(Data):
    """One op: the time of each round, seconds per call, and their median."""

    op: str
    time_s: Annotated[list[Seconds], Field(min_length=1)]
    median_s: Seconds


class OpsRecord(Data):
    """One run of the op benchmarks of a backend; digests as in a bench record."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    kind: Literal["ops"] = "ops"
    run_id: str
    time_utc: AwareDatetime
    backend: str
    versions: Versions
    machine: Machine
    model: ModelIdentity
    ops: list[OpSamples]
    digests: dict[str, str] = Field(default_factory=dict)


def run_op_benchmarks(model: Path, identity: ModelIdentity) -> OpsRecord:
    """Run pytest-benchmark in a process of its own; raises ConformanceError with its last lines if it fails."""
    with tempfile.TemporaryDirectory(prefix="ops-") as folder:
        out = Path(folder) / "benchmarks.json"
        argv: list[str | Path] = [sys.executable, "-m", "pytest", _BENCHMARKS, *_FLAGS, f"--benchmark-json={out}"]
        env = {**package_environment(), MODEL_VARIABLE: str(model.absolute())}
        result = run_process(argv, deadline_s=_DEADLINE_S, env=env, cwd=Path(folder))
        if result.status != "ok":
            raise ConformanceError(f"the op benchmarks failed ({result.status}): {result.log_tail(1)}")
        ops = [*_samples(json.loads(out.read_text()))]
    return OpsRecord(
        run_id=str(uuid.uuid4()),
        time_utc=datetime.now(timezone.utc),
        backend="numpy",
        versions=these_versions(),
        machine=this_machine(),
        model=identity,
        ops=ops,
    )


def write_ops_record(record: OpsRecord, folder: Path) -> Path:
    """Seal and write `record` below `folder`; return its path. Raises RecordError."""
    values = record.model_dump(mode="json")
    return write_sealed(values, record.machine, folder, "ops", f"{record.backend}-{record.run_id}")


def render_ops(record: OpsRecord) -> str:
    """Return the table of an op record."""
    rows = [
        (one.op, f"{one.median_s * 1e6:.1f}", f"{min(one.time_s) * 1e6:.1f}", str(len(one.time_s)))
        for one in record.ops
    ]
    return tabulate(rows, headers=("op", "median us", "least us", "rounds"), disable_numparse=True)


def verify_ops(data: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the content of an op record."""
    yield from broken_seals(data)
    try:
        record = OpsRecord.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        yield f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        return
    for index, one in enumerate(record.ops):
        if one.median_s != median(one.time_s):
            yield f"record.ops[{index}].median_s: {one.median_s} in the row, {median(one.time_s)} from its samples"


def _samples(report: dict[str, Any]) -> Iterator[OpSamples]:
    for benchmark in report["benchmarks"]:
        times = [float(time_s) for time_s in benchmark["stats"]["data"]]
        yield OpSamples(op=benchmark["params"]["op"], time_s=times, median_s=float(median(times)))
