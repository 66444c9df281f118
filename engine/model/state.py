"""What a sequence leaves behind: recurrent state, convolution inputs and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.model.config import ModelConfig
from engine.ops import Array, KVCache, Ops


@dataclass(frozen=True)
class RecurrentState:
    """State of one Gated DeltaNet layer."""

    conv: Array  # (ssm_d_conv - 1, conv_channels) f32, oldest input first
    ssm: Array  # (n_v_heads, value rows, key columns) f32


@dataclass
class DecodeState:
    """The only thing the forward pass writes: one entry per layer, and the number of tokens seen."""

    layers: tuple[RecurrentState | KVCache, ...]
    n_ctx: int
    n_past: int = 0


def new_state(config: ModelConfig, ops: Ops, n_ctx: int) -> DecodeState:
    """Return the state before the first token, with room for `n_ctx` positions in the KV caches."""
    return DecodeState(
        tuple(
            _recurrent(il, config, ops) if config.is_recurrent(il) else _kv_cache(il, config, ops, n_ctx)
            for il in range(config.n_layer)
        ),
        n_ctx,
    )


def _recurrent(il: int, config: ModelConfig, ops: Ops) -> RecurrentState:
    d = config.ssm_d_state
    return RecurrentState(
        conv=ops.state_buffer(f"conv.{il}", (config.ssm_d_conv - 1, config.conv_channels), np.float32),
        ssm=ops.state_buffer(f"ssm.{il}", (config.n_v_heads, d, d), np.float32),
    )


def _kv_cache(il: int, config: ModelConfig, ops: Ops, n_ctx: int) -> KVCache:
    shape = (n_ctx, config.n_head_kv, config.head_dim)
    return KVCache(ops.state_buffer(f"k.{il}", shape, np.float16), ops.state_buffer(f"v.{il}", shape, np.float16))
