from __future__ import annotations

import io

from rich.console import Console
from rich.progress import Progress as RichBar
from rich.progress import TextColumn

from baselines.llama_cpp.progress import BarProgress, PlainProgress


def test_plain_lines_come_at_least_every_15_s_and_not_more_often() -> None:
    lines: list[str] = []
    now = 0.0
    progress = PlainProgress(lines.append, clock=lambda: now)
    progress.step("building")
    for half_second in range(1, 81):
        now = half_second / 2
        progress.update(half_second, 100)
    assert lines == ["building", "building: 30/100 after 15 s", "building: 60/100 after 30 s"]


def test_step_without_a_count_shows_its_time() -> None:
    lines: list[str] = []
    now = 0.0
    progress = PlainProgress(lines.append, clock=lambda: now)
    progress.step("configuring")
    now = 16.0
    progress.update(0, 0)
    assert lines[-1] == "configuring: after 16 s"


def test_the_next_line_says_what_the_step_is_at() -> None:
    lines: list[str] = []
    now = [0.0]
    progress = PlainProgress(lines.append, lambda: now[0])
    progress.step("measuring")
    progress.describe("tiny-c512, repetition 2/5")
    now[0] = 20.0
    progress.update(3, 10)
    assert lines == ["measuring", "tiny-c512, repetition 2/5: 3/10 after 20 s"]


def test_a_bar_changes_its_text_and_shows_what_is_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with RichBar(TextColumn("{task.description}"), console=console) as bar:
        progress = BarProgress(bar)
        progress.describe("nothing has begun")
        progress.step("measuring")
        progress.describe("tiny-c512, repetition 2/5")
        progress.update(3, 10)
        task = bar.tasks[0]
        assert (task.description, task.completed, task.total) == ("tiny-c512, repetition 2/5", 3, 10)
