"""Time prefill and decode of one engine, and check on the way that all ways of prefill give the same bits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.generate import Engine, Generation, PrefillMode, logits_le32_sha256


@dataclass(frozen=True)
class PrefillTiming:
    """One way of prefill: the times of every repetition and the logits after the prompt, (n_vocab) f32."""

    mode: PrefillMode
    pack: int
    n_tokens: int
    time_ns: list[int]
    logits: NDArray[np.float32]

    @property
    def tok_per_s(self) -> float:
        """Tokens per second at the median time."""
        return self.n_tokens / (float(np.median(self.time_ns)) * 1e-9)


@dataclass(frozen=True)
class PrefillComparison:
    """Token-major against layer-major prefill of the same prompt."""

    token_major: PrefillTiming
    layer_major: PrefillTiming

    @property
    def final_logits_bitwise_equal(self) -> bool:
        """Whether both leave the same bits."""
        a, b = self.token_major.logits, self.layer_major.logits
        return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))

    @property
    def final_logits_le32_sha256(self) -> str:
        """Hash of the layer-major logits."""
        return logits_le32_sha256(self.layer_major.logits)

    @property
    def final_greedy_token_id(self) -> int:
        """The id that the layer-major logits lead to."""
        return int(np.argmax(self.layer_major.logits))


def bench_prefill(engine: Engine, prompt_ids: Sequence[int], pack: int, n_repetitions: int) -> PrefillComparison:
    """Time both ways of prefill, alternating, after one warm-up of each."""
    ways: tuple[tuple[PrefillMode, int], ...] = (("token_major", 1), ("layer_major", pack))
    times: dict[PrefillMode, list[int]] = {mode: [] for mode, _ in ways}
    logits = {mode: engine.prefill(prompt_ids, mode, width)[1] for mode, width in ways}
    for _ in range(n_repetitions):
        for mode, width in ways:
            start = time.perf_counter_ns()
            engine.prefill(prompt_ids, mode, width)
            times[mode].append(time.perf_counter_ns() - start)
    timings = [PrefillTiming(mode, width, len(prompt_ids), times[mode], logits[mode]) for mode, width in ways]
    return PrefillComparison(*timings)


def bench_decode(engine: Engine, prompt_ids: Sequence[int], n_steps: int, n_repetitions: int) -> list[Generation]:
    """Generate n_steps + 1 tokens n_repetitions times after one warm-up; the first token comes from the prompt."""
    engine.run(prompt_ids, min(n_steps, 4) + 1)
    return [engine.run(prompt_ids, n_steps + 1) for _ in range(n_repetitions)]


def default_prompt_ids(n_vocab: int, n_tokens: int = 70) -> list[int]:
    """Return ids spread over the vocabulary: speed does not depend on them.

    70 tokens are the prompt of the first source in docs/claimed.md.
    """
    return [(11 + 7919 * i) % n_vocab for i in range(n_tokens)]
