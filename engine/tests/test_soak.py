from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from mmap import mmap
from pathlib import Path

import pytest

from engine.generate import load_engine
from engine.tests.models import Shape, write_model
from engine.tests.soak import N_SAMPLES, generate_often


@pytest.fixture
def generate(tmp_path: Path) -> Callable[[], list[int]]:
    engine = load_engine(write_model(tmp_path / "model.gguf", Shape(n_v_heads=4)), n_ctx=64, n_threads=1)
    return lambda: engine.run([1, 2, 3], 3).generated_token_ids


def test_many_calls_take_no_more_memory(generate: Callable[[], list[int]]) -> None:
    figures = generate_often(generate, 50)
    assert len(figures.resident_n_bytes) == N_SAMPLES
    figures.require_no_growth()


@pytest.mark.soak
def test_a_thousand_calls_take_no_more_memory(
    generate: Callable[[], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    figures = generate_often(generate, 1000)
    with capsys.disabled():
        print(f"\n{asdict(figures)}")
    figures.require_no_growth()


def test_growth_is_seen() -> None:
    kept: list[mmap] = []

    def leak() -> list[int]:
        kept.append(mmap(-1, 1 << 20))  # pages that no freed memory can stand in for
        kept[-1].write(b"\x01" * (1 << 20))
        return [1]

    with pytest.raises(AssertionError, match="bytes more after 10 calls"):
        generate_often(leak, 10).require_no_growth()
    sizes = iter(range(10))
    with pytest.raises(AssertionError, match="the device holds more"):
        generate_often(lambda: [1], 10, lambda: next(sizes)).require_no_growth()


def test_other_tokens_are_seen() -> None:
    calls = iter([[1], [1], [2]])
    with pytest.raises(AssertionError):
        generate_often(lambda: next(calls), 10)
