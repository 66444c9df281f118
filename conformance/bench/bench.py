"""Measure one scenario: every program in turn, forwards and backwards, and make the record of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from baselines.errors import BaselineError
from conformance.bench.derive import derive
from conformance.bench.records import (
    BenchRecord,
    BenchVersions,
    ColdStart,
    Expected,
    Memory,
    Plan,
    Residency,
    Run,
    SubjectRecord,
)
from conformance.bench.subjects import Cold, EngineRunError, Subject
from conformance.bench.telemetry import Sensor, Watch
from conformance.fixtures import identify
from conformance.gpu import free_memory_n_bytes
from conformance.machine import these_versions, this_machine, without_paths
from conformance.scenario import FinalLogitsHash, GeneratedTokenIdsHash, Scenario, ScenarioFile
from engine.errors import one_line
from engine.generate import PrefillMode, token_ids_le64_sha256
from engine.gguf.reader import open_model
from engine.model.config import ModelConfig
from engine.placement import plan_memory

_MODEL_ROOM = 1.15
"""Memory that one program takes for a model, over the size of its file: buffers, state, graphs."""
_PROGRAM_N_BYTES = 1 << 30
"""And what it takes besides: a CUDA context, libraries, the interpreter."""
_WARM_N_PREDICT = 9
_MODES: tuple[PrefillMode, ...] = ("layer_major", "token_major")


@dataclass(frozen=True)
class BenchOptions:
    """n_decode: tokens decoded in each timed run. warm_up_s: how long each program runs before anything is timed."""

    n_repetitions: int
    n_decode: int
    warm_up_s: float


@dataclass
class _Measured:
    """What has been found of one subject so far."""

    subject: Subject
    cold: ColdStart | None = None
    described: dict[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    warm_up_time_ns: int = 0
    n_starts: int = 0
    gone: str | None = None
    peak_n_bytes: int | None = None
    device_before_n_bytes: int | None = None
    device_steady_n_bytes: int | None = None


class Bench:
    """Measures one scenario; `run` gives its record. The state is that of the run in progress.

    tell: gets a line on what is being done; advance: is called after each of the `n_runs` runs. not_measured: what
    this machine does not say of itself, and why.
    """

    def __init__(
        self,
        file: ScenarioFile,
        model: Path,
        backend: str,
        subjects: Sequence[Subject],
        options: BenchOptions,
        tell: Callable[[str], None],
        advance: Callable[[], None],
        sensor: Sensor | None,
        not_measured: dict[str, str],
        read_ceiling_gb_per_s: float | None,
    ) -> None:
        self._file, self._model, self._backend = file, model, backend
        self._options, self._tell_all, self._advance, self._sensor = options, tell, advance, sensor
        self._not_measured, self._ceiling = not_measured, read_ceiling_gb_per_s
        self._measured = [_Measured(subject) for subject in subjects]
        self._order = 0
        self._residency, self._because = choose_residency(backend, model.stat().st_size, len(subjects))

    def run(self) -> BenchRecord:
        """Measure everything; raises BaselineError if our engine cannot be started at all.

        Whatever happens, KeyboardInterrupt included, no program is left running.
        """
        try:
            for one in self._measured:
                self._first_run(one)
            for number in range(1, self._options.n_repetitions + 1):
                for mode in _MODES:
                    for one in turn(self._measured, number):
                        if mode in one.subject.prefill:
                            self._timed_run(one, number, mode)
            for one in self._measured:
                self._finish(one)
        finally:
            for one in self._measured:
                one.subject.close()
        return derive(self._record())

    def _first_run(self, one: _Measured) -> None:
        """Start a program, cold; generate all of the scenario once, for its tokens; warm up."""
        self._tell(one, "first run")
        one.device_before_n_bytes = self._device_n_bytes()
        try:
            cold = one.subject.open()
        except BaselineError as error:
            if one.subject.role == "engine":
                raise
            one.gone = str(error)
            self._run(one, 0, "layer_major", 0)
            return
        one.n_starts += 1
        start = time.monotonic_ns()
        answer = self._run(one, 0, "layer_major", self._file.scenario.n_predict)
        if answer is not None:
            one.token_ids = answer["token_ids"]
            one.described = one.subject.describe()
        one.cold = _cold_start(cold, one.runs[-1])
        self._warm_up(one, start)
        self._note_memory(one)
        if self._residency == "alternating":
            self._unload(one)

    def _warm_up(self, one: _Measured, start_ns: int) -> None:
        """Generate a little in every way of prefill, until warm_up_s have passed since start_ns; no time is kept.

        A program that starts anew for each run has nothing to warm up.
        """
        n_predict = min(_WARM_N_PREDICT, self._file.scenario.n_predict)
        try:
            for mode in one.subject.prefill if one.cold is not None else ():
                one.subject.run(mode, n_predict if mode == "layer_major" else 1)
            while one.cold is not None and time.monotonic_ns() - start_ns < self._options.warm_up_s * 1e9:
                one.subject.run("layer_major", n_predict)
        except (BaselineError, EngineRunError) as error:
            one.gone = str(error)
        one.warm_up_time_ns += time.monotonic_ns() - start_ns

    def _timed_run(self, one: _Measured, number: int, mode: PrefillMode) -> None:
        self._tell(one, f"repetition {number}/{self._options.n_repetitions}")
        if self._residency == "alternating" and one.gone is None:
            try:
                one.subject.open()
            except BaselineError as error:
                one.gone = str(error)
            else:
                one.n_starts += 1
                self._warm_up(one, time.monotonic_ns())
        self._run(one, number, mode, self._options.n_decode + 1 if mode == "layer_major" else 1)
        if self._residency == "alternating":
            self._unload(one)

    def _run(self, one: _Measured, number: int, mode: PrefillMode, n_predict: int) -> dict[str, Any] | None:
        """Run once and keep the outcome; a program that is gone is not asked again, and each of its rounds says so."""
        answer, error, watch = None, one.gone, Watch(self._sensor)
        if error is None:
            try:
                with watch:
                    answer = one.subject.run(mode, n_predict)
            except (BaselineError, EngineRunError) as problem:
                error = str(problem)
        values: dict[str, Any] = {key: value for key, value in (answer or {}).items() if key != "token_ids"}
        values |= {"round": number, "order": self._order, "prefill": mode, "telemetry": watch.telemetry}
        one.runs.append(Run(**values, error=without_paths(None if error is None else one_line(error))))
        self._order += 1
        self._advance()
        return answer

    def _finish(self, one: _Measured) -> None:
        if one.described is not None and self._residency == "together":
            self._note_memory(one)

    def _unload(self, one: _Measured) -> None:
        self._note_memory(one)
        one.subject.close()

    def _note_memory(self, one: _Measured) -> None:
        found = one.subject.peak_n_bytes()
        if found is not None:
            one.peak_n_bytes = max(found, one.peak_n_bytes or 0)
        now = self._device_n_bytes()
        if one.device_steady_n_bytes is None and now is not None and one.device_before_n_bytes is not None:
            one.device_steady_n_bytes = now - one.device_before_n_bytes

    def _device_n_bytes(self) -> int | None:
        return self._sensor.sample().used_n_bytes if self._sensor else None

    def _tell(self, one: _Measured, what: str) -> None:
        self._tell_all(f"{self._file.scenario.name}, {what}, {one.subject.name}")

    def _record(self) -> BenchRecord:
        scenario = self._file.scenario
        described = [one.described for one in self._measured if one.described is not None]
        versions = {key: value for one in described for key, value in one["versions"].items()}
        if self._sensor is not None:
            versions["cuda_driver"] = self._sensor.cuda_driver
        extra = {key: versions.pop(key) for key in ("cuda_runtime", "cuda_driver") if key in versions}
        return BenchRecord(
            run_id=str(uuid.uuid4()),
            time_utc=datetime.now(timezone.utc),
            scenario=scenario.name,
            scenario_version=self._file.version,
            backend=self._backend,
            prompt_token_ids=list(scenario.prompt_token_ids),
            prompt_token_ids_le64_sha256=token_ids_le64_sha256(scenario.prompt_token_ids),
            n_predict=scenario.n_predict,
            n_ctx=scenario.n_ctx,
            plan=self._plan(),
            versions=BenchVersions(**these_versions(**versions).model_dump(), **extra),
            machine=this_machine(),
            model=identify(self._model, scenario.model),
            resident_weights_n_bytes=resident_weights_n_bytes(self._model, scenario.n_ctx),
            read_ceiling_gb_per_s=self._ceiling,
            not_measured=self._not_measured,
            expected=expected_of(scenario, self._measured),
            subjects=[_subject_record(one) for one in self._measured],
        )

    def _plan(self) -> Plan:
        options = self._options
        return Plan(
            n_repetitions=options.n_repetitions,
            n_decode=options.n_decode,
            warm_up_s=options.warm_up_s,
            residency=self._residency,
            because=self._because,
            prefill=list(_MODES),
        )


def n_runs(subjects: Sequence[Subject], options: BenchOptions) -> int:
    """Count the runs that a scenario takes, first runs included."""
    return options.n_repetitions * sum(len(subject.prefill) for subject in subjects) + len(subjects)


def turn(subjects: Sequence[Any], number: int) -> list[Any]:
    """Return the order of round `number`, from 1: A B, B A, A B, ... so that drift favours nobody.

    With more than two, each pair of rounds starts with the next one: a program in the middle of A B C, C B A never runs
    twice in a row, and on a busy machine the scheduler favours it for that (by 4 to 5 % in the self-test).
    """
    shift = (number - 1) // 2 % len(subjects) if len(subjects) > 2 else 0
    order = [*subjects[shift:], *subjects[:shift]]
    return order if number % 2 else order[::-1]


def choose_residency(backend: str, model_n_bytes: int, n_subjects: int) -> tuple[Residency, str]:
    """Say whether all programs can be loaded at the same time, from what is free now, and which figures decided it."""
    needed = (int(model_n_bytes * _MODEL_ROOM) + _PROGRAM_N_BYTES) * n_subjects
    where = "device memory" if backend == "cuda" else "memory"
    free = free_memory_n_bytes() if backend == "cuda" else int(psutil.virtual_memory().available)
    if free is None:
        return "alternating", "the GPU does not say how much of its memory is free"
    because = f"{n_subjects} programs need about {needed:,} bytes, {free:,} bytes of {where} are free"
    return ("together" if needed <= free else "alternating"), because


def expected_of(scenario: Scenario, measured: Sequence[_Measured]) -> Expected | None:
    """Return the scenario's golden hashes, or those of llama.cpp's reference run where it has none."""
    ids = next((c.expected for c in scenario.checks if isinstance(c, GeneratedTokenIdsHash)), None)
    logits = next((c.expected for c in scenario.checks if isinstance(c, FinalLogitsHash)), None)
    if ids is not None:
        return Expected(source="the scenario", generated_token_ids_le64_sha256=ids, final_logits_le32_sha256=logits)
    for one in measured:
        if one.subject.role == "baseline" and one.token_ids:
            digest = token_ids_le64_sha256(one.token_ids)
            return Expected(
                source=one.subject.name, generated_token_ids_le64_sha256=digest, final_logits_le32_sha256=None
            )
    return None


def resident_weights_n_bytes(model: Path, n_ctx: int) -> int:
    """Return the bytes of weights that every decode step reads: all but the embedding table, from the file's header."""
    file = open_model(model)
    return plan_memory(ModelConfig.from_model(file), file.tensors.values(), n_ctx).device["weights"]


