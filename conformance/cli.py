"""`python -m conformance`: run scenarios, judge records, make fixture models, recompute golden values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from baselines.llama_cpp import pin
from baselines.llama_cpp.build import BuildOptions, ensure_build
from baselines.llama_cpp.progress import show_progress
from conformance import golden as goldens
from conformance.bench import commands as bench_commands
from conformance.bench.ablation import AblationRecord
from conformance.bench.ops import OpsRecord
from conformance.bench.records import BenchRecord
from conformance.command_line import (
    Backends,
    CacheDir,
    Names,
    Subjects,
    environment_errors,
    fail,
    known_backends,
    known_subjects,
)
from conformance.errors import ConformanceError
from conformance.fixtures import fresh_model
from conformance.gate import Outcome, judge
from conformance.gate_output import (
    append_summary,
    github_annotations,
    github_command,
    github_plain,
    junit_of_error,
    write_junit,
)
from conformance.gate_output import junit as junit_xml
from conformance.hostile import verdicts
from conformance.llama_builds import LlamaBuilds
from conformance.models import PRESETS, make_model
from conformance.publishing.pages import stale_pages
from conformance.records import DEFAULT_FOLDER, Record, claimed, read_records
from conformance.report import render
from conformance.runner import Runner, engine_name
from conformance.scenario import ScenarioFile, all_scenarios, find_scenario, select_scenarios

_EXIT_CODES = "Exit code: 0 all match, 1 mismatch, 2 something was not measured, 3 this environment cannot run it."

_SCHEMAS: dict[str, type[BaseModel]] = {
    "record": Record,
    "bench": BenchRecord,
    "ops": OpsRecord,
    "ablation": AblationRecord,
}

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would take "[default: ...]" for markup
    help="Check an engine for Qwen3.5-class hybrid models against llama.cpp, token by token and bit by bit.",
)


@app.command(epilog=_EXIT_CODES)
def run(
    scenarios: Names = None,
    llama_cpp: Annotated[
        Path | None, typer.Option(metavar="DIR", help=f"Your own shared build of llama.cpp b{pin.BUILD_NUMBER}.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Unpacked source of llama.cpp b{pin.BUILD_NUMBER}, instead of fetching it."),
    ] = None,
    cuda_arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH",
            help="CUDA architecture, such as 90, for scenarios with llama.cpp on a GPU; repeat for more "
            "[default: native].",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the records.")] = DEFAULT_FOLDER,
    backend: Backends = None,
    subject: Subjects = None,
    cache_dir: CacheDir = None,
) -> None:
    """Run scenarios and the negative controls, write one record per scenario and engine, print the table.

    Each record is written as soon as it is made. Ctrl-C ends the run with the table of what there is, and
    exit code 130.
    """
    with environment_errors():
        backends = known_backends(backend)
        files = select_scenarios(scenarios or [])
        subjects = known_subjects(subject, files)
        if llama_cpp and cuda_arch:
            raise ConformanceError("--llama-cpp takes a build as it is: --cuda-arch does not apply to it")
        options = BuildOptions(source=source, llama_cpp=llama_cpp, cache_dir=cache_dir)
        records: list[Record] = []
        with claimed(out), show_progress() as progress, _table_in_any_case(records, files, backends, subjects):
            builds = LlamaBuilds(options, tuple(cuda_arch or ()), progress)
            runner = Runner(builds.open, out, progress, backends, cache_dir, extra=subjects)
            for record in runner.records(files):
                records.append(record)
    raise typer.Exit(judge(records, files, backends, subjects=subjects).outcome)


@contextmanager
def _table_in_any_case(
    records: list[Record], files: Sequence[ScenarioFile], backends: Sequence[str], subjects: Mapping[str, str | None]
) -> Iterator[None]:
    """Print the table of `records` after the context, also where that ends early."""
    try:
        yield
    finally:
        if records:
            typer.echo(render(records, files, judge(records, files, backends, subjects=subjects)))


@app.command(epilog=_EXIT_CODES)
def gate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the records.")] = DEFAULT_FOLDER,
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", help="Scenario that must have passed; repeat for more [default: as for run]."),
    ] = None,
    backend: Backends = None,
    subject: Subjects = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the verdicts as JUnit XML, too.")
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Print annotations for GitHub Actions, too, and add to the job's summary.")
    ] = False,
    any_source: Annotated[
        bool, typer.Option("--any-source", help="Let records count that were made by other engine source than this.")
    ] = False,
) -> None:
    """Read records and judge them; no record at all is "not measured"."""
    with environment_errors(), _shown_to_ci(junit, github):
        files = select_scenarios(scenario or [])
        backends = known_backends(backend)
        records = read_records(folder)
        subjects = known_subjects(subject, files)
        judgement = judge(records, files, backends, subjects=subjects, any_source=any_source)
        if junit:
            write_junit(junit, junit_xml(judgement))
        if github:
            append_summary(judgement)
    table = render(records, files, judgement)
    typer.echo(github_plain(table) if github else table)
    for line in github_annotations(judgement) if github else ():
        typer.echo(line)
    raise typer.Exit(judgement.outcome)


@contextmanager
def _shown_to_ci(junit: Path | None, github: bool) -> Iterator[None]:
    """Say where CI looks for it, too, why records cannot be judged."""
    try:
        yield
    except (ConformanceError, OSError) as error:
        if github:
            typer.echo(github_command("error", "records cannot be judged", str(error)))
        if junit:
            write_junit(junit, junit_of_error(str(error)))
        raise


@app.command("list")
def list_scenarios() -> None:
    """Print the scenarios of the suite, which of them run by default, and what they ask."""
    with environment_errors():
        for file in all_scenarios():
            when = "default" if file.scenario.default else "by name"
            typer.echo(f"{file.scenario.name:19}  {when}  {file.scenario.asks}")


@app.command("make-model")
def make_model_command(
    kind: Annotated[str, typer.Argument(help=f"One of: {', '.join(PRESETS)}.")],
    out: Annotated[Path, typer.Argument(help="GGUF file to write.")],
    seed: Annotated[int | None, typer.Option(help="Seed of the weights [default: the kind's own].")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="Leave a hole in place of the weights.")] = False,
) -> None:
    """Make a fixture model: random weights with a planted margin, the same bytes from a seed everywhere."""
    try:
        with show_progress() as progress:
            progress.step(f"making the {kind} model")
            made = make_model(kind, out, seed, sparse=sparse, progress=progress.update)
    except (OSError, ValueError) as error:
        raise fail(str(error), Outcome.CANNOT_RUN) from None
    digest = "weights left out" if made.sha256 is None else f"sha256 {made.sha256}"
    typer.echo(f"{made.path}: {made.n_bytes:,} bytes, {made.n_tensors} tensors, {digest}")


@app.command(epilog="Exit code: 0 the file's values are right, 1 they differ, 3 this environment cannot run it.")
def golden(
    scenario: Annotated[str, typer.Argument(help="Name or YAML file of a scenario.")],
    write: Annotated[bool, typer.Option("--write", help="Put the new values into the scenario's file.")] = False,
) -> None:
    """Recompute a scenario's golden values and print what differs (for maintainers).

    They come from the NumPy backend, or from the scenario's own where it is not for that one. A fixture is made anew
    first, so that its SHA256 is one of these values.
    """
    with environment_errors():
        file = find_scenario(scenario)
        goldens.require_backend(file.scenario)
    with environment_errors(), show_progress() as progress, fresh_model(file, progress) as (model, sha256):
        progress.step(f"{file.scenario.name}: {engine_name(goldens.golden_backend(file.scenario))}")
        n_done = iter(range(1, file.scenario.n_predict + 1))
        found = goldens.compute_golden(
            file, model, sha256, lambda token: progress.update(next(n_done), file.scenario.n_predict)
        )
    differing = [change for change in found.changes if change.old != change.new]
    for change in found.changes:
        typer.echo(f"  {change.name}: {change.old}" + (f"\n    now {change.new}" if change in differing else ""))
    typer.echo(f"  the engine's smallest top-2 gap: {found.smallest_top2_gap:.4f}")
    if write:
        goldens.write_golden(file.path, found)
    elif differing:
        raise typer.Exit(Outcome.MISMATCH)


@app.command(epilog="Exit code: 0 all as recorded, 1 something differs, 3 this environment cannot run it.")
def corpus(
    write: Annotated[bool, typer.Option("--write", help="Record what llama.cpp does, and write the page.")] = False,
    llama_cpp: Annotated[
        Path | None, typer.Option(metavar="DIR", help=f"Your own shared build of llama.cpp b{pin.BUILD_NUMBER}.")
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Give malformed model files to the engine and to llama.cpp; compare with what both are known to do."""
    with environment_errors(), show_progress() as progress:
        build = ensure_build(BuildOptions(llama_cpp=llama_cpp, cache_dir=cache_dir), progress)
        progress.step("malformed files: the engine")
        differing = verdicts.engine_faults()
        progress.step("malformed files: llama.cpp")
        found = verdicts.llama_verdicts(build, progress)
        if write:
            verdicts.write_verdicts(found)
        known = verdicts.read_verdicts().cases
    for id_, theirs in found.cases.items():
        recorded = known[id_].verdict if id_ in known else "nothing"
        if theirs.verdict != recorded:
            differing.append(f"{id_}: llama.cpp {theirs.verdict}, recorded is {recorded}")
    typer.echo("\n".join([*differing, f"{len(found.cases)} files, {len(differing)} not as expected"]))
    raise typer.Exit(Outcome.MISMATCH if differing else Outcome.MATCH)


