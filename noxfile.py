"""Sessions of the suite: `nox -l` lists them, `nox -s NAME -- ARGS` passes arguments through."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.sessions = ["conformance"]
nox.options.default_venv_backend = "uv|virtualenv"
nox.needs_version = ">=2024.4"

PACKAGES = ("engine", "baselines", "conformance")


def install(session: nox.Session, *extras: str) -> None:
    """Install the project, editable, with extras."""
    session.install("-e", f".[{','.join(extras)}]" if extras else ".")


@nox.session
def conformance(session: nox.Session) -> None:
    """Build llama.cpp, make the fixture models, run both engines, compare token ids and logits."""
    install(session, "build")
    session.run("python", "-m", "conformance", "run", *session.posargs)


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
    session.run("python", "-m", "conformance", "gate", *session.posargs)


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile every kernel for every architecture, no GPU needed; fail on a spill. CUDA_EXTRA as for gpu."""
    install(session, "dev", session.env.get("CUDA_EXTRA") or "cuda13")
    models = [Path(session.create_tmp(), f"{kind}.gguf") for kind in ("tiny", "small", "27b")]
    for model in models:
        session.run("python", "-m", "conformance", "make-model", model.stem, model, "--sparse")
    session.run("python", "-m", "engine", "kernels", *models, *session.posargs)
    session.run("pytest", "engine/tests/test_cuda_compile.py")


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device; EXTRA is cuda13 unless CUDA_EXTRA names another."""
    install(session, "build", "dev", session.env.get("CUDA_EXTRA") or "cuda13")
    session.run("pytest", "-m", "gpu", *session.posargs)
