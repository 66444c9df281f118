"""Measure our engine on one request, in a process of its own.

A crash, a deadline and a lack of memory then look the same for our engine as for llama.cpp: they are a status.
`python -m conformance.subject REQUEST.json FOLDER` is that process; it writes its measurement into FOLDER.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from baselines.llama_cpp.guard import scratch_folder
from baselines.llama_cpp.process import ProcessResult, describe_end, run_process, telling_line
from conformance.controls import CONTROLS
from engine.decoder import Decoder, Run
from engine.errors import EngineError, NoDeviceError, one_line
from engine.generate import Engine, Generation, PrefillMode, load_engine
from engine.ops import Ops
from engine.placement import N_PACK
from engine.wrap import WrappedOps

Status: TypeAlias = Literal["ok", "failed", "crashed", "timeout", "out_of_memory", "not_measured"]
ReportProgress: TypeAlias = Callable[[int, int], None]
_EXIT_FAILED, _EXIT_NO_DEVICE = 4, 5
_EXIT_STATUS: dict[int, Status] = {_EXIT_FAILED: "failed", _EXIT_NO_DEVICE: "not_measured"}
_PROGRESS = re.compile(r"^progress (\d+) (\d+)$")


@dataclass(frozen=True)
class SubjectRequest:
    """What to run: the generation in the first mode of `prefill`, the prompt alone in the others.

    vram_budget_n_bytes: hard limit on device memory (cuda). control: name of the negative control to run in place of
    the right engine.
    """

    model: Path
    backend: str
    prompt_ids: Sequence[int]
    n_predict: int
    n_ctx: int
    n_threads: int
    prefill: Sequence[PrefillMode]
    vram_budget_n_bytes: int | None = None
    control: str | None = None


@dataclass(frozen=True)
class Measurement:
    """What our engine gave.

    logits (n_predict, n_vocab) f32: row i is the one behind token_ids[i]. final_logits: those after the prompt,
    (n_vocab) f32, of every other prefill mode and of `second_run`. tie: the id that argmax chose among equal logits,
    and the lowest of them. Times in ns, prepare_time_ns the median until a step's graph was launched, None where there
    is no graph; peak_memory_n_bytes is the resident set of the whole process. versions: of what only this backend uses.
    """

    token_ids: list[int]
    logits: NDArray[np.float32]
    final_logits: dict[str, NDArray[np.float32]]
    tie: tuple[int, int]
    load_time_ns: int
    prefill_time_ns: int
    decode_time_ns: list[int]
    peak_memory_n_bytes: int
    effective: dict[str, Any]
    prepare_time_ns: int | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SubjectResult:
    """How the process ended; measurement is None unless status is "ok"."""

    status: Status
    reason: str | None
    log_tail: str
    measurement: Measurement | None


def run_subject(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
    """Measure in a new process, under a deadline; `report` gets (done, total) now and then."""
    done = [0, 0]

    def watch(line: str) -> None:
        found = _PROGRESS.match(line)
        if found:
            done[:] = int(found[1]), int(found[2])

    with scratch_folder("subject") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps({**asdict(request), "model": str(request.model.absolute())}))
        argv: list[str | Path] = [sys.executable, "-m", "conformance.subject", folder / "request.json", folder]
        process = run_process(
            argv, deadline_s=deadline_s, env=package_environment(), on_line=watch, on_tick=lambda: report(*done)
        )
        measurement = _read(folder) if process.status == "ok" else None
    return _result(process, measurement, deadline_s)


def measure(engine: Engine, request: SubjectRequest, report: ReportProgress) -> Measurement:
    """Run `request` on a loaded engine; raises EngineError."""
    n_prompt, first = len(request.prompt_ids), request.prefill[0]
    others: dict[str, PrefillMode] = {mode: mode for mode in request.prefill[1:]} | {"second_run": first}
    total = n_prompt * (len(others) + 1) + request.n_predict
    final_logits = {}
    for n_done, (name, mode) in enumerate(others.items()):
        report(n_done * n_prompt, total)
        _, final_logits[name] = engine.prefill(request.prompt_ids, mode)
    n_tokens = iter(range(total - request.n_predict + 1, total + 1))
    watch = _DecoderWatch(engine.ops)
    engine = replace(engine, ops=cast(Ops, watch))
    generation = engine.run(
        request.prompt_ids,
        request.n_predict,
        prefill=first,
        keep_logits=True,
        on_token=lambda token: report(next(n_tokens), total),
    )
    measurement = _measurement(engine, generation, final_logits, request)
    return replace(measurement, prepare_time_ns=watch.prepare_time_ns, versions=backend_versions(request.backend))


class _DecoderWatch(WrappedOps):
    """Keeps the decoder that the backend hands out, to read its times afterwards."""

    decoding: Decoder | None = None

    def decoder(self, run: Run, state: object) -> Any:
        """Return the backend's own decoder."""
        self.decoding = self.inner.decoder(run, state)
        return self.decoding

    @property
    def prepare_time_ns(self) -> int | None:
        """Median time until a step was launched, None if the decoder has none."""
        times = getattr(self.decoding, "prepare_time_ns", None)
        return median_low(times) if times else None


