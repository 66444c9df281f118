"""What a record says of the machine and the software, without naming the host or any folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import psutil

import engine
from conformance.gpu import Gpu, this_gpu
from conformance.scenario import Data
from engine.generate import BACKENDS

_BACKEND_FOLDERS = {"numpy": "reference", "cuda": "cuda"}
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])(?:[A-Za-z]:\\|/)(?:[^\s/\\:'\"=,;()]+[/\\])+")


class Machine(Data):
    """The machine of a run; n_cores are physical, n_threads logical; gpu is None without one."""

    cpu: str
    n_cores: int
    n_threads: int
    memory_n_bytes: int
    os: str
    architecture: str
    gpu: Gpu | None = None


class Versions(Data):
    """The software of a run; those of llama.cpp and of CUDA are None where they took no part.

    backend_source_sha256: by backend, None in older records.
    """

    package: str
    engine_source_sha256: str
    backend_source_sha256: dict[str, str] | None = None
    python: str
    numpy: str
    gguf: str
    llama_cpp_build: int | None = None
    llama_cpp_compiler: str | None = None
    cupy: str | None = None
    nvrtc: str | None = None


def this_machine() -> Machine:
    """Describe the machine."""
    return Machine(
        cpu=_cpu_name(),
        n_cores=psutil.cpu_count(logical=False) or 1,
        n_threads=psutil.cpu_count() or 1,
        memory_n_bytes=psutil.virtual_memory().total,
        os=platform.system(),
        architecture=platform.machine(),
        gpu=this_gpu(),
    )


def these_versions(**others: Any) -> Versions:
    """Describe the software; the package's version is "not installed" when it runs from a plain checkout.

    others: the versions that only some runs have, by their keys in `Versions`.
    """
    return Versions(
        package=_version("hybrid-engine-conformance"),
        engine_source_sha256=engine_source_sha256(),
        backend_source_sha256={backend: engine_source_sha256(backend) for backend in BACKENDS},
        python=platform.python_version(),
        numpy=_version("numpy"),
        gguf=_version("gguf"),
        **others,
    )


def engine_source_sha256(backend: str | None = None, root: Path = Path(engine.__file__).parent) -> str:
    """Return one digest over the engine's own source files, tests left out: which code made a record.

    With a backend: without what is of the other backends alone, the folders in which they lie.
    """
    left_out = {"tests", *(folder for name, folder in _BACKEND_FOLDERS.items() if backend and name != backend)}
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh", ".json") and not left_out & {*path.relative_to(root).parts}:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def without_paths(value: Any) -> Any:
    """Return `value` with every absolute path in its strings cut down to its last part."""
    if isinstance(value, str):
        for folder in (os.getcwd(), str(Path.home()), tempfile.gettempdir()):
            if len(folder) > 1:
                value = value.replace(folder + os.sep, os.sep)
        return _ABSOLUTE_PATH.sub("", value)
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    return value


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
