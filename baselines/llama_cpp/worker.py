"""Run llama-worker: one greedy generation or one tokenization, as a value in and a value out."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from baselines.errors import AnswerError, BaselineError, BaselineRequestError, ProcessError, WrongBuildError
from baselines.llama_cpp.answers import Generated, Loaded, Tokenized, WorkerRun, parse_answer, require_n_tokens
from baselines.llama_cpp.build import WORKER, LlamaBuild
from baselines.llama_cpp.effective import parse_effective
from baselines.llama_cpp.guard import scratch_folder
from baselines.llama_cpp.process import LiveProcess, ProcessResult, Status, run_process

# variables that change what ggml does without appearing in any flag
_ENVIRONMENT = re.compile(r"^(GGML_.*|LLAMA_.*|OMP_.*|CUDA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE)$")

WorkerStatus: TypeAlias = Status | Literal["failed"]
_MAX_ANSWER_N_BYTES = 1 << 26


@dataclass(frozen=True)
class WorkerRequest:
    """One greedy run. Field names are those of the engine, values those of llama.cpp's flags.

    force_ids: after row i the i-th of these is fed in place of the chosen id (at least n_predict - 1).
    split_mode: "none" keeps the model on the first GPU and fails where there is none.
    override_tensor: llama.cpp's -ot, "REGEX=BUFFER[,...]". repack: whether llama.cpp may re-lay weights for
    this processor (AMX, interleaved rows), which changes the order of its sums.
    """

    model: Path
    prompt_ids: Sequence[int]
    n_predict: int
    n_ctx: int
    prefill: Literal["batched", "single"] = "batched"
    force_ids: Sequence[int] | None = None
    n_threads: int = 1
    n_gpu_layers: int = 0
    override_tensor: str | None = None
    flash_attn: Literal["on", "off", "auto"] = "on"
    type_k: str = "f16"
    type_v: str = "f16"
    n_batch: int = 512
    n_ubatch: int = 512
    split_mode: Literal["none", "layer"] = "layer"
    repack: bool = True
    warmup: bool = False
    want_logits: bool = True
    deadline_s: float = 600.0

    def flags(self) -> dict[str, str]:
        """Return every setting as the flag that is passed, none left to a default."""
        return self.shared_flags() | {"-n": str(self.n_predict), "--prefill": self.prefill}

    def shared_flags(self) -> dict[str, str]:
        """Return the flags that llama.cpp's own programs have too."""
        flags = {
            "-c": str(self.n_ctx),
            "-b": str(self.n_batch),
            "-ub": str(self.n_ubatch),
            "--threads": str(self.n_threads),
            "-ngl": str(self.n_gpu_layers),
            "-sm": self.split_mode,
            "-fa": self.flash_attn,
            "-ctk": self.type_k,
            "-ctv": self.type_v,
        }
        if self.override_tensor:
            flags["-ot"] = self.override_tensor
        return flags

    def switches(self) -> list[str]:
        """Return the flags that take no value."""
        return ["--repack" if self.repack else "--no-repack", "--warmup" if self.warmup else "--no-warmup"]


@dataclass(frozen=True)
class WorkerResult:
    """What one run gave; the lists are empty and logits is None unless status is "ok".

    status "failed": it ended well, but what it gave cannot be used; problem says why.
    logits: (n_predict, n_vocab) f32, row i is what token_ids[i] was chosen from (largest value, lowest id on
    a tie); top2_gap[i] is the distance of its two largest values. decode_time_ns has n_predict - 1 entries,
    one per llama_decode of a generated token. requested and effective are data for the record; log is
    llama.cpp's own.
    """

    status: WorkerStatus
    exit_code: int
    log_tail: str
    token_ids: list[int]
    logits: npt.NDArray[np.float32] | None
    top2_gap: list[float]
    n_non_finite: int
    prefill_time_ns: int
    decode_time_ns: list[int]
    load_time_ns: int
    wall_time_ns: int
    build_number: int
    requested: dict[str, Any]
    effective: dict[str, Any]
    log: str
    problem: str | None = None


