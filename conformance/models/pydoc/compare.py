"""Logits of the checkpoint by transformers against those of the engine on the GGUF file made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.oracle import nmse
from engine.generate import load_engine

__all__ = ["Agreement", "agreement", "engine_logits", "transformers_logits"]


@dataclass(frozen=True)
class Agreement:
    """How close two sets of logits are, per position.

    nmse (n_positions): squared error over the reference's variance. reference_gap (n_positions): distance of the
    reference's two largest logits where the two disagree on the largest, else infinite.
    """

    nmse: NDArray[np.float64]
    reference_gap: NDArray[np.float64]


def transformers_logits(folder: Path, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits (len(ids), n_vocab) f32 after each of `ids`, of the checkpoint in `folder`, on the CPU."""
    import torch

    from conformance.models.pydoc.network import load_network

    with torch.no_grad():
        logits = load_network(folder)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return np.asarray(logits[0].float().numpy())


def engine_logits(model: Path, ids: Sequence[int], backend: str = "numpy") -> NDArray[np.float32]:
    """Return the logits (len(ids), n_vocab) f32 after each of `ids`, of the engine on `model`.

    Raises EngineError, NoDeviceError where the backend cannot run.
    """
    n_ctx = -(-len(ids) // 256) * 256
    engine = load_engine(model, n_ctx=n_ctx, backend=backend)
    generation = engine.run(ids[:1], len(ids), force_ids=ids[1:], keep_logits=True)
    assert generation.logits is not None
    return generation.logits


def agreement(logits: NDArray[np.float32], reference: NDArray[np.float32]) -> Agreement:
    """Compare `logits` with `reference`, both (n_positions, n_vocab)."""
    exact = reference.astype(np.float64)
    errors = [nmse(row[None], wanted[None]) for row, wanted in zip(logits, exact, strict=True)]
    second, first = np.sort(exact, axis=-1)[:, -2:].T
    same = logits.argmax(axis=-1) == exact.argmax(axis=-1)
    return Agreement(np.array(errors), np.where(same, np.inf, first - second))
