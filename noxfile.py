"""Sessions of the suite: `nox -l` lists them, `nox -s NAME -- ARGS` passes arguments through."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import nox

nox.options.sessions = ["conformance"]
nox.options.default_venv_backend = "uv|virtualenv"
nox.needs_version = ">=2024.4"

CUDA_EXTRA = os.environ.get("CUDA_EXTRA", "cuda13")
"""The extra that brings CuPy and NVRTC: cuda13, or cuda12 for older drivers."""
TRAINED_MODEL = Path("conformance", "models", "pydoc", "pydoc.gguf")
OUTCOMES = {1: "a mismatch", 2: "something was not measured", 3: "it cannot be run or judged, the line above says why"}


LOCKED = ((), ("build",), ("build", "dev"), ("cuda13", "dev"), ("dev", "docs"), ("browser", "dev", "docs"))
"""The combinations of extras that CI and the site take: pinned with hashes in requirements/ by `nox -s lock`."""


def lock_path(*extras: str) -> Path:
    """Return the file that pins what these extras need."""
    return Path("requirements", f"{'-'.join(sorted(extras)) or 'base'}.txt")


def install(session: nox.Session, *extras: str) -> None:
    """Install the project, editable, with extras: as pinned where they are locked, else as pip resolves them."""
    if tuple(sorted(extras)) in LOCKED:
        session.install("--require-hashes", "-r", str(lock_path(*extras)))
        session.install("--no-deps", "--no-build-isolation", "-e", ".")
    else:
        session.install("-e", f".[{','.join(extras)}]")


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
def corpus(session: nox.Session) -> None:
    """Give malformed model files to both engines; `-- --write` records llama.cpp's verdicts and writes the page."""
    install(session, "build")
    judge(session, "corpus")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz the parsers, guided by coverage, 150 s each; `-- TARGET --seconds N --found DIR`. Not part of CI."""
    install(session, "dev", "fuzz")
    session.run("python", "-m", "conformance.fuzz", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Kill 200 runs at random moments, generate 1,000 times in one process; about half an hour. SOAK_SEED=2: others."""
    install(session, "build", "dev")
    session.run("pytest", "-m", "soak", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Pin what CI installs, with hashes, for every supported Python and platform."""
    session.install("uv")
    for extras in LOCKED:
        chosen = [argument for extra in extras for argument in ("--extra", extra)]
        compile_lock(session, lock_path(*extras), "pyproject.toml", "requirements/backend.in", *chosen)
    compile_lock(session, Path("requirements/nox.txt"), "requirements/nox.in")


def compile_lock(session: nox.Session, out: Path, *sources: str) -> None:
    """Resolve anew; the command that uv would name in the file is that of this session."""
    options = ["--universal", "--python-version", "3.10", "--generate-hashes", "--no-annotate", "--upgrade", "--quiet"]
    environment = {"UV_CUSTOM_COMPILE_COMMAND": "nox -s lock"}
    session.run("uv", "pip", "compile", *options, *sources, "-o", str(out), env=environment)


@nox.session
def gate(session: nox.Session) -> None:
    """Judge the records of the last run: 0 match, 1 mismatch, 2 not measured, 3 cannot be judged."""
    install(session)
    judge(session, "gate")


@nox.session
def bench(session: nox.Session) -> None:
    """Time the engine and llama.cpp in alternation, on the GPU if there is one: `-- --quick`, `-- --model FILE`."""
    install(session, "build", *([CUDA_EXTRA] if shutil.which("nvidia-smi") else []))
    judge(session, "bench")


@nox.session(name="bench-selftest")
def bench_selftest(session: nox.Session) -> None:
    """Compare the engine with itself, and with itself slowed by a tenth: does the bench say so? About eight minutes."""
    install(session)
    judge(session, "bench-selftest")


@nox.session(name="bench-ops")
def bench_ops(session: nox.Session) -> None:
    """Time each op of the NumPy backend with pytest-benchmark, into the same records."""
    install(session, "dev")
    judge(session, "bench-ops")


@nox.session
def ablation(session: nox.Session) -> None:
    """Decode on the GPU with each surgery of the kernels switched off: `-- MODEL`. CUDA_EXTRA=cuda12 for CUDA 12."""
    install(session, CUDA_EXTRA)
    judge(session, "ablation")


@nox.session
def verify(session: nox.Session) -> None:
    """Check published rows from nothing but themselves: `-- ROW` for single ones."""
    install(session)
    judge(session, "verify")


@nox.session
def report(session: nox.Session) -> None:
    """Write the tables made of results/ into the README and the docs: `-- --check` only says what is not current."""
    install(session)
    judge(session, "report")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/: warnings are errors, links lead somewhere, nothing is fetched from elsewhere."""
    install(session, "dev", "docs")
    build_site(session)
    session.run("pytest", "-m", "docs", "conformance/tests/test_site.py", *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """Look at the site in a headless Chromium, which must be installed; CHROMIUM names another. Not part of CI."""
    install(session, "browser", "dev", "docs")
    build_site(session)
    session.run("pytest", "-m", "browser", "conformance/tests/test_site.py")
    session.run("python", "-m", "conformance.publishing.browser_check", "site", *session.posargs)


def build_site(session: nox.Session) -> None:
    """Build the site from pages that are up to date with the records, and check its files."""
    session.run("python", "-m", "conformance", "report", "--check")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "-m", "conformance.publishing.site_check", "site")


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile every kernel for every architecture, no GPU needed; fail on a spill. CUDA_EXTRA=cuda12 for CUDA 12."""
    install(session, "dev", CUDA_EXTRA)
    models = [Path(session.create_tmp(), f"{kind}.gguf") for kind in ("tiny", "small", "27b")]
    for model in models:
        session.run("python", "-m", "conformance", "make-model", model.stem, model, "--sparse")
    session.run("python", "-m", "engine", "kernels", *models, TRAINED_MODEL, *session.posargs)
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
