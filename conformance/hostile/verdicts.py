"""Accept or reject: the engine's verdict on every case beside llama.cpp's, as data and as a page of docs/."""

from __future__ import annotations

import json
import platform
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, ValidationError
from tabulate import tabulate

from baselines.llama_cpp import pin
from baselines.llama_cpp.build import LlamaBuild
from baselines.llama_cpp.process import ProcessResult
from baselines.llama_cpp.progress import Progress
from baselines.llama_cpp.worker import try_model
from conformance.errors import RecordError
from conformance.hostile.cases import CASES, Case
from conformance.hostile.engine_runs import EngineRun, run_engine
from conformance.scenario import Data

__all__ = [
    "DATA_PATH",
    "PAGE_PATH",
    "LlamaVerdicts",
    "engine_commands",
    "engine_faults",
    "explained",
    "llama_verdicts",
    "read_verdicts",
    "render_page",
    "write_verdicts",
]

DATA_PATH = Path("results/hostile") / f"llama.cpp-b{pin.BUILD_NUMBER}-cpu.json"
PAGE_PATH = Path("docs/hostile-files.md")
_DEADLINE_S = 5.0
_PROMPT = "abc ab"
_TELLING = re.compile(
    r"gguf_init_from_file\w*: (.*)|error loading model: (.*)|(\S+: GGML_ASSERT.*)|(\S+: fatal error.*)"
)
_FOLDERS = re.compile(r"\S*/(?=[^/\s])")

Verdict: TypeAlias = Literal["runs", "refuses", "crashes", "hangs"]


class LlamaVerdict(Data):
    """What llama.cpp did with one file; says is its own line, or the signal that ended it."""

    verdict: Verdict
    says: str


class LlamaVerdicts(Data):
    """llama.cpp's verdict on every case, by id."""

    llama_cpp_build: Annotated[int, Field(ge=1)]
    llama_cpp_compiler: str
    architecture: str
    cases: dict[str, LlamaVerdict]


def engine_commands(paths: Sequence[Path], *options: str) -> list[list[str]]:
    """Return the command lines that run one token on each file."""
    return [["generate", "-m", str(path), "-p", _PROMPT, "-n", "1", "-c", "16", *options] for path in paths]


def engine_faults() -> list[str]:
    """Run the engine on every case; return one line for each whose exit code or message is not the expected one."""
    with tempfile.TemporaryDirectory() as name:
        paths = make_all(Path(name))
        runs = run_engine(engine_commands(paths))
    found = ((case, path, run) for case, path, run in zip(CASES, paths, runs, strict=True))
    return [f"{case.id}: {wrong}" for case, path, run in found if (wrong := _wrong(case, path, run))]


def make_all(folder: Path) -> list[Path]:
    """Make every case in a folder of its own below `folder`."""
    paths = []
    for number, case in enumerate(CASES):
        (folder / str(number)).mkdir()
        paths.append(case.make(folder / str(number)))
    return paths


def llama_verdicts(build: LlamaBuild, progress: Progress) -> LlamaVerdicts:
    """Run every case through llama.cpp, each in a process of its own under a deadline."""
    verdicts = {}
    with tempfile.TemporaryDirectory() as name:
        for n_done, (case, path) in enumerate(zip(CASES, make_all(Path(name)), strict=True)):
            progress.update(n_done, len(CASES))
            verdicts[case.id] = _verdict(try_model(build, path, deadline_s=_DEADLINE_S))
    return LlamaVerdicts(
        llama_cpp_build=build.build_number,
        llama_cpp_compiler=build.compiler,
        architecture=platform.machine(),
        cases=verdicts,
    )


def read_verdicts(path: Path = DATA_PATH) -> LlamaVerdicts:
    """Read the stored verdicts; raises RecordError."""
    try:
        return LlamaVerdicts.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RecordError(f"{path}: not a list of verdicts: {error}") from None


