"""Streaming kernels against the NumPy backend, bit for bit: formats, row lengths, shares of rows, float rows beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import numerics, quants
from engine.cuda import gemv, streams
from engine.cuda.device import Device
from engine.reference import linear
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
from engine.tests.gpu.test_gemv import on_device, random_rows

pytestmark = pytest.mark.gpu

N_IN = (1024, 5120, 6144, 17408)
N_OUT = (1, 37, 5120)
PAIRS = (("Q4_K", "Q4_K"), ("Q5_K", "Q6_K"), ("IQ4_XS", "IQ3_S"), ("Q8_0", "Q4_K"))
GROUPS = (
    ("Q4_K", "Q4_K", "F32", "F32"),
    ("Q6_K", "IQ3_S", "Q5_K"),
    ("F16", "Q8_0", "IQ4_XS", "BF16"),
)
EPS = 1e-6


@pytest.fixture(scope="module")
def target(device: Device) -> streams.Target:
    return streams.Target.of(device.arch, device.n_sm)


@pytest.fixture(scope="module")
def kernels(compile_all: Compile, target: streams.Target) -> Any:
    expressions = [gemv.repack_expression(f) for f in quants.QUANT_FORMATS] + ["&iq3s_grid"]
    expressions += [streams.gemv_expression(f, k, target) for f in quants.QUANT_FORMATS for k in N_IN]
    expressions += [streams.project_expression(types, k, target) for types in GROUPS for k in (1024, 5120)]
    expressions += [streams.gate_up_expression(g, u, k, target) for g, u in PAIRS for k in (1024, 5120)]
    compiled = compile_all(expressions)
    compiled.write_global("iq3s_grid", gemv.iq3s_grid_words())
    return compiled


@pytest.mark.parametrize("n_out", N_OUT)
@pytest.mark.parametrize("n_in", N_IN)
@pytest.mark.parametrize("type_name", quants.QUANT_FORMATS)
def test_gemv(kernels: Any, target: streams.Target, type_name: str, n_in: int, n_out: int) -> None:
    rng = np.random.default_rng(n_in + n_out)
    raw, h = random_rows(type_name, n_out, n_in, seed=n_out), numerics.quantize(random_f32(rng, 1, n_in))
    residual = random_f32(rng, 1, n_out)
    out = cupy.asarray(residual)
    streams.Streams(kernels, target).gemv(on_device(kernels, type_name, raw), activation_on_device(h), out)
    assert_same_bits(out, residual + linear.load(type_name, raw).apply(h))


def norm_input(n_in: int) -> tuple[streams.NormInput, numerics.Activation]:
    """Return a row that is to be normalised, and what comes out."""
    rng = np.random.default_rng(n_in)
    x, weight = random_f32(rng, 1, n_in), random_f32(rng, n_in)
    expected = numerics.quantize(numerics.rms_norm(x, weight, EPS, numerics.LANES_EMBD))
    return streams.NormInput(cupy.asarray(x), cupy.asarray(weight), EPS), expected


@pytest.mark.parametrize("n_in", [1024, 5120])
@pytest.mark.parametrize("n_out", [(10240, 6144, 48, 48), (37, 1, 5, 300)])
@pytest.mark.parametrize("types", GROUPS)
def test_project(
    kernels: Any, target: streams.Target, types: tuple[str, ...], n_out: tuple[int, ...], n_in: int
) -> None:
    given, h = norm_input(n_in)
    raws = [random_rows(name, n, n_in, seed=i) for i, (name, n) in enumerate(zip(types, n_out, strict=False))]
    outs = [poisoned((1, raw.shape[0]), np.float32) for raw in raws]
    matrices = [on_device(kernels, name, raw) for name, raw in zip(types, raws, strict=True)]
    streams.Streams(kernels, target).project(matrices, given, outs)
    for name, raw, out in zip(types, raws, outs, strict=True):
        assert_same_bits(out, linear.load(name, raw).apply(h))


@pytest.mark.parametrize("n_in", [1024, 5120])
@pytest.mark.parametrize("n_ff", [32, 160, 17408])
@pytest.mark.parametrize("types", PAIRS)
def test_gate_up_silu(kernels: Any, target: streams.Target, types: tuple[str, str], n_ff: int, n_in: int) -> None:
    given, h = norm_input(n_in)
    gate, up = (random_rows(name, n_ff, n_in, seed=seed) for seed, name in enumerate(types))
    done = cupy.zeros(n_ff // 32, np.uint32)
    expected = numerics.quantize(
        numerics.silu(linear.load(types[0], gate).apply(h)) * linear.load(types[1], up).apply(h)
    )
    matrices = on_device(kernels, types[0], gate), on_device(kernels, types[1], up)
    for _ in range(2):  # the counters must be zero again after the first call
        out = poisoned_activation(1, n_ff)
        streams.Streams(kernels, target).gate_up_silu(*matrices, given, out, done=done, fault=no_fault(), op=0)
        assert_same_activation(out, expected)
    assert not cupy.asnumpy(done).any()
