"""Run scenarios: llama.cpp, our engine on each backend, the negative controls; check, and write the records."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from baselines.llama_cpp import pin
from baselines.llama_cpp.progress import Progress
from baselines.llama_cpp.worker import WorkerRequest, WorkerResult
from conformance import checks
from conformance.checks import F32, CheckResult, Comparison, Evidence, Reference
from conformance.controls import CONTROLS
from conformance.errors import BaselineUnavailableError
from conformance.extra_subject import ExtraResult, run_extra_subject
from conformance.fixtures import ensure_model, identify
from conformance.gpu import DeviceMemoryMeter
from conformance.http_json import is_loopback
from conformance.machine import these_versions, this_machine, without_paths
from conformance.oracle import F64, Oracle
from conformance.records import Output, Record, Timings, remove_records, write_record
from conformance.scenario import CONTROL_BACKEND, BaselineFlags, ExtraSubject, OracleNmse, Scenario, ScenarioFile
from conformance.subject import (
    Measurement,
    ReportProgress,
    SubjectRequest,
    SubjectResult,
    explain,
    run_subject,
)
from engine.cuda.device import MODULE_LOADING, open_device
from engine.errors import NoDeviceError, one_line
from engine.generate import logits_le32_sha256, token_ids_le64_sha256

CONTROL_NAMES = tuple(control.name for control in CONTROLS)
RunSubject: TypeAlias = Callable[[SubjectRequest, float, ReportProgress], SubjectResult]


def baseline_name(flags: BaselineFlags) -> str:
    """Return the name of llama.cpp with `flags` in records and tables: its build and the device it runs on."""
    return f"llama.cpp-b{pin.BUILD_NUMBER}-{flags.device}"


def engine_name(backend: str) -> str:
    """Return the name of our engine on `backend` in records and tables."""
    return f"engine-{backend}"


def control_name(control: str) -> str:
    """Return the name of a negative control in records and tables."""
    return f"control-{control}"


def subject_name(subject: str) -> str:
    """Return the name of another engine, called `subject` in its scenario, in records and tables."""
    return f"subject-{subject}"


class Baseline(Protocol):
    """llama.cpp as the runner sees it."""

    @property
    def build_number(self) -> int: ...  # noqa: D102
    @property
    def compiler(self) -> str: ...  # noqa: D102
    def run(self, request: WorkerRequest) -> WorkerResult: ...  # noqa: D102


OpenBaseline: TypeAlias = Callable[[str], Baseline]
"""Gives llama.cpp on a device, "cpu" or "cuda"; raises BaselineUnavailableError where it cannot run there."""


@dataclass(frozen=True)
class BaselineRun:
    """llama.cpp's run of a scenario with the prompt in one batch, and its record; result is None if it went wrong.

    llama is None, too, where this machine cannot run it.
    """

    record: Record
    result: WorkerResult | None
    llama: Baseline | None


@dataclass
class Runner:
    """Runs scenarios one after the other; the only state is what later scenarios may reuse.

    out: folder of the records. backends: those asked for; the others are recorded as not measured, but for the one
    that the controls, given by their names, are compared with. extra: the other engines asked for, by their names in
    the scenario, with an address in place of the scenario's own or None.
    """

    open_baseline: OpenBaseline
    out: Path
    progress: Progress
    backends: Sequence[str] = ("numpy",)
    cache: Path | None = None
    subject: RunSubject = run_subject
    controls: Sequence[str] = CONTROL_NAMES
    extra: Mapping[str, str | None] = field(default_factory=dict)
    _models: dict[str, Path] = field(default_factory=dict)
    _oracle: tuple[tuple[str, tuple[int, ...]], F64] | None = None
    _hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    _run_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def run(self, files: Sequence[ScenarioFile]) -> list[Record]:
        """Run every scenario, write its records, and return them all; raises FixtureError and RecordError."""
        return list(self.records(files))

    def records(self, files: Sequence[ScenarioFile]) -> Iterator[Record]:
        """Run every scenario; yield each record once it is made, and written: what comes later may fail.

        Raises FixtureError, and RecordError where a record cannot be written: it has been yielded then.
        """
        remove_records(self.out, [file.scenario.name for file in files])
        for file in files:
            for record in self._run_scenario(file):
                yield record
                write_record(record, self.out)

    def _run_scenario(self, file: ScenarioFile) -> Iterator[Record]:
        wanted = file.scenario.backends_to_run(self.backends, self.controls)
        llama = self._open_baseline(file.scenario, wanted)
        if isinstance(llama, str) and not any(why_unavailable(backend) is None for backend in wanted):
            return self._run_nothing(file, wanted, llama)  # and make no model
        return self._run_engines(file, wanted, llama)

    def _open_baseline(self, scenario: Scenario, wanted: Sequence[str]) -> Baseline | str:
        """Return llama.cpp on the scenario's device, or why there is none."""
        if not wanted:
            return f"no backend of this scenario was asked for: add --backend {' or '.join(scenario.backends)}"
        try:
            return self.open_baseline(scenario.baseline.device)
        except BaselineUnavailableError as error:
            return str(error)

    def _run_nothing(self, file: ScenarioFile, wanted: Sequence[str], why_no_baseline: str) -> Iterator[Record]:
        yield self._unmeasured_baseline(file, why_no_baseline).record
        for backend in file.scenario.backends:
            yield self._unmeasured_engine(file, backend)
        why = "neither llama.cpp nor our engine can run this scenario here" if wanted else why_no_baseline
        for spec in file.scenario.subjects:
            yield self._unmeasured_subject(file, spec, why)

    def _run_engines(self, file: ScenarioFile, wanted: Sequence[str], llama: Baseline | str) -> Iterator[Record]:
        sha256 = file.scenario.model.sha256
        if sha256 not in self._models:
            self._models[sha256] = ensure_model(file, self.cache, self.progress)
        baseline = self._unmeasured_baseline(file, llama) if isinstance(llama, str) else self._run_baseline(file, llama)
        yield baseline.record
        engines: dict[str, Record] = {}
        for backend in file.scenario.backends:
            is_wanted = backend in wanted
            engines[backend] = (
                self._run_engine(file, backend, baseline) if is_wanted else self._unmeasured_engine(file, backend)
            )
            yield engines[backend]
        for name in self.controls if file.scenario.controls else ():
            yield self._run_control(file, name, baseline, engines[CONTROL_BACKEND])
        for spec in file.scenario.subjects:
            yield self._run_subject(file, spec, baseline)

    def _unmeasured_baseline(self, file: ScenarioFile, why: str) -> BaselineRun:
        name = baseline_name(file.scenario.baseline)
        return BaselineRun(self._record(file, name, "baseline", "not_measured", reason=why), None, None)

    def _unmeasured_engine(self, file: ScenarioFile, backend: str) -> Record:
        """Say why a backend was not measured; first of all, whether it could have been."""
        why = why_unavailable(backend) or f"not asked for: add --backend {backend}"
        return self._record(file, engine_name(backend), "engine", "not_measured", reason=why)

    def _unmeasured_subject(self, file: ScenarioFile, spec: ExtraSubject, why: str) -> Record:
        why = why if spec.name in self.extra else f"not asked for: add --subject {spec.name}"
        return self._record(file, subject_name(spec.name), "subject", "not_measured", reason=why)

    def _run_baseline(self, file: ScenarioFile, llama: Baseline) -> BaselineRun:
        """Run llama.cpp with the prompt in one batch, and again token by token: how far does it agree with itself?"""
        name = baseline_name(file.scenario.baseline)
        self.progress.step(f"{file.scenario.name}: {name}")
        with DeviceMemoryMeter(file.scenario.baseline.device == "cuda") as device_memory:
            batched = llama.run(self._worker_request(file))
        single = batched
        if batched.status == "ok":
            self.progress.step(f"{file.scenario.name}: {name}, prompt token by token")
            single = llama.run(replace(self._worker_request(file), prefill="single"))
        went_wrong = next((result for result in (batched, single) if result.status != "ok"), None)
        worst = went_wrong or batched
        record = self._record(
            file,
            name,
            "baseline",
            worst.status,
            reason=_why(worst, file.scenario.deadline_s),
            log_tail=went_wrong.log_tail if went_wrong else "",
            requested=batched.requested,
            effective=batched.effective,
            versions={"llama_cpp_build": llama.build_number, "llama_cpp_compiler": llama.compiler},
        )
        if batched.status != "ok":
            return BaselineRun(record, None, llama)
        update = _baseline_findings(file.scenario, batched, single)
        update["peak_device_memory_n_bytes"] = device_memory.peak_n_bytes
        return BaselineRun(record.model_copy(update=update), batched, llama)

    def _run_engine(self, file: ScenarioFile, backend: str, baseline: BaselineRun) -> Record:
        """Measure our engine on one backend and check it."""
        request = self._subject_request(file, backend)
        record, results = self._measure(file, engine_name(backend), "engine", request, baseline)
        if record.output is not None:
            hashes = self._hashes.setdefault(backend, {})
            hashes[file.scenario.name] = record.output.generated_token_ids_le64_sha256
        return record.model_copy(update={"checks": results})

    def _run_control(self, file: ScenarioFile, control: str, baseline: BaselineRun, right: Record) -> Record:
        """Run a wrong engine; it is caught by the checks that it fails and the right engine passes."""
        request = replace(self._subject_request(file, CONTROL_BACKEND), control=control)
        record, results = self._measure(file, control_name(control), "control", request, baseline)
        passed = {check.name for check in right.checks if check.passed}
        caught_by = [check.name for check in results if check.passed is False and check.name in passed]
        return record.model_copy(update={"checks": results, "caught_by": caught_by})

    def _run_subject(self, file: ScenarioFile, spec: ExtraSubject, baseline: BaselineRun) -> Record:
        """Ask another engine, if the run names it, and check its ids."""
        if spec.name not in self.extra:
            return self._unmeasured_subject(file, spec, "")
        name, url = subject_name(spec.name), self.extra[spec.name]
        self.progress.step(f"{file.scenario.name}: {name}")
        found = run_extra_subject(spec, url, file, self._models[file.scenario.model.sha256])
        record = self._record(
            file,
            name,
            "subject",
            found.status,
            reason=found.reason,
            log_tail="" if found.status == "ok" else found.log_tail,
            requested=_requested_of_subject(spec, url, file.scenario),
            effective=found.effective,
        )
        if not found.answers:
            return record
        evidence = self._ids_evidence(file, name, found, baseline)
        self._hashes.setdefault(name, {})[file.scenario.name] = token_ids_le64_sha256(evidence.token_ids)
        update = {
            "output": _ids_output(found.answers[0].token_ids),
            "comparison": evidence.comparison,
            "request_times": [answer.times for answer in found.answers],
            "checks": checks.evaluate_ids(file.scenario.checks, evidence),
        }
        return record.model_copy(update=update)

    def _ids_evidence(
        self, file: ScenarioFile, name: str, found: ExtraResult, baseline: BaselineRun
    ) -> checks.IdsEvidence:
        """Bring together what the checks on ids look at."""
        first, second = (answer.token_ids for answer in found.answers)
        result, theirs = baseline.result, baseline.record
        comparison = None
        if result is not None and result.logits is not None:
            reference = Reference(result.token_ids, result.logits, result.logits)
            comparison = checks.compare_ids(theirs.engine, first, reference, file.scenario.margin)
        missing = f"{theirs.engine}: {theirs.reason}"
        return checks.IdsEvidence(first, second, self._hashes.get(name, {}), comparison, missing)

    def _measure(
        self,
        file: ScenarioFile,
        name: str,
        role: Literal["engine", "control"],
        request: SubjectRequest,
        baseline: BaselineRun,
    ) -> tuple[Record, list[CheckResult]]:
        """Run one engine in its process, collect the evidence and apply the checks."""
        self.progress.step(f"{file.scenario.name}: {name}")
        with DeviceMemoryMeter(request.backend == "cuda") as device_memory:
            subject = self.subject(request, file.scenario.deadline_s, self.progress.update)
        found = subject.measurement
        record = self._record(
            file,
            name,
            role,
            subject.status,
            reason=subject.reason,
            log_tail=subject.log_tail,
            requested=_requested(request),
            effective=found.effective if found else {},
            versions=found.versions if found else {},
        )
        if found is None:
            return record, []
        evidence = self._evidence(file, found, baseline, request.backend)
        update = _engine_findings(found, evidence.comparison)
        update["peak_device_memory_n_bytes"] = device_memory.peak_n_bytes
        return record.model_copy(update=update), checks.evaluate(file.scenario.checks, evidence)

    def _evidence(self, file: ScenarioFile, found: Measurement, baseline: BaselineRun, backend: str) -> Evidence:
        """Bring together what the checks look at: llama.cpp's logits after the same ids, and the oracle's."""
        evidence = Evidence(found, self._hashes.get(backend, {}))
        free, llama, name = baseline.result, baseline.llama, baseline.record.engine
        if llama is None or free is None or free.logits is None:
            return replace(evidence, missing=f"{name}: {baseline.record.reason}")
        if free.logits.shape[1] != found.logits.shape[1]:
            sizes = f"{free.logits.shape[1]} tokens in the vocabulary, the engine has {found.logits.shape[1]}"
            return replace(evidence, missing=f"{name} has {sizes}")
        forced = free
        if found.token_ids != free.token_ids:
            self.progress.step(f"{file.scenario.name}: {name}, fed the engine's tokens")
            forced = llama.run(replace(self._worker_request(file), force_ids=found.token_ids))
        if forced.logits is None:
            return replace(
                evidence, missing=f"{name}, fed the engine's tokens: {_why(forced, file.scenario.deadline_s)}"
            )
        reference = Reference(free.token_ids, free.logits, forced.logits)
        return replace(
            evidence,
            reference=reference,
            comparison=checks.compare(name, found.token_ids, found.logits, reference, file.scenario.margin),
            oracle=self._oracle_logits(file, found.token_ids),
        )

    def _oracle_logits(self, file: ScenarioFile, ids: Sequence[int]) -> F64 | None:
        """Return the oracle's logits behind each of `ids`, or None if no check asks; the last answer is kept."""
        scenario = file.scenario
        if not any(isinstance(check, OracleNmse) for check in scenario.checks):
            return None
        sequence = (*scenario.prompt_token_ids, *ids[:-1])
        key = (scenario.model.sha256, sequence)
        if self._oracle is None or self._oracle[0] != key:
            self.progress.step(f"{scenario.name}: float64 oracle")
            positions = range(len(scenario.prompt_token_ids) - 1, len(sequence))
            self._oracle = key, Oracle(self._models[scenario.model.sha256]).logits(sequence, positions)
        return self._oracle[1]

    def _worker_request(self, file: ScenarioFile) -> WorkerRequest:
        return worker_request(file.scenario, self._models[file.scenario.model.sha256])

    def _subject_request(self, file: ScenarioFile, backend: str) -> SubjectRequest:
        return subject_request(file.scenario, self._models[file.scenario.model.sha256], backend)

    def _record(
        self,
        file: ScenarioFile,
        name: str,
        role: Literal["engine", "baseline", "control", "subject"],
        status: str,
        *,
        reason: str | None,
        log_tail: str = "",
        requested: dict[str, Any] | None = None,
        effective: dict[str, Any] | None = None,
        versions: dict[str, Any] | None = None,
    ) -> Record:
        """Return a record without findings; absolute paths are cut out of everything that others wrote."""
        model = self._models.get(file.scenario.model.sha256)
        values = {
            "run_id": self._run_id,
            "time_utc": datetime.now(timezone.utc),
            "scenario": file.scenario.name,
            "scenario_version": file.version,
            "engine": name,
            "role": role,
            "status": status,
            "reason": without_paths(reason),
            "log_tail": without_paths(log_tail.splitlines()),
            "requested": without_paths(requested or {}),
            "effective": without_paths(effective or {}),
            "versions": these_versions(**(versions or {})),
            "machine": this_machine(),
            "model": identify(model, file.scenario.model) if model else None,
        }
        return Record(**values)


