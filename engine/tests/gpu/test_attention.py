"""Norm, rotation, append and attention of a pack, cache included, against the NumPy backend bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import numerics
from engine.cuda import attention, faults
from engine.cuda.buffers import MAX_PACK
from engine.model.config import ModelConfig
from engine.ops import KVCache
from engine.reference.ops import NumpyOps
from engine.tests.gpu.arrays import (
    assert_same_activation,
    assert_same_bits,
    control_words,
    cupy,
    no_fault,
    poison,
    poisoned,
    poisoned_activation,
    random_f32,
)
from engine.tests.gpu.conftest import Compile
from engine.tests.models import CONFIG_27B

pytestmark = pytest.mark.gpu

X = NDArray[np.float32]


def config(n_head: int, n_head_kv: int, head_dim: int, n_rot: int | None = None) -> ModelConfig:
    n_rot = n_rot or head_dim // 4
    third = n_rot // 6
    sections = (third, third, n_rot // 2 - 2 * third, 0)
    return replace(
        CONFIG_27B, n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim, n_rot=n_rot, rope_sections=sections
    )


CONFIGS = {f"{q}-{kv}x{d}": config(q, kv, d) for d in (64, 128, 256) for q, kv in ((24, 4), (4, 2), (4, 1))}
CONFIGS["3-3x64, all turn"] = config(3, 3, 64, n_rot=64)
POSITIONS = (0, 1, 30, 31, 32, 33, 63, 64, 200, 511)
PACKS = (1, 2, 3, 4, 5, 8, 16, 70)
SCRATCH_N_TOKENS = 12  # so a pack of 70 takes six turns
OP = faults.kernel_argument(faults.Op.ATTENTION, 3)


@pytest.fixture(scope="module")
def kernels(compile_all: Compile) -> Any:
    return compile_all(e for c in CONFIGS.values() for e in attention.expressions(c, MAX_PACK))


@dataclass
class Layer:
    """A pack's projections, the norms, and a cache filled up to the pack, all on the host."""

    config: ModelConfig
    position: int
    qg: X  # (n_tokens, n_head, 2, head_dim)
    k: X  # (n_tokens, n_head_kv, head_dim)
    v: X
    q_norm: X
    k_norm: X
    cache: KVCache

    @classmethod
    def random(cls, c: ModelConfig, position: int, n_tokens: int, n_ctx: int, scale: float = 1.0) -> Layer:
        """What lies behind the pack in the cache, and what the pack writes there, is poison before."""
        rng = np.random.default_rng(position * 100 + n_tokens)
        kv = (n_tokens, c.n_head_kv, c.head_dim)
        return cls(
            c,
            position,
            random_f32(rng, n_tokens, c.n_head, 2, c.head_dim, scale=2.0 * scale),
            random_f32(rng, *kv, scale=scale),
            random_f32(rng, *kv, scale=scale),
            random_f32(rng, c.head_dim) + np.float32(1.0),
            random_f32(rng, c.head_dim) + np.float32(1.0),
            KVCache(*(cls._filled(rng, c, position, n_ctx, scale) for _ in range(2))),
        )

    @staticmethod
    def _filled(
        rng: np.random.Generator, c: ModelConfig, position: int, n_ctx: int, scale: float
    ) -> NDArray[np.float16]:
        rows: NDArray[np.float16] = poison((n_ctx, c.n_head_kv, c.head_dim), np.float16)
        rows[:position] = random_f32(rng, position, c.n_head_kv, c.head_dim, scale=scale)
        return rows

    @property
    def n_tokens(self) -> int:
        return self.qg.shape[0]


@dataclass(frozen=True)
class Result:
    """What a backend made of a pack: rotated queries, the cache after it, the input of attn_output."""

    q: X
    cache: KVCache
    out: numerics.Activation


