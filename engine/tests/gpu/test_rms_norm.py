"""The norm over n_embd, f32 and quantised, against the NumPy backend bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import numerics
from engine.cuda import rms_norm
from engine.tests.gpu.arrays import assert_same_activation, cupy, poisoned_activation, random_f32
from engine.tests.gpu.conftest import Compile

pytestmark = pytest.mark.gpu

N_EMBD = (90, 256, 320, 1000, 1024, 5120)  # 1000: rows of whole quads, no whole group; 90: not even that
EPS = 1e-6
X = NDArray[np.float32]


@pytest.fixture(scope="module")
def kernels(compile_all: Compile) -> Any:
    return compile_all(e for n in N_EMBD for e in rms_norm.expressions(SimpleNamespace(n_embd=n), 1))


def check(kernels: Any, x: X, weight: X) -> None:
    out = rms_norm.rms_norm(kernels, cupy.asarray(x), cupy.asarray(weight), EPS, poisoned_activation(*x.shape))
    with np.errstate(all="ignore"):
        expected = numerics.quantize(numerics.rms_norm(x, weight, EPS, numerics.LANES_EMBD))
    assert_same_activation(out, expected)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 8, 16, 70])
@pytest.mark.parametrize("n_embd", N_EMBD)
def test_rms_norm(kernels: Any, n_embd: int, n_tokens: int) -> None:
    rng = np.random.default_rng(n_embd + n_tokens)
    check(kernels, random_f32(rng, n_tokens, n_embd, scale=3.0), random_f32(rng, n_embd))


def one_huge(x: X) -> X:
    """One value decides the scale; the others become small codes or zero."""
    return np.where(np.arange(x.shape[1]) == x.shape[1] // 2, np.float32(1e18), x)


def half_way(x: X) -> X:
    """Multiples of a half of amax / 127, so that rint meets ties."""
    codes = np.arange(x.size).reshape(x.shape) % 509 - 254
    return np.where(np.arange(x.shape[1]) % 32 == 0, 127, codes / 2).astype(np.float32)


AWKWARD = {
    "zeros": lambda x: x * np.float32(0.0),
    "negative zeros": lambda x: np.full_like(x, -0.0),
    "one zero token": lambda x: x * (np.arange(len(x)) != 1)[:, None].astype(np.float32),
    "one huge": one_huge,
    "squares overflow": lambda x: x * np.float32(1e20),
    "denormal": lambda x: x * np.float32(1e-41),
    "squares are denormal": lambda x: x * np.float32(1e-20),
    "equal": lambda x: np.full_like(x, -2.5),
    "ties": half_way,
}


@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("n_embd", N_EMBD)
def test_awkward_rows(kernels: Any, n_embd: int, kind: str) -> None:
    rng = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        x = AWKWARD[kind](random_f32(rng, 3, n_embd))
    check(kernels, x.astype(np.float32), random_f32(rng, n_embd))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-42, 1e30])
@pytest.mark.parametrize("n_embd", N_EMBD)
def test_awkward_weights(kernels: Any, n_embd: int, scale: float) -> None:
    rng = np.random.default_rng(8)
    check(kernels, random_f32(rng, 2, n_embd), random_f32(rng, n_embd, scale=scale))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize("n_embd", N_EMBD)
def test_what_is_not_finite_reaches_the_scales(kernels: Any, n_embd: int, where: str, value: float) -> None:
    rng = np.random.default_rng(9)
    x, weight = random_f32(rng, 3, n_embd), random_f32(rng, n_embd)
    (x[1] if where == "x" else weight)[n_embd // 3] = value
    check(kernels, x, weight)
