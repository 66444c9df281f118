"""Command line: `python -m engine COMMAND`. The only module of the engine that prints."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from engine import ablation as ablations
from engine import opbench as opbenches
from engine import picture as pictures
from engine import profile as profiles
from engine.bench import PrefillComparison, bench_decode, bench_prefill, default_prompt_ids
from engine.cuda.variants import FULL, VARIANTS, Variant, variant
from engine.errors import EngineError, ModelFileError, NoDeviceError, RequestError, is_device_failure, one_line, shown
from engine.generate import BACKENDS, Engine, Generation, TextStream, check_request, load_engine
from engine.gguf.reader import ModelFile, open_model
from engine.gguf.tokenizer import Tokenizer
from engine.gguf.trunk import write_trunk
from engine.inspect import inspect_report, render_plan
from engine.model.config import ModelConfig, check_tensors
from engine.model.weights import loaded_n_bytes
from engine.placement import N_PACK
from engine.usage import run_app

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markup would swallow the defaults in brackets
    help="Run Qwen3.5-class hybrid GGUF models with results that are the same bits everywhere.",
)

TRAINED_MODEL = Path(__file__).parents[1] / "conformance" / "models" / "pydoc" / "pydoc.gguf"
"""The small model that comes with the suite; it continues the text of Python's documentation topics."""

_MAX_ID_DIGITS = 18
_BUDGET_HELP = "Hard limit in bytes on weights and buffers (cuda); the CUDA context comes on top."
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ContextSize = Annotated[int, typer.Option("-c", "--ctx-size", help="Positions in the context.")]


def main() -> None:
    """Run the command line; an expected failure prints one line and exits with 1, a missing device with 3.

    Wrong arguments are an expected failure.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    try:
        sys.exit(run_app(app, "python -m engine", 1))
    except MemoryError as error:
        print(f"error: out of memory: {error}; try a smaller -c", file=sys.stderr)
        sys.exit(1)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, NoDeviceError) else 1)
    except Exception as error:
        if not is_device_failure(error):
            raise
        print(f"error: {one_line(f'the device failed, what it held is lost: {error}')}; run again", file=sys.stderr)
        _leave_without_cleanup(1)


def _leave_without_cleanup(exit_code: int) -> None:
    """End the process at once: what CuPy would free on the way out is gone with the device, and each failure prints."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@app.command()
