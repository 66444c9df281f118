"""Runs that are killed: records are whole or absent, nothing is left running, the next run works."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.scenario import ScenarioFile
from conformance.tests.bench_fakes import right_ids
from conformance.tests.kills import COMMANDS, Arena

N_KILLS, N_SOAK_KILLS, N_BETWEEN = 8, 200, 20
SEED = int(os.environ.get("SOAK_SEED", "1"))


@pytest.fixture
def arena(short: ScenarioFile, tmp_path: Path) -> Arena:
    arena = Arena(tmp_path, SEED)
    arena.prepare(short, right_ids(short), 2048)
    return arena


def kill_often(arena: Arena, n_kills: int, tell: Callable[[str], None]) -> None:
    """Kill runs one after the other; every N_BETWEEN, and at the end, let a whole one of each command follow."""
    for number in range(n_kills):
        command, with_signal, exit_code = arena.kill_at_random(number)
        tell(f"kill {number + 1} of {n_kills}: {command}, {with_signal}: exit code {exit_code}")
        if (number + 1) % N_BETWEEN == 0 or number + 1 == n_kills:
            for other in COMMANDS:
                arena.run_whole(other)


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
