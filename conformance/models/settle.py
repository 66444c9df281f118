"""Give every step of one scenario the same narrow band of margins, without changing a token of it.

129 choices among four candidates are not all wide by luck: one in five is closer than a quarter of a logit, while
two correct engines differ by up to 0.15. And a choice that is wider than it needs to be hides faults. So each group
on the path where llama.cpp's lead was outside the band gets other rows of its own, drawn until the same member wins
by a lead inside it. The path, and with it every other step, stays as it was. The result is a list of (group, draw)
pairs for `ModelSpec.redraws`.

The hidden state behind a step is recovered from its logits: they are the output matrix times that state.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from conformance.models.planted import Groups, output_rows, plant_groups
from conformance.models.spec import ModelSpec
from conformance.models.streams import RandomStream
from conformance.models.vocabulary import build_vocabulary

_MAX_DRAWS = 1000


def settle(
    spec: ModelSpec, model: Path, token_ids: list[int], logits: NDArray[np.float32], band: tuple[float, float]
) -> tuple[tuple[int, int], ...]:
    """Return the redraws that keep `token_ids` and give each of them a lead within `band`.

    model: the file written from `spec`; token_ids: its greedy path; logits (len(token_ids), n_vocab): the row
    behind each id. Every id must belong to a group and no group may be visited twice. Raises ValueError
    otherwise, and when a group finds no fitting draw.
    """
    groups = plant_groups(spec, build_vocabulary(spec.n_vocab).speakable_ids)
    visited = groups.group_of[token_ids]
    if (visited < 0).any() or len(set(visited.tolist())) < len(token_ids):
        raise ValueError("the path leaves the planted groups or meets one twice; it cannot be settled")
    top = np.partition(logits, -2, axis=1)[:, -2:]
    lead = top[:, 1] - top[:, 0]
    outside = np.flatnonzero((lead < band[0]) | (lead > band[1]))
    states = _hidden_states(model, logits[outside])
    redraws = dict(spec.redraws)
    for step, state in zip(outside.tolist(), states, strict=True):
        group = int(visited[step])
        members = np.flatnonzero(groups.group_of == group)
        first_draw = redraws.get(group, 0) + 1
        redraws[group] = _fitting_draw(spec, groups, members, token_ids[step], state, band, first_draw)
    return tuple(sorted(redraws.items()))


def _fitting_draw(
    spec: ModelSpec,
    groups: Groups,
    members: NDArray[np.int64],
    winner: int,
    state: NDArray[np.float64],
    band: tuple[float, float],
    first_draw: int,
) -> int:
    """Return the first draw from first_draw on in which `winner` leads `members` within band at state (n_embd,)."""
    group = int(groups.group_of[winner])
    is_winner = members == winner
    for draw in range(first_draw, first_draw + _MAX_DRAWS):
        scores = _redrawn_matrix(spec, groups, members, (group, draw)) @ state
        if band[0] <= float(scores[is_winner][0] - scores[~is_winner].max()) <= band[1]:
            return draw
    raise ValueError(f"group {group}: no draw out of {_MAX_DRAWS} leads by {band[0]} to {band[1]}")


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
