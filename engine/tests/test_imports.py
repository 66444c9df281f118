"""What may import what: one way only, and no CuPy unless the CUDA backend is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS = (
    {"engine.errors"},
    {"engine.usage"},
    {"engine.gguf"},
    {"engine.quants", "engine.numerics"},
    {"engine.ops"},
    {"engine.decoder"},
    {"engine.wrap", "engine.model.config"},
    {"engine.cuda.layout"},
    {"engine.placement", "engine.finite"},
    {"engine.reference", "engine.cuda", "engine.model"},
    {"engine.generate"},
    {"engine.inspect", "engine.bench"},
    {"engine.profile", "engine.opbench", "engine.ablation"},
    {"engine.picture"},
    {"engine.cli"},
    {"engine.__main__"},
)
"""A module imports from its own package and from the layers above its own in this list."""

FORBIDDEN = {
    "engine": {"baselines", "conformance"},
    "baselines": {"engine", "conformance"},
    "engine.reference": {"engine.cuda", "engine.model", "engine.gguf"},
    "engine.cuda": {"engine.reference", "engine.model.forward", "engine.model.state", "engine.model.weights"},
    "engine.model": {"engine.reference", "engine.cuda", "engine.quants"},
    "engine.quants": {"engine.gguf"},
    "conformance.oracle": {"engine", "baselines"},
}
"""What a package must not import whatever the layers say: backends know neither the forward pass nor each other."""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yield name and file of every module of `package`, tests left out."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "tests" not in parts:
            yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> set[str]:
    """Return the names that a file imports, wherever in it; `from a import b` counts as a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer(name: str) -> int | None:
    """Return the layer of a module of the engine by its longest listed prefix, None if there is none."""
    found = [(len(member), i) for i, members in enumerate(LAYERS) for member in members if within(name, member)]
    return max(found)[1] if found else None


ENGINE_MODULES = [(name, path) for name, path in modules("engine") if name != "engine"]


@pytest.mark.parametrize(("name", "path"), ENGINE_MODULES, ids=[name for name, _ in ENGINE_MODULES])
def test_engine_imports_point_one_way(name: str, path: Path) -> None:
    own = layer(name)
    assert own is not None, f"{name} has no place in LAYERS"
    package = ".".join(name.split(".")[:2])
    for imported in imports(path):
        other = layer(imported)
        if other is not None and not within(imported, package):
            assert other < own, f"{name} imports {imported}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_do_not_know_each_other(package: str) -> None:
    found = [
        f"{name} imports {imported}"
        for name, path in modules(package.split(".")[0])
        if within(name, package)
        for imported in imports(path)
        if any(within(imported, forbidden) for forbidden in FORBIDDEN[package])
    ]
    assert found == []


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_the_engine_loads_no_cupy() -> None:
    loaded = loaded_by("import engine, engine.generate, engine.cli, conformance, conformance.controls")
    assert "engine.reference.ops" in loaded
    assert not [name for name in loaded if within(name, "cupy") or within(name, "cupy_backends")]


def test_reading_files_needs_no_model_code() -> None:
    loaded = loaded_by("import engine.gguf.reader, engine.gguf.tokenizer")
    assert not [name for name in loaded if within(name, "engine.model") or within(name, "engine.reference")]
