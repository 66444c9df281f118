"""Bench records: one file per scenario and run, with every sample inside. results/README.md explains each key.

What was measured (`subjects` and what stands before them) and what follows from it (`figures`, `comparisons`) lie side
by side: `conformance.bench.derive` computes the second from the first, when a record is made and when it is verified.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AwareDatetime, Field, JsonValue, ValidationError

from conformance.bench.stats import Verdict
from conformance.bench.telemetry import Telemetry
from conformance.errors import RecordError
from conformance.machine import Machine, Versions
from conformance.records import DEFAULT_FOLDER, ModelIdentity, write_whole
from conformance.scenario import Data, Sha256
from engine.generate import PrefillMode

SCHEMA_VERSION = 1
SCHEMA_NAME = "bench-v1"
DEFAULT_BENCH_FOLDER = DEFAULT_FOLDER / SCHEMA_NAME
MACHINE_FILE = "machine.json"
_N_DIGEST = 16

Metric: TypeAlias = Literal[
    "decode", "prefill_layer_major", "prefill_token_major", "first_token", "client_first_token", "end_to_end"
]
Residency: TypeAlias = Literal["together", "alternating"]
TokensVerdict: TypeAlias = Literal["right", "wrong", "failed", "none"]
Seconds = Annotated[float, Field(ge=0)]
_Time = Annotated[int, Field(ge=0)]


class Settings(Data):
    """The settings in force, in one form for every engine; None: the engine does not say.

    n_prompt_passes: in how many parts the prompt went through the model, layer-major. layers_on_gpu: "all",
    "none" or "N/ALL". n_threads matters where the layers are on the CPU.
    """

    n_ctx: int | None
    n_prompt_passes: int | None
    flash_attn: str | None
    type_k: str | None
    type_v: str | None
    layers_on_gpu: str | None
    n_threads: int | None


class Run(Data):
    """One timed run; `round` 0 is the first, the untimed reference run of a subject, of which everything is checked.

    order: its place among all runs of the record. decode_time_ns: one entry per token, or one for all n_decoded of
    them where the program says no more. first_token_time_ns: by the program's own clock; client_first_token_time_ns: by
    the clock of who asked, None where the program does not stream. error: why it gave nothing.
    """

    round: Annotated[int, Field(ge=0)]
    order: Annotated[int, Field(ge=0)]
    prefill: PrefillMode
    n_decoded: Annotated[int, Field(ge=0)] = 0
    prefill_time_ns: _Time | None = None
    first_token_time_ns: _Time | None = None
    client_first_token_time_ns: _Time | None = None
    decode_time_ns: list[_Time] = Field(default_factory=list)
    wall_time_ns: _Time | None = None
    n_generated: Annotated[int, Field(ge=0)] = 0
    generated_token_ids_le64_sha256: Sha256 | None = None
    final_logits_le32_sha256: Sha256 | None = None
    telemetry: Telemetry | None = None
    error: str | None = None


class ColdStart(Data):
    """One sample each: a new process until the model is loaded, the compiler's part of it, the first token then.

    compile_time_ns is None where nothing is compiled at run time, 0 where all was in the cache.
    """

    ready_time_ns: _Time
    load_time_ns: _Time | None
    compile_time_ns: _Time | None
    first_token_time_ns: _Time | None


class Memory(Data):
    """Peak resident set of the process; its device memory after warm-up and at most, None where not sampled."""

    peak_n_bytes: int | None
    device_steady_n_bytes: int | None
    device_peak_n_bytes: int | None


class SubjectRecord(Data):
    """One program that was measured.

    metrics: what it can be measured by. programs: SHA256 of each file that was run. token_ids: of its reference run.
    """

    name: str
    role: Literal["engine", "baseline"]
    metrics: list[Metric]
    programs: dict[str, Sha256]
    requested: dict[str, JsonValue]
    effective: dict[str, JsonValue]
    settings: Settings
    cold_start: ColdStart | None
    memory: Memory
    warm_up_time_ns: _Time
    n_starts: int
    token_ids: list[int]
    runs: list[Run]


class Figure(Data):
    """A subject's speed by one metric: the median over the rounds. n_tokens is what one sample stands for.

    gb_per_s: resident bytes of the weights, which every step reads once, over the time of a step (decode alone);
    ceiling_fraction: of the read ceiling measured in the same run.
    """

    subject: str
    metric: Metric
    n_samples: int
    n_tokens: int
    time_ns: float
    tok_per_s: float
    ms_per_token: float
    gb_per_s: float | None
    ceiling_fraction: float | None


class ParityRow(Data):
    """One setting on both sides; exempt says why a difference is allowed."""

    setting: str
    engine: JsonValue
    baseline: JsonValue
    equal: bool
    exempt: str | None


class BenchComparison(Data):
    """Engine against one baseline by one metric; ratio above 1: the engine is faster. No ratio if INVALID."""

    metric: Metric
    engine: str
    baseline: str
    n_rounds: int
    ratio: float | None
    interval_low: float | None
    interval_high: float | None
    verdict: Verdict
    reason: str
    parity: list[ParityRow]


class Expected(Data):
    """What makes tokens right: the scenario's golden hashes, or where it has none, llama.cpp's own reference run."""

    source: str
    generated_token_ids_le64_sha256: Sha256
    final_logits_le32_sha256: Sha256 | None


class Plan(Data):
    """How it was measured. n_decode: tokens decoded in each timed run; the reference run has all of the scenario's.

    residency: whether all programs were loaded at the same time, or each was loaded for its turn; because: which
    measurement decided that.
    """

    n_repetitions: int
    n_decode: int
    warm_up_s: float
    residency: Residency
    because: str
    prefill: list[PrefillMode]


class BenchVersions(Versions):
    """The software; cuda_runtime as CuPy loaded it, cuda_driver as the driver states it."""

    cuda_runtime: str | None = None
    cuda_driver: str | None = None


class BenchRecord(Data):
    """One run of one scenario; digests holds a digest of every object in it, so that an edit is found and placed."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    kind: Literal["bench"] = "bench"
    run_id: str
    time_utc: AwareDatetime
    scenario: str
    scenario_version: Sha256
    backend: str
    prompt_token_ids: list[int]
    prompt_token_ids_le64_sha256: Sha256
    n_predict: int
    n_ctx: int
    plan: Plan
    versions: BenchVersions
    machine: Machine
    model: ModelIdentity
    resident_weights_n_bytes: int
    read_ceiling_gb_per_s: float | None
    not_measured: dict[str, str]
    expected: Expected | None
    subjects: list[SubjectRecord]
    figures: list[Figure] = Field(default_factory=list)
    comparisons: list[BenchComparison] = Field(default_factory=list)
    digests: dict[str, str] = Field(default_factory=dict)