def inspect(
    model: ModelArgument,
    n_ctx: ContextSize = 512,
    vram_budget: Annotated[
        int | None, typer.Option(min=1, help="Bytes of device memory that the plan may use.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show hyperparameters, where the bytes of a file are, and what a context of -c positions needs."""
    report = inspect_report(model, n_ctx, vram_budget)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.render())


@app.command()
def trunk(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
) -> None:
    """Copy a file without its multi-token-prediction block, which llama.cpp b8763 cannot load."""
    file = open_model(model)
    with _bar("writing", file.n_bytes) as advance:
        write_trunk(file, out, overwrite=force, progress=advance)
    print(f"{out}: {out.stat().st_size} bytes")


@app.command()
def generate(
    model: Annotated[
        Path, typer.Option("-m", "--model", show_default=False, help="GGUF file [default: the trained model shipped]")
    ] = TRAINED_MODEL,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Prompt text")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Prompt as token ids, such as 1,2,3")] = None,
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", help="Tokens to generate")] = 129,
    n_ctx: ContextSize = 512,
    backend: Annotated[str, typer.Option(help=f"One of: {', '.join(BACKENDS)}")] = "numpy",
    threads: Annotated[int | None, typer.Option("-t", "--threads", min=1, help="CPU threads [default: cores]")] = None,
    vram_budget: Annotated[int | None, typer.Option(help=_BUDGET_HELP)] = None,
    scheduling: Annotated[str, typer.Option(help="How the host waits: spin or auto (cuda).")] = "spin",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at an end token.")] = False,
    check_weights: Annotated[
        bool, typer.Option("--check-weights", help="Read all weights first and refuse NaN and infinity.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Generate greedily: stream the text, then print speeds and hashes."""
    file = open_model(model)
    if (prompt is None) == (prompt_ids is None):
        raise RequestError("give the prompt either as text with -p or as ids with --prompt-ids")
    tokenizer = _tokenizer(file, needed=prompt is not None)
    ids = tokenizer.encode(prompt) if tokenizer and prompt is not None else parse_ids(prompt_ids or "")
    check_request(ModelConfig.from_model(file), n_ctx, ids, n_predict)
    engine = _load(file, n_ctx, backend, vram_budget, scheduling, threads, check_weights)
    end_ids = frozenset() if ignore_eos or tokenizer is None else tokenizer.end_ids
    printer = _Printer(tokenizer, quiet=as_json)
    result = engine.run(ids, n_predict, end_ids=end_ids, on_token=printer.token)
    printer.finish()
    summary = _summary(engine, result, printer.data.decode(errors="replace"))
    if as_json:
        print(json.dumps(summary))
    else:
        print("\n" + _summary_text(summary))


@app.command()
def kernels(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="GGUF files; weights are not read.")],
    arch: Annotated[
        list[str] | None, typer.Option(help="Architecture; repeat for more [default: sm_80 to sm_120]")
    ] = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Processes [default: cores]")] = None,
    as_json: Json = False,
) -> None:
    """Compile all kernels of the models, no GPU needed; show registers, shared memory, spills. Exit 1 on a spill."""
    try:
        from engine.cuda import report
    except ImportError as error:
        raise NoDeviceError(f"kernels needs CuPy ({error}): install the extra cuda12 or cuda13") from None
    archs = arch or list(report.ARCHS)
    files = [open_model(model) for model in models]
    expressions = {name: report.model_expressions(files, name) for name in archs}
    found: dict[str, report.ArchReport] = {}
    with _bar("compiling kernels", len(archs), MofNCompleteColumn()) as advance:
        for one in report.compile_reports(expressions, jobs or psutil.cpu_count() or 1):
            found[one.arch] = one
            advance(1)
    reports = [found[name] for name in archs]
    print(json.dumps(report.to_dict(reports)) if as_json else report.render(reports))
    if any(one.spilling for one in reports):
        raise typer.Exit(1)


BenchModel = Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file")]
PromptIds = Annotated[str | None, typer.Option(help="Prompt as token ids [default: 70 ids over the vocabulary]")]
Backend = Annotated[str, typer.Option(help=f"One of: {', '.join(BACKENDS)}")]
Budget = Annotated[int | None, typer.Option(help=_BUDGET_HELP)]
Scheduling = Annotated[str, typer.Option(help="How the host waits for the device: spin or auto (cuda).")]
Repetitions = Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Timed runs.")]


@app.command("decode-bench")
def decode_bench(
    model: BenchModel,
    n_steps: Annotated[int, typer.Argument(metavar="STEPS", min=1, help="Decode steps")] = 128,
    n_ctx: Annotated[int, typer.Argument(metavar="CTX", min=1, help="Positions in the context")] = 512,
    pack: Annotated[int, typer.Argument(metavar="PACK", min=1, help="Tokens per pack of the prefill")] = N_PACK,
    prompt_ids: PromptIds = None,
    backend: Backend = "cuda",
    vram_budget: Budget = None,
    scheduling: Scheduling = "spin",
    repetitions: Repetitions = 3,
    as_json: Json = False,
) -> None:
    """Time greedy decoding: decode-bench MODEL 128 512."""
    engine, ids = _bench_engine(model, n_ctx, backend, vram_budget, scheduling, prompt_ids, n_steps + 1)
    prefill = bench_prefill(engine, ids, pack, 1)
    runs = bench_decode(engine, ids, n_steps, repetitions)
    print(json.dumps(_decode_dict(engine, prefill, runs)) if as_json else _decode_text(engine, prefill, runs))


@app.command("prompt-bench")
def prompt_bench(
    model: BenchModel,
    n_ctx: Annotated[int, typer.Argument(metavar="CTX", min=1, help="Positions in the context")] = 512,
    pack: Annotated[int, typer.Argument(metavar="PACK", min=1, help="Tokens per pack of layer-major prefill")] = N_PACK,
    prompt_ids: PromptIds = None,
    backend: Backend = "cuda",
    vram_budget: Budget = None,
    scheduling: Scheduling = "spin",
    repetitions: Repetitions = 3,
    as_json: Json = False,
) -> None:
    """Time token-major against layer-major prefill and compare their logits bit for bit."""
    engine, ids = _bench_engine(model, n_ctx, backend, vram_budget, scheduling, prompt_ids, 1)
    prefill = bench_prefill(engine, ids, pack, repetitions)
    print(json.dumps(_prefill_dict(prefill)) if as_json else _prefill_text(prefill))


@app.command()
def profile(
    model: BenchModel,
    n_ctx: ContextSize = 512,
    depth: Annotated[int, typer.Option(min=0, help="Position of the token whose step is profiled.")] = 70,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Replays of each part.")] = 12,
    vram_budget: Budget = None,
    with_nodes: Annotated[bool, typer.Option("--nodes", help="List every launch in the table.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw stacked bars: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Time every launch of a decode step on the GPU, against its bytes and the read ceiling."""
    if picture is not None:
        pictures.require_matplotlib()
    file = open_model(model)
    check_request(ModelConfig.from_model(file), n_ctx, [0], depth + 1)
    with _measuring():
        found = profiles.profile_step(_load(file, n_ctx, "cuda", vram_budget, "spin"), depth, repetitions)
    print(json.dumps(found.to_dict()) if as_json else profiles.render(found, with_nodes))
    if picture is not None:
        pictures.draw(found, picture)


@app.command()
def opbench(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file; of it, the header is enough.")],
    variants: Annotated[
        list[str] | None,
        typer.Option("--variant", help=f"Repeat for more [default: {', '.join(opbenches.VARIANT_NAMES)}]."),
    ] = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Replays of each graph.")] = 12,
    as_json: Json = False,
) -> None:
    """Time each matrix kernel of a model on the GPU, weights cold, by each variant of the kernels."""
    file = open_model(model)
    check_tensors(file, ModelConfig.from_model(file))
    n_rows = len(opbenches.bench_nodes(file))
    with _measuring(), _bar("timing kernels", n_rows, MofNCompleteColumn()) as advance:
        found = opbenches.bench_ops(file, variants or opbenches.VARIANT_NAMES, repetitions, advance)
    print(json.dumps(found.to_dict()) if as_json else opbenches.render(found))


@app.command()
def ablation(
    model: BenchModel,
    n_ctx: ContextSize = 512,
    n_steps: Annotated[int, typer.Option("-n", "--steps", min=1, help="Decode steps of a run.")] = 128,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Pairs of runs.")] = 5,
    variants: Annotated[
        list[str] | None, typer.Option("--variant", help="What to switch off; repeat for more [default: all].")
    ] = None,
    vram_budget: Budget = None,
    compile_for: Annotated[
        str | None, typer.Option(metavar="ARCH", help="Only compile into the cache, such as for sm_90; needs no GPU.")
    ] = None,
    n_sm: Annotated[int, typer.Option(min=1, help="Multiprocessors of the device to compile for.")] = 132,
    as_json: Json = False,
) -> None:
    """Decode on the GPU with each surgery switched off, in alternation with the whole engine."""
    chosen = [variant(name) for name in variants] if variants else list(VARIANTS[1:])
    ablations.check_variants(chosen)
    file = open_model(model)
    if compile_for is not None:
        _compile_variants(file, chosen, compile_for, n_sm)
        return
    with _measuring():
        engine, ids = _bench_engine(model, n_ctx, "cuda", vram_budget, "spin", None, n_steps + 1)
    with _bar("runs", len(chosen) * repetitions, MofNCompleteColumn()) as advance:
        found = ablations.ablate(engine, ids, n_steps, repetitions, chosen, advance)
    print(json.dumps(found.to_dict()) if as_json else ablations.render(found))
    if not all(row.same_bits for row in found.rows):
        raise typer.Exit(1)


def _compile_variants(file: ModelFile, variants: list[Variant], arch: str, n_sm: int) -> None:
    """Fill the cache of compiled kernels and print what each variant comes to."""
    config = ModelConfig.from_model(file)
    check_tensors(file, config)
    try:
        from engine.cuda.build import compile_for
    except ImportError as error:
        raise NoDeviceError(f"compiling needs CuPy ({error}): install the extra cuda12 or cuda13") from None
    every = [FULL, *variants]
    for one, cubin in zip(every, compile_for(every, config, file.tensors, arch, n_sm), strict=True):
        spilling = [r.name for r in cubin.resources() if r.spill_n_bytes or r.stack_n_bytes]
        sizes = f"{len(cubin.code)} bytes of code, {cubin.ptx_n_bytes} of PTX"
        print(f"{one.name}: {sizes}, spilling: {', '.join(spilling) or 'none'}", flush=True)


@contextmanager
def _measuring() -> Iterator[None]:
    """Say of a measurement that a missing device kept from being made that it was not made."""
    try:
        yield
    except NoDeviceError as error:
        raise NoDeviceError(f"not measured: {error}") from None


def _load(
    file: ModelFile,
    n_ctx: int,
    backend: str,
    vram_budget: int | None,
    scheduling: str,
    threads: int | None = None,
    check_weights: bool = False,
) -> Engine:
    """Load with progress on stderr, after the memory plan of a device backend."""
    config = ModelConfig.from_model(file)
    check_tensors(file, config)
    with _bar("loading", loaded_n_bytes(file, config)) as advance:
        return load_engine(
            file,
            n_ctx=n_ctx,
            backend=backend,
            n_threads=threads,
            vram_budget=vram_budget,
            scheduling=scheduling,
            check_weights=check_weights,
            on_plan=lambda plan: print(render_plan(plan), file=sys.stderr),
            progress=advance,
        )


def _bench_engine(
    model: Path,
    n_ctx: int,
    backend: str,
    vram_budget: int | None,
    scheduling: str,
    prompt_ids: str | None,
    n_predict: int,
) -> tuple[Engine, list[int]]:
    """Return the engine and the prompt, checked before the model is loaded."""
    file = open_model(model)
    config = ModelConfig.from_model(file)
    ids = default_prompt_ids(config.n_vocab) if prompt_ids is None else parse_ids(prompt_ids)
    check_request(config, n_ctx, ids, n_predict)
    return _load(file, n_ctx, backend, vram_budget, scheduling), ids


def _prefill_dict(prefill: PrefillComparison) -> dict[str, Any]:
    ways = {f"{way.mode}_pack_{way.pack}": way for way in (prefill.token_major, prefill.layer_major)}
    return {
        "n_prompt": prefill.layer_major.n_tokens,
        "prefill_time_ns": {name: way.time_ns for name, way in ways.items()},
        "prefill_tok_per_s": {name: way.tok_per_s for name, way in ways.items()},
        "final_logits_bitwise_equal": prefill.final_logits_bitwise_equal,
        "final_logits_le32_sha256": prefill.final_logits_le32_sha256,
        "final_greedy_token_id": prefill.final_greedy_token_id,
    }


def _prefill_text(prefill: PrefillComparison) -> str:
    lines = [
        f"prefill {way.mode} pack {way.pack}: {way.tok_per_s:.2f} tok/s ({1000 / way.tok_per_s:.2f} ms/tok)"
        for way in (prefill.token_major, prefill.layer_major)
    ]
    return "\n".join(
        (
            *lines,
            f"final_logits_bitwise_equal: {'yes' if prefill.final_logits_bitwise_equal else 'no'}",
            f"final_logits_le32_sha256: {prefill.final_logits_le32_sha256}",
            f"final_greedy_token_id: {prefill.final_greedy_token_id}",
        )
    )


def _decode_dict(engine: Engine, prefill: PrefillComparison, runs: list[Generation]) -> dict[str, Any]:
    step_time_ns = [run.step_time_ns for run in runs]
    median_ns = float(np.median([sum(times) for times in step_time_ns]))
    n_steps = len(step_time_ns[0])
    return {
        **_prefill_dict(prefill),
        "n_ctx": engine.n_ctx,
        "n_steps": n_steps,
        "step_time_ns": step_time_ns,
        "decode_tok_per_s": n_steps / (median_ns * 1e-9),
        "output_tok_per_s": (n_steps + 1) / (median_ns * 1e-9),
        "generated_token_ids": runs[0].generated_token_ids,
        "generated_token_ids_le64_sha256": sorted({run.generated_token_ids_le64_sha256 for run in runs}),
        "load_time_ns": engine.load_time_ns,
        "backend": engine.ops.describe(),
    }


def _decode_text(engine: Engine, prefill: PrefillComparison, runs: list[Generation]) -> str:
    found = _decode_dict(engine, prefill, runs)
    decode, output = found["decode_tok_per_s"], found["output_tok_per_s"]
    hashes = found["generated_token_ids_le64_sha256"]
    return "\n".join(
        (
            _prefill_text(prefill),
            f"decode c={engine.n_ctx}, {found['n_steps']} steps: {decode:.2f} tok/s ({1000 / decode:.2f} ms/tok)",
            f"output throughput: {output:.2f} tok/s",
            *(f"generated_token_ids_le64_sha256: {digest}" for digest in hashes),
            f"last token id: {found['generated_token_ids'][-1]}",
            *(f"{name}: {value}" for name, value in found["backend"].items()),
        )
    )


def _tokenizer(file: ModelFile, needed: bool) -> Tokenizer | None:
    """Return the file's tokenizer; ids alone can do without one."""
    try:
        return Tokenizer.from_model(file)
    except ModelFileError:
        if needed:
            raise
        return None


def parse_ids(text: str) -> list[int]:
    """Parse ids separated by commas or blanks."""
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit() or len(word) > _MAX_ID_DIGITS:
            raise RequestError(f"--prompt-ids has {shown(word)}, expected token ids such as 1,2,3")
    return [int(word) for word in words]


@contextmanager
def _bar(what: str, total: int, unit: ProgressColumn | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, in bytes unless another unit is given; yields the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), unit or DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)


class _Printer:
    """Prints tokens as they come: text where there is a tokenizer, else ids."""

    def __init__(self, tokenizer: Tokenizer | None, quiet: bool) -> None:
        self._tokenizer, self._quiet = tokenizer, quiet
        self._stream = TextStream()
        self.data = b""

    def token(self, token: int) -> None:
        if self._tokenizer is None:
            self._put(b"%d " % token)
        else:
            self._put(self._stream.feed(self._tokenizer.token_bytes(token)))

    def finish(self) -> None:
        self._put(self._stream.finish())

    def _put(self, piece: bytes) -> None:
        self.data += piece
        if not self._quiet:
            _write(piece)


def _write(piece: bytes) -> None:
    """Write text to standard output, byte by byte as it is where that takes UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name == "utf-8":
        sys.stdout.flush()
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    else:
        print(piece.decode(errors="replace"), end="", flush=True)


def _summary(engine: Engine, result: Generation, text: str) -> dict[str, Any]:
    """Return what a run measured; the first token comes out of the prompt, so n tokens take n - 1 steps."""
    decode_time_ns = sum(result.step_time_ns)
    return {
        "model": engine.model.name,
        "n_ctx": engine.n_ctx,
        "prompt_token_ids": result.prompt_token_ids,
        "generated_token_ids": result.generated_token_ids,
        "generated_token_ids_le64_sha256": result.generated_token_ids_le64_sha256,
        "final_logits_le32_sha256": result.final_logits_le32_sha256,
        "final_greedy_token_id": result.final_greedy_token_id,
        "text": text,
        "load_time_ns": engine.load_time_ns,
        "prefill_time_ns": result.prefill_time_ns,
        "step_time_ns": result.step_time_ns,
        "prompt_tok_per_s": _rate(len(result.prompt_token_ids), result.prefill_time_ns),
        "decode_tok_per_s": _rate(len(result.step_time_ns), decode_time_ns),
        "output_tok_per_s": _rate(len(result.generated_token_ids), decode_time_ns),
    }


def _rate(n_tokens: int, time_ns: int) -> float | None:
    return n_tokens / (time_ns * 1e-9) if time_ns else None


def _summary_text(summary: dict[str, Any]) -> str:
    def speed(key: str) -> str:
        rate = summary[key]
        return "not measured" if rate is None else f"{rate:.2f} tok/s ({1000 / rate:.2f} ms/tok)"

    steps = len(summary["step_time_ns"])
    return "\n".join(
        (
            f"prompt   {len(summary['prompt_token_ids'])} tokens, {speed('prompt_tok_per_s')}",
            f"decode   {steps} steps, {speed('decode_tok_per_s')}",
            f"output   {len(summary['generated_token_ids'])} tokens, {speed('output_tok_per_s')}",
            f"generated_token_ids_le64_sha256  {summary['generated_token_ids_le64_sha256']}",
            f"final_logits_le32_sha256         {summary['final_logits_le32_sha256']}",
            f"final_greedy_token_id            {summary['final_greedy_token_id']}",
        )
    )
