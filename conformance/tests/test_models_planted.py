from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from conformance.models import PRESETS, ModelSpec
from conformance.models.planted import Groups, embedding_rows, output_rows, plant_groups
from conformance.models.streams import RandomStream
from conformance.models.vocabulary import build_vocabulary

PLANTABLE = ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "F32", "F16", "BF16"]
SPEC = replace(PRESETS["tiny"], redraws=())
IDS = np.arange(SPEC.n_vocab)


def _groups(spec: ModelSpec) -> Groups:
    return plant_groups(spec, build_vocabulary(spec.n_vocab).speakable_ids)


def _embeddings(spec: ModelSpec, groups: Groups) -> NDArray[np.float64]:
    rows = embedding_rows(spec, groups, IDS, RandomStream(1, "embd"))
    values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[spec.token_embd_type])
    return values.reshape(len(IDS), spec.n_embd).astype(np.float64)


def _outputs(spec: ModelSpec, groups: Groups) -> NDArray[np.float64]:
    rows = output_rows(spec, groups, IDS, RandomStream(1, "output"))
    values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[spec.output_type])
    return values.reshape(len(IDS), spec.n_embd).astype(np.float64)


@pytest.mark.parametrize("type_name", PLANTABLE)
def test_an_embedding_points_to_the_next_group(type_name: str) -> None:
    spec = replace(SPEC, token_embd_type=type_name, output_type=type_name)
    groups = _groups(spec)
    logits = _embeddings(spec, groups) @ _outputs(spec, groups).T
    grouped = groups.group_of >= 0
    assert np.array_equal(groups.group_of[logits.argmax(axis=1)][grouped], groups.next_group[grouped])


@pytest.mark.parametrize("type_name", PLANTABLE)
def test_planted_rows_have_the_wanted_size(type_name: str) -> None:
    spec = replace(SPEC, token_embd_type=type_name, output_type=type_name)
    groups = _groups(spec)
    grouped = groups.group_of >= 0
    # scales are drawn between 24/32 and 39/32 of the nominal one
    assert _embeddings(spec, groups)[grouped].std() == pytest.approx(np.sqrt(spec.n_layer / 2), rel=0.25)
    assert _outputs(spec, groups)[grouped].std() == pytest.approx(2 / np.sqrt(spec.n_embd), rel=0.25)


def test_every_group_has_group_size_members_and_only_printable_ids() -> None:
    groups = _groups(SPEC)
    speakable = set(build_vocabulary(SPEC.n_vocab).speakable_ids)
    members = np.flatnonzero(groups.group_of >= 0)
    assert set(members.tolist()) <= speakable
    assert (np.bincount(groups.group_of[members]) == SPEC.group_size).all()


def test_a_walk_of_129_steps_meets_no_group_twice() -> None:
    groups = _groups(SPEC)
    steps = groups.next_group[groups.group_of >= 0] - groups.group_of[groups.group_of >= 0]
    n_groups = int(groups.group_of.max()) + 1
    assert set((steps % n_groups).tolist()) == {1, 2, 3, 4}
    assert n_groups > 129 * 2.5  # mean step


def test_ids_without_a_group_are_never_the_argmax() -> None:
    groups = _groups(SPEC)
    outputs = _outputs(SPEC, groups)
    assert np.abs(outputs[groups.group_of < 0]).max() == 0.0


def test_a_redraw_changes_the_rows_of_its_group_only() -> None:
    groups = _groups(SPEC)
    before = output_rows(SPEC, groups, IDS, RandomStream(1, "output"))
    after = output_rows(replace(SPEC, redraws=((5, 2),)), groups, IDS, RandomStream(1, "output"))
    changed = (before != after).any(axis=1)
    assert np.array_equal(changed, groups.group_of == 5)


def test_a_redraw_does_not_depend_on_the_chunk() -> None:
    groups = _groups(SPEC)
    spec = replace(SPEC, redraws=((5, 2),))
    members = np.flatnonzero(groups.group_of == 5)
    whole = output_rows(spec, groups, IDS, RandomStream(1, "output"))[members]
    assert np.array_equal(whole, output_rows(spec, groups, members, RandomStream(9, "other")))


def test_tied_tokens_lead_to_their_own_group() -> None:
    spec = replace(SPEC, tied_output=True, group_size=32)
    groups = _groups(spec)
    grouped = groups.group_of >= 0
    assert np.array_equal(groups.next_group[grouped], groups.group_of[grouped])
    half = _embeddings(spec, groups)[:, : spec.n_embd // 2]
    best = (half @ half.T).argmax(axis=1)
    assert np.array_equal(groups.group_of[best][grouped], groups.group_of[grouped])


def test_a_format_without_planted_rows_is_refused() -> None:
    spec = replace(SPEC, output_type="IQ3_S")
    with pytest.raises(ValueError, match="IQ3_S: no writer for planted rows"):
        output_rows(spec, _groups(spec), IDS[:1], RandomStream(1, "output"))
