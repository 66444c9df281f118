"""The files that pin what CI installs: they cover what pyproject.toml asks for, each line with its hashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {
    "base": (),
    "build": ("build",),
    "build-dev": ("build", "dev"),
    "cuda13-dev": ("cuda13", "dev"),
    "dev-docs": ("dev", "docs"),
    "browser-dev-docs": ("browser", "dev", "docs"),
}
PIN = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[\w+\])?==\S+", re.MULTILINE)


def pins(name: str) -> set[str]:
    return {normal(found) for found in PIN.findall((ROOT / "requirements" / f"{name}.txt").read_text())}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def asked(extras: tuple[str, ...]) -> set[str]:
    """Return the names of what the project and its extras need, read as text: Python 3.10 has no tomllib."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = [re.search(rf"^{key} = \[(.*?)\]\s*$", text, re.DOTALL | re.MULTILINE) for key in ("dependencies", *extras)]
    assert all(lists)
    items = [item for found in lists if found for item in re.findall(r'"([A-Za-z0-9_.-]+)', found[1])]
    return {normal(item) for item in items}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_covers_what_is_asked_for(name: str) -> None:
    needed = asked(LOCKS[name]) | {"hatchling", "editables"}
    assert len(needed) >= 12
    assert needed - pins(name) == set(), "run `nox -s lock`"


@pytest.mark.parametrize("name", [*LOCKS, "nox"])
def test_every_pin_has_a_hash(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) > 5
    assert [line for line in lines if "==" not in line or "--hash=sha256:" not in line] == []


def test_ci_installs_nothing_that_is_not_pinned() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert installs == ["python -m pip install --quiet --require-hashes -r requirements/nox.txt"]