def worker_request(scenario: Scenario, model: Path) -> WorkerRequest:
    """Return what a scenario asks of llama.cpp, with the prompt in one batch."""
    flags = scenario.baseline
    return WorkerRequest(
        model=model,
        prompt_ids=scenario.prompt_token_ids,
        n_predict=scenario.n_predict,
        n_ctx=scenario.n_ctx,
        n_threads=flags.threads,
        n_gpu_layers=flags.n_gpu_layers,
        override_tensor=flags.override_tensor,
        split_mode=flags.split_mode,
        flash_attn=flags.flash_attn,
        type_k=scenario.type_k,
        type_v=scenario.type_v,
        n_batch=flags.batch_size,
        n_ubatch=flags.ubatch_size,
        repack=flags.repack,
        deadline_s=scenario.deadline_s,
    )


def subject_request(scenario: Scenario, model: Path, backend: str) -> SubjectRequest:
    """Return what a scenario asks of our engine on a backend."""
    return SubjectRequest(
        model=model,
        backend=backend,
        prompt_ids=scenario.prompt_token_ids,
        n_predict=scenario.n_predict,
        n_ctx=scenario.n_ctx,
        n_threads=scenario.n_threads,
        prefill=scenario.prefill,
        vram_budget_n_bytes=scenario.vram_budget_n_bytes if backend == "cuda" else None,
    )


