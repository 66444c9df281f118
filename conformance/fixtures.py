"""Find the model file of a scenario, making a fixture in the cache when it is not there yet."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from baselines.llama_cpp.progress import Progress
from baselines.llama_cpp.source import cache_dir
from conformance.errors import FixtureError
from conformance.models import make_model
from conformance.records import ModelIdentity
from conformance.scenario import ModelRef, ScenarioFile

_CHUNK_N_BYTES = 1 << 24


def ensure_model(file: ScenarioFile, cache: Path | None, progress: Progress) -> Path:
    """Return the path of the scenario's model, its SHA256 verified.

    A fixture lies in the cache's models folder and is made once. Raises FixtureError when the file is missing, cannot
    be made, or is another one than the scenario pins.
    """
    ref = file.scenario.model
    if ref.file is not None:
        path = _given_file(file)
        _require_pinned(path, sha256_of(path, progress), file)
        return path
    try:
        return _ensure_fixture(ref, file, cache_dir(cache) / "models", progress)
    except OSError as error:
        raise FixtureError(f"the {ref.kind} model cannot be made: {error}") from None


@contextmanager
def fresh_model(file: ScenarioFile, progress: Progress) -> Iterator[tuple[Path, str]]:
    """Yield the scenario's model, a fixture made anew, and its SHA256, whatever the scenario pins.

    Raises FixtureError when a file is missing or a fixture cannot be made.
    """
    ref = file.scenario.model
    if ref.kind is None:
        path = _given_file(file)
        yield path, sha256_of(path, progress)
        return
    with tempfile.TemporaryDirectory(prefix="fixture-") as name:
        progress.step(f"making the {ref.kind} model")
        try:
            made = make_model(ref.kind, Path(name) / "model.gguf", ref.seed, progress=progress.update)
        except OSError as error:
            raise FixtureError(f"the {ref.kind} model cannot be made: {error}") from None
        yield made.path, str(made.sha256)


def identify(path: Path, ref: ModelRef) -> ModelIdentity:
    """Return what a record says of the model at `path`, which has been verified to be that of `ref`."""
    return ModelIdentity(file=path.name, sha256=ref.sha256, n_bytes=path.stat().st_size)


def sha256_of(path: Path, progress: Progress) -> str:
    """Return the SHA256 of a file, reporting how far it is in bytes."""
    digest, n_done, n_bytes = hashlib.sha256(), 0, path.stat().st_size
    progress.step(f"verifying {path.name}")
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_N_BYTES):
            digest.update(chunk)
            n_done += len(chunk)
            progress.update(n_done, n_bytes)
    return digest.hexdigest()


def _given_file(file: ScenarioFile) -> Path:
    """Return the path of the model that the scenario names relative to its own folder."""
    path = file.path.parent / str(file.scenario.model.file)
    if not path.is_file():
        raise FixtureError(f"{file.path}: model.file {file.scenario.model.file}: no such file in {file.path.parent}")
    return path


def _ensure_fixture(ref: ModelRef, file: ScenarioFile, folder: Path, progress: Progress) -> Path:
    """Return the fixture in `folder`; one with other bytes (damaged, or of an older maker) is made anew."""
    assert ref.kind is not None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{ref.kind}-seed{ref.seed}-{ref.sha256[:12]}.gguf"
    with filelock.FileLock(folder / "lock"):
        if path.is_file() and sha256_of(path, progress) == ref.sha256:
            return path
        progress.step(f"making the {ref.kind} model")
        made = make_model(ref.kind, path, ref.seed, progress=progress.update)
        if made.sha256 != ref.sha256:
            path.unlink()
            _require_pinned(path, str(made.sha256), file)
    return path


def _require_pinned(path: Path, digest: str, file: ScenarioFile) -> None:
    expected = file.scenario.model.sha256
    if digest != expected:
        raise FixtureError(f"{path.name} has sha256 {digest}, {file.path.name} expects {expected}")