def run_worker(build: LlamaBuild, request: WorkerRequest) -> WorkerResult:
    """Run request and return how it went; a crash, a deadline and a lack of memory are values of status.

    Raises BaselineRequestError for a request that cannot work, WrongBuildError if another libllama is loaded.
    """
    check_request(request)
    with scratch_folder(WORKER) as name:
        folder = Path(name)
        environment = library_environment(build, hide_gpus=request.n_gpu_layers == 0)
        result = run_process(_argv(build, request, folder), deadline_s=request.deadline_s, env=environment)
        if result.status != "ok":
            return _result(build, request, result, None, None)
        try:
            out, logits = _read_run(folder, request)
        except AnswerError as error:
            failed = _result(build, request, result, None, None)
            return replace(failed, status="failed", problem=str(error))
    return _result(build, request, result, out, logits)


class WorkerSession:
    """A worker that stays up: one generation after another, each from an empty state.

    ready_time_ns: from its start until the model was loaded; loaded: what it says of itself then. Raises
    BaselineRequestError, WrongBuildError, or ProcessError when the worker ends, does not answer in time, or gives an
    answer that cannot be used.
    """

    def __init__(self, build: LlamaBuild, request: WorkerRequest) -> None:
        check_request(request)
        self._folder = scratch_folder(WORKER)
        self._deadline_s = request.deadline_s
        start_ns = time.monotonic_ns()
        argv = [*_common_argv(build, request, Path(self._folder.name)), "--serve"]
        self._process = LiveProcess(argv, env=library_environment(build, hide_gpus=request.n_gpu_layers == 0))
        try:
            self.loaded = parse_answer(Loaded, self._process.read(self._deadline_s), WORKER)
            self.ready_time_ns = time.monotonic_ns() - start_ns
            _loaded_build_number(build, self.loaded)
        except BaseException:
            self.close()
            raise
        self._build, self._request = build, request
        self.requested = _requested(request)

    @property
    def effective(self) -> dict[str, Any]:
        """The settings in force, from the log so far: to be read after the first generation."""
        return _effective(self._build, self._request, self._process.log, self.loaded)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def generate(self, prefill: Literal["batched", "single"], n_predict: int) -> dict[str, Any]:
        """Return token_ids, prefill_time_ns, first_token_time_ns, decode_time_ns and wall_time_ns of one run."""
        try:
            answer = parse_answer(Generated, self._process.ask(f"{prefill} {n_predict}", self._deadline_s), WORKER)
            _require_complete(answer, n_predict)
        except AnswerError as error:
            raise self._process.give_up(str(error)) from None
        return answer.model_dump()

    def close(self) -> None:
        """End the worker."""
        self._process.close()
        self._folder.cleanup()


def try_model(build: LlamaBuild, model: Path, *, deadline_s: float) -> ProcessResult:
    """Have llama.cpp load whatever is at `model` and decode token 0; nothing is checked before it does."""
    request = WorkerRequest(model, [0], 1, 256, want_logits=False, deadline_s=deadline_s)
    with scratch_folder(WORKER) as name:
        argv = _argv(build, request, Path(name))
        return run_process(argv, deadline_s=deadline_s, env=library_environment(build, hide_gpus=True))


def tokenize(
    build: LlamaBuild,
    model: Path,
    texts: Sequence[str | bytes],
    *,
    add_special: bool = True,
    parse_special: bool = True,
    deadline_s: float = 120.0,
) -> list[list[int]]:
    """Return llama.cpp's ids for each text (str as UTF-8); the defaults are those of a llama-server prompt.

    Raises BaselineRequestError if the model is missing, BaselineError if llama.cpp cannot tokenize with it.
    """
    _check_model(model)
    encoded = [text.encode("utf-8") if isinstance(text, str) else text for text in texts]
    with scratch_folder(WORKER) as name:
        folder = Path(name)
        _write(folder / "texts", b"".join(b"%d\n%b" % (len(text), text) for text in encoded))
        argv: list[str | Path] = [
            build.worker,
            "-m",
            model,
            "--tokenize",
            folder / "texts",
            "--out",
            folder / "out.json",
        ]
        argv += [] if add_special else ["--no-add-special"]
        argv += [] if parse_special else ["--no-parse-special"]
        result = run_process(argv, deadline_s=deadline_s, env=library_environment(build))
        if result.status != "ok":
            raise BaselineError(f"llama.cpp could not tokenize with {model} ({result.status}): {result.log_tail(1)}")
        return parse_answer(Tokenized, _read_file(folder / "out.json", _MAX_ANSWER_N_BYTES), WORKER).tokens


