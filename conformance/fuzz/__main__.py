"""`python -m conformance.fuzz`: coverage-guided fuzzing with atheris, which must be installed; not part of CI."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import atheris
import typer

_SECONDS_EACH = 150
_MAX_N_BYTES = 16384
_RUN_TARGET = "--run-target"


def main(
    targets: Annotated[list[str] | None, typer.Argument(metavar="TARGET", help="Targets [default: all].")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="Time for each target.")] = _SECONDS_EACH,
    found: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for inputs that reach new code [default: a temporary one]."),
    ] = None,
    keep_found: Annotated[bool, typer.Option("--keep", help="Keep what was found as seeds of later runs.")] = False,
) -> None:
    """Fuzz each target for a while; exit code 1 if one let an exception out, whose input is then kept as ./crash-*."""
    from conformance.fuzz.targets import SEED_PREFIX, TARGETS, keep, seeds

    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for target in targets or list(TARGETS):
            folder = (found or Path(temporary)) / target
            folder.mkdir(parents=True, exist_ok=True)
            for number, seed in enumerate(seeds(target)):
                (folder / f"{SEED_PREFIX}{number}").write_bytes(seed)
            limits = [f"-max_total_time={seconds}", f"-max_len={_MAX_N_BYTES}", "-timeout=10", "-rss_limit_mb=1024"]
            command = [sys.executable, "-m", "conformance.fuzz", _RUN_TARGET, target, *limits, str(folder)]
            if subprocess.run(command, check=False).returncode:
                failed.append(target)
            if keep_found:
                keep(target, folder)
    typer.echo(f"faults in: {', '.join(failed)}" if failed else "no fault found")
    raise typer.Exit(1 if failed else 0)


def _run_target(target: str, arguments: list[str]) -> None:
    """Fuzz one target in this process; libFuzzer ends it."""
    with atheris.instrument_imports(include=["engine", "conformance", "yaml"]):
        from conformance.fuzz.targets import TARGETS
    atheris.Setup([sys.argv[0], *arguments], TARGETS[target])
    atheris.Fuzz()


if sys.argv[1:2] == [_RUN_TARGET]:
    _run_target(sys.argv[2], sys.argv[3:])
else:
    typer.run(main)
