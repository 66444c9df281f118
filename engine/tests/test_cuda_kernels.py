"""Which launches are made and how, with a module that only notes them; needs CuPy, but no device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed: launches not measured", exc_type=ImportError)

import cupy

from engine.cuda import kernels as module
from engine.cuda.kernels import Kernels

NAMES = ["a", "b", "c"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was launched: the kernel's name, with + where it may overlap the one before."""
    made: list[str] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.ptr = name

        def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int) -> None:
            made.append(self.ptr)

    fake = SimpleNamespace(load=lambda code: None, get_function=Kernel)
    cubin = SimpleNamespace(code=b"", lowered={name: name for name in NAMES})
    monkeypatch.setattr(cupy.cuda.function, "Module", lambda: fake)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: SimpleNamespace(attributes={"MultiProcessorCount": 7}))
    monkeypatch.setattr(module, "compile_kernels", lambda names, arch, parts: cubin)
    monkeypatch.setattr(module, "_allow_shared_memory", lambda function: None)
    monkeypatch.setattr(module, "_launch_overlapped", lambda function, *rest: made.append(f"{function}+"))
    return made


def launch_all(kernels: Kernels) -> None:
    for i, name in enumerate(NAMES):
        kernels[name]((i + 1,), (32,), ())


def test_all_but_the_first_launch_overlap(made: list[str]) -> None:
    kernels = Kernels(NAMES, "sm_90")
    for _ in range(2):
        with kernels.overlapping():
            launch_all(kernels)
    launch_all(kernels)
    assert made == ["a", "b+", "c+"] * 2 + NAMES


@pytest.mark.parametrize(("arch", "overlaps"), [("sm_89", True), ("sm_90", False)])
def test_nothing_overlaps_where_it_cannot_or_shall_not(made: list[str], arch: str, overlaps: bool) -> None:
    kernels = Kernels(NAMES, arch, overlaps=overlaps)
    with kernels.overlapping():
        launch_all(kernels)
    assert made == NAMES


def test_a_watch_sees_every_launch_and_leaves_out_what_it_refuses(made: list[str]) -> None:
    kernels, seen = Kernels(NAMES, "sm_90"), []

    def watch(expression: str, grid: tuple[int, ...]) -> bool:
        seen.append((expression, grid))
        return expression != "a"

    with kernels.watched(watch), kernels.overlapping():
        launch_all(kernels)
    assert seen == [("a", (1,)), ("b", (2,)), ("c", (3,))]
    assert made == ["b", "c+"]  # the first that is made follows the copies
    launch_all(kernels)
    assert made[2:] == NAMES
