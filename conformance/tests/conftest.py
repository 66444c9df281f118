"""Fixtures of the conformance tests: a short scenario, and the records of one run of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.records import Record
from conformance.runner import Runner
from conformance.scenario import ScenarioFile
from conformance.tests.fakes import FakeLlama, Silent, make_scenario, run_here


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> ScenarioFile:
    return make_scenario(tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="session")
def records(short: ScenarioFile, out: Path) -> list[Record]:
    """The records of llama.cpp, both backends and every control, with the engine in llama.cpp's place."""
    return Runner(FakeLlama().open, out, Silent(), subject=run_here).run([short])
