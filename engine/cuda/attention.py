"""Launchers of attention.cu: norm, rotation and append to the KV cache; attention in splits; combination and gate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.cuda.buffers import DeviceActivation
from engine.errors import RequestError
from engine.numerics import KV_SPLIT
from engine.ops import Hyperparameters, KVCache

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels

ROPE_WARPS = 4
SPLIT_THREADS = 256
HEAD_SIZES = (64, 128, 256)
"""Sizes of a head that the kernels are written for."""


@dataclass(frozen=True)
class RopeTables:
    """cos and sin per position, each (n_ctx, n_rot / 2) f32, from numerics.rope_table on the host."""

    cos: cupy.ndarray
    sin: cupy.ndarray


@dataclass(frozen=True)
class AttentionScratch:
    """Results of the splits of some tokens on their way to the combination, all f32.

    maxima, sums: (n_tokens, n_head, n_splits); values: (n_tokens, n_head, n_splits, head_dim). Where a pack has more
    tokens, they take turns.
    """

    maxima: cupy.ndarray
    sums: cupy.ndarray
    values: cupy.ndarray


def n_splits(n_ctx: int) -> int:
    """Return the splits of a cache of n_ctx positions."""
    return -(-n_ctx // KV_SPLIT)


def scratch_n_words(config: Hyperparameters, n_ctx: int) -> int:
    """Return the f32 words of scratch that one token needs: 99,072 for 24 heads of 256 at n_ctx = 512."""
    return config.n_head * n_splits(n_ctx) * (config.head_dim + 2)


def scratch(config: Hyperparameters, n_ctx: int, words: cupy.ndarray) -> AttentionScratch:
    """Return `words`, flat f32, as scratch for as many tokens as there is room for."""
    n_tokens, per_token = words.size // scratch_n_words(config, n_ctx), config.n_head * n_splits(n_ctx)
    shape, n = (n_tokens, config.n_head, n_splits(n_ctx)), n_tokens * per_token
    values = words[2 * n : (2 + config.head_dim) * n].reshape(*shape, config.head_dim)
    return AttentionScratch(words[:n].reshape(shape), words[n : 2 * n].reshape(shape), values)


def expressions(config: Hyperparameters, pack: int) -> list[str]:
    """Return the kernels needed; the same for every pack width."""
    return [_append_expression(config), _split_expression(config), _combine_expression(config)]


def qk_norm_rope_append(
    kernels: Kernels,
    config: Hyperparameters,
    qg: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    q_norm: cupy.ndarray,
    k_norm: cupy.ndarray,
    tables: RopeTables,
    control: cupy.ndarray,
    cache: KVCache,
    q: cupy.ndarray,
) -> cupy.ndarray:
    """Normalise and rotate q and k, write k and v to `cache` at control[1] and after it, and return q.

    qg: (n_tokens, n_head, 2, head_dim) f32, q and gate of each head; k, v: (n_tokens, n_head_kv, head_dim) f32;
    q_norm, k_norm: (head_dim,) f32; control: i32, [1] the position of the first token; q: (n_tokens, n_head,
    head_dim) f32, written.
    """
    n_warps = config.n_head + 2 * config.n_head_kv
    kernels[_append_expression(config)](
        (-(-n_warps // ROPE_WARPS), q.shape[0]),
        (32 * ROPE_WARPS,),
        (
            qg,
            k,
            v,
            q_norm,
            k_norm,
            tables.cos,
            tables.sin,
            control,
            np.float32(config.rms_eps),
            q,
            cache.k,
            cache.v,
        ),
    )
    return q


def attention(
    kernels: Kernels,
    config: Hyperparameters,
    q: cupy.ndarray,
    qg: cupy.ndarray,
    cache: KVCache,
    control: cupy.ndarray,
    scratch: AttentionScratch,
    out: DeviceActivation,
    *,
    fault: cupy.ndarray,
    op: np.uint32,
) -> DeviceActivation:
    """Attend from each token to the positions up to its own, gate, and write `out`, (n_tokens, n_head * head_dim).

    q: (n_tokens, n_head, head_dim) f32, rotated; qg as in qk_norm_rope_append, for the gates; cache: (n_ctx,
    n_head_kv, head_dim) f16, with the pack's own keys and values in it; fault: (1,) u32, set if a score or an
    output is not finite; op: its faults.kernel_argument.
    """
    n_tokens, room = q.shape[0], scratch.maxima.shape[0]
    for first in range(0, n_tokens, room):
        n = min(room, n_tokens - first)
        _split(kernels, config, q, cache, control, scratch, first, n, fault, op)
        _combine(kernels, config, qg, cache, control, scratch, first, n, out, fault, op)
    return out


def _split(
    kernels: Kernels,
    config: Hyperparameters,
    q: cupy.ndarray,
    cache: KVCache,
    control: cupy.ndarray,
    scratch: AttentionScratch,
    first: int,
    n: int,
    fault: cupy.ndarray,
    op: np.uint32,
) -> None:
    scale = np.float32(1.0 / math.sqrt(config.head_dim))
    results = (scratch.maxima, scratch.sums, scratch.values)
    kernels[_split_expression(config)](
        (config.n_head_kv, n_splits(cache.k.shape[0]), n),
        (SPLIT_THREADS,),
        (q, cache.k, cache.v, control, np.int32(first), scale, *results, op, fault),
    )


def _combine(
    kernels: Kernels,
    config: Hyperparameters,
    qg: cupy.ndarray,
    cache: KVCache,
    control: cupy.ndarray,
    scratch: AttentionScratch,
    first: int,
    n: int,
    out: DeviceActivation,
    fault: cupy.ndarray,
    op: np.uint32,
) -> None:
    results = (scratch.maxima, scratch.sums, scratch.values)
    n_split = np.int32(n_splits(cache.k.shape[0]))
    kernels[_combine_expression(config)](
        (config.n_head, n),
        (config.head_dim,),
        (qg, *results, control, np.int32(first), n_split, out.x, out.q, out.scales, op, fault),
    )


def _append_expression(config: Hyperparameters) -> str:
    return f"qk_norm_rope_append<{_head_dim(config)}, {config.n_head}, {config.n_head_kv}, {config.n_rot}>"


def _split_expression(config: Hyperparameters) -> str:
    return f"attention_split<{_head_dim(config)}, {config.n_head}, {config.n_head_kv}>"


def _combine_expression(config: Hyperparameters) -> str:
    return f"attention_combine<{_head_dim(config)}, {config.n_head}>"


def _head_dim(config: Hyperparameters) -> int:
    if config.head_dim not in HEAD_SIZES:
        raise RequestError(f"attention is written for attention.key_length {HEAD_SIZES}, not {config.head_dim}")
    return config.head_dim