def reference(layer: Layer) -> Result:
    ops, cache = NumpyOps(layer.config, 1), KVCache(layer.cache.k.copy(), layer.cache.v.copy())
    positions = range(layer.position, layer.position + layer.n_tokens)
    n = layer.n_tokens
    with np.errstate(all="ignore"):
        rows = (layer.qg.reshape(n, -1), layer.k.reshape(n, -1), layer.v.reshape(n, -1))
        q, gate = ops.qk_norm_rope(*rows, layer.q_norm, layer.k_norm, positions, cache)
        return Result(q, cache, ops.sigmoid_gate(ops.attention(q, cache, positions), gate))


class OnDevice:
    """A pack on the device; the results are poison until `run`."""

    def __init__(self, kernels: Any, layer: Layer) -> None:
        c, n_ctx = layer.config, layer.cache.k.shape[0]
        self._kernels, self._config = kernels, c
        self._inputs = [cupy.asarray(a) for a in (layer.qg, layer.k, layer.v, layer.q_norm, layer.k_norm)]
        frequencies = numerics.rope_frequencies(c.n_rot, c.rope_freq_base, c.rope_sections)
        tables = numerics.rope_table(np.arange(n_ctx), frequencies)
        self._tables = attention.RopeTables(*(cupy.asarray(table) for table in tables))
        words = poisoned((SCRATCH_N_TOKENS * attention.scratch_n_words(c, n_ctx),), np.float32)
        self._scratch = attention.scratch(c, n_ctx, words)
        self._control = control_words(layer.position)
        self.cache = KVCache(cupy.asarray(layer.cache.k), cupy.asarray(layer.cache.v))
        self.q = poisoned((layer.n_tokens, c.n_head, c.head_dim), np.float32)
        self.out = poisoned_activation(layer.n_tokens, c.n_embd_q)
        self.fault = no_fault()

    def append(self) -> None:
        tables, control = self._tables, self._control
        args = (self._kernels, self._config, *self._inputs, tables, control, self.cache, self.q)
        attention.qk_norm_rope_append(*args)

    def attend(self) -> None:
        qg, control, scratch = self._inputs[0], self._control, self._scratch
        args = (self._kernels, self._config, self.q, qg, self.cache, control, scratch, self.out)
        attention.attention(*args, fault=self.fault, op=OP)

    @property
    def fault_word(self) -> int:
        return int(cupy.asnumpy(self.fault)[0])


def check(kernels: Any, layer: Layer, expected: Result | None = None) -> None:
    expected = expected or reference(layer)
    ours = OnDevice(kernels, layer)
    ours.append()
    assert_same_bits(ours.q, expected.q)
    assert_same_bits(ours.cache.k, expected.cache.k)
    assert_same_bits(ours.cache.v, expected.cache.v)
    ours.attend()
    assert_same_activation(ours.out, expected.out)
    assert_same_bits(ours.cache.k, expected.cache.k)
    assert ours.fault_word == 0


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_token_at_every_kind_of_position(kernels: Any, name: str, position: int) -> None:
    check(kernels, Layer.random(CONFIGS[name], position, 1, n_ctx=512))


