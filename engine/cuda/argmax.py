"""Launcher of argmax.cu: the greedy choice, fed back on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels

ARGMAX_THREADS = 256
ARGMAX_LOGITS = 8
SCRATCH_N_WORDS = 4
"""32-bit words of scratch, all zero before the first call; the kernel leaves them zero."""


def expressions() -> list[str]:
    """Return the kernels needed."""
    return ["argmax"]


def bytes_moved(n_vocab: int) -> int:
    """Return the bytes read: the logits."""
    return 4 * n_vocab


def argmax(
    kernels: Kernels,
    logits: cupy.ndarray,
    control: cupy.ndarray,
    n_tokens: int,
    scratch: cupy.ndarray,
    next_token: cupy.ndarray,
    chosen: cupy.ndarray,
    outcome: cupy.ndarray,
    *,
    fault: cupy.ndarray,
    op: np.uint32,
) -> cupy.ndarray:
    """Write the lowest id among the largest logits to `next_token`, `chosen` and `outcome`; return next_token.

    logits: (n_vocab,) f32 of the last token of a pack of n_tokens; control: i32, [1] the position of the pack's
    first token; scratch: (SCRATCH_N_WORDS,) u32; next_token: (1,) i32; chosen: (n_ctx,) i32, where the entry of
    the last token's position is written, so that the ids of many steps can be read at once. outcome: (2,)
    i32, the device's side of upload.mapped(): the id, and what the fault word then is. fault: (1,) u32, set if a logit
    is not finite; op: its faults.kernel_argument.
    """
    n_vocab = logits.size
    kernels["argmax"](
        (-(-n_vocab // (ARGMAX_THREADS * ARGMAX_LOGITS)),),
        (ARGMAX_THREADS,),
        (logits, np.int32(n_vocab), np.int32(n_tokens), control, scratch, next_token, chosen, outcome, op, fault),
    )
    return next_token
