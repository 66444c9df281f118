"""Entry point of `python -m conformance`."""

from __future__ import annotations

from conformance.cli import app

app(prog_name="python -m conformance")
