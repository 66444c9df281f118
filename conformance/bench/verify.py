"""Check published rows from nothing but themselves: offline, without a GPU, without the engines that made them.

A bench record is sealed by digests and holds what was measured beside what follows from it: both are computed anew. A
conformance record is checked for what its parts say of each other, and against the scenario, if this checkout has that
version of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.bench.ablation import verify_ablation
from conformance.bench.derive import derive
from conformance.bench.ops import verify_ops
from conformance.bench.records import (
    MACHINE_FILE,
    BenchRecord,
    Run,
    broken_seals,
    load_json,
    machine_slug,
    parse_bench_record,
)
from conformance.checks import CheckResult
from conformance.errors import RecordError
from conformance.facts import FACTS_FOLDER, page_findings, verify_facts
from conformance.models.pydoc.figures import FIGURES_FOLDER, verify_figures
from conformance.records import Record, read_record
from conformance.scenario import (
    FinalGreedyTokenId,
    FinalLogitsHash,
    GeneratedTokenIdsHash,
    Scenario,
    all_scenarios,
)
from engine.generate import token_ids_le64_sha256

PUBLISHED_FOLDER = Path("results")
_NO_ROWS = ("schema", "hostile")
_TOLERANCE = 1e-12
_PASSES: dict[str, Callable[[Any, Any], bool]] = {
    "finite": lambda value, limit: value == limit,
    "settings_honoured": lambda value, limit: value == limit,
    "final_logits_bitwise_equal": lambda value, limit: value == limit,
    "final_logits_le32_sha256": lambda value, limit: value == limit,
    "final_greedy_token_id": lambda value, limit: value == limit,
    "generated_token_ids_le64_sha256": lambda value, limit: value == limit,
    "generated_token_ids_equal": lambda value, limit: value == limit,
    "same_hash_at_both_n_ctx": lambda value, limit: value == limit,
    "second_run_token_ids_equal": lambda value, limit: value == limit,
    "lowest_id_on_tie": lambda value, limit: value == limit,
    "smallest_top2_gap": lambda value, limit: value >= limit,
    "oracle_nmse": lambda value, limit: value <= limit,
}
"""What passes each check, given what was found and what is allowed."""


def verify_paths(paths: Sequence[Path]) -> tuple[list[str], int]:
    """Verify records and every record below folders; return the findings, one line each, and how many rows there are.

    Of a folder with files of facts the page beside it that cites them is verified, too. Raises RecordError for a path
    that does not exist.
    """
    scenarios = {file.version: file.scenario for file in all_scenarios()}
    rows = [row for path in paths for row in _rows(path)]
    pages = [text for path in paths if (path / FACTS_FOLDER).is_dir() for text in page_findings(path.parent)]
    return [*(f"{row}: {text}" for row in rows for text in verify_row(row, scenarios)), *pages], len(rows)


def verify_row(path: Path, scenarios: dict[str, Scenario]) -> Iterator[str]:
    """Yield what is wrong with one record's file; scenarios: those of this checkout, by version."""
    try:
        data = load_json(path)
        if path.parent.name == FACTS_FOLDER:
            yield from verify_facts(data)
        elif path.parent.name == FIGURES_FOLDER:
            yield from verify_figures(data)
        elif isinstance(data, dict) and data.get("kind") == "bench":
            yield from verify_bench(path, data, scenarios)
        elif isinstance(data, dict) and data.get("kind") == "ops":
            yield from verify_ops(data)
        elif isinstance(data, dict) and data.get("kind") == "ablation":
            yield from verify_ablation(data)
        else:
            yield from verify_record(read_record(path), scenarios)
    except RecordError as error:
        yield str(error).removeprefix(f"{path}: ")


def verify_bench(path: Path, data: dict[str, Any], scenarios: dict[str, Scenario]) -> Iterator[str]:
    """Yield what is wrong with a bench record; raises RecordError when it does not follow the schema."""
    yield from broken_seals(data)
    record = parse_bench_record(path, data)
    yield from _place(path, record)
    yield from _bench_tokens(record)
    yield from _bench_runs(record)
    derived = derive(record).model_dump(mode="json")
    for key in ("figures", "comparisons"):
        yield from _differences(f"record.{key}", data[key], derived[key])
    scenario = scenarios.get(record.scenario_version)
    if scenario is not None:
        yield from _bench_scenario(record, scenario)