def digests_of(values: dict[str, Any]) -> dict[str, str]:
    """Return a short SHA256 of each object in a record's JSON, by its path; of its own values, not of objects in it."""
    return {path: _digest(own) for path, own in _objects("record", values) if not path.startswith("record.digests")}


def machine_slug(machine: Machine) -> str:
    """Return the name of a machine's folder: its GPU or processor, and a digest that tells apart what differs."""
    name = machine.gpu.name if machine.gpu else f"{machine.cpu} {machine.n_cores} cores"
    readable = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")
    return f"{readable}-{_digest(machine.model_dump(mode='json'))[:6]}"


def bench_path(folder: Path, record: BenchRecord) -> Path:
    """Return where a record lies below `folder`: no two runs share a file."""
    return folder / machine_slug(record.machine) / record.scenario / f"{record.backend}-{record.run_id}.json"


def write_bench_record(record: BenchRecord, folder: Path) -> Path:
    """Seal and write `record` and the file of its machine; return the record's path. Raises RecordError."""
    path = bench_path(folder, record)
    return write_sealed(record.model_dump(mode="json"), record.machine, folder, path.parent.name, path.stem)


def write_sealed(values: dict[str, Any], machine: Machine, folder: Path, group: str, name: str) -> Path:
    """Write MACHINE/group/name.json below `folder`, with digests, and the machine's own file; raises RecordError."""
    values = values | {"digests": digests_of(values)}
    machine_folder = folder / machine_slug(machine)
    write_whole(machine_folder / MACHINE_FILE, machine.model_dump(mode="json"), values["run_id"])
    path = machine_folder / group / f"{name}.json"
    write_whole(path, values, values["run_id"])
    return path


def broken_seals(data: dict[str, Any]) -> Iterator[str]:
    """Yield every object of a record whose values are not those that were sealed."""
    given, found = data.get("digests"), digests_of(data)
    if not isinstance(given, dict):
        yield "record.digests: missing"
        return
    for place in sorted(given.keys() | found.keys()):
        if place not in found:
            yield f"{place}: is sealed but not in the row"
        elif given.get(place) != found[place]:
            yield f"{place}: one of its values ({', '.join(_own_keys(data, place))}) or its seal was changed"


def read_bench_record(path: Path) -> BenchRecord:
    """Read one record; raise RecordError naming the file, the key and what is wrong with it."""
    return parse_bench_record(path, load_json(path))


def parse_bench_record(path: Path, data: Any) -> BenchRecord:
    """Check the content of a record's file; raise RecordError. Another schema version is incomparable, not read."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(f"{path}: schema_version is {version!r}, not comparable with {SCHEMA_VERSION}")
    try:
        return BenchRecord.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        raise RecordError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def load_json(path: Path) -> Any:
    """Return the JSON of a file; raise RecordError."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: not a record: {error}") from None


def _objects(path: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object below `value` with its path, and its own values without the objects in it."""
    if isinstance(value, dict):
        yield path, {key: item for key, item in value.items() if not _holds_objects(item)}
        for key, item in value.items():
            yield from _objects(f"{path}.{key}", item)
    elif isinstance(value, list) and _holds_objects(value):
        for index, item in enumerate(value):
            yield from _objects(f"{path}[{index}]", item)


def _holds_objects(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def _own_keys(data: Any, place: str) -> list[str]:
    """Return the keys of the values that the digest of `place` covers."""
    for part in place.replace("[", ".[").split(".")[1:]:
        data = data[int(part[1:-1])] if part.startswith("[") else data[part]
    return sorted(key for key, value in data.items() if not _holds_objects(value))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_N_DIGEST]
