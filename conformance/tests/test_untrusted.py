"""Input stays data: nothing in the packages can run what a file or a server says. See SECURITY.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conformance.errors import ConformanceError
from conformance.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load"}
FORBIDDEN_WORDS = {"shell", "allow_pickle"}
"""Keywords of calls that may not be given a true value."""
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def sources() -> Iterator[Path]:
    for package in ("engine", "baselines", "conformance"):
        yield from (path for path in sorted((ROOT / package).rglob("*.py")) if "tests" not in path.parts)


def faults(text: str) -> list[str]:
    """Return what a source text must not do, one line each."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            found += sorted(f"imports {name}" for name in names & FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [f"calls {called}"] if called in FORBIDDEN_CALLS else []
            found += [f"gives {word.arg}" for word in node.keywords if word.arg in FORBIDDEN_WORDS and is_true(word)]
        elif isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            found.append(f"names {node.value}, expected one of {sorted(LOOPBACK)}")
    return found


def is_true(word: ast.keyword) -> bool:
    return not (isinstance(word.value, ast.Constant) and not word.value.value)


def test_no_source_runs_what_it_reads_or_listens_beyond_this_machine() -> None:
    paths = list(sources())
    assert len(paths) > 80
    assert {str(path): found for path in paths if (found := faults(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import pickle", ["imports pickle"]),
        ("from marshal import loads", ["imports marshal"]),
        ("eval(x)", ["calls eval"]),
        ("yaml.load(x, Loader)", ["calls yaml.load"]),
        ("run(x, shell=True)", ["gives shell"]),
        ("np.load(x, allow_pickle=flag)", ["gives allow_pickle"]),
        ("bind('0.0.0.0')", ["names 0.0.0.0, expected one of ['127.0.0.1', '::1', 'localhost']"]),
        ("run(x, shell=False); yaml.safe_load(x); re.compile(x)", []),
    ],
)
def test_the_search_finds_what_it_looks_for(text: str, expected: list[str]) -> None:
    assert faults(text) == expected


def test_arrays_of_objects_are_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        np.load(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: !!python/object/apply:os.system [echo]", "found 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("name: !!python/name:os.system", "found '' as 'tag:yaml.org,2002:python/name:os.system', expected text"),
        ("a: &a [x]\nb: *a", "2: *a is a reference, expected the value itself"),
        ("a: &a [*a]", "1: *a is a reference, expected the value itself"),
        ("[" * 5000, "1: more than 8 levels of nesting, expected fewer"),
        ("{[a]: b}", "1: found a key 'tag:yaml.org,2002:seq', expected text"),
        ("2024-01-01: b", "1: found a key 'tag:yaml.org,2002:timestamp', expected text"),
        ("1: b", "1: found a key 'tag:yaml.org,2002:int', expected text"),
        ("a: 2024-99-99", "1: found '2024-99-99' as 'tag:yaml.org,2002:timestamp', expected text (in quotes"),
        ("a: " + "9" * 5000, "999'... as 'tag:yaml.org,2002:int', expected text (in quotes if need be), a number"),
        ("a: !!int x", "1: found 'x' as 'tag:yaml.org,2002:int', expected text (in quotes"),
        ("a: !!bool x", "1: found 'x' as 'tag:yaml.org,2002:bool', expected text (in quotes"),
        ("a: !!set {x}", "1: found 'tag:yaml.org,2002:set', expected a list or a mapping"),
        ("#" * (1 << 16) + "#", "has more than 65536 bytes, expected a scenario"),
        ('"a\\nb": 1', r"1: a\nb is an unknown key, expected one of: name, asks"),
    ],
)
def test_yaml_that_is_more_than_data(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ConformanceError) as caught:
        load_scenario(path)
    assert str(caught.value).isprintable()
    assert message in str(caught.value)
