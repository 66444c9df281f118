"""The commands bench, bench-selftest and verify of `python -m conformance`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baselines.llama_cpp import pin
from baselines.llama_cpp.build import WORKER, BuildOptions
from baselines.llama_cpp.guard import start_guard
from baselines.llama_cpp.progress import Progress, show_progress
from conformance.bench.ablation import make_ablation_record, write_ablation_record
from conformance.bench.bench import Bench, BenchOptions, n_runs
from conformance.bench.derive import tokens_verdict
from conformance.bench.ops import render_ops, run_op_benchmarks, write_ops_record
from conformance.bench.plan import BenchRequest, bench_files, make_subjects
from conformance.bench.records import DEFAULT_BENCH_FOLDER, BenchRecord, write_bench_record
from conformance.bench.report import render_bench
from conformance.bench.selftest import TrialResult, run_selftest
from conformance.bench.subjects import BASELINES, Subject, measure_read_ceiling
from conformance.bench.telemetry import open_sensor
from conformance.bench.verify import PUBLISHED_FOLDER, verify_paths
from conformance.command_line import CacheDir, Names, environment_errors, known_backends
from conformance.errors import ConformanceError
from conformance.fixtures import ensure_model, identify, sha256_of
from conformance.gate import Outcome
from conformance.llama_builds import LlamaBuilds
from conformance.records import ModelIdentity, claimed
from conformance.runner import why_unavailable
from conformance.scenario import ScenarioFile, find_scenario
from engine.ablation import Ablation, ablate, check_variants
from engine.ablation import render as render_ablation
from engine.bench import default_prompt_ids
from engine.cuda.variants import VARIANTS, Variant, variant
from engine.generate import check_request, load_engine
from engine.gguf.reader import open_model
from engine.model.config import ModelConfig
from engine.usage import INTERRUPTED

BENCH_EXIT_CODES = (
    "Exit code: 0 measured, whoever is faster; 1 wrong tokens; 2 something could not be measured or compared; "
    "3 this environment cannot run it; 130 stopped by Ctrl-C, what was finished is recorded."
)
SELFTEST_EXIT_CODES = "Exit code: 0 every verdict is right, 1 one is not, 3 this environment cannot run it."
VERIFY_EXIT_CODES = "Exit code: 0 every row holds, 1 one does not, 2 there is no row, 3 it cannot be read."
ABLATION_EXIT_CODES = "Exit code: 0 measured, 1 a variant has other bits, 3 not measured: there is no GPU to run it on."
OPS_SCENARIO = "tiny-c512"


@dataclass(frozen=True)
class _Job:
    file: ScenarioFile
    model: Path
    subjects: list[Subject]
    options: BenchOptions


def bench(
    scenarios: Names = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend of the engine: numpy or cuda [default: cuda where there is a GPU].")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A GGUF file of your own, at c=512 and c=2048.")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option("-r", "--repetitions", min=1, help="Timed rounds [default: 5, cuda 7].")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help="Tokens decoded in each timed run [default: 16, cuda 128].")
    ] = None,
    warm_up: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that each program runs before it is timed [default: 1, cuda 3]."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("-t", "--threads", min=1, help="CPU threads of both sides [default: the scenario's].")
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(BASELINES)}; repeat for more [default: the first, cuda all]."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The shortest bench that still gives verdicts.")] = False,
    native: Annotated[
        bool, typer.Option("--native", help="Build llama.cpp for the CPU with every instruction that it has.")
    ] = False,
    llama_cpp: Annotated[
        Path | None, typer.Option(metavar="DIR", help=f"Your own shared build of llama.cpp b{pin.BUILD_NUMBER}.")
    ] = None,
    cuda_arch: Annotated[
        list[str] | None, typer.Option(metavar="ARCH", help="CUDA architecture, such as 90 [default: native].")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the records.")] = DEFAULT_BENCH_FOLDER,
    cache_dir: CacheDir = None,
) -> None:
    """Time the engine and llama.cpp in alternation, keep every sample, print speeds and verdicts."""
    backend = backend or ("numpy" if why_unavailable("cuda") else "cuda")
    request = BenchRequest(
        scenarios or (), backend, model, repetitions, decode, warm_up, threads, baseline or None, quick
    )
    with environment_errors():
        known_backends([backend])
        programs = request.programs()
        why = why_unavailable(backend)
        if why is not None:
            typer.echo(f"not measured: {why}")
            raise typer.Exit(Outcome.NOT_MEASURED)
        options = BuildOptions(
            native=native,
            full=llama_cpp is None and programs != ("llama.cpp",),
            llama_cpp=llama_cpp,
            cache_dir=cache_dir,
        )
        records: list[BenchRecord] = []
        start_guard()  # now, so that it disturbs no cold start
        with claimed(out), show_progress() as progress, _tables_in_any_case(records):
            builds = LlamaBuilds(options, tuple(cuda_arch or ()), progress)
            jobs = list(_jobs(request, builds, cache_dir, progress))
            interrupted = _measure(jobs, backend, out, progress, records)
    if interrupted:
        typer.echo(f"stopped: {len(records)} of {len(jobs)} scenarios are measured and recorded", err=True)
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(outcome_of(records))


def bench_selftest(
    trials: Annotated[int, typer.Option(min=1, help="Trials of each kind.")] = 20,
    rounds: Annotated[int, typer.Option(min=24, help="Rounds of a trial at most.")] = 480,
    cache_dir: CacheDir = None,
) -> None:
    """Compare the engine with itself, and with itself slowed by a tenth: are the verdicts right?"""
    with environment_errors(), show_progress() as progress:
        results = run_selftest(trials, rounds, cache_dir, progress)
    for result in results:
        typer.echo(result.line())
    typer.echo(_selftest_summary(results))
    raise typer.Exit(Outcome.MATCH if all(result.is_right for result in results) else Outcome.MISMATCH)


def bench_ops(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the records.")] = DEFAULT_BENCH_FOLDER,
    cache_dir: CacheDir = None,
) -> None:
    """Time each op of the NumPy backend as it is in a decode step of the tiny model, by pytest-benchmark."""
    with environment_errors(), claimed(out), show_progress() as progress:
        file = find_scenario(OPS_SCENARIO)
        model = ensure_model(file, cache_dir, progress)
        progress.step("op benchmarks")
        record = run_op_benchmarks(model, identify(model, file.scenario.model))
        write_ops_record(record, out)
    typer.echo(render_ops(record))


def ablation(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file")],
    n_ctx: Annotated[int, typer.Option("-c", "--ctx-size", min=1, help="Positions in the context.")] = 512,
    n_steps: Annotated[int, typer.Option("-n", "--steps", min=1, help="Decode steps of a run.")] = 128,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=5, help="Pairs of runs for each that is switched off.")
    ] = 5,
    variants: Annotated[
        list[str] | None, typer.Option("--variant", help="What to switch off; repeat for more [default: all].")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the records.")] = DEFAULT_BENCH_FOLDER,
) -> None:
    """Decode on the GPU with each surgery of the kernels switched off, in alternation with the whole engine."""
    with environment_errors(), show_progress() as progress:
        chosen = [variant(name) for name in variants] if variants else list(VARIANTS[1:])
        check_variants(chosen)
        why = why_unavailable("cuda")
        if why is not None:
            raise ConformanceError(f"not measured: {why}")
        found = _ablate(model, n_ctx, n_steps, repetitions, chosen, progress)
        identity = ModelIdentity(file=model.name, sha256=sha256_of(model, progress), n_bytes=model.stat().st_size)
        path = write_ablation_record(make_ablation_record(found, identity), out)
    typer.echo(render_ablation(found))
    typer.echo(f"record: {path}")
    raise typer.Exit(Outcome.MATCH if all(row.same_bits for row in found.rows) else Outcome.MISMATCH)


def _ablate(
    model: Path, n_ctx: int, n_steps: int, repetitions: int, variants: Sequence[Variant], progress: Progress
) -> Ablation:
    file = open_model(model)
    ids = default_prompt_ids(ModelConfig.from_model(file).n_vocab)
    check_request(ModelConfig.from_model(file), n_ctx, ids, n_steps + 1)
    progress.step(f"loading {model.name}")
    engine = load_engine(file, n_ctx=n_ctx, backend="cuda")
    progress.step("measuring")
    n_done, n_pairs = 0, repetitions * len(variants)

    def advance(n: int) -> None:
        nonlocal n_done
        n_done += n
        progress.update(n_done, n_pairs)

    return ablate(engine, ids, n_steps, repetitions, variants, advance)


def verify(
    rows: Annotated[
        list[Path] | None,
        typer.Argument(metavar="ROW", help="Records or folders of records [default: all published ones]."),
    ] = None,
) -> None:
    """Check records from nothing but themselves: digests, hashes, parity of flags, every figure and interval."""
    with environment_errors():
        findings, n_rows = verify_paths(rows or [PUBLISHED_FOLDER])
    for finding in findings:
        typer.echo(f"FAIL: {finding}")
    typer.echo(f"{n_rows} rows verified, {len(findings)} findings")
    if findings:
        raise typer.Exit(Outcome.MISMATCH)
    raise typer.Exit(Outcome.MATCH if n_rows else Outcome.NOT_MEASURED)


def outcome_of(records: Sequence[BenchRecord]) -> Outcome:
    """Return what a bench comes to: wrong tokens, or an engine of ours that stopped, outweigh what was not compared."""
    for record in records:
        for subject in record.subjects:
            tokens, _ = tokens_verdict(record, subject)
            if tokens == "wrong" or (tokens == "failed" and subject.role == "engine"):
                return Outcome.MISMATCH
    verdicts = {row.verdict for record in records for row in record.comparisons}
    return Outcome.NOT_MEASURED if "INVALID" in verdicts or not verdicts else Outcome.MATCH


def _jobs(request: BenchRequest, builds: LlamaBuilds, cache: Path | None, progress: Progress) -> Iterator[_Job]:
    """Build llama.cpp and make the models before anything is timed."""
    models: dict[str, Path] = {}
    build = builds.open("cuda" if request.backend == "cuda" else "cpu").build
    for file in bench_files(request, progress):
        sha256 = file.scenario.model.sha256
        if sha256 not in models:
            models[sha256] = ensure_model(file, cache, progress)
        subjects = make_subjects(file, models[sha256], request, build)
        yield _Job(file, models[sha256], subjects, request.options(file.scenario))


@contextmanager
def _tables_in_any_case(records: list[BenchRecord]) -> Iterator[None]:
    """Print the tables of `records` after the context, also where that ends early."""
    try:
        yield
    finally:
        if records:
            typer.echo(render_bench(records))


def _measure(jobs: Sequence[_Job], backend: str, out: Path, progress: Progress, records: list[BenchRecord]) -> bool:
    """Measure and record one scenario after the other, into `records`; return whether Ctrl-C ended it."""
    total, done = sum(n_runs(job.subjects, job.options) for job in jobs), 0
    progress.step(f"measuring with {WORKER} b{pin.BUILD_NUMBER}")

    def advance() -> None:
        nonlocal done
        done += 1
        progress.update(done, total)

    try:
        sensor, no_sensor = open_sensor() if backend == "cuda" else (None, "there is no GPU in this comparison")
        ceiling, no_ceiling = measure_read_ceiling(backend)
        missing = {"GPU telemetry": no_sensor, "read ceiling": no_ceiling}
        not_measured = {what: why for what, why in missing.items() if why is not None}
        for job in jobs:
            one = Bench(
                job.file,
                job.model,
                backend,
                job.subjects,
                job.options,
                progress.describe,
                advance,
                sensor,
                not_measured,
                ceiling,
            )
            records.append(one.run())
            write_bench_record(records[-1], out)
    except KeyboardInterrupt:
        return True
    return False


def _selftest_summary(results: Sequence[TrialResult]) -> str:
    right = sum(result.is_right for result in results)
    return f"{right} of {len(results)} verdicts are right"
