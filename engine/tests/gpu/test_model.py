"""Whole small models: prefill in every form and decoding through the captured graph, against the NumPy backend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.cuda import compile as compiler
from engine.cuda.plan import step
from engine.errors import RequestError
from engine.generate import Engine, Generation, PrefillMode, load_engine
from engine.model.state import DecodeState, RecurrentState
from engine.ops import Ops
from engine.placement import N_CHUNK
from engine.tests.gpu.arrays import assert_same_bits, cupy
from engine.tests.models import SHAPES, write_model
from engine.wrap import WrappedOps

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]
N_PROMPT, N_PREDICT = 70, 25  # 24 decode steps, over three splits of the cache
N_CTX = 512
FIRST = next(iter(SHAPES))


def tokens(engine: Engine, n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, engine.config.n_vocab, n)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "_"))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", SHAPES[request.param], seed=1)


@pytest.fixture(scope="module")
def first_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for what does not depend on the shape."""
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", SHAPES[FIRST], seed=1)


@pytest.fixture(scope="module")
def numpy_engine(path: Path) -> Engine:
    return load_engine(path, n_ctx=N_CTX)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return load_engine(path, n_ctx=N_CTX, backend="cuda")


@pytest.fixture(scope="module")
def prompt(numpy_engine: Engine) -> list[int]:
    return tokens(numpy_engine, N_PROMPT, seed=3)


@pytest.fixture(scope="module")
def expected(numpy_engine: Engine, prompt: list[int]) -> Generation:
    return numpy_engine.run(prompt, N_PREDICT, keep_logits=True)


def assert_same_run(found: Generation, expected: Generation) -> None:
    """Compare ids and every row of logits."""
    assert found.generated_token_ids == expected.generated_token_ids
    assert found.logits is not None
    assert expected.logits is not None
    assert_same_bits(found.logits, expected.logits)
    assert_same_bits(found.final_logits, expected.final_logits)


def state_arrays(state: DecodeState) -> Iterator[NDArray[Any]]:
    for layer in state.layers:
        arrays = (layer.conv, layer.ssm) if isinstance(layer, RecurrentState) else (layer.k, layer.v)
        yield from (cupy.asnumpy(array) for array in arrays)


# Bits


@pytest.mark.parametrize(
    ("mode", "pack"), [("token_major", 1), *(("layer_major", pack) for pack in (1, 2, 3, 8, 16, 40, 72))]
)
def test_prefill_leaves_the_logits_and_the_state_of_the_numpy_backend(
    engine: Engine, numpy_engine: Engine, prompt: list[int], mode: PrefillMode, pack: int
) -> None:
    state, logits = engine.prefill(prompt, mode, pack)
    expected_state, expected_logits = numpy_engine.prefill(prompt)
    assert_same_bits(logits, expected_logits)
    for found, wanted in zip(state_arrays(state), state_arrays(expected_state), strict=True):
        assert_same_bits(found, wanted)


def test_every_step_of_the_graph(engine: Engine, prompt: list[int], expected: Generation) -> None:
    assert_same_run(engine.run(prompt, N_PREDICT, keep_logits=True), expected)


def test_a_second_run_and_a_second_engine(path: Path, engine: Engine, prompt: list[int], expected: Generation) -> None:
    engine.run(tokens(engine, 5, seed=4), 3)
    second = load_engine(path, n_ctx=N_CTX, backend="cuda")
    assert_same_run(second.run(prompt, N_PREDICT, keep_logits=True), expected)
    assert_same_run(engine.run(prompt, N_PREDICT, keep_logits=True), expected)


@pytest.mark.parametrize("n_ctx", [N_PROMPT + N_PREDICT - 1, 128, 2048])
def test_the_context_size_changes_no_bit(path: Path, prompt: list[int], expected: Generation, n_ctx: int) -> None:
    other = load_engine(path, n_ctx=n_ctx, backend="cuda")
    assert_same_run(other.run(prompt, N_PREDICT, keep_logits=True), expected)


def test_wrapped_ops_run_one_by_one_give_the_bits_of_the_graph(
    path: Path, prompt: list[int], expected: Generation
) -> None:
    wrapped = load_engine(path, n_ctx=N_CTX, backend="cuda", wrap_ops=lambda ops: cast(Ops, WrappedOps(ops)))
    assert_same_run(wrapped.run(prompt, N_PREDICT, keep_logits=True), expected)


def test_teacher_forcing(engine: Engine, numpy_engine: Engine, prompt: list[int]) -> None:
    forced = tokens(engine, 9, seed=5)
    found, expected = (e.run(prompt[:20], 10, force_ids=forced, keep_logits=True) for e in (engine, numpy_engine))
    assert_same_run(found, expected)


