"""Entry point of `python -m conformance`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; Ctrl-C is one line from the first import on."""
    try:
        from conformance.cli import app
        from conformance.gate import Outcome
        from engine.usage import run_app

        return run_app(app, "python -m conformance", Outcome.CANNOT_RUN)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130  # the name for it may not have been imported yet


if __name__ == "__main__":
    sys.exit(main())
