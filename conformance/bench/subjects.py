"""The programs that are measured, each as something that is opened, run once per round, and closed."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import psutil

from baselines.errors import ProcessError
from baselines.llama_cpp import pin
from baselines.llama_cpp.bench import PROGRAM as LLAMA_BENCH
from baselines.llama_cpp.bench import run_llama_bench
from baselines.llama_cpp.build import LlamaBuild, find_library
from baselines.llama_cpp.guard import scratch_folder
from baselines.llama_cpp.process import LiveProcess
from baselines.llama_cpp.server import PROGRAM as LLAMA_SERVER
from baselines.llama_cpp.server import LlamaServer
from baselines.llama_cpp.worker import WorkerRequest, WorkerSession
from conformance.bench.engine_process import READ_CEILING
from conformance.bench.records import Metric, Settings
from conformance.errors import ConformanceError
from conformance.machine import engine_source_sha256, without_paths
from conformance.runner import baseline_name, engine_name
from conformance.scenario import BaselineFlags
from conformance.subject import SubjectRequest, package_environment
from engine.generate import PrefillMode, token_ids_le64_sha256

_ENGINE_PROCESS = "conformance.bench.engine_process"
_READ_CEILING_DEADLINE_S = 120.0
_HOST_BUFFERS = ("CPU", "AMX")


class EngineRunError(ConformanceError):
    """Our engine refused one generation, and said why."""


@dataclass(frozen=True)
class Cold:
    """What opening a program said of its own start, ns; None where it does not say."""

    ready_time_ns: int
    load_time_ns: int | None = None
    compile_time_ns: int | None = None


class Subject(Protocol):
    """A program to be measured; a closed one holds no memory and may be opened again."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def role(self) -> Literal["engine", "baseline"]: ...  # noqa: D102
    @property
    def metrics(self) -> tuple[Metric, ...]: ...  # noqa: D102
    @property
    def prefill(self) -> tuple[PrefillMode, ...]: ...  # noqa: D102

    def open(self) -> Cold | None:
        """Start the program and load the model; None where each run does that by itself. Raises BaselineError."""

    def run(self, prefill: PrefillMode, n_predict: int) -> dict[str, Any]:
        """Generate once: the fields of a `Run` that were measured, and token_ids. Raises BaselineError."""

    def describe(self) -> dict[str, Any]:
        """Return programs, requested, effective, settings and versions, as they are after a run."""

    def peak_n_bytes(self) -> int | None:
        """Return the peak resident set of the program, None where it is not up."""

    def close(self) -> None:
        """End the program."""


@dataclass
class EngineSubject:
    """Our engine on one backend; slowed_by sleeps that part of each decode step's time after it (for the self-test)."""

    request: SubjectRequest
    deadline_s: float
    slowed_by: float = 0.0
    role: Literal["engine"] = "engine"
    metrics: tuple[Metric, ...] = get_args(Metric)
    prefill: tuple[PrefillMode, ...] = ("layer_major", "token_major")
    _process: LiveProcess | None = None
    _said: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in records and tables."""
        return engine_name(self.request.backend)

    def open(self) -> Cold:
        """Start the engine's process."""
        values = {**asdict(self.request), "model": str(self.request.model.absolute()), "slowed_by": self.slowed_by}
        with scratch_folder("bench") as folder:
            file = Path(folder) / "request.json"
            file.write_text(json.dumps(values))
            start_ns = time.monotonic_ns()
            self._process = LiveProcess(_engine_argv(str(file)), env=package_environment(), name=self.name)
            self._said = _said(self._process, self._process.read(self.deadline_s))
            ready_time_ns = time.monotonic_ns() - start_ns
        return Cold(ready_time_ns, self._said["load_time_ns"], self._said["compile_time_ns"])

    def run(self, prefill: PrefillMode, n_predict: int) -> dict[str, Any]:
        """Generate once; the first id comes ahead of the answer, as a server streams it."""
        assert self._process is not None
        asked = json.dumps({"prefill": prefill, "n_predict": n_predict})
        start_ns = time.perf_counter_ns()
        first = _unless_error(_said(self._process, self._process.ask(asked, self.deadline_s)))
        client_first_token_time_ns = time.perf_counter_ns() - start_ns
        answer = _unless_error(_said(self._process, self._process.read(self.deadline_s)))
        _require_first(self.name, first["first_token_id"], answer["token_ids"])
        return answer | _counts(answer["token_ids"]) | {"client_first_token_time_ns": client_first_token_time_ns}

    def describe(self) -> dict[str, Any]:
        """Return what the process said when it was ready."""
        effective = self._said["effective"]
        passes = math.ceil(len(self.request.prompt_ids) / effective["n_prompt_per_pass"])
        requested = {key: value for key, value in asdict(self.request).items() if key not in ("model", "prompt_ids")}
        return {
            "programs": {"engine_source": engine_source_sha256()},
            "requested": json.loads(json.dumps(requested)),
            "effective": effective,
            "settings": Settings(
                n_ctx=effective["n_ctx"],
                n_prompt_passes=passes,
                flash_attn=effective["flash_attn"],
                type_k=effective["type_k"],
                type_v=effective["type_v"],
                layers_on_gpu=layers_on_gpu(effective),
                n_threads=effective.get("n_threads"),
            ),
            "versions": self._said["versions"],
        }

    def peak_n_bytes(self) -> int | None:
        """Return the peak resident set of the engine's process."""
        return _peak_n_bytes(self._process.pid) if self._process else None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None


