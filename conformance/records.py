"""Records: one JSON file per scenario and engine, written whole or not at all. results/README.md explains each key."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import filelock
from pydantic import AwareDatetime, Field, JsonValue, ValidationError

from conformance.checks import CheckResult, Comparison
from conformance.errors import RecordError
from conformance.machine import Machine, Versions
from conformance.scenario import Data, Sha256

SCHEMA_VERSION = 1
DEFAULT_FOLDER = Path("results/local")
_LOCK = ".lock"
RecordStatus: TypeAlias = Literal["ok", "failed", "crashed", "timeout", "out_of_memory", "not_measured"]


class ModelIdentity(Data):
    """The GGUF file that was run."""

    file: str
    sha256: Sha256
    n_bytes: int


class Timings(Data):
    """Wall times of one run; decode_time_ns has one entry per generated id after the first.

    prepare_time_ns: median time until a step's graph was launched, None where steps are not replayed as one.
    """

    load_time_ns: int
    prefill_time_ns: int
    decode_time_ns: list[int]
    prepare_time_ns: int | None = None


class RequestTimes(Data):
    """One request to another engine: the client's clock, and what the other side states, None where it does not."""

    client_wall_time_ns: int
    server_prompt_time_ns: int | None
    server_generation_time_ns: int | None


class Output(Data):
    """What an engine generated. smallest_top2_gap is in logits, at generated position smallest_top2_gap_position.

    top2_gaps: that of every position; None in older records and where one is not finite. Another engine gives ids
    alone: what would be of its logits is None.
    """

    generated_token_ids: list[int]
    generated_token_ids_le64_sha256: Sha256
    final_logits_le32_sha256: Sha256 | None
    final_greedy_token_id: int
    smallest_top2_gap: float | None
    smallest_top2_gap_position: int | None
    top2_gaps: list[float] | None = None


class Record(Data):
    """What one engine did with one scenario; output, timings and model are None where it did not get that far."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    run_id: str
    time_utc: AwareDatetime
    scenario: str
    scenario_version: Sha256
    engine: str
    role: Literal["engine", "baseline", "control", "subject"]
    status: RecordStatus
    reason: str | None
    log_tail: list[str]
    requested: dict[str, JsonValue]
    effective: dict[str, JsonValue]
    versions: Versions
    machine: Machine
    model: ModelIdentity | None
    output: Output | None = None
    comparison: Comparison | None = None
    checks: list[CheckResult] = Field(default_factory=list)
    caught_by: list[str] | None = None
    timings: Timings | None = None
    request_times: list[RequestTimes] = Field(default_factory=list)
    peak_memory_n_bytes: int | None = None
    peak_device_memory_n_bytes: int | None = None


def record_path(folder: Path, scenario: str, engine: str) -> Path:
    """Return where the record of `engine` in `scenario` lies below `folder`."""
    return folder / scenario / f"{engine}.json"


def write_record(record: Record, folder: Path) -> Path:
    """Write `record` below `folder`, replacing an older one only when the new one is complete; return its path.

    Raises RecordError if the folder cannot be written.
    """
    path = record_path(folder, record.scenario, record.engine)
    write_whole(path, record.model_dump(mode="json"), record.run_id)
    return path


def write_whole(path: Path, values: dict[str, Any], run_id: str) -> None:
    """Write JSON under another name, then rename: the file is whole or absent, whoever else writes it.

    Raises RecordError if the folder cannot be written.
    """
    text = json.dumps(values, sort_keys=True, indent=1, allow_nan=False)
    partial = path.with_name(f"{path.name}.{run_id}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + "\n")
        partial.replace(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def read_record(path: Path) -> Record:
    """Read one record; raise RecordError naming the file and what is wrong with it."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not a record: {error}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(f"{path}: schema_version is {version!r}, expected {SCHEMA_VERSION}")
    try:
        return Record.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        raise RecordError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def read_records(folder: Path) -> list[Record]:
    """Read every record below `folder`, in the order of their paths; raise RecordError."""
    return [read_record(path) for path in sorted(folder.glob("*/*.json"))]


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Have a folder of records to oneself while the context lasts; raises RecordError.

    Found out before anything is measured: that it cannot be written, and that another run writes to it. The claim goes
    with the process, however that ends.
    """
    lock = filelock.FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            lock.acquire(blocking=False)
        for path in folder.rglob("*.json.*.partial"):  # of a run that was killed
            path.unlink()
    except filelock.Timeout:
        raise RecordError(
            f"{folder}: another run writes its records here: wait for it, or choose another --out"
        ) from None
    except OSError as error:
        raise RecordError(f"{folder}: cannot be written: {error.strerror}: choose another --out") from None
    try:
        yield
    finally:
        lock.release()


def remove_records(folder: Path, scenarios: Iterable[str]) -> None:
    """Remove the records of `scenarios`, so that a run that stops half-way leaves none of an earlier run."""
    for scenario in scenarios:
        for path in (folder / scenario).glob("*.json"):
            try:
                path.unlink()
            except OSError as error:
                raise RecordError(f"{path}: cannot be removed: {error.strerror}") from None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a record."""
    return Record.model_json_schema()
