"""Give every step of one scenario the same narrow band of margins, without changing a token of it.

129 choices among four candidates are not all wide by luck: one in five is closer than a quarter of a logit, while
two correct engines differ by up to 0.15. And a choice that is wider than it needs to be hides faults. So each group
on the path where llama.cpp's lead was outside the band gets other rows of its own, drawn until the same member wins
by a lead inside it. The path, and with it every other step, stays as it was. The result is a list of (group, draw)
pairs for `ModelSpec.redraws`.

A fault too faint to show by chance, such as a cache that forgets one position, can be given: at the steps where its
hidden state is furthest off, the draw is one in which the fault changes the winner.

The hidden state behind a step is recovered from its logits: they are the output matrix times that state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from conformance.models.planted import Groups, output_rows, plant_groups
from conformance.models.spec import ModelSpec
from conformance.models.streams import RandomStream
from conformance.models.vocabulary import build_vocabulary

_MAX_DRAWS = 20_000
_N_EXPOSING_STEPS = 2


@dataclass(frozen=True)
class Wish:
    """The lead that the winner of a step shall have at a hidden state (n_embd,): at least low, at most high."""

    state: NDArray[np.float64]
    low: float
    high: float


def settle(
    spec: ModelSpec,
    model: Path,
    token_ids: list[int],
    logits: NDArray[np.float32],
    band: tuple[float, float],
    faulty_logits: NDArray[np.float32] | None = None,
) -> tuple[tuple[int, int], ...]:
    """Return the redraws that keep `token_ids` and give each of them a lead within `band`.

    model: the file written from `spec`; token_ids: its greedy path; logits (len(token_ids), n_vocab): the row
    behind each id. faulty_logits: the same from a faulty engine that was fed the same path. Every id must belong
    to a group and no group may be visited twice. Raises ValueError otherwise, and when a group finds no fitting
    draw.
    """
    groups = plant_groups(spec, build_vocabulary(spec.n_vocab).speakable_ids)
    visited = groups.group_of[token_ids]
    if (visited < 0).any() or len(set(visited.tolist())) < len(token_ids):
        raise ValueError("the path leaves the planted groups or meets one twice; it cannot be settled")
    top = np.partition(logits, -2, axis=1)[:, -2:]
    lead = top[:, 1] - top[:, 0]
    states = _hidden_states(model, logits)
    outside = np.flatnonzero((lead < band[0]) | (lead > band[1])).tolist()
    wishes = {step: [Wish(states[step], *band)] for step in outside}
    if faulty_logits is not None:
        faulty = _hidden_states(model, faulty_logits)
        for step in np.argsort(np.linalg.norm(faulty - states, axis=1))[-_N_EXPOSING_STEPS:].tolist():
            wishes[step] = [Wish(states[step], *band), Wish(faulty[step], -math.inf, -band[0] / 3)]
    redraws = dict(spec.redraws)
    for step, step_wishes in wishes.items():
        group = int(visited[step])
        redraws[group] = _fitting_draw(spec, groups, token_ids[step], step_wishes, redraws.get(group, 0) + 1)
    return tuple(sorted(redraws.items()))


def _fitting_draw(spec: ModelSpec, groups: Groups, winner: int, wishes: Sequence[Wish], first_draw: int) -> int:
    """Return the first draw from first_draw on with which `winner` leads the rest of its group as wished."""
    group = int(groups.group_of[winner])
    members = np.flatnonzero(groups.group_of == group)
    is_winner = members == winner
    states = np.stack([wish.state for wish in wishes], axis=1)
    for draw in range(first_draw, first_draw + _MAX_DRAWS):
        scores = _redrawn_matrix(spec, groups, members, (group, draw)) @ states
        leads = scores[is_winner][0] - scores[~is_winner].max(axis=0)
        if all(wish.low <= lead <= wish.high for wish, lead in zip(wishes, leads.tolist(), strict=True)):
            return draw
    raise ValueError(f"group {group}: none of {_MAX_DRAWS} draws gives the wanted lead")


def _hidden_states(model: Path, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Solve output @ state = logits for the states (n_steps, n_embd), from twice as many rows as unknowns."""
    output = next(tensor for tensor in GGUFReader(model).tensors if tensor.name == "output.weight")
    n_rows = 2 * int(output.shape[0])
    matrix = dequantize(output.data[:n_rows], output.tensor_type).astype(np.float64)
    solution, *_ = np.linalg.lstsq(matrix, logits[:, :n_rows].astype(np.float64).T, rcond=None)
    states: NDArray[np.float64] = solution.T
    return states


def _redrawn_matrix(
    spec: ModelSpec, groups: Groups, members: NDArray[np.int64], redraw: tuple[int, int]
) -> NDArray[np.float64]:
    """Return the output rows (len(members), n_embd) that the members of one group have after a redraw."""
    stream = RandomStream(spec.seed, "unused")  # a redrawn row takes nothing from the tensor's own stream
    rows = output_rows(replace(spec, redraws=(redraw,)), groups, members, stream)
    values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[spec.output_type])
    return values.astype(np.float64)
