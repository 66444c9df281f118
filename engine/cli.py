"""Command line: `python -m engine inspect | trunk | generate`. The only module of the engine that prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from engine.errors import EngineError, ModelFileError, RequestError
from engine.generate import BACKENDS, Engine, Generation, TextStream, load_engine
from engine.gguf.reader import ModelFile, open_model
from engine.gguf.tokenizer import Tokenizer
from engine.gguf.trunk import write_trunk
from engine.inspect import inspect_report
from engine.model.config import ModelConfig
from engine.model.weights import loaded_n_bytes

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run Qwen3.5-class hybrid GGUF models with results that are the same bits everywhere.",
)

ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF file")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ContextSize = Annotated[int, typer.Option("-c", "--ctx-size", help="Positions in the context.")]


def main() -> None:
    """Run the command line; an expected failure prints one line and exits with 1."""
    try:
        app()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


@app.command()
def inspect(
    model: ModelArgument,
    n_ctx: ContextSize = 512,
    vram_budget: Annotated[int | None, typer.Option(help="Bytes of device memory that the plan may use.")] = None,
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
    model: Annotated[Path, typer.Option("-m", "--model", help="GGUF file")],
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Prompt text")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Prompt as token ids, such as 1,2,3")] = None,
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", help="Tokens to generate")] = 129,
    n_ctx: ContextSize = 512,
    backend: Annotated[str, typer.Option(help=f"One of: {', '.join(BACKENDS)}")] = "numpy",
    threads: Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads [default: cores]")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at an end token.")] = False,
    as_json: Json = False,
) -> None:
    """Generate greedily: stream the text, then print speeds and hashes."""
    file = open_model(model)
    if (prompt is None) == (prompt_ids is None):
        raise RequestError("give the prompt either as text with -p or as ids with --prompt-ids")
    tokenizer = _tokenizer(file, needed=prompt is not None)
    ids = tokenizer.encode(prompt) if tokenizer and prompt is not None else _parse_ids(prompt_ids or "")
    with _bar("loading", loaded_n_bytes(file, ModelConfig.from_model(file))) as advance:
        engine = load_engine(file, n_ctx=n_ctx, backend=backend, n_threads=threads, progress=advance)
    end_ids = frozenset() if ignore_eos or tokenizer is None else tokenizer.end_ids
    printer = _Printer(tokenizer, quiet=as_json)
    result = engine.run(ids, n_predict, end_ids=end_ids, on_token=printer.token)
    printer.finish()
    summary = _summary(engine, result, printer.text)
    if as_json:
        print(json.dumps(summary))
    else:
        print("\n" + _summary_text(summary))


def _tokenizer(file: ModelFile, needed: bool) -> Tokenizer | None:
    """Return the file's tokenizer; ids alone can do without one."""
    try:
        return Tokenizer.from_model(file)
    except ModelFileError:
        if needed:
            raise
        return None


def _parse_ids(text: str) -> list[int]:
    """Parse ids separated by commas or blanks."""
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise RequestError(f"--prompt-ids has {word!r}, expected token ids such as 1,2,3")
    return [int(word) for word in words]


@contextmanager
def _bar(what: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a byte progress bar on stderr; yields the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=n_bytes)
        yield lambda n: progress.advance(task, n)


class _Printer:
    """Prints tokens as they come: text where there is a tokenizer, else ids."""

    def __init__(self, tokenizer: Tokenizer | None, quiet: bool) -> None:
        self._tokenizer, self._quiet = tokenizer, quiet
        self._stream = TextStream()
        self.text = ""

    def token(self, token: int) -> None:
        if self._tokenizer is None:
            self._put(f"{token} ")
        else:
            self._put(self._stream.feed(self._tokenizer.token_bytes(token)))

    def finish(self) -> None:
        self._put(self._stream.finish())

    def _put(self, text: str) -> None:
        self.text += text
        if not self._quiet:
            print(text, end="", flush=True)


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
