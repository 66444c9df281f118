"""Find compilers, CMake and Ninja, and describe the compilers and this machine for the build's cache key."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from baselines.errors import BuildError


@dataclass(frozen=True)
class Toolchain:
    """The compilers of one build; versions holds what identifies them: C, C++ and, for CUDA, nvcc."""

    cc: str
    cxx: str
    nvcc: str | None
    versions: tuple[str, ...]


def find_toolchain(*, cuda: bool) -> Toolchain:
    """Return the compilers of this machine; raise BuildError naming the first that is missing."""
    cc, cxx = _compiler("C", "CC", ("cc", "gcc", "clang")), _compiler("C++", "CXX", ("c++", "g++", "clang++"))
    nvcc = _nvcc() if cuda else None
    versions = tuple(_version(program) for program in (cc, cxx, nvcc) if program)
    return Toolchain(cc, cxx, nvcc, versions)


def find_build_tool(name: str) -> str:
    """Return the path of cmake or ninja, the one beside this interpreter (from pip) before the one on PATH.

    Raises BuildError if there is none.
    """
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise BuildError(f"{name} not found: install it with `python -m pip install {name}`")
    return found


def machine_id() -> str:
    """Return a digest of what -march=native depends on, so that a shared cache never mixes processors."""
    text = f"{platform.system()} {platform.machine()} {platform.processor()}"
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = " ".join(sorted(found.group(1).split())) if found else ""
    return hashlib.sha256(f"{text} {flags}".encode()).hexdigest()[:16]


def n_cpus() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _compiler(language: str, variable: str, names: tuple[str, ...]) -> str:
    chosen = os.environ.get(variable)
    if chosen:
        if shutil.which(chosen) is None:
            raise BuildError(f"{variable}={chosen} is not a program: set it to a {language} compiler")
        return chosen
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(
            f"no {language} compiler found (looked for {', '.join(names)}): install one, or set {variable}"
        )
    return found


def _nvcc() -> str:
    chosen = os.environ.get("CUDACXX") or "nvcc"
    found = shutil.which(chosen) or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None:
        raise BuildError(f"no CUDA compiler found ({chosen}): install the CUDA toolkit, or set CUDACXX")
    return found


def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr.strip() or program