@app.command(epilog="Exit code: 0 written or up to date, 1 with --check a page is not, 3 records cannot be read.")
def report(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing, name the pages that are not up to date.")
    ] = False,
) -> None:
    """Write the tables made of results/ into the README and the docs of the checkout in the working folder."""
    with environment_errors():
        stale = list(stale_pages(Path()))
        for path, text in stale:
            typer.echo(f"{path}: {'not up to date, run `nox -s report`' if check else 'written'}")
            if not check:
                path.write_text(text, encoding="utf-8")
    raise typer.Exit(Outcome.MISMATCH if check and stale else Outcome.MATCH)


@app.command()
def schema(
    kind: Annotated[str, typer.Argument(help=f"One of: {', '.join(_SCHEMAS)}.")] = "record",
) -> None:
    """Print the JSON Schema of a kind of record."""
    with environment_errors():
        if kind not in _SCHEMAS:
            raise ConformanceError(f"{kind!r} is no kind of record, expected one of: {', '.join(_SCHEMAS)}")
    typer.echo(json.dumps(_SCHEMAS[kind].model_json_schema(), indent=1, sort_keys=True))


app.command(epilog=bench_commands.BENCH_EXIT_CODES)(bench_commands.bench)
app.command("bench-selftest", epilog=bench_commands.SELFTEST_EXIT_CODES)(bench_commands.bench_selftest)
app.command("bench-ops")(bench_commands.bench_ops)
app.command(epilog=bench_commands.ABLATION_EXIT_CODES)(bench_commands.ablation)
app.command(epilog=bench_commands.VERIFY_EXIT_CODES)(bench_commands.verify)
