"""What the commands of `python -m conformance` share: options, and how an expected failure ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from baselines.errors import BaselineError
from baselines.llama_cpp.source import CACHE_VARIABLE
from conformance.errors import ConformanceError
from conformance.gate import Outcome
from conformance.http_json import parse_base_url
from conformance.scenario import ScenarioFile
from engine.errors import EngineError, one_line
from engine.generate import BACKENDS

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCENARIO",
        help="Names or YAML files of scenarios [default: those that `list` says].",
    ),
]
Backends = Annotated[
    list[str] | None, typer.Option("--backend", help="Backend of the engine; repeat for more [default: numpy].")
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help=f"Folder for llama.cpp and models [default: ${CACHE_VARIABLE}, else the user's cache folder].",
    ),
]

Subjects = Annotated[
    list[str] | None,
    typer.Option(
        "--subject",
        metavar="NAME[=URL]",
        help="Engine that a scenario names besides ours, and its address if it has none there; repeat for more.",
    ),
]


def known_subjects(given: list[str] | None, files: Sequence[ScenarioFile]) -> dict[str, str | None]:
    """Return the other engines asked for by name, with the address given or None.

    Raises ConformanceError for one that no scenario names, and for an address that is none.
    """
    specs = {subject.name: subject for file in files for subject in file.scenario.subjects}
    asked: dict[str, str | None] = {}
    for text in given or []:
        name, _, url = text.partition("=")
        if name not in specs:
            known = ", ".join(sorted(specs)) or "none"
            raise ConformanceError(f"--subject is {name!r}, the scenarios of this run name: {known}")
        if url and specs[name].api == "command":
            raise ConformanceError(f"--subject {name}: is a command and has no address")
        try:
            asked[name] = parse_base_url(url).geturl() if url else None
        except ValueError as error:
            raise ConformanceError(f"--subject {name}: {error}") from None
    return asked


def known_backends(names: list[str] | None) -> list[str]:
    """Return the backends asked for, numpy if none is; raises ConformanceError for one that does not exist."""
    unknown = set(names or []) - set(BACKENDS)
    if unknown:
        raise ConformanceError(f"--backend is {min(unknown)!r}, expected one of: {', '.join(BACKENDS)}")
    return names or [BACKENDS[0]]


@contextmanager
def environment_errors() -> Iterator[None]:
    """Turn what keeps a command from running at all into one line and exit code 3."""
    try:
        yield
    except (ConformanceError, BaselineError, EngineError, OSError) as error:
        raise fail(str(error), Outcome.CANNOT_RUN) from None


def fail(message: str, outcome: Outcome) -> typer.Exit:
    """Print one line and return what ends the command."""
    print(f"error: {one_line(message)}", file=sys.stderr)
    return typer.Exit(outcome)
