"""A device without room, lost, or held by others; generations broken off; a thousand of them in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError, PlacementError
from engine.generate import Engine, load_engine
from engine.tests.gpu.arrays import assert_same_bits, cupy
from engine.tests.models import Shape, write_model
from engine.tests.soak import generate_often

pytestmark = pytest.mark.gpu

PROMPT = [1, 2, 3, 4, 5]
ROOT = Path(__file__).parents[3]

# holds all of the device but some, until its standard input ends
_HOLDER = """
import sys, cupy
free, _ = cupy.cuda.runtime.memGetInfo()
held = cupy.cuda.Memory(free - int(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

# lets a kernel write where nothing is before the engine's first step, and runs the engine's own command line
_LOSE = """
import sys
import cupy
from engine import cli, generate
def lose(self, *args, **options):
    kernel = cupy.RawKernel('extern "C" __global__ void k(int *p) { p[threadIdx.x] = 1; }', "k")
    kernel((1,), (32,), (cupy.uint64(64),))
    return prefill(self, *args, **options)
prefill, generate.Engine.prefill = generate.Engine.prefill, lose
cli.main()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", Shape(n_v_heads=4, n_vocab=1000))


@pytest.fixture
def engine(path: Path) -> Engine:
    return load_engine(path, n_ctx=64, backend="cuda")


def in_use_n_bytes() -> int:
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


class _NoRoom:
    """Stands for cupy.cuda.Memory, and has no room at the `fails_at`-th call."""

    def __init__(self, fails_at: int | None) -> None:
        self.n_calls, self._fails_at, self._memory = 0, fails_at, cupy.cuda.Memory

    def __call__(self, n_bytes: int) -> Any:
        self.n_calls += 1
        return self._memory(1 << 52 if self.n_calls == self._fails_at else n_bytes)


def test_no_room_at_any_allocation_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = _NoRoom(None)
    with monkeypatch.context() as patch:
        patch.setattr("cupy.cuda.Memory", counter)
        right = load_engine(path, n_ctx=64, backend="cuda").run(PROMPT, 4).generated_token_ids
    assert counter.n_calls > 5
    for fails_at in range(1, counter.n_calls + 1):
        with monkeypatch.context() as patch:
            patch.setattr("cupy.cuda.Memory", _NoRoom(fails_at))
            with pytest.raises(PlacementError, match=r"^the device has no .* bytes left after") as caught:
                load_engine(path, n_ctx=64, backend="cuda").run(PROMPT, 4)
        assert "\n" not in str(caught.value)
    assert load_engine(path, n_ctx=64, backend="cuda").run(PROMPT, 4).generated_token_ids == right


def test_a_lost_device_is_one_line(path: Path) -> None:
    command = ["generate", "-m", str(path), "--prompt-ids", "1,2,3", "-n", "4", "-c", "64", "--backend", "cuda"]
    done = subprocess.run(
        [sys.executable, "-c", _LOSE, *command], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: the device failed, what it held is lost: ")
    assert "Traceback" not in done.stderr


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Another process that leaves 64 MiB of the device."""
    argv = [sys.executable, "-c", _HOLDER, str(64 << 20)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.communicate("")


@pytest.mark.usefixtures("holder")
def test_a_device_that_another_process_holds_is_one_line(path: Path) -> None:
    with pytest.raises(EngineError, match=r"bytes short|the device has no") as caught:
        load_engine(path, n_ctx=1_000_000, backend="cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n_before", [1, 2, 4])
def test_a_generation_that_is_broken_off_leaves_nothing(engine: Engine, n_before: int) -> None:
    healthy = engine.run(PROMPT, 6, keep_logits=True)
    ids: list[int] = []

    def stop(token: int) -> None:
        ids.append(token)
        if len(ids) == n_before:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(PROMPT, 6, on_token=stop)
    assert ids == healthy.generated_token_ids[:n_before]
    again = engine.run(PROMPT, 6, keep_logits=True)
    assert again.generated_token_ids == healthy.generated_token_ids
    assert again.logits is not None
    assert healthy.logits is not None
    assert_same_bits(again.logits, healthy.logits)


def test_a_thousand_calls_take_no_more_memory(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    figures = generate_often(lambda: engine.run(PROMPT, 4).generated_token_ids, 1000, in_use_n_bytes)
    with capsys.disabled():
        print(f"\n{asdict(figures)}")
    figures.require_no_growth()
