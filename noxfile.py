"""Sessions of the suite: `nox -l` lists them, `nox -s NAME -- ARGS` passes arguments through."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import nox

nox.options.sessions = ["conformance"]
nox.options.default_venv_backend = "uv|virtualenv"
nox.needs_version = ">=2024.4"

CUDA_EXTRA = os.environ.get("CUDA_EXTRA", "cuda13")
"""The extra that brings CuPy and NVRTC: cuda13, or cuda12 for older drivers."""
OUTCOMES = {1: "a mismatch", 2: "something was not measured", 3: "it cannot be run or judged, the line above says why"}


def install(session: nox.Session, *extras: str) -> None:
    """Install the project, editable, with extras."""
    session.install("-e", f".[{','.join(extras)}]" if extras else ".")


def judge(session: nox.Session, *arguments: str) -> None:
    """Run `python -m conformance` and end with its own exit code, 0 to 3; session.run would make each failure a 1."""
    path = os.pathsep.join((session.bin, os.environ.get("PATH", "")))
    command = [Path(session.bin, "python"), "-m", "conformance", *arguments, *session.posargs]
    code = subprocess.run(command, env={**os.environ, "PATH": path}, check=False).returncode
    if code:
        session.warn(f"exit code {code}: {OUTCOMES.get(code, 'stopped by a signal')}")
        raise SystemExit(code)


@nox.session
def conformance(session: nox.Session) -> None:
    """Build llama.cpp, make the fixture models, run both engines, compare token ids and logits."""
    install(session, "build")
    judge(session, "run")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the unit tests; builds llama.cpp first, since some tests compare with it."""
    install(session, "build", "dev")
    session.run("python", "-m", "baselines.llama_cpp")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style with ruff and types with mypy --strict."""
    install(session, "build", "dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *session.posargs)


@nox.session
def baseline(session: nox.Session) -> None:
    """Build the pinned llama.cpp, or find it in the cache: `-- --cuda --full` adds CUDA and its own programs."""
    install(session, "build")
    session.run("python", "-m", "baselines.llama_cpp", *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """Judge the records of the last run: 0 match, 1 mismatch, 2 not measured, 3 cannot be judged."""
    install(session)
    judge(session, "gate")


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile every kernel for every architecture, no GPU needed; fail on a spill. CUDA_EXTRA=cuda12 for CUDA 12."""
    install(session, "dev", CUDA_EXTRA)
    models = [Path(session.create_tmp(), f"{kind}.gguf") for kind in ("tiny", "small", "27b")]
    for model in models:
        session.run("python", "-m", "conformance", "make-model", model.stem, model, "--sparse")
    session.run("python", "-m", "engine", "kernels", *models, *session.posargs)
    session.run("pytest", "engine/tests/test_cuda_compile.py")


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device. CUDA_EXTRA=cuda12 for CUDA 12."""
    install(session, "build", "dev", CUDA_EXTRA)
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train the pydoc model: `-- --out DIR`; about two minutes on a GPU, needs no download but the packages."""
    install(session, "train")
    session.run("python", "-m", "conformance.models.pydoc.train", *session.posargs)


@nox.session
def oracle(session: nox.Session) -> None:
    """Compare the engine with transformers' own Qwen3.5 on a checkpoint that both read (CPU, PyTorch)."""
    install(session, "dev", "train")
    session.run("pytest", "-m", "transformers", *session.posargs)
