"""Matrix times vectors in the contract's order, for quantised and for float weights.

Quantised: the dot product of 32 int8 activations with 32 integer weights is an exact integer; it is computed
here by an f32 matrix product, in which every partial sum is an integer below 2^24 and so exact whatever the
order. What follows is the contract: one f32 term per 32 weights, lane = sub-block mod 32, tree over the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine import quants
from engine.numerics import (
    ELEMENTS_PER_LANE_STEP,
    F32,
    LANES_HEAD,
    SUB_BLOCK,
    Activation,
    tree,
)

_SCRATCH_N_BYTES = 1 << 20
"""Widened weights in work at a time: about half of a core's level-2 cache."""
_UNPACK_N_WEIGHTS = 1 << 21
"""Weights unpacked at a time while loading, so that the temporaries stay small."""
_THREADED_N_WEIGHTS = 1 << 19
"""Matrices from this size on are split over the threads; below it the hand-over costs more than it gains."""


@dataclass(frozen=True)
class QuantMatrix:
    """A quantised matrix with its rows along the last axis, so that every step works on whole vectors.

    q: (n_in / 32, 32, n_out) int8 or int16; scale, minimum: (n_in / 32, n_out) f32.
    """

    n_in: int
    n_out: int
    q: NDArray[np.int8] | NDArray[np.int16]
    scale: F32
    minimum: F32 | None

    def columns(self, begin: int, end: int) -> QuantMatrix:
        """Return the part that computes outputs begin..end-1, as views."""
        minimum = None if self.minimum is None else self.minimum[:, begin:end]
        return QuantMatrix(self.n_in, end - begin, self.q[..., begin:end], self.scale[:, begin:end], minimum)

    def apply(self, h: Activation) -> F32:
        """Return W h, (n_tokens, n_out) f32."""
        if h.q8 is None:
            raise ValueError(f"a quantised matrix needs rows of 32 n, not {h.x.shape[1]}")
        activations = h.q8.q.transpose(1, 0, 2).astype(np.float32)
        d = h.q8.d.T[..., None]
        totals = h.q8.total.T[..., None].astype(np.float32)
        lanes = np.zeros((LANES_HEAD, h.x.shape[0], self.n_out), dtype=np.float32)
        for group in self._groups():
            term = np.matmul(activations[group], self.q[group].astype(np.float32))
            term *= self.scale[group, None, :]
            if self.minimum is not None:
                term -= self.minimum[group, None, :] * totals[group]
            term *= d[group]
            lane = group.start % LANES_HEAD
            lanes[lane : lane + term.shape[0]] += term
        return tree(lanes, axis=0)

    def _groups(self) -> Iterator[slice]:
        """Yield runs of sub-blocks in order, none crossing a multiple of 32, sized for the cache."""
        n_sub = self.q.shape[0]
        size = LANES_HEAD
        while size > 1 and size * SUB_BLOCK * self.n_out * 4 > _SCRATCH_N_BYTES:
            size //= 2
        for begin in range(0, n_sub, size):
            yield slice(begin, min(begin + size, n_sub))


@dataclass(frozen=True)
class FloatMatrix:
    """A float matrix, widened to f32: w is (n_steps, 4, 32 lanes, n_out), zero where n_in is exceeded."""

    n_in: int
    n_out: int
    w: F32

    def columns(self, begin: int, end: int) -> FloatMatrix:
        """Return the part that computes outputs begin..end-1, as views."""
        return FloatMatrix(self.n_in, end - begin, self.w[..., begin:end])

    def apply(self, h: Activation) -> F32:
        """Return W h, (n_tokens, n_out) f32."""
        n_tokens = h.x.shape[0]
        x = _lane_steps(h.x).transpose(1, 2, 3, 0)[..., None]
        lanes = np.zeros((LANES_HEAD, n_tokens, self.n_out), dtype=np.float32)
        for step in range(self.w.shape[0]):
            for e in range(ELEMENTS_PER_LANE_STEP):
                lanes += self.w[step, e, :, None, :] * x[step, e]
        return tree(lanes, axis=0)


NumpyMatrix = QuantMatrix | FloatMatrix


def load(type_name: str, raw: NDArray[np.uint8]) -> NumpyMatrix:
    """Unpack a matrix from its rows in the file, raw (n_out, row_n_bytes) u8, a slice of rows at a time."""
    if quants.is_quantized(type_name):
        return _load_quantized(quants.QUANT_FORMATS[type_name], raw)
    widen = quants.FLOAT_FORMATS[type_name]
    w = np.concatenate([_lane_steps(widen(raw[rows])) for rows in _row_slices(raw)], axis=0)
    return FloatMatrix(int(widen(raw[:1]).shape[1]), raw.shape[0], np.ascontiguousarray(w.transpose(1, 2, 3, 0)))


def _load_quantized(form: quants.QuantFormat, raw: NDArray[np.uint8]) -> QuantMatrix:
    n_out = raw.shape[0]
    first = form.planes(raw[:1])
    n_sub = first.scale.shape[1]
    q = np.empty((n_sub, SUB_BLOCK, n_out), dtype=first.q.dtype)
    scale = np.empty((n_sub, n_out), dtype=np.float32)
    minimum = None if first.minimum is None else np.empty((n_sub, n_out), dtype=np.float32)
    for rows in _row_slices(raw):
        planes = form.planes(raw[rows])
        q[..., rows] = planes.q.reshape(-1, n_sub, SUB_BLOCK).transpose(1, 2, 0)
        scale[:, rows] = planes.scale.T
        if minimum is not None and planes.minimum is not None:
            minimum[:, rows] = planes.minimum.T
    return QuantMatrix(n_sub * SUB_BLOCK, n_out, q, scale, minimum)


def _row_slices(raw: NDArray[np.uint8]) -> Iterator[slice]:
    n_rows = max(1, _UNPACK_N_WEIGHTS // raw.shape[1])
    for begin in range(0, raw.shape[0], n_rows):
        yield slice(begin, min(begin + n_rows, raw.shape[0]))


def _lane_steps(x: F32) -> F32:
    """Return rows x (n_rows, n), zero-padded, as (n_rows, n_steps, 4, 32 lanes)."""
    step = LANES_HEAD * ELEMENTS_PER_LANE_STEP
    padded = np.pad(x, [(0, 0), (0, -x.shape[1] % step)])
    return padded.reshape(x.shape[0], -1, LANES_HEAD, ELEMENTS_PER_LANE_STEP).transpose(0, 1, 3, 2)


def apply(matrix: NumpyMatrix, h: Activation, threads: Executor, n_threads: int) -> F32:
    """Return W h, (n_tokens, n_out) f32; the rows are split over `n_threads`, which changes no bit."""
    if n_threads == 1 or matrix.n_in * matrix.n_out < _THREADED_N_WEIGHTS:
        return matrix.apply(h)
    bounds = [matrix.n_out * i // n_threads for i in range(n_threads + 1)]
    part: Callable[[int], F32] = lambda i: matrix.columns(bounds[i], bounds[i + 1]).apply(h)  # noqa: E731
    return np.concatenate(list(threads.map(part, range(n_threads))), axis=1)
