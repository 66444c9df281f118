"""What a bench measures: which scenarios, with which programs, how long; one preset for a machine of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baselines.llama_cpp.bench import PROGRAM as LLAMA_BENCH
from baselines.llama_cpp.build import LlamaBuild
from baselines.llama_cpp.progress import Progress
from baselines.llama_cpp.server import PROGRAM as LLAMA_SERVER
from conformance.bench.bench import BenchOptions
from conformance.bench.subjects import BASELINES, EngineSubject, Subject
from conformance.errors import ConformanceError
from conformance.fixtures import sha256_of
from conformance.runner import subject_request, worker_request
from conformance.scenario import (
    BaselineFlags,
    GeneratedTokenIdsEqual,
    ModelRef,
    Scenario,
    ScenarioFile,
    default_scenarios,
    find_scenario,
)
from engine.bench import default_prompt_ids
from engine.gguf.reader import open_model
from engine.model.config import ModelConfig

PROGRAMS = {"numpy": ("llama.cpp",), "cuda": ("llama.cpp", LLAMA_BENCH, LLAMA_SERVER)}
"""What each backend is compared with unless told otherwise: llama-bench and llama-server take long to build, and where
a GPU is compared they are what others quote."""
N_REPETITIONS = {"numpy": 5, "cuda": 7}
N_DECODE = {"numpy": 16, "cuda": 128}
"""Tokens decoded in a timed run: the NumPy backend is slow, and its first run has all of the scenario's tokens."""
WARM_UP_S = {"numpy": 1.0, "cuda": 3.0}
CUDA_SCENARIOS = ("27b-c512", "27b-c2048")
QUICK_REPETITIONS = 5
_OWN_N_CTX = (512, 2048)
_OWN_N_PREDICT = 129


@dataclass(frozen=True)
class BenchRequest:
    """What the command line asks for; None: the default of the backend."""

    scenarios: Sequence[str]
    backend: str
    model: Path | None = None
    repetitions: int | None = None
    n_decode: int | None = None
    warm_up_s: float | None = None
    threads: int | None = None
    baselines: Sequence[str] | None = None
    quick: bool = False

    def programs(self) -> tuple[str, ...]:
        """Return the names of the baselines; raises ConformanceError for one that does not exist."""
        unknown = set(self.baselines or ()) - set(BASELINES)
        if unknown:
            raise ConformanceError(f"--baseline is {min(unknown)!r}, expected one of: {', '.join(BASELINES)}")
        return tuple(self.baselines) if self.baselines else PROGRAMS[self.backend]

    def options(self, scenario: Scenario) -> BenchOptions:
        """Return how often and how long; raises ConformanceError where a run would be longer than the scenario."""
        n_decode = min(N_DECODE[self.backend], scenario.n_predict - 1) if self.n_decode is None else self.n_decode
        if not 1 <= n_decode < scenario.n_predict:
            raise ConformanceError(f"--decode is {n_decode}, {scenario.name} has 1 to {scenario.n_predict - 1} steps")
        default = QUICK_REPETITIONS if self.quick else N_REPETITIONS[self.backend]
        return BenchOptions(
            n_repetitions=self.repetitions or default,
            n_decode=n_decode,
            warm_up_s=WARM_UP_S[self.backend] if self.warm_up_s is None else self.warm_up_s,
        )


def bench_files(request: BenchRequest, progress: Progress) -> list[ScenarioFile]:
    """Return the scenarios to measure: those named, the fixtures' of the backend, or those of the user's model.

    --quick takes, on a CPU, the tiny model alone. Raises ScenarioError, ConformanceError, EngineError.
    """
    if request.model is not None:
        if request.scenarios:
            raise ConformanceError("--model has scenarios of its own: name either a model or scenarios")
        return own_scenarios(request.model, request.backend, progress)
    if request.scenarios:
        files = [find_scenario(name) for name in request.scenarios]
    elif request.backend == "cuda":
        files = [find_scenario(name) for name in CUDA_SCENARIOS]
    else:
        kinds = ("tiny",) if request.quick else ("tiny", "small")
        files = [file for file in default_scenarios() if file.scenario.model.kind in kinds]
    for file in files:
        if request.backend not in file.scenario.backends:
            raise ConformanceError(f"{file.scenario.name} is not for --backend {request.backend}")
    return files


def own_scenarios(model: Path, backend: str, progress: Progress) -> list[ScenarioFile]:
    """Return the article's two scenarios for a model of the user's: 70 prompt ids, 129 greedy ids, both contexts.

    The right tokens are then llama.cpp's. Raises EngineError if the file cannot be run.
    """
    if not model.is_file():
        raise ConformanceError(f"--model {model}: no such file")
    config = ModelConfig.from_model(open_model(model))
    sha256 = sha256_of(model, progress)
    like = find_scenario(CUDA_SCENARIOS[0] if backend == "cuda" else "tiny-c512").scenario
    check = GeneratedTokenIdsEqual(
        check="generated_token_ids_equal", against="llama.cpp", because="both engines read the same weights"
    )
    common = {
        "asks": "How fast is this model?",
        "default": False,
        "model": ModelRef(file=str(model.absolute()), sha256=sha256),
        "prompt_token_ids": tuple(default_prompt_ids(config.n_vocab)),
        "n_predict": _OWN_N_PREDICT,
        "vram_budget_n_bytes": None,
        "backends": (backend,),
        "controls": False,
        "checks": (check,),
    }
    name = f"own-{sha256[:8]}"
    return [
        ScenarioFile(model, like.model_copy(update=common | {"name": f"{name}-c{n_ctx}", "n_ctx": n_ctx}))
        for n_ctx in _OWN_N_CTX
    ]


def make_subjects(file: ScenarioFile, model: Path, request: BenchRequest, build: LlamaBuild) -> list[Subject]:
    """Return our engine and every baseline, with the same settings as far as they apply to each."""
    threads = request.threads or file.scenario.n_threads
    flags = baseline_flags(file.scenario, request.backend, threads)
    scenario = file.scenario.model_copy(update={"baseline": flags, "n_threads": threads})
    engine = EngineSubject(subject_request(scenario, model, request.backend), scenario.deadline_s)
    worker = worker_request(scenario, model)
    return [engine, *(BASELINES[name](build, worker, flags) for name in request.programs())]


def baseline_flags(scenario: Scenario, backend: str, threads: int) -> BaselineFlags:
    """Return llama.cpp's flags where speed is compared.

    As many threads as our engine has, weights re-laid for the processor as it does by itself, and on a GPU everything
    there but the embedding table, as in the 27b scenarios, also for scenarios that run llama.cpp on the CPU.
    """
    changes: dict[str, object] = {"threads": threads, "repack": True}
    if backend == "cuda" and scenario.baseline.device == "cpu":
        changes |= {"n_gpu_layers": 99, "override_tensor": "token_embd.weight=CPU", "split_mode": "none"}
    return scenario.baseline.model_copy(update=changes)
