"""Device memory: the budget is a hard limit, asked before anything is taken, and the plan is what is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.device import Device
from engine.errors import PlacementError
from engine.generate import load_engine
from engine.gguf.reader import ModelFile, open_model
from engine.model.config import ModelConfig
from engine.placement import MemoryPlan, plan_memory
from engine.tests.gpu.arrays import cupy
from engine.tests.models import SHAPES, Shape, write_model

pytestmark = pytest.mark.gpu

MODELS = {"quantised": Shape(n_v_heads=4, n_vocab=1000), "tied": SHAPES["8 layers, 2 value heads, Q8_0, tied"]}


# The allocator


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record what the device is asked for."""
    sizes: list[int] = []
    memory = cupy.cuda.Memory

    def take(n_bytes: int) -> Any:
        sizes.append(n_bytes)
        return memory(n_bytes)

    monkeypatch.setattr("cupy.cuda.Memory", take)
    return sizes


def test_a_budget_is_checked_before_the_device_is_asked(taken: list[int]) -> None:
    from engine.cuda.memory import DeviceMemory

    memory = DeviceMemory(1 << 20)
    memory.array((1 << 19,), np.uint8)
    with pytest.raises(PlacementError, match=r"budget of 1,048,576 bytes .* 524,288 in use, 524,544 more wanted"):
        memory.allocate((1 << 19) + 1)
    assert taken == [1 << 19]
    assert (memory.n_bytes, memory.n_allocations) == (1 << 19, 1)
    memory.allocate(1 << 19)
    assert memory.n_bytes == 1 << 20


def test_sizes_are_padded_and_arrays_zeroed(taken: list[int]) -> None:
    from engine.cuda.memory import DeviceMemory

    memory = DeviceMemory()
    arrays = [memory.array(shape, np.float32) for shape in ((1,), (64,), (65,), (3, 100))]
    assert taken == [256, 256, 512, 1280]
    assert memory.n_bytes == sum(taken)
    for array in arrays:
        assert array.data.ptr % 256 == 0
        assert not cupy.asnumpy(array).any()


def test_what_is_released_can_be_taken_again() -> None:
    from engine.cuda.memory import DeviceMemory

    memory = DeviceMemory(1024)
    first = memory.array((1000,), np.uint8)
    with pytest.raises(PlacementError):
        memory.allocate(1)
    memory.release(first)
    assert memory.n_bytes == 0
    memory.allocate(1024)


def test_a_device_that_has_no_room_is_one_line() -> None:
    from engine.cuda.memory import DeviceMemory

    with pytest.raises(PlacementError, match=r"^the device has no 4,503,599,627,370,496 bytes left after 0: .*$"):
        DeviceMemory().allocate(1 << 52)


def test_a_pool_hands_out_aligned_blocks_up_to_its_end() -> None:
    from engine.cuda.memory import DeviceMemory, Pool

    pool = Pool(DeviceMemory(), 1024)
    blocks = [pool.take(n_bytes) for n_bytes in (1, 256, 257)]
    assert [block.data.ptr - blocks[0].data.ptr for block in blocks] == [0, 256, 512]
    assert (blocks[0].data.ptr % 256, pool.used_n_bytes) == (0, 1024)
    with pytest.raises(PlacementError, match="the weights need 1,280 bytes, 1,024 were planned"):
        pool.take(1)


# The plan of a model


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", MODELS[request.param])


def plan_of(path: Path, n_ctx: int) -> tuple[ModelFile, ModelConfig, MemoryPlan]:
    model = open_model(path)
    config = ModelConfig.from_model(model)
    return model, config, plan_memory(config, model.tensors.values(), n_ctx)


@pytest.mark.parametrize("n_ctx", [8, 512, 2048])
def test_an_engine_takes_what_was_planned_and_nothing_later(path: Path, n_ctx: int) -> None:
    _, _, plan = plan_of(path, n_ctx)
    engine = load_engine(path, n_ctx=n_ctx, backend="cuda")
    memory = engine.ops.memory  # type: ignore[attr-defined]
    assert memory.n_bytes == plan.total_n_bytes
    engine.run([1, 2, 3], 4)
    assert memory.n_bytes == plan.total_n_bytes


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes in use after each allocation."""
    from engine.cuda.memory import DeviceMemory

    in_use: list[int] = []
    allocate = DeviceMemory.allocate

    def recorded(self: DeviceMemory, n_bytes: int) -> Any:
        pointer = allocate(self, n_bytes)
        in_use.append(self.n_bytes)
        return pointer

    monkeypatch.setattr(DeviceMemory, "allocate", recorded)
    return in_use


def test_the_budget_may_be_exactly_the_plan(path: Path, peaks: list[int]) -> None:
    """Loading needs no more than running."""
    _, _, plan = plan_of(path, 512)
    budget = plan.total_n_bytes
    free = load_engine(path, n_ctx=512, backend="cuda").run([1, 2, 3], 4)
    limited = load_engine(path, n_ctx=512, backend="cuda", vram_budget=budget).run([1, 2, 3], 4)
    assert limited.generated_token_ids == free.generated_token_ids
    assert max(peaks) == budget


def test_a_budget_below_the_plan_is_refused_before_anything_is_taken(path: Path, peaks: list[int]) -> None:
    _, _, plan = plan_of(path, 512)
    budget = plan.total_n_bytes - 1
    numbers = f"needs {plan.total_n_bytes:,} bytes .* at -c 512.* the budget is {budget:,}: 1 bytes short"
    with pytest.raises(PlacementError, match=numbers):
        load_engine(path, n_ctx=512, backend="cuda", vram_budget=budget)
    assert peaks == []


def test_a_context_that_does_not_fit_is_refused(path: Path) -> None:
    _, _, plan = plan_of(path, 512)
    load_engine(path, n_ctx=512, backend="cuda", vram_budget=plan.total_n_bytes)
    with pytest.raises(PlacementError, match="at -c 2048"):
        load_engine(path, n_ctx=2048, backend="cuda", vram_budget=plan.total_n_bytes)


def test_the_limit_holds_without_the_plan_too(path: Path, device: Device, peaks: list[int]) -> None:
    """The allocator itself refuses; the check of the plan is left out here."""
    from engine.cuda.ops import CudaOps
    from engine.model.weights import load_weights

    model, config, plan = plan_of(path, 512)
    budget = plan.total_n_bytes - 256

    def load() -> None:
        load_weights(model, config, CudaOps(model, config, device, 512, budget), lambda n_bytes: None)

    with pytest.raises(PlacementError, match=re.escape(f"budget of {budget:,} bytes is exceeded")):
        load()
    assert max(peaks) <= budget


def test_weights_lie_aligned_in_the_pool(path: Path) -> None:
    engine: Any = load_engine(path, n_ctx=64, backend="cuda")
    layers = engine.weights.layers
    pointers = [getattr(layers[0], name).data.data.ptr for name in ("attn_qkv", "attn_gate", "ssm_out")]
    pointers += [getattr(layers[3], name).data.ptr for name in ("attn_norm", "attn_q_norm", "attn_k_norm")]
    pointers += [getattr(layers[3].ffn, name).data.data.ptr for name in ("ffn_gate", "ffn_up", "ffn_down")]
    assert {pointer % 256 for pointer in pointers} == {0}
