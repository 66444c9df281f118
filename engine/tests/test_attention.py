"""The ops of a full-attention layer against the scalar twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import numerics
from engine.ops import KVCache
from engine.reference import attention
from engine.reference.ops import NumpyOps
from engine.tests import scalar_twin as twin
from engine.tests.scalar_twin import assert_same_bits


@dataclass(frozen=True)
class Config:
    """The hyperparameters that attention reads."""

    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_rot: int = 16
    rope_freq_base: float = 1e7
    rope_sections: tuple[int, int, int, int] = (3, 3, 2, 0)
    rms_eps: float = 1e-6


CONFIG = Config()
WIDE = Config(n_head=3, n_head_kv=1, head_dim=256, n_rot=64, rope_sections=(11, 11, 10, 0))


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_cache(n_ctx: int, config: Config = CONFIG, seed: int = 5) -> KVCache:
    shape = (n_ctx, config.n_head_kv, config.head_dim)
    return KVCache(normal(*shape, seed=seed).astype(np.float16), normal(*shape, seed=seed + 1).astype(np.float16))


def twin_attention(q: NDArray[np.float32], cache: KVCache, n: int) -> list[twin.Vector]:
    """Attend with every head of one token to the first n positions."""
    group = q.shape[0] // cache.k.shape[1]
    k, v = cache.k.astype(np.float32), cache.v.astype(np.float32)
    return [
        twin.attend(list(q[h]), [list(x) for x in k[:n, h // group]], [list(x) for x in v[:n, h // group]])
        for h in range(q.shape[0])
    ]


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 64, 65, 70])
def test_attention_follows_the_contract(n: int) -> None:
    q, cache = normal(1, 4, 64, seed=n), random_cache(n)
    out = NumpyOps(CONFIG, 1).attention(q, cache, [n - 1])
    assert_same_bits(out[0], twin_attention(q[0], cache, n))


@pytest.mark.parametrize("n", [33, 70])
def test_attention_with_wide_heads_and_one_kv_head(n: int) -> None:
    q, cache = normal(1, 3, 256), random_cache(n, WIDE)
    out = NumpyOps(WIDE, 1).attention(q, cache, [n - 1])
    assert_same_bits(out[0], twin_attention(q[0], cache, n))


def test_attention_with_sharp_scores() -> None:
    q, cache = normal(1, 4, 64) * np.float32(40), random_cache(70)
    out = NumpyOps(CONFIG, 1).attention(q, cache, [69])
    assert_same_bits(out[0], twin_attention(q[0], cache, 70))


def test_query_heads_are_grouped_over_kv_heads() -> None:
    cache = random_cache(40)
    cache.v[:, 1] = 0  # the second KV head, read by query heads 2 and 3
    out = NumpyOps(CONFIG, 1).attention(normal(1, 4, 64), cache, [39])
    assert [bool(head.any()) for head in out[0]] == [True, True, False, False]


def test_each_token_sees_itself_and_what_came_before() -> None:
    q, cache = normal(3, 4, 64), random_cache(70)
    out = NumpyOps(CONFIG, 1).attention(q, cache, [31, 32, 33])
    for t in range(3):
        assert_same_bits(out[t], twin_attention(q[t], cache, 32 + t))


def test_attention_never_reads_behind_the_position() -> None:
    q, cache = normal(1, 4, 64), random_cache(128)
    poisoned = KVCache(cache.k.copy(), cache.v.copy())
    poisoned.k[40:] = np.nan
    poisoned.v[40:] = np.nan
    ops = NumpyOps(CONFIG, 1)
    assert_same_bits(ops.attention(q, poisoned, [39]), ops.attention(q, cache, [39]))


def test_attention_to_one_position_is_its_value() -> None:
    cache = random_cache(1)
    out = NumpyOps(CONFIG, 1).attention(normal(1, 4, 64), cache, [0])
    assert_same_bits(out[0, 0], cache.v[0, 0].astype(np.float32))
    assert_same_bits(out[0, 3], cache.v[0, 1].astype(np.float32))


@pytest.mark.parametrize("n", [70, 500])
def test_attention_error_against_float64(n: int) -> None:
    q, cache = normal(1, 4, 64), random_cache(n)
    out = NumpyOps(CONFIG, 1).attention(q, cache, [n - 1])[0]
    k, v = (np.repeat(x.astype(np.float64), 2, axis=1) for x in (cache.k, cache.v))
    scores = np.einsum("hd,nhd->hn", q[0].astype(np.float64), k) / 8
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    exact = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 5e-7


# RoPE, q and k norm, KV append


def test_rotation_by_hand() -> None:
    x = np.arange(1.0, 7.0, dtype=np.float32).reshape(1, 1, 6)
    cos, sin = np.array([[0.0, 1.0]], dtype=np.float32), np.array([[1.0, 0.0]], dtype=np.float32)
    assert attention.rotate(x, cos, sin).ravel().tolist() == [-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["head size 64", "head size 256"])
def test_qk_norm_rope_follows_the_contract(config: Config) -> None:
    positions = [68, 69]
    n_q, n_kv, d = config.n_head, config.n_head_kv, config.head_dim
    qg, k, v = normal(2, n_q * 2 * d), normal(2, n_kv * d, seed=1), normal(2, n_kv * d, seed=2)
    q_norm, k_norm = normal(d, seed=3), normal(d, seed=4)
    cache = KVCache(*(np.full((80, n_kv, d), 7, dtype=np.float16) for _ in range(2)))
    q, gate = NumpyOps(config, 1).qk_norm_rope(qg, k, v, q_norm, k_norm, positions, cache)
    frequencies = [
        twin.rope_frequency(i, config.n_rot, config.rope_freq_base, config.rope_sections)
        for i in range(config.n_rot // 2)
    ]

    def normed(x: NDArray[np.float32], weight: NDArray[np.float32], position: int) -> twin.Vector:
        return twin.rotate(twin.rms_norm(list(x), list(weight), config.rms_eps, 32), position, frequencies)

    for t, position in enumerate(positions):
        heads = qg[t].reshape(n_q, 2, d)
        assert_same_bits(gate[t], heads[:, 1])
        assert_same_bits(q[t], [normed(head, q_norm, position) for head in heads[:, 0]])
        keys = [normed(head, k_norm, position) for head in k[t].reshape(n_kv, d)]
        assert_same_bits(cache.k[position].astype(np.float32), [[twin.to_f16(x) for x in key] for key in keys])
        values = [[twin.to_f16(x) for x in head] for head in v[t].reshape(n_kv, d)]
        assert_same_bits(cache.v[position].astype(np.float32), values)
    untouched = np.delete(np.arange(80), positions)
    assert (cache.k[untouched] == 7).all()
    assert (cache.v[untouched] == 7).all()


def test_position_zero_is_not_rotated() -> None:
    ops, ones = NumpyOps(CONFIG, 1), np.ones(64, dtype=np.float32)
    qg = normal(1, 4 * 2 * 64)
    q, _ = ops.qk_norm_rope(qg, normal(1, 128), normal(1, 128), ones, ones, [0], random_cache(4))
    assert_same_bits(q, numerics.rms_norm(qg.reshape(1, 4, 2, 64)[:, :, 0], ones, 1e-6, 32))


def test_rotation_keeps_scores_between_equal_distances() -> None:
    frequencies = numerics.rope_frequencies(16, 1e7, (3, 3, 2, 0))
    a, b = normal(1, 1, 64), normal(1, 1, 64, seed=1)

    def score(p: int, q: int) -> float:
        cos, sin = numerics.rope_table(np.array([p, q]), frequencies)
        rotated = [attention.rotate(x, cos[i : i + 1], sin[i : i + 1]) for i, x in enumerate((a, b))]
        return float((rotated[0].astype(np.float64) * rotated[1]).sum())

    assert score(5, 3) == pytest.approx(score(1005, 1003), abs=1e-5)
    assert abs(score(5, 3) - score(5, 2)) > 1e-3


def test_sigmoid_gate_follows_the_contract() -> None:
    o, gate = normal(2, 4, 64), normal(2, 4, 64, seed=1) * np.float32(10)
    h = NumpyOps(CONFIG, 1).sigmoid_gate(o, gate)
    expected = [
        [value * twin.sigmoid(g) for value, g in zip(o[t].ravel(), gate[t].ravel(), strict=True)] for t in range(2)
    ]
    assert_same_bits(h.x, expected)
    assert h.q8 is not None
    assert h.q8.q[0].tolist() == [group.q for group in twin.quantize(expected[0])]