def test_a_prompt_of_several_chunks(first_path: Path) -> None:
    engine, reference = load_engine(first_path, n_ctx=N_CTX, backend="cuda"), load_engine(first_path, n_ctx=N_CTX)
    prompt = tokens(engine, 2 * N_CHUNK + 33, seed=6)
    assert_same_run(engine.run(prompt, 3, keep_logits=True), reference.run(prompt, 3, keep_logits=True))


def test_the_context_can_be_filled_to_its_last_position(first_path: Path) -> None:
    engine, reference = (load_engine(first_path, n_ctx=40, backend=backend) for backend in ("cuda", "numpy"))
    prompt = tokens(engine, 30, seed=7)
    assert_same_run(engine.run(prompt, 11, keep_logits=True), reference.run(prompt, 11, keep_logits=True))


def test_the_backends_choose_alike_from_given_logits(engine: Engine, numpy_engine: Engine) -> None:
    rng = np.random.default_rng(8)
    for _ in range(3):
        logits = np.round(rng.standard_normal(engine.config.n_vocab) * 2).astype(np.float32)  # many ties
        assert engine.greedy(logits) == numpy_engine.greedy(logits)


_IN_A_PROCESS = """
import json, sys
from pathlib import Path
from engine.cuda.compile import n_compiled
from engine.generate import load_engine
path, prompt = Path(sys.argv[1]), json.loads(sys.argv[2])
run = load_engine(path, n_ctx=512, backend="cuda").run(prompt, 25)
print(json.dumps([run.final_logits_le32_sha256, run.generated_token_ids, n_compiled()]))
"""


def test_a_fresh_process_agrees_and_compiles_nothing(first_path: Path) -> None:
    engine = load_engine(first_path, n_ctx=N_CTX, backend="cuda")
    prompt = tokens(engine, N_PROMPT, seed=3)
    run = engine.run(prompt, 25)
    command = [sys.executable, "-c", _IN_A_PROCESS, str(first_path), json.dumps(prompt)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout) == [run.final_logits_le32_sha256, run.generated_token_ids, 0]


# What decoding costs


def test_a_second_start_compiles_nothing(first_path: Path) -> None:
    load_engine(first_path, n_ctx=N_CTX, backend="cuda")
    before = compiler.n_compiled()
    engine: Any = load_engine(first_path, n_ctx=2048, backend="cuda")
    assert compiler.n_compiled() == before
    assert engine.ops.kernels.cubin.was_cached


class CountedAllocations:
    """An allocator for CuPy's own arrays that counts."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, n_bytes: int) -> Any:
        self.n += 1
        return cupy.get_default_memory_pool().malloc(n_bytes)


def test_nothing_is_allocated_after_loading(engine: Engine, prompt: list[int]) -> None:
    ops: Any = engine.ops
    before, counted = (ops.memory.n_allocations, ops.memory.n_bytes), CountedAllocations()
    with cupy.cuda.using_allocator(counted):
        engine.run(prompt, N_PREDICT, keep_logits=True)
        state, logits = engine.prefill(prompt)
        decoder = engine.decoder(state)
        token = engine.greedy(logits)
        for _ in range(50):
            token = decoder.step(token)
    assert (ops.memory.n_allocations, ops.memory.n_bytes) == before
    assert counted.n == 0


def test_a_step_is_one_graph_of_few_nodes_and_its_preparation_is_timed(
    engine: Engine, prompt: list[int], record_property: Callable[[str, object], None]
) -> None:
    state, logits = engine.prefill(prompt)
    decoder: Any = engine.decoder(state)
    ops: Any = engine.ops
    token = engine.greedy(logits)
    for _ in range(5):
        token = decoder.step(token)
    record_property("n_nodes", decoder.n_nodes)
    record_property("prepare_time_ns", decoder.prepare_time_ns)
    config = engine.config
    # Embedding, norm, head, argmax; ten and eleven kernels a layer before any further fusion. Nothing is copied.
    assert 0 < decoder.n_nodes <= 4 + 10 * config.n_layer_recurrent + 11 * config.n_layer_attn
    assert decoder.n_nodes == len(list(step(config, engine.model.tensors, ops.dispatch)))
    assert len(decoder.prepare_time_ns) == 5
    assert min(decoder.prepare_time_ns) > 0
    assert state.n_past == len(prompt) + 5


def test_a_pack_wider_than_the_kernels_take_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="pack of 73 tokens is asked for, the CUDA backend takes up to 72"):
        engine.prefill(tokens(engine, 73, seed=9), pack=73)
    engine.prefill(tokens(engine, 73, seed=9), pack=72)
