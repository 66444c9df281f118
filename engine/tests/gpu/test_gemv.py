"""Matrix kernels against the NumPy backend, bit for bit: every format, shape, pack width and awkward input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import numerics, quants
from engine.cuda import faults, gemv, packs
from engine.reference import linear
from engine.tests.edge_blocks import EDGES, edge_rows
from engine.tests.gpu.arrays import (
    activation_on_device,
    assert_same_activation,
    assert_same_bits,
    cupy,
    no_fault,
    poisoned,
    poisoned_activation,
    random_f32,
)
from engine.tests.gpu.conftest import Compile

pytestmark = pytest.mark.gpu

FORMATS = (*quants.QUANT_FORMATS, *quants.FLOAT_FORMATS)
N_IN = (256, 1024, 5120, 6144, 10240, 17408)
N_TOKENS = (1, 2, 3, 8, 9, 17, 40, 41, 70)
N_OUT = 37  # no multiple of any tile
MAX_TOKENS = 80
PAIRS = (("Q4_K", "Q4_K"), ("Q5_K", "Q6_K"), ("IQ4_XS", "IQ4_XS"), ("Q5_K", "Q5_K"), ("F16", "Q8_0"))

GROUPS = (
    ("Q4_K",),
    ("Q5_K", "F32"),
    ("Q6_K", "Q4_K", "Q4_K"),
    ("IQ4_XS", "Q8_0", "F16", "BF16"),
    ("IQ3_S", "F32", "F32"),
)


@pytest.fixture(scope="module")
def kernels(compile_all: Compile) -> Any:
    expressions = [gemv.repack_expression(f) for f in quants.QUANT_FORMATS] + ["&iq3s_grid"]
    expressions += [gemv.gemv_expression(f, k, gemv.STORE) for f in FORMATS for k in N_IN]
    expressions += [gemv.gemv_expression("F32", 90, gemv.STORE)]
    expressions += [gemv.gemv_expression("Q8_0", k, gemv.STORE) for k in (96, 1056)]
    expressions += [gemv.gemv_expression("Q4_K", 256, mode) for mode in (gemv.ADD_RESIDUAL, gemv.LOGITS)]
    expressions += [gemv.project_expression(types, 1024) for types in GROUPS]
    expressions += [gemv.gate_up_expression(g, u, 1024) for g, u in PAIRS]
    expressions += packs.expressions()
    compiled = compile_all(expressions)
    compiled.write_global("iq3s_grid", gemv.iq3s_grid_words())
    return compiled


def random_rows(type_name: str, n_rows: int, n: int, seed: int) -> NDArray[np.uint8]:
    """Return rows of finite random weights as they lie in a file."""
    rng = np.random.default_rng(seed)
    if type_name in quants.FLOAT_FORMATS:
        values = random_f32(rng, n_rows, n)
        if type_name == "F32":
            return values.view(np.uint8)
        if type_name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    form = quants.QUANT_FORMATS[type_name]
    raw = rng.integers(0, 256, (n_rows, n // form.n_weights, form.block.itemsize), dtype=np.uint8)
    blocks = raw.view(form.block)[..., 0]
    for field in {"d", "dmin"} & set(form.block.names or ()):
        blocks[field] = (rng.standard_normal(blocks.shape) * 0.01).astype(np.float16)
    return raw.reshape(n_rows, -1)


def on_device(kernels: Any, type_name: str, raw: NDArray[np.uint8]) -> gemv.DeviceMatrix:
    n_out, n_in = raw.shape[0], gemv.n_in_of_row(type_name, raw.shape[1])
    data = cupy.asarray(raw.reshape(-1))
    if quants.is_quantized(type_name):
        strips = poisoned(data.shape, np.uint8)
        n_sub = n_out * n_in // 32
        gemv.repack(kernels, type_name, data, strips, n_sub, 0, n_sub)
        data = strips
    return gemv.DeviceMatrix(type_name, n_in, n_out, data)


def check(kernels: Any, type_name: str, raw: NDArray[np.uint8], x: NDArray[np.float32]) -> None:
    h = numerics.quantize(x)
    out = poisoned((x.shape[0], raw.shape[0]), np.float32)
    matrix, vectors = on_device(kernels, type_name, raw), activation_on_device(h)
    if x.shape[0] == 1:
        gemv.gemv(kernels, matrix, vectors, out, fault=no_fault(), mode=gemv.STORE)
    else:
        packs.project(kernels, [matrix], vectors, [out], tiles_for(x.shape[1]))
    assert_same_bits(out, linear.load(type_name, raw).apply(h))


def tiles_for(n_in: int) -> Any:
    return poisoned((packs.tiles_n_bytes(MAX_TOKENS, n_in) + 16,), np.uint8)


@pytest.mark.parametrize("n_tokens", N_TOKENS)
@pytest.mark.parametrize("n_in", N_IN)
@pytest.mark.parametrize("type_name", FORMATS)
def test_gemv(kernels: Any, type_name: str, n_in: int, n_tokens: int) -> None:
    x = random_f32(np.random.default_rng(n_in + n_tokens), n_tokens, n_in)
    check(kernels, type_name, random_rows(type_name, N_OUT, n_in, seed=n_tokens), x)


@pytest.mark.parametrize("n_groups", [3, 4, 9])
@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_groups_of_tokens(kernels: Any, monkeypatch: pytest.MonkeyPatch, type_name: str, n_groups: int) -> None:
    monkeypatch.setattr(packs, "n_groups", lambda n_row_blocks, n_tokens, target: n_groups)
    x = random_f32(np.random.default_rng(12), 70, 1024)
    check(kernels, type_name, random_rows(type_name, N_OUT, 1024, seed=13), x)


@pytest.mark.parametrize("n_out", [1, 3, 32, 1024, 5120])
@pytest.mark.parametrize("n_tokens", [1, 2, 70])
@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_row_counts(kernels: Any, type_name: str, n_tokens: int, n_out: int) -> None:
    x = random_f32(np.random.default_rng(n_out), n_tokens, 1024)
    check(kernels, type_name, random_rows(type_name, n_out, 1024, seed=n_out), x)


AWKWARD = {
    "zeros": lambda x: x * np.float32(0.0),
    "negative zeros": lambda x: np.full_like(x, -0.0),
    "one huge": lambda x: np.where(np.arange(x.shape[1]) == 77, np.float32(3.0e38), x),
    "denormal": lambda x: x * np.float32(1e-42),
    "tiny": lambda x: x * np.float32(1e-28),
    "equal": lambda x: np.full_like(x, -2.5),
}


@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("n_tokens", [1, 2])
@pytest.mark.parametrize("type_name", FORMATS)
def test_awkward_activations(kernels: Any, type_name: str, n_tokens: int, kind: str) -> None:
    x = random_f32(np.random.default_rng(5), n_tokens, 1024)
    raw = random_rows(type_name, N_OUT, 1024, seed=6)
    with np.errstate(over="ignore", invalid="ignore"):
        check(kernels, type_name, raw, AWKWARD[kind](x).astype(np.float32))


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
@pytest.mark.parametrize("d", [6e-8, 1.0, 65504.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_extreme_blocks(kernels: Any, type_name: str, n_tokens: int, d: float, fill: int) -> None:
    form = quants.QUANT_FORMATS[type_name]
    blocks = np.full((N_OUT, 1024 // form.n_weights, form.block.itemsize), fill, dtype=np.uint8)
    for field in {"d", "dmin"} & set(form.block.names or ()):
        blocks.view(form.block)[..., 0][field] = d
    x = random_f32(np.random.default_rng(7), n_tokens, 1024)
    with np.errstate(invalid="ignore"):
        check(kernels, type_name, blocks.reshape(N_OUT, -1), x)


@pytest.mark.parametrize("d", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_one_damaged_scale(kernels: Any, type_name: str, d: float) -> None:
    """The pack kernels take another way round such a block; infinity must not become NaN on it."""
    form = quants.QUANT_FORMATS[type_name]
    raw = random_rows(type_name, N_OUT, 1024, seed=10)
    raw.reshape(N_OUT, -1, form.block.itemsize).view(form.block)[20, 1, 0]["d"] = d
    with np.errstate(invalid="ignore"):
        check(kernels, type_name, raw, random_f32(np.random.default_rng(11), 43, 1024))


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("type_name", FORMATS)
def test_edge_blocks(kernels: Any, type_name: str, edge: str) -> None:
    x = random_f32(np.random.default_rng(11), 2, 1024)
    with np.errstate(all="ignore"):
        check(kernels, type_name, edge_rows(type_name, edge, N_OUT), x)


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_float_rows_that_end_inside_a_step(kernels: Any, n_tokens: int) -> None:
    check(kernels, "F32", random_rows("F32", N_OUT, 90, seed=8), random_f32(np.random.default_rng(9), n_tokens, 90))


@pytest.mark.parametrize("n_in", [96, 1056])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_rows_with_sub_blocks_for_some_lanes_only(kernels: Any, n_tokens: int, n_in: int) -> None:
    x = random_f32(np.random.default_rng(n_in), n_tokens, n_in)
    check(kernels, "Q8_0", random_rows("Q8_0", N_OUT, n_in, seed=8), x)


@pytest.mark.parametrize("n_tokens", [1, 2, 70])
def test_residual_is_added_in_place(kernels: Any, n_tokens: int) -> None:
    raw = random_rows("Q4_K", N_OUT, 256, seed=1)
    rng = np.random.default_rng(2)
    h = numerics.quantize(random_f32(rng, n_tokens, 256))
    residual = random_f32(rng, n_tokens, N_OUT)
    out = cupy.asarray(residual)
    matrix, vectors = on_device(kernels, "Q4_K", raw), activation_on_device(h)
    if n_tokens == 1:
        gemv.gemv(kernels, matrix, vectors, out, fault=no_fault(), mode=gemv.ADD_RESIDUAL)
    else:
        packs.project(kernels, [matrix], vectors, [out], tiles_for(256), add=True)
    assert_same_bits(out, residual + linear.load("Q4_K", raw).apply(h))


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 16, 70])
@pytest.mark.parametrize("types", GROUPS)
def test_project(kernels: Any, types: tuple[str, ...], n_tokens: int) -> None:
    rows = [random_rows(t, n_out, 1024, seed=n_out) for t, n_out in zip(types, (N_OUT, 6, 1, 130), strict=False)]
    h = numerics.quantize(random_f32(np.random.default_rng(4), n_tokens, 1024))
    matrices = [on_device(kernels, t, raw) for t, raw in zip(types, rows, strict=True)]
    outs = [poisoned((n_tokens, matrix.n_out), np.float32) for matrix in matrices]
    if n_tokens == 1:
        gemv.project(kernels, matrices, activation_on_device(h), outs)
    else:
        packs.project(kernels, matrices, activation_on_device(h), outs, tiles_for(1024))
    for type_name, raw, out in zip(types, rows, outs, strict=True):
        assert_same_bits(out, linear.load(type_name, raw).apply(h))


def counters(n_ff: int) -> Any:
    return cupy.asarray(np.zeros(-(-n_ff // 32), np.uint32))


def launch_gate_up(
    kernels: Any, matrices: list[gemv.DeviceMatrix], h: numerics.Activation, out: Any, fault: Any, op: int = 0
) -> None:
    (gate, up), vectors, done = matrices, activation_on_device(h), counters(out.x.shape[1])
    if out.x.shape[0] == 1:
        gemv.gate_up_silu(kernels, gate, up, vectors, out, done=done, fault=fault, op=op)
    else:
        packs.gate_up_silu(kernels, gate, up, vectors, out, tiles_for(h.x.shape[1]), fault=fault, op=op)
    assert not cupy.asnumpy(done).any()


@pytest.mark.parametrize("n_tokens", [1, 2, 9, 70])
@pytest.mark.parametrize("n_ff", [512, 40])
@pytest.mark.parametrize(("gate", "up"), PAIRS)
def test_gate_up_silu(kernels: Any, gate: str, up: str, n_ff: int, n_tokens: int) -> None:
    rows = [random_rows(t, n_ff, 1024, seed=i) for i, t in enumerate((gate, up))]
    h = numerics.quantize(random_f32(np.random.default_rng(3), n_tokens, 1024))
    matrices = [on_device(kernels, t, raw) for t, raw in zip((gate, up), rows, strict=True)]
    out, fault = poisoned_activation(n_tokens, n_ff), no_fault()
    launch_gate_up(kernels, matrices, h, out, fault)
    g, u = (linear.load(t, raw).apply(h) for t, raw in zip((gate, up), rows, strict=True))
    assert_same_activation(out, numerics.quantize(numerics.silu(g) * u))
    assert int(cupy.asnumpy(fault)[0]) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_set_the_fault_word(kernels: Any, value: float) -> None:
    raw = random_rows("Q4_K", N_OUT, 256, seed=4)
    raw.reshape(N_OUT, 1, -1).view(quants.QUANT_FORMATS["Q4_K"].block)[N_OUT - 1]["d"] = value
    h = numerics.quantize(random_f32(np.random.default_rng(5), 1, 256))
    out, fault = poisoned((1, N_OUT), np.float32), no_fault()
    arguments = (kernels, on_device(kernels, "Q4_K", raw), activation_on_device(h), out)
    gemv.gemv(*arguments, fault=fault, mode=gemv.LOGITS, op=int(faults.kernel_argument(faults.Op.HEAD)))
    assert str(faults.describe(int(cupy.asnumpy(fault)[0]))).startswith("output head: op head produced ")
    with np.errstate(invalid="ignore"):
        assert_same_bits(out, linear.load("Q4_K", raw).apply(h))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n_ff", [512, 40])
@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("n_tokens", [1, 2])
def test_gate_and_up_that_are_not_finite_set_the_fault_word(
    kernels: Any, n_tokens: int, damaged: int, n_ff: int, value: float
) -> None:
    rows = [random_rows("Q4_K", n_ff, 1024, seed=i) for i in range(2)]
    rows[damaged].reshape(n_ff, 4, -1).view(quants.QUANT_FORMATS["Q4_K"].block)[n_ff - 1, 2]["d"] = value
    h = numerics.quantize(random_f32(np.random.default_rng(6), n_tokens, 1024))
    matrices = [on_device(kernels, "Q4_K", raw) for raw in rows]
    fault, op = no_fault(), int(faults.kernel_argument(faults.Op.GATE_UP_SILU, 9))
    launch_gate_up(kernels, matrices, h, poisoned_activation(n_tokens, n_ff), fault, op)
    assert str(faults.describe(int(cupy.asnumpy(fault)[0]))).startswith("layer 9: op gate_up_silu produced ")
