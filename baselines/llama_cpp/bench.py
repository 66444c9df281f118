"""Run llama-bench, llama.cpp's own measure of speed: prompt processing and token generation, no ids to compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baselines.errors import AnswerError
from baselines.llama_cpp.answers import BENCH_OUTPUT, BenchTest, parse_answer
from baselines.llama_cpp.build import LlamaBuild
from baselines.llama_cpp.effective import parse_effective
from baselines.llama_cpp.process import LiveProcess
from baselines.llama_cpp.worker import WorkerRequest, library_environment

PROGRAM = "llama-bench"
_MAX_LINES = 1000  # two tests take less than a hundred


@dataclass(frozen=True)
class LlamaBenchResult:
    """One process: times of one repetition in ns, and the settings in force, from its output and its log."""

    prompt_time_ns: int
    generation_time_ns: int
    wall_time_ns: int
    effective: dict[str, Any]


def llama_bench_argv(build: LlamaBuild, request: WorkerRequest) -> list[str | Path]:
    """Return the command for one repetition of each test, ppN of the prompt's length and tgM of n_predict - 1.

    The flags are those of `request` but for -c, which llama-bench sets itself. -v: it says what is in force.
    """
    flags = request.shared_flags()
    del flags["-c"]
    flags["-fa"] = "1" if request.flash_attn == "on" else "0"
    tests = ["-p", str(len(request.prompt_ids)), "-n", str(request.n_predict - 1), "-r", "1", "-o", "json", "-v"]
    return [build.tool(PROGRAM), "-m", request.model, *(part for pair in flags.items() for part in pair), *tests]


def run_llama_bench(build: LlamaBuild, request: WorkerRequest) -> LlamaBenchResult:
    """Run one repetition in a process of its own, which warms up first; raises BaselineError."""
    environment = library_environment(build, hide_gpus=request.n_gpu_layers == 0)
    end = time.monotonic() + request.deadline_s
    start_ns = time.monotonic_ns()
    with LiveProcess(llama_bench_argv(build, request), env=environment) as process:
        lines: list[str] = []
        while not lines or lines[-1] != "]":
            if len(lines) == _MAX_LINES:
                raise process.give_up(f"wrote {_MAX_LINES} lines and no end of its JSON")
            lines.append(process.read(max(0.0, end - time.monotonic())))
        wall_time_ns = time.monotonic_ns() - start_ns
        log = process.log
    return parse_llama_bench("\n".join(lines), log, wall_time_ns, request, build.build_number)


def parse_llama_bench(
    output: str, log: str, wall_time_ns: int, request: WorkerRequest, build_number: int
) -> LlamaBenchResult:
    """Read the JSON of `-p N -n M -r 1` and the log of -v; raises AnswerError unless it is of what was asked for."""
    tests = parse_answer(BENCH_OUTPUT, output, PROGRAM)
    prompt = _test(tests, len(request.prompt_ids), 0)
    generation = _test(tests, 0, request.n_predict - 1)
    for test in tests:
        if test.build_number != build_number:
            raise AnswerError(f"{PROGRAM} says that it is build {test.build_number}, expected {build_number}")
    stated = ("n_threads", "n_batch", "n_ubatch", "type_k", "type_v", "build_number")
    said = generation.model_dump()
    return LlamaBenchResult(
        prompt_time_ns=prompt.samples_ns[0],
        generation_time_ns=generation.samples_ns[0],
        wall_time_ns=wall_time_ns,
        effective=parse_effective(log) | {key: said.get(key) for key in stated},
    )


def _test(tests: Sequence[BenchTest], n_prompt: int, n_gen: int) -> BenchTest:
    for test in tests:
        if (test.n_prompt, test.n_gen) == (n_prompt, n_gen):
            return test
    raise AnswerError(f"{PROGRAM} gave no time for the test of {n_prompt} prompt and {n_gen} generated tokens")
