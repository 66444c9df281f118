"""Planted faults: a NaN or infinity anywhere is named by layer and op within the step, and no id comes out of it.

Faults are planted on the device between two decode steps and taken out again, so a run afterwards shows that nothing
of them is left. The op named is the first that checks its result downstream (docs/numerics.md, "Finite checks").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import quants
from engine.errors import NonFiniteError
from engine.generate import Engine, PrefillMode, load_engine
from engine.model.state import DecodeState
from engine.tests.gpu.arrays import assert_same_bits, cupy
from engine.tests.models import QUANTISED, Shape, write_model

pytestmark = pytest.mark.gpu

PROMPT = [1, 2, 3, 4, 5]
VALUES = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])

GATED_DELTA, ATTENTION, GATE_UP, HEAD = "gated_delta", "attention", "gate_up_silu", "head"
LAYERS = {layer: f"layer {layer}" for layer in range(5)}  # 3 is attention, the others are recurrent
OUTPUT = "output head"

MATRICES = {
    "blk.1.attn_qkv.weight": (LAYERS[1], GATED_DELTA),
    "blk.1.attn_gate.weight": (LAYERS[1], GATE_UP),  # z: past the check of o, through ssm_out into the residual
    "blk.0.ssm_out.weight": (LAYERS[0], GATE_UP),
    "blk.3.attn_q.weight": (LAYERS[3], ATTENTION),
    "blk.3.attn_k.weight": (LAYERS[3], ATTENTION),
    "blk.3.attn_v.weight": (LAYERS[3], ATTENTION),
    "blk.3.attn_output.weight": (LAYERS[3], GATE_UP),
    "blk.2.ffn_gate.weight": (LAYERS[2], GATE_UP),
    "blk.4.ffn_up.weight": (LAYERS[4], GATE_UP),
    "blk.0.ffn_down.weight": (LAYERS[1], GATED_DELTA),  # the mixer of the layer behind
    "blk.2.ffn_down.weight": (LAYERS[3], ATTENTION),
    "blk.4.ffn_down.weight": (OUTPUT, HEAD),
    "output.weight": (OUTPUT, HEAD),
}
"""Where a damaged scale of each kind of matrix is found."""

SMALL_TENSORS = {
    "blk.1.attn_norm.weight": (LAYERS[1], GATED_DELTA),
    "blk.3.attn_norm.weight": (LAYERS[3], ATTENTION),
    "blk.2.post_attention_norm.weight": (LAYERS[2], GATE_UP),
    "output_norm.weight": (OUTPUT, HEAD),
    "blk.3.attn_q_norm.weight": (LAYERS[3], ATTENTION),
    "blk.3.attn_k_norm.weight": (LAYERS[3], ATTENTION),
    "blk.1.ssm_norm.weight": (LAYERS[1], GATE_UP),  # past the check of o, as attn_gate
    "blk.1.ssm_conv1d.weight": (LAYERS[1], GATED_DELTA),
    "blk.4.ssm_dt.bias": (LAYERS[4], GATED_DELTA),
    "blk.4.ssm_a": (LAYERS[4], GATED_DELTA),
    "blk.1.ssm_alpha.weight": (LAYERS[1], GATED_DELTA),
    "blk.1.ssm_beta.weight": (LAYERS[1], GATED_DELTA),
}
"""The same for norms, gates and the other F32 tensors."""

STATE = {
    "k first": (3, "k", (0, 0, 0), ATTENTION),
    "k last": (3, "k", (len(PROMPT), 1, 63), ATTENTION),
    "v first": (3, "v", (0, 1, 63), ATTENTION),
    "v last": (3, "v", (len(PROMPT), 0, 0), ATTENTION),
    "ssm first": (1, "ssm", (0, 0, 0), GATED_DELTA),
    "ssm last": (4, "ssm", (3, 63, 63), GATED_DELTA),
    "conv oldest": (0, "conv", (0, 0), GATED_DELTA),
    "conv newest": (2, "conv", (2, 511), GATED_DELTA),
}
"""Layer, part and index of what a sequence has left behind, and the op that finds it."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    """Return what gives the engine of a model that has one block format throughout; each is loaded once."""
    loaded: dict[str, Engine] = {}

    def engine(type_name: str) -> Engine:
        if type_name not in loaded:
            shape = Shape(
                n_layer=5, n_v_heads=4, n_vocab=256, types=(type_name,), token_embd=type_name, output=type_name
            )
            path = write_model(tmp_path_factory.mktemp("model") / "model.gguf", shape, seed=2)
            loaded[type_name] = load_engine(path, n_ctx=64, backend="cuda")
        return loaded[type_name]

    return engine


# Planting


def weight(engine: Engine, name: str) -> Any:
    """Return the weight that a tensor was loaded to: a matrix, or an array on the device."""
    parts = name.split(".")
    if parts[0] != "blk":
        return getattr(engine.weights, parts[0])
    layer = engine.weights.layers[int(parts[1])]
    return getattr(layer if hasattr(layer, parts[2]) else layer.ffn, parts[2])


@contextmanager
def replaced(array: Any, values: NDArray[Any]) -> Iterator[None]:
    """Put values into a device array for as long as the context lasts."""
    before = cupy.asnumpy(array)
    put(array, values)
    try:
        yield
    finally:
        put(array, before)


def put(array: Any, values: NDArray[Any]) -> None:
    array.set(np.ascontiguousarray(values, dtype=array.dtype))
    cupy.cuda.runtime.deviceSynchronize()


def damaged_scale(engine: Engine, name: str, field: str, value: float) -> AbstractContextManager[None]:
    """Overwrite a field of the second block of a matrix's third row."""
    from engine.cuda import gemv

    ops: Any = engine.ops
    matrix, form = weight(engine, name), quants.QUANT_FORMATS[engine.model.tensor(name).type]
    raw = engine.model.raw(name).copy()
    raw.reshape(raw.shape[0], -1, form.block.itemsize).view(form.block)[2, -1][field] = value
    strips, n_sub = cupy.zeros(raw.size, np.uint8), raw.shape[0] * matrix.n_in // 32
    gemv.repack(ops.kernels, matrix.type_name, cupy.asarray(raw.reshape(-1)), strips, n_sub, 0, n_sub)
    return replaced(matrix.data, cupy.asnumpy(strips))


