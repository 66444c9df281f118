"""Every device buffer beside the weights, by name: what the memory plan adds up and what CudaOps allocates.

One pure function of the configuration serves both, so that they cannot disagree. Nothing here needs CuPy or a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from engine.cuda import argmax, attention, gated_delta, packs
from engine.cuda.buffers import MAX_PACK
from engine.gguf.inventory import padded_n_bytes
from engine.model.config import ModelConfig
from engine.numerics import SUB_BLOCK

DType: TypeAlias = type[np.generic]


@dataclass(frozen=True)
class Buffer:
    """An array on the device; `region` is the line of the memory plan that it belongs to."""

    region: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def n_bytes(self) -> int:
        """Bytes taken, padded to the alignment of device memory."""
        return padded_n_bytes(math.prod(self.shape) * np.dtype(self.dtype).itemsize)


def buffers(config: ModelConfig, n_ctx: int, n_chunk: int) -> dict[str, Buffer]:
    """Return name -> buffer for one sequence of up to n_ctx positions.

    n_chunk: prompt tokens that layer-major prefill carries through a layer together. The names of the state are those
    that `engine.model.state` asks for.
    """
    return dict((*_state(config, n_ctx), *_working(config, n_ctx, min(n_ctx, n_chunk))))


Named: TypeAlias = Iterator[tuple[str, Buffer]]


def _state(c: ModelConfig, n_ctx: int) -> Named:
    """Yield what a sequence leaves behind: conv and ssm of each recurrent layer, k and v of each attention layer."""
    for il in range(c.n_layer):
        if c.is_recurrent(il):
            yield f"conv.{il}", Buffer("conv_state", gated_delta.conv_state_shape(c), np.float32)
            yield f"ssm.{il}", Buffer("gdn_state", gated_delta.ssm_state_shape(c), np.float32)
        else:
            for name in ("k", "v"):
                yield f"{name}.{il}", Buffer("kv_cache", (n_ctx, c.n_head_kv, c.head_dim), np.float16)


def _working(c: ModelConfig, n_ctx: int, n_chunk: int) -> Named:
    """Yield the buffers that every layer uses in turn, and those around the layers."""
    yield "hidden", Buffer("residual", (n_chunk, c.n_embd), np.float32)
    for i, width in enumerate(projected_widths(c)):
        yield f"projected.{i}", Buffer("activations", (MAX_PACK * width,), np.float32)
    yield "q", Buffer("activations", (MAX_PACK, c.n_head, c.head_dim), np.float32)
    yield from _activation("normed", c.n_embd)
    yield from _activation("mixed", max(c.value_dim, c.n_embd_q))
    yield from _activation("ffn", c.n_ff)
    widest = max(c.n_embd, c.value_dim, c.n_embd_q, c.n_ff)
    yield "tiles", Buffer("quantised", (packs.tiles_n_bytes(MAX_PACK, widest),), np.uint8)
    shapes = attention.scratch_shapes(c, n_ctx, MAX_PACK)
    for name, shape in zip(("maxima", "sums", "values"), shapes, strict=True):
        yield f"splits.{name}", Buffer("attention", shape, np.float32)
    for name in ("cos", "sin"):
        yield f"rope.{name}", Buffer("rope", (n_ctx, c.n_rot // 2), np.float32)
    for name in ("logits", "given_logits"):
        yield name, Buffer("logits", (1, c.n_vocab), np.float32)
    yield from _control(c, n_ctx, n_chunk)


def _activation(name: str, n: int) -> Named:
    """Yield the three parts of a DeviceActivation of n values for MAX_PACK tokens."""
    yield f"{name}.x", Buffer("activations", (MAX_PACK, n), np.float32)
    yield f"{name}.q", Buffer("quantised", (MAX_PACK, n), np.int8)
    yield f"{name}.scales", Buffer("quantised", (MAX_PACK, -(-n // SUB_BLOCK), 2), np.int32)


def _control(c: ModelConfig, n_ctx: int, n_chunk: int) -> Named:
    """Yield token ids, positions, counters and results: a few words each."""
    yield "control", Buffer("control", (n_chunk, 2), np.int32)
    yield "tickets", Buffer("control", gated_delta.tickets_shape(c), np.uint32)
    yield "gate_up_done", Buffer("control", (-(-c.n_ff // SUB_BLOCK),), np.uint32)
    yield "argmax_scratch", Buffer("control", (argmax.SCRATCH_N_WORDS,), np.uint32)
    yield "chosen", Buffer("control", (n_ctx,), np.int32)
    yield "outcome", Buffer("control", (2,), np.int32)


def projected_widths(c: ModelConfig) -> tuple[int, ...]:
    """Return the widest output of each place in `Ops.project`: qkv, z, alpha, beta or q with its gate, k, v."""
    recurrent = (c.conv_channels, c.value_dim, c.n_v_heads, c.n_v_heads)
    full = (2 * c.n_embd_q, c.n_embd_kv, c.n_embd_kv, 0)
    return tuple(max(pair) for pair in zip(recurrent, full, strict=True))