def _check_model(model: Path) -> None:
    if not model.is_file():
        raise BaselineRequestError(f"{model} is not a file: expected a GGUF model")


def check_request(request: WorkerRequest) -> None:
    """Raise BaselineRequestError if `request` cannot work."""
    _check_model(request.model)
    if not request.prompt_ids:
        raise BaselineRequestError("the prompt has no token id: expected at least one")
    if request.n_predict < 1:
        raise BaselineRequestError(f"n_predict is {request.n_predict}, expected at least 1")
    n_cells = len(request.prompt_ids) + request.n_predict - 1
    if n_cells > request.n_ctx:
        raise BaselineRequestError(f"the run needs {n_cells} context cells, -c is {request.n_ctx}: raise -c")
    if request.force_ids is not None and len(request.force_ids) < request.n_predict - 1:
        raise BaselineRequestError(f"{len(request.force_ids)} forced ids, expected at least {request.n_predict - 1}")


def _argv(build: LlamaBuild, request: WorkerRequest, folder: Path) -> list[str | Path]:
    """Write the input files into folder and return the command line."""
    argv = [*_common_argv(build, request, folder), "--out", folder / "out.json"]
    if request.force_ids is not None:
        argv += ["--force-ids", _write_ids(folder / "force-ids", request.force_ids)]
    if request.want_logits:
        argv += ["--logits-out", folder / "logits.f32"]
    return argv


def _common_argv(build: LlamaBuild, request: WorkerRequest, folder: Path) -> list[str | Path]:
    argv: list[str | Path] = [build.worker, "-m", request.model]
    for flag, value in request.flags().items():
        argv += [flag, value]
    return [*argv, *request.switches(), "--prompt-ids", _write_ids(folder / "prompt-ids", request.prompt_ids)]


def _write_ids(file: Path, ids: Sequence[int]) -> Path:
    return _write(file, " ".join(str(int(i)) for i in ids).encode())


def _write(file: Path, data: bytes) -> Path:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise ProcessError(f"{file} cannot be written: {error.strerror}: point TMPDIR to a folder with room") from None
    return file


def _read_run(folder: Path, request: WorkerRequest) -> tuple[WorkerRun, npt.NDArray[np.float32] | None]:
    """Read what a worker that ended well has written; raises AnswerError."""
    out = parse_answer(WorkerRun, _read_file(folder / "out.json", _MAX_ANSWER_N_BYTES), WORKER)
    _require_complete(out, request.n_predict)
    if not request.want_logits:
        return out, None
    n_bytes = 4 * request.n_predict * out.n_vocab
    data = _read_file(folder / "logits.f32", n_bytes)
    if len(data) != n_bytes:
        raise AnswerError(f"{WORKER} wrote {len(data)} bytes of logits, expected {n_bytes}: is the disk full?")
    logits = np.frombuffer(data, "<f4").astype(np.float32).reshape(request.n_predict, out.n_vocab)
    if not out.n_non_finite and logits.argmax(axis=1).tolist() != out.token_ids:
        raise AnswerError(f"{WORKER} gave tokens that are not those of its own logits")
    return out, logits