def _why(result: WorkerResult, deadline_s: float) -> str | None:
    """Return one line that says why llama.cpp's run did not end well, None if it did."""
    if result.problem is not None:
        return one_line(result.problem)
    return explain(result.status, result.exit_code, result.log_tail, deadline_s)


def _engine_findings(found: Measurement, comparison: Comparison | None) -> dict[str, Any]:
    """Return the parts of our engine's record that come from its process."""
    return {
        "output": _output(found.token_ids, found.logits),
        "comparison": comparison,
        "timings": Timings(
            load_time_ns=found.load_time_ns,
            prefill_time_ns=found.prefill_time_ns,
            decode_time_ns=found.decode_time_ns,
            prepare_time_ns=found.prepare_time_ns,
        ),
        "peak_memory_n_bytes": found.peak_memory_n_bytes,
    }


def _baseline_findings(scenario: Scenario, batched: WorkerResult, single: WorkerResult) -> dict[str, Any]:
    """Return the parts of llama.cpp's record that come from its logits."""
    assert batched.logits is not None
    return {
        "output": _output(batched.token_ids, batched.logits),
        "comparison": _self_comparison(scenario, batched, single),
        "checks": checks.evaluate_baseline(scenario, batched.logits, batched.top2_gap, batched.effective),
        "timings": Timings(
            load_time_ns=batched.load_time_ns,
            prefill_time_ns=batched.prefill_time_ns,
            decode_time_ns=batched.decode_time_ns,
        ),
    }


