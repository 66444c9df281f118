"""Launcher of rms_norm.cu: the norm over n_embd, fused with the quantisation of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.cuda.buffers import DeviceActivation, activation_n_bytes
from engine.numerics import LANES_EMBD

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels


class EmbeddingSize(Protocol):
    """What rms_norm must know of a model."""

    @property
    def n_embd(self) -> int: ...  # noqa: D102


def expressions(config: EmbeddingSize, pack: int) -> list[str]:
    """Return the kernels needed; the same for every pack width."""
    return [_expression(config.n_embd)]


def rms_norm(
    kernels: Kernels, x: cupy.ndarray, weight: cupy.ndarray, eps: float, out: DeviceActivation
) -> DeviceActivation:
    """Write rms_norm(x) * weight, as f32 and quantised, to `out` and return it.

    x: (n_tokens, n_embd) f32; weight: (n_embd,) f32. Where n_embd is no multiple of 32, only out.x is written.
    """
    n_tokens, n_embd = x.shape
    kernels[_expression(n_embd)]((n_tokens,), (LANES_EMBD,), (x, weight, np.float32(eps), out.x, out.q, out.scales))
    return out


def bytes_moved(n_embd: int) -> int:
    """Return the bytes of one token that must be read and written: x, the weight, the result in both forms."""
    return 8 * n_embd + activation_n_bytes(n_embd)


def _expression(n_embd: int) -> str:
    return f"rms_norm<{n_embd}>"
