"""A Gated DeltaNet layer between its matrices, outputs and both states, against the NumPy backend bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import numerics
from engine.cuda import faults, gated_delta
from engine.cuda.buffers import DeviceActivation
from engine.model.config import ModelConfig
from engine.reference.ops import NumpyOps
from engine.tests.gpu.arrays import (
    assert_same_activation,
    assert_same_bits,
    cupy,
    no_fault,
    poisoned_activation,
    random_f32,
)
from engine.tests.gpu.conftest import Compile
from engine.tests.models import CONFIG_27B

pytestmark = pytest.mark.gpu

X = NDArray[np.float32]


def config(n_k_heads: int, n_v_heads: int, d: int, d_conv: int = 4) -> ModelConfig:
    heads = replace(CONFIG_27B, n_k_heads=n_k_heads, n_v_heads=n_v_heads)
    return replace(heads, ssm_d_state=d, ssm_d_inner=n_v_heads * d, ssm_d_conv=d_conv)


CONFIGS = {
    "16-48x128": config(16, 48, 128),
    "2-6x128": config(2, 6, 128),
    "16-16x64": config(16, 16, 64),
    "2-2x64": config(2, 2, 64),
    "1-2x32": config(1, 2, 32),
    "2-4x64, 3 taps": config(2, 4, 64, d_conv=3),
}
PACKS = (1, 2, 3, 4, 5, 8, 16, 40, 70)
SPLITS = (
    [1] * 40,
    [2] * 20,
    [4] * 10,
    [5] * 8,
    [16, 16, 8],
    [3, 8, 2, 16, 1, 10],
    [17, 23],
    [40],
)
OP = faults.kernel_argument(faults.Op.GATED_DELTA, 5)


@pytest.fixture(scope="module")
def kernels(compile_all: Compile) -> Any:
    return compile_all(e for c in CONFIGS.values() for e in gated_delta.expressions(c, 1))


@dataclass
class Layer:
    """One layer's weights, inputs of some tokens, and the states before them, all on the host."""

    config: ModelConfig
    arrays: dict[str, X]

    @classmethod
    def random(cls, c: ModelConfig, n_tokens: int, seed: int = 0) -> Layer:
        rng = np.random.default_rng(seed)
        d, channels = c.ssm_d_state, c.conv_channels
        return cls(
            c,
            {
                "conv": random_f32(rng, channels, c.ssm_d_conv, scale=0.5),
                "dt": random_f32(rng, c.n_v_heads),
                "a": -np.exp(random_f32(rng, c.n_v_heads)),
                "norm": random_f32(rng, d) + np.float32(1.0),
                "qkv": random_f32(rng, n_tokens, channels),
                "z": random_f32(rng, n_tokens, c.value_dim, scale=3.0),
                "alpha": random_f32(rng, n_tokens, c.n_v_heads, scale=6.0),
                "beta": random_f32(rng, n_tokens, c.n_v_heads, scale=4.0),
                "conv_state": random_f32(rng, c.ssm_d_conv - 1, channels),
                "ssm_state": random_f32(rng, c.n_v_heads, d, d, scale=0.3),
            },
        )

    def with_inputs(self, **arrays: X) -> Layer:
        return Layer(self.config, self.arrays | arrays)


@dataclass(frozen=True)
class Result:
    """What a backend made of a layer: the input of ssm_out, and the states after the last token."""

    out: numerics.Activation
    conv_state: X
    ssm_state: X


def reference(layer: Layer) -> Result:
    """Run the NumPy backend's three ops over all tokens."""
    a, ops = {name: array.copy() for name, array in layer.arrays.items()}, NumpyOps(layer.config, 1)
    with np.errstate(all="ignore"):
        qkv = ops.conv_silu(a["qkv"], a["conv"], a["conv_state"])
        o = ops.gated_delta(qkv, a["alpha"], a["beta"], a["dt"], a["a"], a["ssm_state"])
        return Result(ops.gated_norm(o, a["z"], a["norm"]), a["conv_state"], a["ssm_state"])


class OnDevice:
    """A layer on the device, which takes its tokens in packs."""

    def __init__(self, kernels: Any, layer: Layer) -> None:
        self._kernels, self._layer = kernels, layer
        a = {name: cupy.asarray(array) for name, array in layer.arrays.items()}
        self._weights = gated_delta.GatedDeltaWeights(a["conv"], a["dt"], a["a"], a["norm"])
        tickets = cupy.zeros(gated_delta.tickets_shape(layer.config), np.uint32)
        self.state = gated_delta.GatedDeltaState(a["conv_state"], a["ssm_state"], tickets)
        self._inputs = [a[name] for name in ("qkv", "z", "alpha", "beta")]
        self.fault = no_fault()

    def run(self, packs: Sequence[int]) -> DeviceActivation:
        """Advance by packs of tokens; return the outputs of all of them."""
        c, out = self._layer.config, poisoned_activation(sum(packs), self._layer.config.value_dim)
        first = 0
        for n in packs:
            p = slice(first, first + n)
            inputs = [array[p] for array in self._inputs]
            part = DeviceActivation(out.x[p], out.q[p], out.scales[p])
            args = (self._kernels, c, self._weights, self.state, *inputs, part)
            gated_delta.gated_delta(*args, fault=self.fault, op=OP)
            first += n
        return out