def _cold_start(cold: Cold | None, first: Run) -> ColdStart | None:
    if cold is None:
        return None
    return ColdStart(
        ready_time_ns=cold.ready_time_ns,
        load_time_ns=cold.load_time_ns,
        compile_time_ns=cold.compile_time_ns,
        first_token_time_ns=first.first_token_time_ns,
    )


_NOTHING_SAID: dict[str, Any] = {
    "programs": {},
    "requested": {},
    "effective": {},
    "settings": {
        "n_ctx": None,
        "n_prompt_passes": None,
        "flash_attn": None,
        "type_k": None,
        "type_v": None,
        "layers_on_gpu": None,
        "n_threads": None,
    },
}


def _subject_record(one: _Measured) -> SubjectRecord:
    described = one.described or _NOTHING_SAID
    used = [run.telemetry for run in one.runs if run.telemetry is not None]
    steady = one.device_steady_n_bytes
    grown = max((t.used_peak_n_bytes - t.used_before_n_bytes for t in used), default=0)
    return SubjectRecord(
        name=one.subject.name,
        role=one.subject.role,
        metrics=list(one.subject.metrics),
        programs=described["programs"],
        requested=without_paths(described["requested"]),
        effective=without_paths(described["effective"]),
        settings=described["settings"],
        cold_start=one.cold,
        memory=Memory(
            peak_n_bytes=one.peak_n_bytes,
            device_steady_n_bytes=steady,
            device_peak_n_bytes=None if steady is None else steady + grown,
        ),
        warm_up_time_ns=one.warm_up_time_ns,
        n_starts=one.n_starts,
        token_ids=one.token_ids,
        runs=one.runs,
    )
