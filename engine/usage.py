"""Run a command line so that a mistake in its arguments is one line with an exit code of its own.

Left to itself, typer would end with 2, which means "not measured" in this project.
"""

from __future__ import annotations

import sys

import typer

from engine.errors import one_line

__all__ = ["INTERRUPTED", "run_app"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, the shell's own."""


def run_app(app: typer.Typer, prog_name: str, usage_exit_code: int) -> int:
    """Run `app` with the process's arguments and return the exit code; errors of the project's own pass through."""
    try:
        exit_code = int(app(prog_name=prog_name, standalone_mode=False) or 0)
    except typer.Abort:
        exit_code = INTERRUPTED
    except Exception as error:
        describe = getattr(error, "format_message", None)  # typer's own errors have it, whichever click they come from
        if describe is None:
            raise
        text = one_line(describe()) if sys.argv[1:] else f"no command; {prog_name} --help lists them"
        print(f"error: {text}", file=sys.stderr)
        return usage_exit_code
    if exit_code == INTERRUPTED:  # typer says nothing by itself
        print("error: interrupted", file=sys.stderr)
    return exit_code
