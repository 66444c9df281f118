"""Gated DeltaNet: causal convolution with SiLU, and the delta rule, one token after the other.

Prefill runs the same recurrence as decode, never a chunked form, so both give the same bits.
"""

from __future__ import annotations

import math

import numpy as np

from engine import numerics
from engine.numerics import F32


def conv_silu(qkv: F32, weight: F32, conv_state: F32) -> F32:
    """Return silu(sum over taps of weight * input), (n_tokens, conv_channels); shift `conv_state` in place.

    The oldest input comes first. weight: (conv_channels, d_conv); conv_state: (d_conv - 1, conv_channels).
    """
    n_tokens, d_conv = qkv.shape[0], weight.shape[1]
    inputs = np.concatenate([conv_state, qkv])
    total = np.zeros_like(qkv)
    for tap in range(d_conv):
        total += weight[:, tap] * inputs[tap : tap + n_tokens]
    conv_state[...] = inputs[n_tokens:]
    return numerics.silu(total)


def split_heads(qkv: F32, n_v_heads: int, d: int, eps: float) -> tuple[F32, F32, F32]:
    """Cut qkv (n_tokens, channels) into L2-normalised q, k (n_tokens, n_k_heads, d) and v (n_tokens, n_v_heads, d)."""
    n_tokens = qkv.shape[0]
    value_dim = n_v_heads * d
    key_dim = (qkv.shape[1] - value_dim) // 2
    q = qkv[:, :key_dim].reshape(n_tokens, -1, d)
    k = qkv[:, key_dim : 2 * key_dim].reshape(n_tokens, -1, d)
    v = qkv[:, 2 * key_dim :].reshape(n_tokens, n_v_heads, d)
    return numerics.l2_norm(q, eps), numerics.l2_norm(k, eps), v


def key_head_of_value_head(n_k_heads: int, n_v_heads: int) -> list[int]:
    """Return the key head that each value head reads: tiled, v % n_k_heads (as in llama.cpp's ggml_gated_delta_net)."""
    return [v % n_k_heads for v in range(n_v_heads)]


def delta_rule(q: F32, k: F32, v: F32, decay: F32, beta: F32, ssm_state: F32) -> F32:
    """Advance `ssm_state` (n_v_heads, d rows, d columns) in place; return the outputs (n_tokens, n_v_heads, d).

    q, k, v: (n_tokens, n_v_heads, d), q and k already repeated per value head; decay, beta: (n_tokens, n_v_heads).
    Per token: S = S decay; delta = (v - S k) beta; S = S + delta k^T; o = (S q) / sqrt(d).
    """
    scale = np.float32(1.0 / math.sqrt(q.shape[-1]))
    out = np.empty_like(v)
    for t in range(q.shape[0]):
        key, query = k[t, :, None, :], q[t, :, None, :]
        ssm_state *= decay[t, :, None, None]
        delta = (v[t] - numerics.row_sum(ssm_state * key)) * beta[t, :, None]
        ssm_state += key * delta[:, :, None]
        out[t] = numerics.row_sum(ssm_state * query) * scale
    return out
