"""Progress of the long steps: a moving bar on a terminal, plain lines in a CI log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichBar

PLAIN_INTERVAL_S = 15.0


class Progress(Protocol):
    """What ensure_build tells about itself while it works."""

    def step(self, text: str) -> None:
        """Begin a step, named by one line of text."""

    def describe(self, text: str) -> None:
        """Say what the step is at now."""

    def update(self, done: int, total: int) -> None:
        """Report that done of total parts are finished; called about twice a second, changed or not."""


class PlainProgress:
    """Write a line for every step, and one at least every 15 s while a step goes on."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._text, self._started, self._last = "", 0.0, 0.0

    def step(self, text: str) -> None:
        """Write the step's own line."""
        self._text, self._started = text, self._clock()
        self._last = self._started
        self._write(text)

    def describe(self, text: str) -> None:
        """Let the next line begin with `text`."""
        self._text = text

    def update(self, done: int, total: int) -> None:
        """Write how far the step is, unless a line was written less than 15 s ago."""
        now = self._clock()
        if now - self._last < PLAIN_INTERVAL_S:
            return
        self._last = now
        count = f" {done}/{total}" if total else ""
        self._write(f"{self._text}:{count} after {now - self._started:.0f} s")


class BarProgress:
    """Move one rich bar per step."""

    def __init__(self, bar: RichBar) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._total = 1

    def step(self, text: str) -> None:
        """Fill the bar of the step before, and start one of unknown length."""
        self.finish()
        self._task, self._total = self._bar.add_task(text, total=None), 1

    def describe(self, text: str) -> None:
        """Change the text of the bar."""
        if self._task is not None:
            self._bar.update(self._task, description=text)

    def update(self, done: int, total: int) -> None:
        """Move the bar; a total of 0 leaves its length unknown."""
        if self._task is not None and total:
            self._total = total
            self._bar.update(self._task, completed=done, total=total)

    def finish(self) -> None:
        """Fill the last bar."""
        if self._task is not None:
            self._bar.update(self._task, completed=self._total, total=self._total)


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yield the progress display that suits standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainProgress(lambda line: print(line, file=sys.stderr, flush=True))
        return
    counted = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with RichBar(TextColumn("{task.description}"), *counted, console=console) as bar:
        progress = BarProgress(bar)
        yield progress
        progress.finish()
