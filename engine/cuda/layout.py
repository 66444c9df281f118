"""Every device buffer beside the weights, by name: what the memory plan adds up and what CudaOps allocates.

One pure function of the configuration serves both, so that they cannot disagree. Nothing here needs CuPy or a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    """An array on the device; `region` is the line of the memory plan that it belongs to.

    inside: the buffer whose memory it uses from byte `offset_n_bytes` on, at times when that one holds nothing.
    """

    region: str
    shape: tuple[int, ...]
    dtype: DType
    inside: str | None = None
    offset_n_bytes: int = 0

    @property
    def size_n_bytes(self) -> int:
        """Bytes, padded to the alignment of device memory."""
        return padded_n_bytes(math.prod(self.shape) * np.dtype(self.dtype).itemsize)

    @property
    def n_bytes(self) -> int:
        """Bytes taken for it."""
        return self.size_n_bytes if self.inside is None else 0


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
    yield from _activation("normed", c.n_embd)
    yield from _activation("mixed", max(c.value_dim, c.n_embd_q))
    # A token's attention is written where its q was, once that has been used.
    yield "q", Buffer("activations", (MAX_PACK, c.n_head, c.head_dim), np.float32, inside="mixed.x")
    yield from _activation("ffn", c.n_ff)
    yield from _beside_feed_forward(c, n_ctx)
    widest = max(c.n_embd, c.value_dim, c.n_embd_q, c.n_ff)
    yield "tiles", Buffer("quantised", (packs.tiles_n_bytes(MAX_PACK, widest),), np.uint8)
    for name in ("cos", "sin"):
        yield f"rope.{name}", Buffer("rope", (n_ctx, c.n_rot // 2), np.float32)
    yield from _control(c, n_ctx, n_chunk)


def _beside_feed_forward(c: ModelConfig, n_ctx: int) -> Named:
    """Yield what is needed only while ffn.x holds nothing, in its memory where there is room for it.

    The splits live from one launch of attention to the next, the logits from the end of a pass to the next one.
    """
    room_n_bytes = MAX_PACK * c.n_ff * 4
    token_n_words = attention.scratch_n_words(c, n_ctx)
    n_tokens = min(max(room_n_bytes // 4 // token_n_words, 1), MAX_PACK)
    yield "splits", _in_room(Buffer("attention", (n_tokens * token_n_words,), np.float32), "ffn.x", room_n_bytes, 0)
    offset_n_bytes = 0
    for name in ("logits", "given_logits"):
        logits = _in_room(Buffer("logits", (1, c.n_vocab), np.float32), "ffn.x", room_n_bytes, offset_n_bytes)
        yield name, logits
        offset_n_bytes += logits.size_n_bytes


def _in_room(buffer: Buffer, inside: str, room_n_bytes: int, offset_n_bytes: int) -> Buffer:
    """Return `buffer` in the memory of another one, or on its own if that is too small."""
    if offset_n_bytes + buffer.size_n_bytes > room_n_bytes:
        return buffer
    return replace(buffer, inside=inside, offset_n_bytes=offset_n_bytes)


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
