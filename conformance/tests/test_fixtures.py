from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance import fixtures
from conformance.errors import FixtureError
from conformance.fixtures import ensure_model
from conformance.scenario import ScenarioFile, load_scenario
from conformance.tests.fakes import Silent, content, write_scenario

DATA = b"a model"
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Count the models that are made, each a few bytes."""
    paths: list[Path] = []

    def make(kind: str, out: Path, seed: int | None, *, progress: object) -> SimpleNamespace:
        out.write_bytes(DATA)
        paths.append(out)
        return SimpleNamespace(path=out, sha256=SHA256)

    monkeypatch.setattr(fixtures, "make_model", make)
    return paths


def _scenario(folder: Path, sha256: str) -> ScenarioFile:
    values = content("", sha256) | {"model": {"kind": "tiny", "seed": 3, "sha256": sha256}}
    return load_scenario(write_scenario(folder / "s.yaml", values))


def test_a_fixture_is_made_once_and_found_in_the_cache(tmp_path: Path, made: list[Path]) -> None:
    file = _scenario(tmp_path, SHA256)
    path = ensure_model(file, tmp_path / "cache", Silent())
    assert path == tmp_path / "cache" / "models" / f"tiny-seed3-{SHA256[:12]}.gguf"
    assert ensure_model(file, tmp_path / "cache", Silent()) == path
    assert made == [path]


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert ensure_model(_scenario(tmp_path, SHA256), None, Silent()).is_relative_to(tmp_path / "elsewhere")


def test_a_damaged_fixture_is_made_anew(tmp_path: Path, made: list[Path]) -> None:
    file = _scenario(tmp_path, SHA256)
    path = ensure_model(file, tmp_path, Silent())
    path.write_bytes(b"a mod")
    assert ensure_model(file, tmp_path, Silent()).read_bytes() == DATA
    assert len(made) == 2


def test_a_maker_that_makes_another_file_is_an_error(tmp_path: Path, made: list[Path]) -> None:
    file = _scenario(tmp_path, "ab" * 32)
    with pytest.raises(FixtureError, match=f"has sha256 {SHA256}, s.yaml expects {'ab' * 32}"):
        ensure_model(file, tmp_path, Silent())
    assert not made[0].exists()


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **values: object) -> None:
        raise OSError("8 bytes needed, 7 free")

    monkeypatch.setattr(fixtures, "make_model", fail)
    with pytest.raises(FixtureError, match="the tiny model cannot be made: 8 bytes needed, 7 free"):
        ensure_model(_scenario(tmp_path, SHA256), tmp_path, Silent())
