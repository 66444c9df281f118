"""The prompts of the scenarios, as token ids."""

from __future__ import annotations

from conformance.models.spec import ModelSpec
from conformance.models.streams import RandomStream
from conformance.models.vocabulary import build_vocabulary

N_PROMPT = 70


def prompt_ids(spec: ModelSpec, seed: int | None = None) -> list[int]:
    """Return 70 random printable ids of the fixture's vocabulary; `seed` replaces `spec.prompt_seed`."""
    speakable = build_vocabulary(spec.n_vocab).speakable_ids
    stream = RandomStream(spec.prompt_seed if seed is None else seed, f"prompt {spec.name}")
    return [speakable[index] for index in stream.below(len(speakable), N_PROMPT).tolist()]
