"""`python -m baselines.llama_cpp`: build the pinned llama.cpp, or find it in the cache, and describe it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baselines.errors import BaselineError
from baselines.llama_cpp import pin
from baselines.llama_cpp.build import BuildOptions, LlamaBuild, ensure_build
from baselines.llama_cpp.progress import show_progress
from baselines.llama_cpp.source import CACHE_VARIABLE

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_CACHE_HELP = f"Folder for source and builds (default: ${CACHE_VARIABLE}, else the user's cache folder)."


@app.command()
def main(
    native: Annotated[
        bool, typer.Option("--native", help="Use every instruction of this CPU, for comparisons of speed.")
    ] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="Build the CUDA backend too (needs nvcc).")] = False,
    cuda_arch: Annotated[
        list[str] | None,
        typer.Option("--cuda-arch", help="CUDA architecture such as 90 or 120a; repeat for more (default: native)."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Build llama-server, llama-bench and llama-quantize as well.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Unpacked source of b{pin.BUILD_NUMBER}, instead of fetching it."),
    ] = None,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Your own shared build of b{pin.BUILD_NUMBER}; only the worker is compiled.",
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers to run at once (default: all cores).")] = None,
    cache_dir: Annotated[Path | None, typer.Option(metavar="DIR", help=_CACHE_HELP)] = None,
) -> None:
    """Build the pinned llama.cpp and our worker, or find them in the cache, and print where they are."""
    architectures = tuple(part for text in cuda_arch or [] for part in text.replace(";", ",").split(",") if part)
    options = BuildOptions(native, cuda, architectures, full, source, llama_cpp, jobs, cache_dir)
    try:
        with show_progress() as progress:
            build = ensure_build(options, progress)
    except BaselineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(describe(build))


def describe(build: LlamaBuild) -> str:
    """Return the lines that say what build is and where."""
    lines = [
        f"worker        {build.worker}",
        f"libraries     {build.library_folder}",
        f"build number  {build.build_number}",
        f"compiler      {build.compiler}",
        f"programs      {' '.join(build.targets)}",
    ]
    lines += [f"option        {name}={value}" for name, value in build.options.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    app()
