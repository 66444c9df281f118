"""The fault word: the first non-finite value that a kernel of a step found, as layer << 16 | op << 8 | kind.

Kernels get layer << 16 | op << 8 as an argument and add the kind; 0 means that nothing was found. The first
kernel to find something wins, so the word names the earliest op; which of several bad elements of that op gave
the kind is open.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from engine.errors import NonFiniteError

_LAYER_SHIFT = 16
_OP_SHIFT = 8
_KIND_MASK = 0xFF
_KINDS = {1: "NaN", 2: "infinity"}


class Op(IntEnum):
    """The ops that check their results, as numbered in the fault word."""

    GATE_UP_SILU = 1
    GATED_DELTA = 2
    ATTENTION = 3
    HEAD = 4
    ARGMAX = 5


_AFTER_THE_LAYERS = (Op.HEAD, Op.ARGMAX)


def kernel_argument(op: Op, layer: int = 0) -> np.uint32:
    """Return what a kernel that checks its result takes as `op`; `layer` means nothing after the last layer."""
    return np.uint32(layer << _LAYER_SHIFT | op << _OP_SHIFT)


def describe(word: int) -> str | None:
    """Return the sentence for a fault word, the NumPy backend's own for the same fault; None for 0."""
    if word == 0:
        return None
    op = Op(word >> _OP_SHIFT & 0xFF)
    where = "output head" if op in _AFTER_THE_LAYERS else f"layer {word >> _LAYER_SHIFT}"
    kind = _KINDS[word & _KIND_MASK]
    return f"{where}: op {op.name.lower()} produced {kind}; the weights or the state are damaged"


def raise_if_set(word: int) -> None:
    """Raise NonFiniteError if the word that a step left names a fault."""
    message = describe(word)
    if message is not None:
        raise NonFiniteError(message)
