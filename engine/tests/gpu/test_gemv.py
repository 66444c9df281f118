"""Matrix kernels against the NumPy backend, bit for bit: every format, shape, pack width and awkward input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import numerics, quants
from engine.reference import linear

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: CUDA ops not measured", exc_type=ImportError)
pytestmark = pytest.mark.gpu

FORMATS = (*quants.QUANT_FORMATS, *quants.FLOAT_FORMATS)
N_IN = (256, 1024, 5120, 6144, 10240, 17408)
WIDTHS = (1, 2, 3, 4, 5, 8, 16)
N_OUT = 37  # no multiple of any tile
PAIRS = (("Q4_K", "Q4_K"), ("Q5_K", "Q6_K"), ("IQ4_XS", "IQ4_XS"), ("Q5_K", "Q5_K"), ("F16", "Q8_0"))


@pytest.fixture(scope="module")
def kernels() -> Any:
    from engine.cuda import gemv
    from engine.cuda.device import open_device
    from engine.cuda.kernels import Kernels

    expressions = [gemv.repack_expression(f) for f in quants.QUANT_FORMATS] + ["&iq3s_grid"]
    expressions += [gemv.gemv_expression(f, k, w, gemv.STORE) for f in FORMATS for k in N_IN for w in gemv.PACK_WIDTHS]
    expressions += [gemv.gemv_expression("F32", 90, 4, gemv.STORE), gemv.gemv_expression("Q4_K", 256, 4, 1)]
    expressions += [gemv.gate_up_expression(g, u, 1024, w) for g, u in PAIRS for w in (1, 4)]
    compiled = Kernels(expressions, open_device().arch)
    compiled.write_global("iq3s_grid", gemv.iq3s_grid_words())
    return compiled


def random_rows(type_name: str, n_rows: int, n: int, seed: int) -> NDArray[np.uint8]:
    """Return rows of finite random weights as they lie in a file."""
    rng = np.random.default_rng(seed)
    if type_name in quants.FLOAT_FORMATS:
        values = rng.standard_normal((n_rows, n)).astype(np.float32)
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


def on_device(kernels: Any, type_name: str, raw: NDArray[np.uint8]) -> Any:
    from engine.cuda import gemv

    n_out, n_in = raw.shape[0], gemv.n_in_of_row(type_name, raw.shape[1])
    data = cupy.asarray(raw.reshape(-1))
    if quants.is_quantized(type_name):
        planes = cupy.zeros_like(data)
        n_sub = n_out * n_in // 32
        gemv.repack(kernels, type_name, data, planes, n_sub, 0, n_sub)
        data = planes
    return gemv.DeviceMatrix(type_name, n_in, n_out, data)


def activation_on_device(h: numerics.Activation) -> Any:
    from engine.cuda.buffers import DeviceActivation

    if h.q8 is None:
        empty = cupy.zeros(1, np.int8)
        return DeviceActivation(cupy.asarray(h.x), empty, empty)
    scales = np.stack([h.q8.d.view(np.int32), h.q8.total], axis=-1)
    return DeviceActivation(cupy.asarray(h.x), cupy.asarray(h.q8.q.reshape(h.x.shape)), cupy.asarray(scales))


def assert_same_bits(ours: Any, expected: NDArray[Any]) -> None:
    found = cupy.asnumpy(ours)
    assert found.shape == expected.shape
    wrong = np.flatnonzero(found.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8))
    assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[0] // 4}: {found.ravel()[wrong[0] // 4]!r}"


def check(kernels: Any, type_name: str, raw: NDArray[np.uint8], x: NDArray[np.float32]) -> None:
    from engine.cuda import gemv

    h = numerics.quantize(x)
    out = cupy.full((x.shape[0], raw.shape[0]), np.nan, np.float32)
    fault = cupy.zeros(1, np.uint32)
    gemv.gemv(kernels, on_device(kernels, type_name, raw), activation_on_device(h), out, fault=fault)
    assert_same_bits(out, linear.load(type_name, raw).apply(h))


@pytest.mark.parametrize("n_tokens", WIDTHS)
@pytest.mark.parametrize("n_in", N_IN)
@pytest.mark.parametrize("type_name", FORMATS)
def test_gemv(kernels: Any, type_name: str, n_in: int, n_tokens: int) -> None:
    x = np.random.default_rng(n_in + n_tokens).standard_normal((n_tokens, n_in)).astype(np.float32)
    check(kernels, type_name, random_rows(type_name, N_OUT, n_in, seed=n_tokens), x)


@pytest.mark.parametrize("n_out", [1, 3, 32, 1024, 5120])
@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_row_counts(kernels: Any, type_name: str, n_out: int) -> None:
    x = np.random.default_rng(n_out).standard_normal((1, 1024)).astype(np.float32)
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
@pytest.mark.parametrize("type_name", FORMATS)
def test_awkward_activations(kernels: Any, type_name: str, kind: str) -> None:
    x = np.random.default_rng(5).standard_normal((2, 1024)).astype(np.float32)
    raw = random_rows(type_name, N_OUT, 1024, seed=6)
    with np.errstate(over="ignore", invalid="ignore"):
        check(kernels, type_name, raw, AWKWARD[kind](x).astype(np.float32))


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
@pytest.mark.parametrize("d", [6e-8, 1.0, 65504.0])
@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_extreme_blocks(kernels: Any, type_name: str, d: float, fill: int) -> None:
    form = quants.QUANT_FORMATS[type_name]
    blocks = np.full((N_OUT, 1024 // form.n_weights, form.block.itemsize), fill, dtype=np.uint8)
    for field in {"d", "dmin"} & set(form.block.names or ()):
        blocks.view(form.block)[..., 0][field] = d
    x = np.random.default_rng(7).standard_normal((3, 1024)).astype(np.float32)
    check(kernels, type_name, blocks.reshape(N_OUT, -1), x)


def test_float_rows_that_end_inside_a_step(kernels: Any) -> None:
    from engine.cuda import gemv

    raw = random_rows("F32", N_OUT, 90, seed=8)
    h = numerics.quantize(np.random.default_rng(9).standard_normal((3, 90)).astype(np.float32))
    out = cupy.zeros((3, N_OUT), np.float32)
    device = on_device(kernels, "F32", raw)
    gemv.gemv(kernels, device, activation_on_device(h), out, fault=cupy.zeros(1, np.uint32))
    assert_same_bits(out, linear.load("F32", raw).apply(h))


def test_residual_is_added_in_place(kernels: Any) -> None:
    from engine.cuda import gemv

    raw = random_rows("Q4_K", N_OUT, 256, seed=1)
    rng = np.random.default_rng(2)
    h = numerics.quantize(rng.standard_normal((2, 256)).astype(np.float32))
    residual = rng.standard_normal((2, N_OUT)).astype(np.float32)
    out = cupy.asarray(residual)
    device = on_device(kernels, "Q4_K", raw)
    fault = cupy.zeros(1, np.uint32)
    gemv.gemv(kernels, device, activation_on_device(h), out, fault=fault, mode=gemv.ADD_RESIDUAL)
    assert_same_bits(out, residual + linear.load("Q4_K", raw).apply(h))


@pytest.mark.parametrize("n_tokens", [1, 2, 4])
@pytest.mark.parametrize("n_ff", [512, 40])
@pytest.mark.parametrize(("gate", "up"), PAIRS)
def test_gate_up_silu(kernels: Any, gate: str, up: str, n_ff: int, n_tokens: int) -> None:
    from engine.cuda import gemv
    from engine.cuda.buffers import DeviceActivation

    rows = [random_rows(t, n_ff, 1024, seed=i) for i, t in enumerate((gate, up))]
    h = numerics.quantize(np.random.default_rng(3).standard_normal((n_tokens, 1024)).astype(np.float32))
    n_groups = -(-n_ff // 32)
    out = DeviceActivation(
        cupy.zeros((n_tokens, n_ff), np.float32),
        cupy.zeros((n_tokens, n_ff), np.int8),
        cupy.zeros((n_tokens, n_groups, 2), np.int32),
    )
    matrices = [on_device(kernels, t, raw) for t, raw in zip((gate, up), rows, strict=True)]
    fault = cupy.zeros(1, np.uint32)
    gemv.gate_up_silu(kernels, *matrices, activation_on_device(h), out, fault=fault, op=0)
    g, u = (linear.load(t, raw).apply(h) for t, raw in zip((gate, up), rows, strict=True))
    expected = numerics.quantize(numerics.silu(g) * u)
    assert_same_bits(out.x, expected.x)
    if expected.q8 is not None:
        assert_same_bits(out.q, expected.q8.q.reshape(n_tokens, n_ff))
        assert_same_bits(out.scales[..., 0].copy(), expected.q8.d.view(np.int32))
        assert_same_bits(out.scales[..., 1].copy(), expected.q8.total)