def write_verdicts(verdicts: LlamaVerdicts, data: Path = DATA_PATH, page: Path = PAGE_PATH) -> None:
    """Write the data and the page that follows from it; raises RecordError."""
    try:
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(json.dumps(verdicts.model_dump(mode="json"), indent=1) + "\n")
        page.write_text(render_page(verdicts))
    except OSError as error:
        raise RecordError(f"{error.filename}: cannot be written: {error.strerror}") from None


def explained(case: Case, theirs: LlamaVerdict) -> bool:
    """Say whether a case is one on which both agree, or says why they do not."""
    return theirs.verdict == _ours(case) or bool(case.because)


def render_page(verdicts: LlamaVerdicts) -> str:
    """Return docs/hostile-files.md."""
    pairs = [(case, verdicts.cases[case.id]) for case in CASES]
    differing = [(case, theirs) for case, theirs in pairs if theirs.verdict != _ours(case)]
    counts = Counter((_ours(case), theirs.verdict) for case, theirs in pairs)
    return _PAGE.format(
        build=f"b{verdicts.llama_cpp_build}",
        compiler=verdicts.llama_cpp_compiler,
        architecture=verdicts.architecture,
        n_cases=len(pairs),
        counts=_table(("engine", "llama.cpp", "files"), [[*both, n] for both, n in counts.items()]),
        n_differing=len(differing),
        differing=_table(
            ("case", "what", "engine", "llama.cpp", "why"),
            [[case.id, case.what, _ours(case), theirs.verdict, case.because] for case, theirs in differing],
        ),
        every=_table(
            ("case", "what", "the engine", "llama.cpp"),
            [[case.id, case.what, _code(case.message or "runs"), _said(theirs)] for case, theirs in pairs],
        ),
    )


_PAGE = """<!-- Written by `python -m conformance corpus --write`; changes belong into conformance/hostile/. -->
# Hostile model files

{n_cases} files, each made from one small sound `qwen35` model by a single change
([conformance/hostile/cases.py](../conformance/hostile/cases.py)), given to the engine and to llama.cpp {build}
({compiler}, {architecture}, CPU), each file in a process of its own: load, then one token. "Refuses"
is an error message and exit code 1; "crashes" means that a signal ended the process, "hangs" that it had not ended
after five seconds. The engine must print exactly the line below behind `error: FILE: `, and no refused file may reach a
device, cost a second of processor time or 200 MB; `nox -s tests` checks this for each, `nox -s corpus` runs both sides
again. A file that shrinks while it is in use is not among them: see [reliability.md](reliability.md).

{counts}

## Where they differ

{n_differing} files.

{differing}

## Every file

{every}
"""


def _wrong(case: Case, path: Path, run: EngineRun) -> str | None:
    expected = (0, "") if case.is_accepted else (1, case.error(path))
    found = (run.exit_code, run.err.strip())
    return None if found == expected else f"found {found}, expected {expected}"


def _ours(case: Case) -> Verdict:
    return "runs" if case.is_accepted else "refuses"


def _verdict(result: ProcessResult) -> LlamaVerdict:
    if result.status == "ok":
        return LlamaVerdict(verdict="runs", says="")
    if result.status == "timeout":
        return LlamaVerdict(verdict="hangs", says="")
    said = [next(filter(None, match.groups())) for match in _TELLING.finditer(result.log)]
    line = _FOLDERS.sub("", said[0]) if said else ""
    if result.exit_code >= 0:
        return LlamaVerdict(verdict="refuses", says=line)
    name = signal.Signals(-result.exit_code).name
    return LlamaVerdict(verdict="crashes", says=f"{name}: {line}" if line else name)


def _said(theirs: LlamaVerdict) -> str:
    return f"{theirs.verdict}: {_code(theirs.says)}" if theirs.says else theirs.verdict


def _code(text: str) -> str:
    return text if text == "runs" else "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def _table(headers: Sequence[str], rows: list[list[object]]) -> str:
    text: str = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    return re.sub(r" +", " ", re.sub(r"-{4,}", "---", text))
