from __future__ import annotations

from baselines.llama_cpp.progress import PlainProgress


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