@dataclass
class WorkerSubject:
    """llama.cpp through our program on llama.h, timed around llama_decode."""

    build: LlamaBuild
    request: WorkerRequest
    flags: BaselineFlags
    role: Literal["baseline"] = "baseline"
    metrics: tuple[Metric, ...] = ("decode", "prefill_layer_major", "prefill_token_major", "first_token", "end_to_end")
    prefill: tuple[PrefillMode, ...] = ("layer_major", "token_major")
    _session: WorkerSession | None = None

    @property
    def name(self) -> str:
        """Name in records and tables."""
        return baseline_name(self.flags)

    def open(self) -> Cold:
        """Start the worker."""
        self._session = WorkerSession(self.build, self.request)
        return Cold(self._session.ready_time_ns, self._session.loaded.load_time_ns)

    def run(self, prefill: PrefillMode, n_predict: int) -> dict[str, Any]:
        """Generate once."""
        assert self._session is not None
        answer = self._session.generate("batched" if prefill == "layer_major" else "single", n_predict)
        times = ("prefill_time_ns", "first_token_time_ns", "decode_time_ns", "wall_time_ns")
        return {key: answer[key] for key in times} | _tokens(answer["token_ids"])

    def describe(self) -> dict[str, Any]:
        """Return what the worker said, and what its log states."""
        assert self._session is not None
        return _describe(self.build, self.build.worker, self._session.requested, self._session.effective, self.request)

    def peak_n_bytes(self) -> int | None:
        """Return the peak resident set of the worker."""
        return _peak_n_bytes(self._session.pid) if self._session else None

    def close(self) -> None:
        """End the worker."""
        if self._session is not None:
            self._session.close()
            self._session = None


@dataclass
class LlamaBenchSubject:
    """llama-bench, one process with one repetition of each test per round: it keeps no model loaded between them."""

    build: LlamaBuild
    request: WorkerRequest
    flags: BaselineFlags
    role: Literal["baseline"] = "baseline"
    metrics: tuple[Metric, ...] = ("decode", "prefill_layer_major")
    prefill: tuple[PrefillMode, ...] = ("layer_major",)
    _effective: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in records and tables."""
        return f"{LLAMA_BENCH}-b{pin.BUILD_NUMBER}-{self.flags.device}"

    def open(self) -> None:
        """Do nothing: every run is a process of its own."""

    def run(self, prefill: PrefillMode, n_predict: int) -> dict[str, Any]:
        """Run both tests once: the prompt's length, and n_predict - 1 generated tokens."""
        request = WorkerRequest(**{**vars(self.request), "n_predict": n_predict})
        result = run_llama_bench(self.build, request)
        self._effective = result.effective
        return {
            "prefill_time_ns": result.prompt_time_ns,
            "decode_time_ns": [result.generation_time_ns],
            "wall_time_ns": result.wall_time_ns,
            "n_decoded": n_predict - 1,
            "token_ids": [],
        }

    def describe(self) -> dict[str, Any]:
        """Return what the last run said of itself."""
        requested = {"flags": self.request.shared_flags()}
        return _describe(self.build, self.build.tool(LLAMA_BENCH), requested, self._effective, self.request)

    def peak_n_bytes(self) -> int | None:
        """Return None: no process is up between the runs."""
        return None

    def close(self) -> None:
        """Do nothing."""


@dataclass
class LlamaServerSubject:
    """llama-server end to end: /completion of token ids, by the client's clock and by the server's.

    Each run is two requests: a streamed one for the wait until the first id, and one whose ids are all checked.
    """

    build: LlamaBuild
    request: WorkerRequest
    flags: BaselineFlags
    role: Literal["baseline"] = "baseline"
    metrics: tuple[Metric, ...] = ("decode", "prefill_layer_major", "client_first_token", "end_to_end")
    prefill: tuple[PrefillMode, ...] = ("layer_major",)
    _server: LlamaServer | None = None

    @property
    def name(self) -> str:
        """Name in records and tables."""
        return f"{LLAMA_SERVER}-b{pin.BUILD_NUMBER}-{self.flags.device}"

    def open(self) -> Cold:
        """Start the server."""
        self._server = LlamaServer(self.build, self.request)
        return Cold(self._server.ready_time_ns)

    def run(self, prefill: PrefillMode, n_predict: int) -> dict[str, Any]:
        """Ask for a first id, then for one completion."""
        assert self._server is not None
        first = self._server.first_token(self.request.prompt_ids)
        completion = self._server.complete(self.request.prompt_ids, n_predict)
        if first.token_id is not None:
            _require_first(self.name, first.token_id, completion.token_ids)
        return {
            "client_first_token_time_ns": first.time_ns,
            "prefill_time_ns": completion.prompt_time_ns,
            "decode_time_ns": [completion.generation_time_ns],
            "wall_time_ns": completion.wall_time_ns,
            **_tokens(completion.token_ids),
        }

    def describe(self) -> dict[str, Any]:
        """Return what the server's log states."""
        assert self._server is not None
        requested = {"flags": self.request.shared_flags(), "switches": self.request.switches()}
        return _describe(self.build, self.build.tool(LLAMA_SERVER), requested, self._server.effective, self.request)

    def peak_n_bytes(self) -> int | None:
        """Return the peak resident set of the server."""
        return _peak_n_bytes(self._server.pid) if self._server else None

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
            self._server = None


