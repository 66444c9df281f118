"""The faults, each a wrapper around the ops of the NumPy backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ops import Array, KVCache, Matrix, Ops
from engine.wrap import WrappedOps

FORGOTTEN_POSITION = 35
"""Position that `ForgetfulCache` does not see: the middle of a 70-token prompt."""


class FlippedScaleBit(WrappedOps):
    """Flips the lowest bit of the first 6-bit scale in the first row of the first Q4_K matrix."""

    _SCALES_OFFSET = 4  # bytes: after the f16 values d and dmin

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner)
        self._flipped = False

    def load_matrix(self, type_name: str, raw: NDArray[np.uint8]) -> Matrix:
        """Load a matrix, the first Q4_K one with the flipped bit."""
        if type_name == "Q4_K" and not self._flipped:
            raw = raw.copy()
            raw[0, self._SCALES_OFFSET] ^= 1
            self._flipped = True
        return self.inner.load_matrix(type_name, raw)


class GroupedValueHeads(WrappedOps):
    """Gives each value head its own copy of key head v // r, where the model tiles them."""

    def gated_delta(self, qkv: Array, alpha: Array, beta: Array, dt: Array, a: Array, ssm_state: Array) -> Array:
        """Run the delta rule on q and k repeated head by head."""
        n_v_heads, d = ssm_state.shape[:2]
        key_dim = (qkv.shape[1] - n_v_heads * d) // 2
        q, k, v = np.split(qkv, [key_dim, 2 * key_dim], axis=1)
        repeats = n_v_heads * d // key_dim
        q, k = (np.repeat(x.reshape(-1, key_dim // d, d), repeats, axis=1) for x in (q, k))
        grouped = np.concatenate([q.reshape(v.shape), k.reshape(v.shape), v], axis=1)
        return self.inner.gated_delta(grouped, alpha, beta, dt, a, ssm_state)


class RopeOffByOne(WrappedOps):
    """Rotates queries one position too far, keys correctly."""

    def qk_norm_rope(
        self,
        qg: Array,
        k: Array,
        v: Array,
        q_norm: Array,
        k_norm: Array,
        positions: Sequence[int],
        cache: KVCache,
    ) -> tuple[Array, Array]:
        """Return queries of positions + 1; the cache gets the right keys and values."""
        _, gate = self.inner.qk_norm_rope(qg, k, v, q_norm, k_norm, positions, cache)
        late = [p + 1 for p in positions]
        spare = KVCache(*(np.zeros((late[-1] + 1, *x.shape[1:]), x.dtype) for x in (cache.k, cache.v)))
        q, _ = self.inner.qk_norm_rope(qg, k, v, q_norm, k_norm, late, spare)
        return q, gate


class ForgetfulCache(WrappedOps):
    """Attends to every position but one."""

    def attention(self, q: Array, cache: KVCache, positions: Sequence[int]) -> Array:
        """Attend with FORGOTTEN_POSITION cut out of the cache, token by token."""
        cut = KVCache(*(np.delete(x, FORGOTTEN_POSITION, axis=0) for x in (cache.k, cache.v)))
        outputs = [
            self.inner.attention(q[t : t + 1], cut, [p - 1])
            if p > FORGOTTEN_POSITION
            else self.inner.attention(q[t : t + 1], cache, [p])
            for t, p in enumerate(positions)
        ]
        return np.concatenate(outputs)


class HighestIdOnTie(WrappedOps):
    """Breaks ties the wrong way."""

    def argmax(self, logits: Any) -> int:
        """Return the highest id among the largest."""
        last = np.asarray(logits)[-1]
        return int(last.size - 1 - np.argmax(last[::-1]))