def verify_record(record: Record, scenarios: dict[str, Scenario]) -> Iterator[str]:
    """Yield what the parts of a conformance record say otherwise than each other or than the scenario."""
    if record.output is not None:
        yield from _output(record)
    for check in record.checks:
        yield from _check(check)
    failed = [check.name for check in record.checks if check.passed is False]
    if record.caught_by is not None and not set(record.caught_by) <= set(failed):
        yield f"caught_by names {min(set(record.caught_by) - set(failed))}, which did not fail"
    scenario = scenarios.get(record.scenario_version)
    if scenario is not None:
        yield from _record_scenario(record, scenario)


def _rows(path: Path) -> list[Path]:
    """Return the records at `path`: itself, or those below it; schemas and verdicts on files are none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise RecordError(f"{path}: no such file or folder")
    found = sorted(path.rglob("*.json"))
    return [p for p in found if p.name != MACHINE_FILE and p.relative_to(path).parts[0] not in (*_NO_ROWS, "local")]


def _place(path: Path, record: BenchRecord) -> Iterator[str]:
    """Yield where the file's name or its machine's file says something else than the row."""
    if path.stem != f"{record.backend}-{record.run_id}":
        yield f"record.run_id: {record.run_id} with backend {record.backend}, the file is named {path.name}"
    machine = path.parents[1] / MACHINE_FILE
    if machine.is_file():
        if load_json(machine) != record.machine.model_dump(mode="json"):
            yield f"record.machine: is another one than in {MACHINE_FILE}"
        if path.parents[1].name != machine_slug(record.machine):
            yield f"record.machine: belongs into the folder {machine_slug(record.machine)}"


def _bench_tokens(record: BenchRecord) -> Iterator[str]:
    digest = token_ids_le64_sha256(record.prompt_token_ids)
    if record.prompt_token_ids_le64_sha256 != digest:
        yield f"record.prompt_token_ids_le64_sha256: {record.prompt_token_ids_le64_sha256}, of the ids it is {digest}"
    for index, subject in enumerate(record.subjects):
        whole = next((run for run in subject.runs if run.round == 0), None)
        given = whole.generated_token_ids_le64_sha256 if whole else None
        if given is not None and given != token_ids_le64_sha256(subject.token_ids):
            yield f"record.subjects[{index}].token_ids: do not have the hash of the reference run, {given}"


def _bench_runs(record: BenchRecord) -> Iterator[str]:
    """Yield runs that do not fit the plan: an order used twice, a round missing, times that are not one per token."""
    orders = sorted(run.order for subject in record.subjects for run in subject.runs)
    if orders != list(range(len(orders))):
        yield "record.subjects: the order of the runs has gaps or repeats"
    for index, subject in enumerate(record.subjects):
        for place, run in enumerate(subject.runs):
            where = f"record.subjects[{index}].runs[{place}]"
            if run.round > record.plan.n_repetitions:
                yield f"{where}.round: {run.round} of {record.plan.n_repetitions}"
            if len(run.decode_time_ns) not in (0, 1, run.n_decoded):
                yield f"{where}.decode_time_ns: {len(run.decode_time_ns)} times for {run.n_decoded} tokens"
            if _is_too_early(run):
                yield f"{where}.client_first_token_time_ns: before the program itself had its first token"
            n_decoded = record.plan.n_decode if run.prefill == "layer_major" else 0
            if run.round and run.error is None and run.n_decoded != n_decoded:
                yield f"{where}.n_decoded: {run.n_decoded}, planned {n_decoded}"


def _is_too_early(run: Run) -> bool:
    """Say whether a client had the first id before the program that generated it."""
    by_client, by_program = run.client_first_token_time_ns, run.first_token_time_ns
    return by_client is not None and by_program is not None and by_client < by_program


def _bench_scenario(record: BenchRecord, scenario: Scenario) -> Iterator[str]:
    """Yield what differs from the scenario whose version the row names."""
    golden = {type(check): check.expected for check in scenario.checks if hasattr(check, "expected")}
    expected = record.expected
    pairs = {
        "scenario": (record.scenario, scenario.name),
        "prompt_token_ids": (tuple(record.prompt_token_ids), scenario.prompt_token_ids),
        "n_predict": (record.n_predict, scenario.n_predict),
        "n_ctx": (record.n_ctx, scenario.n_ctx),
        "model.sha256": (record.model.sha256, scenario.model.sha256),
        "expected.generated_token_ids_le64_sha256": (
            expected and expected.generated_token_ids_le64_sha256,
            golden.get(GeneratedTokenIdsHash),
        ),
        "expected.final_logits_le32_sha256": (
            expected and expected.final_logits_le32_sha256,
            golden.get(FinalLogitsHash),
        ),
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            yield f"record.{name}: not that of the scenario {scenario.name}"


def _differences(place: str, given: Any, computed: Any) -> Iterator[str]:
    """Yield every value that is not what follows from the samples."""
    if isinstance(given, dict) and isinstance(computed, dict):
        for key in sorted(given.keys() | computed.keys()):
            yield from _differences(f"{place}.{key}", given.get(key), computed.get(key))
    elif isinstance(given, list) and isinstance(computed, list) and len(given) == len(computed):
        for index, (one, other) in enumerate(zip(given, computed, strict=True)):
            yield from _differences(f"{place}[{index}]", one, other)
    elif not _same(given, computed):
        yield f"{place}: {json.dumps(given)} in the row, {json.dumps(computed)} from its samples"


def _same(given: Any, computed: Any) -> bool:
    if isinstance(given, float) and isinstance(computed, float):
        return math.isclose(given, computed, rel_tol=_TOLERANCE)
    return type(given) is type(computed) and bool(given == computed)


def _output(record: Record) -> Iterator[str]:
    """Yield what the ids, their hash and the checks on them say otherwise than each other."""
    output = record.output
    assert output is not None
    ids = output.generated_token_ids
    digest = token_ids_le64_sha256(ids)
    if output.generated_token_ids_le64_sha256 != digest:
        yield f"output.generated_token_ids: have the hash {digest}, {output.generated_token_ids_le64_sha256} is given"
    if ids and output.final_greedy_token_id != ids[0]:
        yield f"output.final_greedy_token_id: {output.final_greedy_token_id}, the first generated id is {ids[0]}"
    position = output.smallest_top2_gap_position
    if (record.role == "subject") != (position is None) or (position is not None and not 0 <= position < len(ids)):
        yield f"output.smallest_top2_gap_position: {position} of {len(ids)} ids"
    gaps = output.top2_gaps
    if gaps is not None and (len(gaps) != len(ids) or min(gaps) != output.smallest_top2_gap):
        yield f"output.top2_gaps: {len(gaps)} of {len(ids)} ids, smallest {min(gaps, default=None)}"
    values = {
        "final_logits_le32_sha256": output.final_logits_le32_sha256,
        "final_greedy_token_id": output.final_greedy_token_id,
        "generated_token_ids_le64_sha256": digest,
        "generated_token_ids_equal": record.comparison.n_equal if record.comparison else None,
        "same_hash_at_both_n_ctx": digest,
    }
    for check in record.checks:
        kind = check.name.split()[0]
        if kind in values and check.passed is not None and check.value != values[kind]:
            yield f"checks, {check.name}: value is {check.value}, of the output it is {values[kind]}"
    yield from _comparison(record, len(ids))


def _comparison(record: Record, n_ids: int) -> Iterator[str]:
    if record.comparison is None:
        return
    first = record.comparison.first_difference
    n_equal = n_ids if first is None else first.position
    if record.comparison.n_equal != n_equal:
        yield f"comparison.n_equal: {record.comparison.n_equal}, by first_difference it is {n_equal}"


def _check(check: CheckResult) -> Iterator[str]:
    if check.passed is None or check.value is None:
        return
    passes = _PASSES[check.name.split()[0]](check.value, check.limit)
    if check.passed != passes:
        yield f"checks, {check.name}: passed is {check.passed}, {check.value} against {check.limit} is {passes}"


def _record_scenario(record: Record, scenario: Scenario) -> Iterator[str]:
    """Yield what differs from the scenario whose version the record names."""
    if record.scenario != scenario.name:
        yield f"scenario: {record.scenario}, the version is that of {scenario.name}"
    if record.model is not None and record.model.sha256 != scenario.model.sha256:
        yield "model.sha256: not that of the scenario"
    if record.output is not None and len(record.output.generated_token_ids) != scenario.n_predict:
        yield f"output.generated_token_ids: {len(record.output.generated_token_ids)}, expected {scenario.n_predict}"
    golden = {
        check.label: check.expected
        for check in scenario.checks
        if isinstance(check, (FinalLogitsHash, FinalGreedyTokenId, GeneratedTokenIdsHash))
    }
    for check in record.checks:
        if check.name in golden and check.limit != golden[check.name]:
            yield f"checks, {check.name}: limit is {check.limit}, the scenario has {golden[check.name]}"