def check(kernels: Any, layer: Layer, packs: Sequence[int], expected: Result | None = None) -> None:
    expected = expected or reference(layer)
    ours = OnDevice(kernels, layer)
    assert_same_activation(ours.run(packs), expected.out)
    assert_same_bits(ours.state.ssm, expected.ssm_state)
    assert_same_bits(ours.state.conv, expected.conv_state)
    assert not cupy.asnumpy(ours.state.tickets).any()
    assert int(cupy.asnumpy(ours.fault)[0]) == 0


@pytest.mark.parametrize("n_tokens", PACKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_pack(kernels: Any, name: str, n_tokens: int) -> None:
    check(kernels, Layer.random(CONFIGS[name], n_tokens, seed=n_tokens), [n_tokens])


@pytest.fixture(scope="module", params=CONFIGS)
def forty_tokens(request: pytest.FixtureRequest) -> tuple[Layer, Result]:
    layer = Layer.random(CONFIGS[request.param], 40, seed=40)
    return layer, reference(layer)


@pytest.mark.parametrize("packs", SPLITS, ids=lambda packs: "+".join(map(str, packs[:6])))
def test_packs_of_any_width_leave_the_same_state(
    kernels: Any, forty_tokens: tuple[Layer, Result], packs: list[int]
) -> None:
    layer, expected = forty_tokens
    check(kernels, layer, packs, expected)


AWKWARD: dict[str, Callable[[dict[str, X]], dict[str, Any]]] = {
    "no state yet": lambda a: {"conv_state": a["conv_state"] * 0, "ssm_state": a["ssm_state"] * 0},
    "zeros": lambda a: {name: a[name] * 0 for name in ("qkv", "z", "conv_state", "ssm_state")},
    "negative zeros": lambda a: {"qkv": np.full_like(a["qkv"], -0.0), "conv_state": a["conv_state"] * -0.0},
    "norms below eps": lambda a: {name: a[name] * np.float32(1e-12) for name in ("qkv", "conv_state")},
    "denormal": lambda a: {name: a[name] * np.float32(1e-40) for name in ("qkv", "conv_state", "ssm_state")},
    "state decays to denormals": lambda a: {"alpha": np.full_like(a["alpha"], 90.0), "a": np.full_like(a["a"], -1.0)},
    "state decays to zero": lambda a: {"alpha": np.full_like(a["alpha"], 500.0)},
    "no decay": lambda a: {"alpha": np.full_like(a["alpha"], -200.0)},
    "beta shut and open": lambda a: {"beta": np.where(a["beta"] > 0, np.float32(100.0), np.float32(-100.0))},
    "large": lambda a: {"qkv": a["qkv"] * np.float32(1e15), "ssm_state": a["ssm_state"] * np.float32(1e10)},
    "gate shut": lambda a: {"z": np.full_like(a["z"], -200.0)},
}


@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("name", ["2-6x128", "2-2x64", "1-2x32"])
def test_awkward_values(kernels: Any, name: str, kind: str) -> None:
    layer = Layer.random(CONFIGS[name], 5, seed=11)
    check(kernels, layer.with_inputs(**AWKWARD[kind](layer.arrays)), [1, 4])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("array", "at"),
    [
        *((array, (2, at)) for array in ("qkv", "conv_state") for at in (0, 2 * 128 + 5, 4 * 128 + 9)),  # q, k, v
        ("conv", (3, 0)),
        ("conv", (4 * 128, 3)),
        *((array, (2, 4)) for array in ("alpha", "beta")),
        *((array, (5,)) for array in ("dt", "a")),
        ("ssm_state", (5, 127, 0)),
        ("ssm_state", (0, 0, 127)),
    ],
)
def test_what_is_not_finite_sets_the_fault_word(kernels: Any, array: str, at: tuple[int, ...], value: float) -> None:
    layer = Layer.random(CONFIGS["2-6x128"], 3, seed=12)
    layer.arrays[array][at] = value
    ours = OnDevice(kernels, layer)
    ours.run([3])
    word = int(cupy.asnumpy(ours.fault)[0])
    assert word >> 8 == int(OP) >> 8
    assert str(faults.describe(word)).startswith("layer 5: op gated_delta produced ")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("array", "at"), [("z", (1, 70)), ("norm", (70,))])
def test_a_gate_that_is_not_finite_reaches_the_scale_of_its_group(
    kernels: Any, array: str, at: tuple[int, ...], value: float
) -> None:
    """No check of this kernel: the next op that checks finds it, through the scale."""
    layer = Layer.random(CONFIGS["2-6x128"], 3, seed=13)
    layer.arrays[array][at] = value
    expected = reference(layer)
    assert expected.out.q8 is not None
    assert not np.isfinite(expected.out.q8.d[1, 2])
    check(kernels, layer, [3], expected)