def _self_comparison(scenario: Scenario, batched: WorkerResult, single: WorkerResult) -> Comparison | None:
    """Compare llama.cpp with itself: the noise that a margin must cover."""
    if batched.logits is None or single.logits is None:
        return None
    pairs = zip(batched.token_ids, single.token_ids, strict=True)
    n_rows = next((i + 1 for i, (a, b) in enumerate(pairs) if a != b), len(batched.token_ids))
    other = Reference(single.token_ids, single.logits, single.logits[:n_rows])
    name = f"{baseline_name(scenario.baseline)}, prompt token by token"
    return checks.compare(name, batched.token_ids, batched.logits, other, scenario.margin)


def _output(token_ids: list[int], logits: F32) -> Output:
    gaps = checks.top2_gap(logits)
    position = int(np.argmin(gaps))
    return Output(
        generated_token_ids=token_ids,
        generated_token_ids_le64_sha256=token_ids_le64_sha256(token_ids),
        final_logits_le32_sha256=logits_le32_sha256(logits[0]),
        final_greedy_token_id=int(np.argmax(logits[0])),
        smallest_top2_gap=float(gaps[position]) if np.isfinite(gaps[position]) else None,
        smallest_top2_gap_position=position,
        top2_gaps=gaps.tolist() if np.isfinite(gaps).all() else None,
    )


