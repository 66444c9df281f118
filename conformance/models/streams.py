"""Random bytes that are the same on every machine and for every NumPy version.

Only the raw 64-bit output of PCG64 is used: NumPy promises that stream, but not what `Generator` makes of it.
Each tensor has a stream of its own, keyed by seed and name, so that tensors can be made in any order.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


class RandomStream:
    """Sequential random bytes for one (seed, label) pair."""

    def __init__(self, seed: int, label: str) -> None:
        digest = hashlib.sha256(f"{seed}/{label}".encode()).digest()
        self._raw = np.random.PCG64(int.from_bytes(digest, "little"))

    def words(self, n: int) -> NDArray[np.uint64]:
        """Return the next n 64-bit words."""
        words: NDArray[np.uint64] = self._raw.random_raw(n)
        return words

    def bytes(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return random bytes of `shape`; a call takes whole words, so the split into calls is part of the stream."""
        n_bytes = int(np.prod(shape))
        words = self.words(-(-n_bytes // 8)).astype("<u8", copy=False)
        return words.view(np.uint8)[:n_bytes].reshape(shape)

    def below(self, limit: int, n: int) -> NDArray[np.int64]:
        """Return n integers in [0, limit), for limits far below 2**64 (the bias is limit / 2**64)."""
        remainders: NDArray[np.int64] = (self.words(n) % np.uint64(limit)).astype(np.int64)
        return remainders

    def symmetric(self, n: int) -> NDArray[np.float32]:
        """Return n float32 values uniform in [-1, 1), exact multiples of 2**-23."""
        integers = self.bytes((n, 4)).view("<i4").reshape(n) >> 8
        values: NDArray[np.float32] = integers.astype(np.float32) * np.float32(2.0**-23)
        return values

    def permutation(self, n: int) -> NDArray[np.int64]:
        """Return a random order of 0..n-1 (a stable sort of random keys)."""
        return np.argsort(self.words(n), kind="stable").astype(np.int64)