def _read_file(file: Path, max_n_bytes: int) -> bytes:
    """Return what a worker wrote into a file; raises AnswerError."""
    try:
        n_bytes = file.stat().st_size
        if n_bytes > max_n_bytes:
            raise AnswerError(f"{WORKER} wrote {n_bytes} bytes into {file.name}, expected at most {max_n_bytes}")
        return file.read_bytes()
    except OSError as error:
        raise AnswerError(f"{WORKER} ended well, but wrote no {file.name}: {error.strerror}") from None


def _require_complete(answer: Generated, n_predict: int) -> None:
    """Raise AnswerError unless there is one id for each that was asked for, one gap each, and a time for each step."""
    require_n_tokens(answer.token_ids, n_predict, WORKER)
    for key, n_expected in (("top2_gap", n_predict), ("decode_time_ns", n_predict - 1)):
        n_found = len(getattr(answer, key))
        if n_found != n_expected:
            raise AnswerError(f"{WORKER} gave {n_found} values of {key}, expected {n_expected}")


def library_environment(build: LlamaBuild, *, hide_gpus: bool = False) -> dict[str, str]:
    """Return this process's environment with the build's own libraries first, and threads that wait asleep.

    hide_gpus: a build with CUDA multiplies long prompts on a GPU even where no layer is offloaded to it.
    """
    variable = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    libraries = os.pathsep.join(filter(None, (str(build.library_folder), os.environ.get(variable))))
    # OpenMP threads spin at each of ggml's barriers by default. Where the cores are shared, that turned 0.1 s of
    # a tiny model's decoding on two threads into 39 s; the results are the same bits.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
    return {"OMP_WAIT_POLICY": "passive", **os.environ, **hidden, variable: libraries}


def _loaded_build_number(build: LlamaBuild, out: Loaded) -> int:
    """Return the number of the libllama the run loaded; raise WrongBuildError if it is not the build's."""
    loaded = Path(out.libllama).resolve()
    if loaded.parent != build.library_folder.resolve():
        raise WrongBuildError(f"the worker loaded {loaded}, expected the libllama in {build.library_folder}")
    named = re.search(r"0\.0\.(\d+)", loaded.name)
    if named and named.group(1) != str(build.build_number):
        raise WrongBuildError(f"the worker loaded {loaded}, expected build {build.build_number}")
    return build.build_number


def _result(
    build: LlamaBuild,
    request: WorkerRequest,
    process: ProcessResult,
    out: WorkerRun | None,
    logits: npt.NDArray[np.float32] | None,
) -> WorkerResult:
    return WorkerResult(
        status=process.status,
        exit_code=process.exit_code,
        log_tail=process.log_tail(),
        token_ids=out.token_ids if out else [],
        logits=logits,
        top2_gap=[math.nan if gap is None else gap for gap in out.top2_gap] if out else [],
        n_non_finite=out.n_non_finite if out else 0,
        prefill_time_ns=out.prefill_time_ns if out else 0,
        decode_time_ns=out.decode_time_ns if out else [],
        load_time_ns=out.load_time_ns if out else 0,
        wall_time_ns=process.wall_time_ns,
        build_number=_loaded_build_number(build, out) if out else build.build_number,
        requested=_requested(request),
        effective=_effective(build, request, process.log, out),
        log=process.log,
    )


def _requested(request: WorkerRequest) -> dict[str, Any]:
    """Describe the request for the record: flags, not the ids themselves, and no path of this machine."""
    return {
        "model": request.model.name,
        "flags": request.flags(),
        "switches": request.switches(),
        "n_prompt": len(request.prompt_ids),
        "teacher_forced": request.force_ids is not None,
        "deadline_s": request.deadline_s,
    }


def _effective(build: LlamaBuild, request: WorkerRequest, log: str, out: Loaded | None) -> dict[str, Any]:
    """Merge what the log states with what the worker asked llama.h for."""
    asked = {key: getattr(out, key, None) for key in ("n_threads", "n_vocab", "system_info", "compiler")}
    given = library_environment(build, hide_gpus=request.n_gpu_layers == 0)
    environment = {key: value for key, value in given.items() if _ENVIRONMENT.match(key)}
    return parse_effective(log) | asked | {"cmake_options": build.options, "environment": environment}