def _ids_output(token_ids: list[int]) -> Output:
    """Return the output of an engine that gives no logits."""
    return Output(
        generated_token_ids=token_ids,
        generated_token_ids_le64_sha256=token_ids_le64_sha256(token_ids),
        final_logits_le32_sha256=None,
        final_greedy_token_id=token_ids[0],
        smallest_top2_gap=None,
        smallest_top2_gap_position=None,
    )


def _requested_of_subject(spec: ExtraSubject, url: str | None, scenario: Scenario) -> dict[str, Any]:
    """Describe a request to another engine for the record, which names no hosts."""
    address = url or spec.url
    return {
        "api": spec.api,
        "command": None if spec.command is None else list(spec.command),
        "server": None if address is None else "this machine" if is_loopback(address) else "another machine",
        "n_prompt": len(scenario.prompt_token_ids),
        "n_predict": scenario.n_predict,
        "n_ctx": scenario.n_ctx,
    }


def why_unavailable(backend: str) -> str | None:
    """Say why this machine cannot run a backend, None if it can."""
    if backend == "cuda":
        set_before = os.environ.get(MODULE_LOADING)
        try:
            open_device()
        except NoDeviceError as error:
            return str(error)
        finally:  # how our kernels are loaded is no setting for llama.cpp, which inherits this environment
            if set_before is None:
                os.environ.pop(MODULE_LOADING, None)
    return None


def _requested(request: SubjectRequest) -> dict[str, Any]:
    """Describe a request to our engine for the record."""
    return {
        "backend": request.backend,
        "control": request.control,
        "n_prompt": len(request.prompt_ids),
        "n_predict": request.n_predict,
        "n_ctx": request.n_ctx,
        "n_threads": request.n_threads,
        "vram_budget_n_bytes": request.vram_budget_n_bytes,
        "prefill": list(request.prefill),
    }