def damaged_element(array: Any, at: tuple[int, ...] | int, value: float) -> AbstractContextManager[None]:
    """Overwrite an element of a device array."""
    values = cupy.asnumpy(array)
    values[at] = value
    return replaced(array, values)


@contextmanager
def damaged_row_in_the_file(engine: Engine, token: int, value: float) -> Iterator[None]:
    """Overwrite the scale of a token's embedding row, which every step reads from the memory map."""
    info = engine.model.tensor("token_embd.weight")
    offset = info.offset + token * info.row_n_bytes
    form = quants.QUANT_FORMATS[info.type]
    with engine.model.path.open("r+b") as file:
        row = np.fromfile(file, np.uint8, info.row_n_bytes, offset=offset)
        damaged = row.copy()
        damaged.view(form.block)["d"][0] = value
        write_at(file, offset, damaged.tobytes())
        try:
            yield
        finally:
            write_at(file, offset, row.tobytes())


def write_at(file: Any, offset: int, data: bytes) -> None:
    file.seek(offset)
    file.write(data)
    file.flush()


def message(where: str, op: str) -> str:
    return f"^{re.escape(where)}: op {op} produced (NaN|infinity); the weights or the state are damaged$"


def assert_found(
    engine: Engine, where: str, op: str, plant: Callable[[DecodeState, int], AbstractContextManager[None]]
) -> None:
    """Plant between two steps of the graph: the step raises instead of returning an id, and nothing stays behind."""
    healthy = engine.run(PROMPT, 4, keep_logits=True)
    state, logits = engine.prefill(PROMPT)
    decoder = engine.decoder(state)
    token = decoder.step(engine.greedy(logits))
    quiet = np.errstate(all="ignore")  # as Engine.run does it
    with quiet, plant(state, token), pytest.raises(NonFiniteError, match=message(where, op)):
        decoder.step(token)
    again = engine.run(PROMPT, 4, keep_logits=True)
    assert again.generated_token_ids == healthy.generated_token_ids
    assert again.logits is not None
    assert healthy.logits is not None
    assert_same_bits(again.logits, healthy.logits)


# In the weights


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("type_name", QUANTISED)
def test_the_scale_of_a_block(engines: Callable[[str], Engine], type_name: str, name: str, value: float) -> None:
    engine, (where, op) = engines(type_name), MATRICES[name]
    assert_found(engine, where, op, lambda state, token: damaged_scale(engine, name, "d", value))


@VALUES
@pytest.mark.parametrize("name", ["blk.1.attn_qkv.weight", "blk.4.ffn_down.weight", "output.weight"])
@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_K"])
def test_the_minimum_of_a_block(engines: Callable[[str], Engine], type_name: str, name: str, value: float) -> None:
    engine, (where, op) = engines(type_name), MATRICES[name]
    assert_found(engine, where, op, lambda state, token: damaged_scale(engine, name, "dmin", value))