@pytest.mark.parametrize("n_tokens", PACKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_packs_across_the_border_of_a_split(kernels: Any, name: str, n_tokens: int) -> None:
    check(kernels, Layer.random(CONFIGS[name], 29, n_tokens, n_ctx=512))


@pytest.mark.parametrize("position", [0, 1, 15, 17, 31, 60, 96, 496])
@pytest.mark.parametrize("n_tokens", [4, 16])
def test_packs_at_other_positions(kernels: Any, n_tokens: int, position: int) -> None:
    check(kernels, Layer.random(CONFIGS["24-4x256"], position, n_tokens, n_ctx=512))


@pytest.mark.parametrize("n_ctx", [64, 70, 512, 2048])
@pytest.mark.parametrize("name", ["24-4x256", "4-1x64"])
def test_the_capacity_of_the_cache_changes_no_bit(kernels: Any, name: str, n_ctx: int) -> None:
    expected = reference(Layer.random(CONFIGS[name], 40, 5, n_ctx=64))
    layer = Layer.random(CONFIGS[name], 40, 5, n_ctx)
    ours = OnDevice(kernels, layer)
    ours.append()
    ours.attend()
    assert_same_activation(ours.out, expected.out)
    assert_same_bits(cupy.asnumpy(ours.cache.k)[:64], expected.cache.k)


def test_the_last_position_of_a_long_context(kernels: Any) -> None:
    """More splits than the combination takes at a time."""
    check(kernels, Layer.random(CONFIGS["4-1x64"], 4095, 1, n_ctx=4096))


AWKWARD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "zeros": lambda a: {name: a[name] * 0 for name in ("qg", "k", "v")},
    "negative zeros": lambda a: {name: np.full_like(a[name], -0.0) for name in ("qg", "k", "v")},
    "norms below eps": lambda a: {name: a[name] * np.float32(1e-20) for name in ("qg", "k")},
    "denormal": lambda a: {name: a[name] * np.float32(1e-40) for name in ("qg", "k", "v")},
    "f16 denormals": lambda a: {"v": a["v"] * np.float32(1e-6), "k_norm": a["k_norm"] * np.float32(1e-6)},
    "f16 ties": lambda a: {"v": np.float32(1.0) + np.round(a["v"] * 8) * np.float32(2.0**-11)},
    "largest f16": lambda a: {"v": np.copysign(np.float32(65519.0), a["v"])},
    "sharp": lambda a: {"q_norm": a["q_norm"] * np.float32(100.0)},  # weights down to denormals and zero
    "gate shut": lambda a: {"qg": a["qg"] * np.float32(1.0) - np.float32(200.0)},
    "gate open": lambda a: {"qg": a["qg"] * np.float32(1.0) + np.float32(200.0)},
}


@pytest.mark.parametrize("kind", AWKWARD)
@pytest.mark.parametrize("name", ["4-2x64", "4-1x128", "24-4x256"])
def test_awkward_values(kernels: Any, name: str, kind: str) -> None:
    layer = Layer.random(CONFIGS[name], 62, 5, n_ctx=128)
    check(kernels, replace(layer, **AWKWARD[kind](vars(layer))))


NOT_FINITE = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])


@NOT_FINITE
@pytest.mark.parametrize("position", [0, 31, 32, 69])
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_damaged_entry_of_the_cache_sets_the_fault_word(kernels: Any, part: str, position: int, value: float) -> None:
    layer = Layer.random(CONFIGS["4-2x64"], 70, 1, n_ctx=128)
    getattr(layer.cache, part)[position, 1, 13] = value
    assert_found(kernels, layer)


@NOT_FINITE
@pytest.mark.parametrize(
    ("part", "at"),
    [
        ("qg", (1, 2, 0, 60)),  # a query
        ("qg", (1, 2, 1, 60)),  # its gate
        ("k", (1, 0, 0)),
        ("v", (1, 1, 63)),
        ("q_norm", (5,)),
        ("k_norm", (40,)),
    ],
)
def test_an_input_that_is_not_finite_sets_the_fault_word(
    kernels: Any, part: str, at: tuple[int, ...], value: float
) -> None:
    layer = Layer.random(CONFIGS["4-2x64"], 33, 2, n_ctx=64)
    getattr(layer, part)[at] = value
    assert_found(kernels, layer)


@pytest.mark.parametrize("value", [65520.0, -1e30])
def test_a_value_beyond_f16_sets_the_fault_word(kernels: Any, value: float) -> None:
    layer = Layer.random(CONFIGS["4-2x64"], 33, 2, n_ctx=64)
    layer.v[1, 0, 0] = value
    assert_found(kernels, layer)


def assert_found(kernels: Any, layer: Layer) -> None:
    ours = OnDevice(kernels, layer)
    ours.append()
    ours.attend()
    assert ours.fault_word >> 8 == int(OP) >> 8
    assert str(faults.describe(ours.fault_word)).startswith("layer 3: op attention produced ")
