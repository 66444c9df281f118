"""Runs that are killed: records are whole or absent, nothing is left running, the next run works."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.scenario import ScenarioFile
from conformance.tests.bench_fakes import right_ids
from conformance.tests.kills import COMMANDS, WHOLE, Arena

N_KILLS, N_SOAK_KILLS, N_BETWEEN = 8, 200, 20
SEED = int(os.environ.get("SOAK_SEED", "1"))


@pytest.fixture
def arena(short: ScenarioFile, tmp_path: Path) -> Arena:
    arena = Arena(tmp_path, SEED)
    arena.prepare(short, right_ids(short), 2048)
    return arena


def kill_often(arena: Arena, n_kills: int, tell: Callable[[str], None]) -> None:
    """Kill so many runs; every N_BETWEEN, and at the end, let a whole one of each command follow.

    Runs that ended before they were to be killed are not counted.
    """
    n_done = 0
    for number in range(2 * n_kills):
        command, with_signal, exit_code = arena.kill_at_random(number)
        if exit_code == WHOLE[command]:
            continue
        n_done += 1
        tell(f"kill {n_done} of {n_kills}: {command}, {with_signal}: exit code {exit_code}")
        if n_done % N_BETWEEN == 0 or n_done == n_kills:
            for other in COMMANDS:
                arena.run_whole(other)
        if n_done == n_kills:
            return
    raise AssertionError(f"only {n_done} of {2 * n_kills} runs were still there to be killed")


def test_a_killed_run_leaves_nothing_behind(arena: Arena) -> None:
    told: list[str] = []
    kill_often(arena, N_KILLS, told.append)
    assert len(told) == N_KILLS


@pytest.mark.soak
def test_hundreds_of_killed_runs_leave_nothing_behind(arena: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    def tell(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    kill_often(arena, N_SOAK_KILLS, tell)
