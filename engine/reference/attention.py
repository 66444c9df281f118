"""Full attention over the f16 KV cache: rotation and append, then softmax in fixed splits of 32 positions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine import numerics
from engine.numerics import F32, KV_SPLIT


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Turn pairs (i, i + n_rot / 2) of x (n_tokens, n_heads, head_dim) by cos, sin (n_tokens, n_rot / 2)."""
    n_pairs = cos.shape[1]
    first, second = x[..., :n_pairs], x[..., n_pairs : 2 * n_pairs]
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate([first * c - second * s, first * s + second * c, x[..., 2 * n_pairs :]], axis=-1)


def attend(q: F32, k: NDArray[np.float16], v: NDArray[np.float16]) -> F32:
    """Return softmax(q k^T / sqrt(head_dim)) v for one token, (n_head, head_dim) f32.

    q: (n_head, head_dim) f32; k, v: (n, n_head_kv, head_dim) f16.
    """
    return mix(scores(q, k), v)


def scores(q: F32, k: NDArray[np.float16]) -> F32:
    """Return q k^T / sqrt(head_dim), (n_head, n) f32; arguments as for `attend`."""
    n_head, head_dim = q.shape
    n, n_head_kv, _ = k.shape
    queries = q.reshape(n_head_kv, n_head // n_head_kv, 1, head_dim)
    keys = k.astype(np.float32).transpose(1, 0, 2)[:, None]
    dots = numerics.row_sum(queries * keys) * np.float32(1.0 / math.sqrt(head_dim))
    return dots.reshape(n_head, n)


def mix(scores: F32, v: NDArray[np.float16]) -> F32:
    """Return the values weighted by softmax(scores), (n_head, head_dim) f32; scores (n_head, n), v as for `attend`.

    Each split of 32 positions has its own maximum, its weights summed by `tree` and its values in order of
    position; splits are then combined in order.
    """
    n_head, n_head_kv, head_dim = scores.shape[0], *v.shape[1:]
    weights, maxima = _split_softmax(scores)
    sums = numerics.tree(weights)
    values = _weighted_values(weights.reshape(n_head_kv, -1, *weights.shape[1:]), v)
    return _combine(maxima, sums, values.reshape(n_head, -1, head_dim))


def _split_softmax(scores: F32) -> tuple[F32, F32]:
    """Return exp(score - split maximum), (n_head, n_split, 32) with +0 past the end, and maxima (n_head, n_split)."""
    n_head, n = scores.shape
    padded = np.pad(scores, [(0, 0), (0, -n % KV_SPLIT)], constant_values=-np.inf)
    splits = padded.reshape(n_head, -1, KV_SPLIT)
    maxima = splits.max(axis=-1)
    return numerics.exp(splits - maxima[..., None]), maxima


def _weighted_values(weights: F32, v: NDArray[np.float16]) -> F32:
    """Return the sum of weight * value per split, (n_head_kv, n_group, n_split, head_dim), in order of position."""
    n, n_head_kv, head_dim = v.shape
    padded = np.pad(v.astype(np.float32), [(0, -n % KV_SPLIT), (0, 0), (0, 0)])
    splits = padded.reshape(-1, KV_SPLIT, n_head_kv, head_dim).transpose(1, 2, 0, 3)[:, :, None]
    total = np.zeros((*weights.shape[:3], head_dim), dtype=np.float32)
    for j in range(KV_SPLIT):
        total += weights[..., j, None] * splits[j]
    return total


def _combine(maxima: F32, sums: F32, values: F32) -> F32:
    """Return the attention output (n_head, head_dim) from maxima, sums (n_head, n_split) and values (.., head_dim)."""
    factors = numerics.exp(maxima - maxima.max(axis=-1, keepdims=True))
    total = np.zeros_like(sums[:, 0])
    out = np.zeros_like(values[:, 0])
    for s in range(factors.shape[1]):
        total += factors[:, s] * sums[:, s]
        out += factors[:, s, None] * values[:, s]
    return out / total[:, None]
