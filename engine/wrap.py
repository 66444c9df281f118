"""Wrappers around a backend's ops: time, record or break single ops without a second forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from engine.decoder import EagerDecoder, Run
from engine.ops import Array, Ops


class WrappedOps:
    """Passes every op through to `inner`; subclasses override the ones they watch or change."""

    def __init__(self, inner: Ops) -> None:
        self.inner = inner

    def append(self, run: Run, state: object, tokens: Sequence[int], pack: int) -> Array:
        """Append op by op, so that each op passes through this wrapper."""
        return run(tokens)

    def decoder(self, run: Run, state: object) -> EagerDecoder:
        """Decode op by op, so that each op passes through this wrapper."""
        return EagerDecoder(cast(Ops, self), run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