@VALUES
@pytest.mark.parametrize("type_name", QUANTISED)
def test_the_embedding_row_of_the_token(engines: Callable[[str], Engine], type_name: str, value: float) -> None:
    engine = engines(type_name)
    plant = lambda state, token: damaged_row_in_the_file(engine, token, value)  # noqa: E731
    assert_found(engine, LAYERS[0], GATED_DELTA, plant)


@VALUES
@pytest.mark.parametrize("name", SMALL_TENSORS)
def test_norms_and_gates(engines: Callable[[str], Engine], name: str, value: float) -> None:
    engine, (where, op) = engines("Q4_K"), SMALL_TENSORS[name]
    found = weight(engine, name)
    # The last element of the first row: an F32 matrix is kept as the bytes of the file.
    array, at = (found.data.view(np.float32), found.n_in - 1) if hasattr(found, "n_in") else (found, (0,) * found.ndim)
    assert_found(engine, where, op, lambda state, token: damaged_element(array, at, value))


# In the state


@VALUES
@pytest.mark.parametrize("name", STATE)
def test_what_the_sequence_left_behind(engines: Callable[[str], Engine], name: str, value: float) -> None:
    layer, part, at, op = STATE[name]
    plant = lambda state, token: damaged_element(getattr(state.layers[layer], part), at, value)  # noqa: E731
    assert_found(engines("Q6_K"), LAYERS[layer], op, plant)


def test_what_lies_behind_the_last_position_is_not_read(engines: Callable[[str], Engine]) -> None:
    engine = engines("Q4_K")
    healthy = engine.run(PROMPT, 4, keep_logits=True)
    assert healthy.logits is not None
    state, logits = engine.prefill(PROMPT)
    cache: Any = state.layers[3]
    for array in (cache.k, cache.v):
        values = cupy.asnumpy(array)
        values[len(PROMPT) :] = np.nan
        put(array, values)
    decoder = engine.decoder(state)
    token = engine.greedy(logits)
    for row in healthy.logits[1:]:
        token = decoder.step(token)
        assert_same_bits(decoder.logits(), row)


# No id comes out


@pytest.mark.parametrize("mode", ["token_major", "layer_major"])
@pytest.mark.parametrize("name", [*MATRICES, *SMALL_TENSORS])
def test_a_damaged_prompt_gives_no_id(engines: Callable[[str], Engine], name: str, mode: PrefillMode) -> None:
    engine, (where, op) = engines("Q4_K"), (MATRICES | SMALL_TENSORS)[name]
    found, ids = weight(engine, name), list[int]()
    if name in MATRICES:
        plant = damaged_scale(engine, name, "d", np.inf)
    elif hasattr(found, "n_in"):
        plant = damaged_element(found.data.view(np.float32), 0, np.inf)
    else:
        plant = damaged_element(found, (0,) * found.ndim, np.inf)
    with plant, pytest.raises(NonFiniteError, match=message(where, op)):
        engine.run(PROMPT, 4, prefill=mode, on_token=ids.append)
    assert ids == []
    assert len(engine.run(PROMPT, 4).generated_token_ids) == 4


@pytest.mark.parametrize("n_before", [1, 2, 5])
def test_a_run_gives_the_ids_before_the_fault_and_none_after(engines: Callable[[str], Engine], n_before: int) -> None:
    engine, ids = engines("Q8_0"), list[int]()
    healthy = engine.run(PROMPT, 8).generated_token_ids
    norm = engine.weights.output_norm
    values = cupy.asnumpy(norm)

    def on_token(token: int) -> None:
        ids.append(token)
        if len(ids) == n_before:
            put(norm, np.where(np.arange(values.size) == 7, np.float32(np.nan), values))

    with replaced(norm, values), pytest.raises(NonFiniteError, match=message(OUTPUT, HEAD)):
        engine.run(PROMPT, 8, on_token=on_token)
    assert ids == healthy[:n_before]
    assert engine.run(PROMPT, 8).generated_token_ids == healthy


@VALUES
def test_given_logits_that_are_not_finite_are_found_by_argmax(engines: Callable[[str], Engine], value: float) -> None:
    engine = engines("Q4_K")
    logits = np.zeros(engine.config.n_vocab, dtype=np.float32)
    logits[200] = value
    with pytest.raises(NonFiniteError, match=message(OUTPUT, "argmax")):
        engine.greedy(logits)
    logits[200] = 1.0
    assert engine.greedy(logits) == 200
