"""Every command that README and docs show exists, and takes the arguments shown; nothing is run."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from baselines.llama_cpp.__main__ import app as baseline_app
from conformance.cli import app as conformance_app
from conformance.scenario import ExtraSubject
from engine.cli import app as engine_app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "results" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
MODULES = {"conformance": conformance_app, "engine": engine_app, "baselines.llama_cpp": baseline_app}
PROGRAMS = ("python", "python3", "nox", "pipx", "uvx", "pip", "mkdocs", "git")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(rf"`((?:{'|'.join(PROGRAMS)}) [^`\n]*(?:\n[^`\n]+)?)`")


def sessions() -> dict[str, str | None]:
    """Return the sessions of noxfile.py, and the command of the suite that takes their arguments, if one does."""
    found: dict[str, str | None] = {}
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if not any("session" in ast.unparse(decorator) for decorator in decorators):
            continue
        assert isinstance(node, ast.FunctionDef)
        names = [re.search(r"name='([\w-]+)'", ast.unparse(decorator)) for decorator in decorators]
        judged = re.search(r"judge\(session, '([\w-]+)'\)", ast.unparse(node))
        found[names[0][1] if names[0] else node.name] = judged[1] if judged else None
    return found


def commands(text: str) -> Iterator[str]:
    """Yield every command of a page: lines of shell blocks, `run` of workflows, and code in sentences."""
    for language, block in FENCE.findall(text):
        if language == "sh":
            yield from (line for line in block.splitlines() if line.strip())
        elif language == "yaml":
            yield from (line for run in runs_in(yaml.safe_load(block)) for line in run.splitlines())
    for found in INLINE.findall(FENCE.sub("", text)):
        yield " ".join(found.split())


def runs_in(value: Any) -> Iterator[str]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key == "run":
            yield item
        yield from runs_in(item)


def check(command: str) -> None:
    """Raise if a command does not exist or does not take its arguments."""
    for part in command.split(" && "):
        words = shlex.split(re.sub(r"\[(\w+)(\.\.\.)?\]$", r"\1", part), comments=True)
        check_words(words)


def check_words(words: list[str]) -> None:
    match words:
        case ["pipx", "run", "nox", *rest] | ["uvx", "nox", *rest] | ["nox", *rest]:
            check_nox(rest)
        case [("python" | "python3"), "-m", "nox", *rest]:
            check_nox(rest)
        case [("python" | "python3"), "-m", "pip", "install", *rest]:
            check_pip(rest)
        case [("python" | "python3"), "-m", module, *rest]:
            check_module(module, rest)
        case _:
            raise AssertionError(f"{words}: no command that this test knows")


def check_nox(words: list[str]) -> None:
    if words == ["-l"]:
        return
    assert words[0] == "-s", words
    command = sessions()[words[1]]
    if words[2:]:
        assert words[2] == "--", words
        if words[1] == "baseline":
            check_module("baselines.llama_cpp", words[3:])
        else:
            assert command is not None, f"{words}: does this session take arguments?"
            check_module("conformance", [command, *words[3:]])


def check_pip(words: list[str]) -> None:
    if words == ["nox"]:
        return
    assert words[0] == "-e", words
    extras = re.fullmatch(r"\.(?:\[(\w+(?:,\w+)*)\])?", words[1])
    assert extras, words
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("optional-dependencies]")[1], re.M)
    assert {*(extras[1] or "").split(",")} - {""} <= {*known}, words


def check_module(module: str, words: list[str]) -> None:
    command = typer.main.get_command(MODULES[module])
    if words and hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    try:
        if words:
            command.make_context("x", list(words))
    except Exception as error:  # click's own, of which typer has a copy in some versions
        raise AssertionError(f"{words}: {error}") from None


def shown() -> list[tuple[str, str]]:
    return [(path.name, command) for path in PAGES for command in commands(path.read_text(encoding="utf-8"))]


def test_there_are_commands_on_the_pages_that_need_them() -> None:
    pages = [page for page, _ in shown()]
    assert len(pages) > 60
    assert {"README.md", "index.md", "own-gguf.md", "ci-gate.md", "extend.md"} <= {*pages}


@pytest.mark.parametrize(("page", "command"), sorted({*shown()}))
def test_a_command_exists_and_takes_what_is_shown(page: str, command: str) -> None:
    check(command)


def test_no_command_hides_in_a_block_that_is_not_marked_as_shell() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n```") % 2 == 0
        for language, block in FENCE.findall(text):
            assert language in ("sh", "yaml", "text"), f"{path.name}: a block of {language or 'no language'}"
            lines = [line for line in block.splitlines() if language == "text" and line.split(" ")[0] in PROGRAMS]
            assert lines == [], path.name


@pytest.mark.parametrize(
    "command",
    [
        "nox -s no-such-session",
        "nox -s bench -- --no-such-option",
        "nox -s lint -- x",
        "python -m conformance no-such-command",
        "python -m conformance gate --junit",
        "python3 -m engine generate --no-such-option",
        "python -m pip install -e .[no-such-extra]",
        "python -m pip install somebody",
        "python -m no.such.module x",
        "make all",
        "nox -s verify && make",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(command)


def test_the_subjects_of_the_page_are_valid() -> None:
    blocks = [yaml.safe_load(block) for _, block in FENCE.findall((ROOT / "docs" / "extend.md").read_text())]
    subjects = next(block["subjects"] for block in blocks if isinstance(block, dict))
    found = [ExtraSubject.model_validate_json(json.dumps(subject)) for subject in subjects]
    assert [subject.api for subject in found] == ["command", "llama-server", "openai"]


def test_the_workflow_of_the_page_judges_even_after_a_failure() -> None:
    block = next(b for language, b in FENCE.findall((ROOT / "docs" / "ci-gate.md").read_text()) if language == "yaml")
    steps = yaml.safe_load(block)["jobs"]["tokens"]["steps"]
    gate = next(step for step in steps if "conformance gate" in step.get("run", ""))
    assert gate["if"] == "always()"
    assert "--github" in gate["run"]
