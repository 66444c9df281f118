"""Entry point of `python -m conformance`."""

from __future__ import annotations

import sys

from conformance.cli import app
from conformance.gate import Outcome
from engine.usage import run_app

sys.exit(run_app(app, "python -m conformance", Outcome.CANNOT_RUN))