def explain(status: str, exit_code: int, log_tail: str, deadline_s: float) -> str | None:
    """Return one line that says why a process did not end well, None if it did."""
    if status == "ok":
        return None
    if status == "timeout":
        return f"not finished after {deadline_s:g} s"
    if status == "out_of_memory":
        return one_line(f"ran out of memory: {telling_line(log_tail) or 'no output'}")
    return one_line(describe_end(exit_code, log_tail))


def main(argv: Sequence[str]) -> int:
    """Measure what the request file argv[0] asks for and write the result into the folder argv[1]."""
    values = json.loads(Path(argv[0]).read_text())
    request = SubjectRequest(**{**values, "model": Path(values["model"])})
    try:
        _write(measure(load_subject(request), request, _print_progress), Path(argv[1]))
    except NoDeviceError as error:
        print(f"error: {error}", flush=True)
        return _EXIT_NO_DEVICE
    except EngineError as error:
        print(f"error: {error}", flush=True)
        return _EXIT_FAILED
    except MemoryError as error:
        print(f"error: out of memory: {error}", flush=True)
        return 1
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}", flush=True)
        return 1
    return 0


def load_subject(request: SubjectRequest) -> Engine:
    """Load the right engine, or the negative control that `request` names; raises EngineError."""
    if request.control is None:
        return load_engine(
            request.model,
            n_ctx=request.n_ctx,
            backend=request.backend,
            n_threads=request.n_threads,
            vram_budget=request.vram_budget_n_bytes,
        )
    control = next(control for control in CONTROLS if control.name == request.control)
    return control.load(request.model, request.n_ctx, request.n_threads)


def _measurement(
    engine: Engine, generation: Generation, final_logits: dict[str, NDArray[np.float32]], request: SubjectRequest
) -> Measurement:
    assert generation.logits is not None
    return Measurement(
        token_ids=generation.generated_token_ids,
        logits=generation.logits,
        final_logits=final_logits,
        tie=_choose_among_equals(engine, generation.final_logits),
        load_time_ns=engine.load_time_ns,
        prefill_time_ns=generation.prefill_time_ns,
        decode_time_ns=generation.step_time_ns,
        peak_memory_n_bytes=_peak_memory_n_bytes(),
        effective=effective_settings(engine, request),
    )


def effective_settings(engine: Engine, request: SubjectRequest) -> dict[str, Any]:
    """Return the settings in force, for the record."""
    return {
        "backend": request.backend,
        "n_ctx": engine.n_ctx,
        "prefill": request.prefill[0],
        "prefill_pack": N_PACK,
        "type_k": "f16",
        "type_v": "f16",
        **engine.ops.describe(),
    }


def backend_versions(backend: str) -> dict[str, str]:
    """Return the versions of the libraries that only `backend` uses, by their keys in a record."""
    if backend != "cuda":
        return {}
    import cupy

    from engine.cuda.compile import nvrtc_version

    return {"cupy": cupy.__version__, "nvrtc": ".".join(map(str, nvrtc_version()))}


def _choose_among_equals(engine: Engine, logits: NDArray[np.float32]) -> tuple[int, int]:
    """Let the engine's argmax choose between two ids that share the largest logit; return its choice and the lower."""
    low, high = len(logits) // 3, 2 * len(logits) // 3
    tied = logits.copy()
    tied[[low, high]] = np.float32(2.0) * np.abs(logits).max() + np.float32(1.0)
    return engine.greedy(tied), low


def _peak_memory_n_bytes() -> int:
    """Return the peak resident set; Linux's ru_maxrss would still have the parent's from before the exec."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[0]) * 1024
    except (OSError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _print_progress(done: int, total: int) -> None:
    print(f"progress {done} {total}", flush=True)


def _write(measurement: Measurement, folder: Path) -> None:
    values = {key: value for key, value in vars(measurement).items() if key not in ("logits", "final_logits")}
    (folder / "result.json").write_text(json.dumps(values))
    np.save(folder / "logits.npy", measurement.logits)
    for name, logits in measurement.final_logits.items():
        np.save(folder / f"final_logits.{name}.npy", logits)


def _read(folder: Path) -> Measurement:
    values = json.loads((folder / "result.json").read_text())
    values["tie"] = tuple(values["tie"])
    final_logits = {path.suffixes[0][1:]: np.load(path) for path in folder.glob("final_logits.*.npy")}
    return Measurement(**values, logits=np.load(folder / "logits.npy"), final_logits=final_logits)


def package_environment() -> dict[str, str]:
    """Return this process's environment, with this package importable from any working folder."""
    root = str(Path(__file__).parents[1])
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, others)))}


def _result(process: ProcessResult, measurement: Measurement | None, deadline_s: float) -> SubjectResult:
    lines = [line for line in process.log.splitlines() if line.strip() and not _PROGRESS.match(line)]
    log_tail = "\n".join(lines[-20:])
    if process.exit_code in _EXIT_STATUS:
        return SubjectResult(_EXIT_STATUS[process.exit_code], lines[-1].removeprefix("error: "), log_tail, None)
    reason = explain(process.status, process.exit_code, log_tail, deadline_s)
    return SubjectResult(process.status, reason, log_tail, measurement)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