BASELINES: dict[str, Callable[[LlamaBuild, WorkerRequest, BaselineFlags], Subject]] = {
    "llama.cpp": WorkerSubject,
    LLAMA_BENCH: LlamaBenchSubject,
    LLAMA_SERVER: LlamaServerSubject,
}
"""What engines can be compared with, by the names of `bench --baseline`."""


def measure_read_ceiling(backend: str) -> tuple[float | None, str | None]:
    """Return the device's read ceiling in GB/s, or why there is none; from a process that leaves nothing behind."""
    if backend != "cuda":
        return None, "only a GPU's is measured"
    try:
        with LiveProcess(_engine_argv(READ_CEILING), env=package_environment(), name="the read ceiling") as process:
            return float(_said(process, process.read(_READ_CEILING_DEADLINE_S))["gb_per_s"]), None
    except ProcessError as error:
        return None, without_paths(str(error))


def llama_settings(effective: dict[str, Any], request: WorkerRequest) -> Settings:
    """Return llama.cpp's settings in force, as its log states them."""
    batches = [effective.get(key) for key in ("n_batch", "n_ubatch")]
    sizes = [size for size in batches if size]
    return Settings(
        n_ctx=effective.get("n_ctx"),
        n_prompt_passes=math.ceil(len(request.prompt_ids) / min(sizes)) if len(sizes) == len(batches) else None,
        flash_attn=effective.get("flash_attn"),
        type_k=effective.get("type_k"),
        type_v=effective.get("type_v"),
        layers_on_gpu=layers_on_gpu(effective),
        n_threads=effective.get("n_threads"),
    )


def layers_on_gpu(effective: dict[str, Any]) -> str | None:
    """Return "all", "none" or "N/ALL" of what was offloaded, in a program's own words or by where its weights lie."""
    if effective.get("layers_offloaded"):
        n, n_all = effective["layers_offloaded"].split("/")
        return "none" if n == "0" else "all" if n == n_all else f"{n}/{n_all}"
    buffers = [key.removeprefix("model ") for key in effective.get("buffers_mib", {}) if key.startswith("model ")]
    return "none" if buffers and all(name.startswith(_HOST_BUFFERS) for name in buffers) else None


def _describe(
    build: LlamaBuild, program: Path, requested: dict[str, Any], effective: dict[str, Any], request: WorkerRequest
) -> dict[str, Any]:
    return {
        "programs": {path.name: _sha256(path) for path in (program, find_library(build.library_folder))},
        "requested": requested,
        "effective": effective,
        "settings": llama_settings(effective, request),
        "versions": {"llama_cpp_build": build.build_number, "llama_cpp_compiler": build.compiler},
    }


def _tokens(ids: list[int]) -> dict[str, Any]:
    return {"token_ids": ids} | _counts(ids)


def _counts(ids: list[int]) -> dict[str, Any]:
    return {
        "n_generated": len(ids),
        "n_decoded": len(ids) - 1,
        "generated_token_ids_le64_sha256": token_ids_le64_sha256(ids),
    }


def _require_first(name: str, token_id: int, ids: list[int]) -> None:
    """Raise ProcessError unless the id that came first is the first of the answer: else its time means nothing."""
    if ids[:1] != [token_id]:
        raise ProcessError(f"{name} gave {token_id} as its first id, and {ids[:1]} in its answer")


def _unless_error(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of our engine; raises EngineRunError where it is a refusal."""
    if "error" in answer:
        raise EngineRunError(answer["error"])
    return answer


def _said(process: LiveProcess, line: str) -> dict[str, Any]:
    """Read a line of our own process; raises ProcessError if a library wrote something else in between."""
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise process.give_up(f"wrote {line[:80]!r} where an answer was expected")
    return values


def _engine_argv(argument: str) -> list[str | Path]:
    return [sys.executable, "-m", _ENGINE_PROCESS, argument]


def _peak_n_bytes(pid: int) -> int | None:
    """Return the peak resident set of a process; where the system does not keep it, what is resident now."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return int(psutil.Process(pid).memory_info().rss)
    except (OSError, psutil.Error):
        return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
