"""Parts of the training that a wrong line would spoil silently; the training itself is judged by its losses."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from conformance.models.pydoc.vocabulary import END_OF_TEXT, end_of_text_id, learn_vocabulary

pytestmark = pytest.mark.transformers

TEXTS = ["the first topic\n" * 200, "another one, longer than the first\n" * 200]


@pytest.fixture(scope="module")
def train() -> Any:
    from conformance.models.pydoc import train

    return train


def settings(train: Any, **changes: Any) -> Any:
    values = {"seed": 1, "n_steps": 4, "seconds": 1.0, "batch_size": 16, "learning_rate": 1.0}
    return train.Settings(**{**values, "weight_decay": 0.1, "dropout": 0.5, "device": "cpu", **changes})


def test_topics_are_closed_and_windows_begin_with_some(train: Any) -> None:
    tokenizer = learn_vocabulary(TEXTS, 300)
    ids, starts = train._joined(TEXTS, tokenizer)
    ends = [at for at, id_ in enumerate(ids.tolist()) if id_ == end_of_text_id(tokenizer)]
    assert starts.tolist() == [0, ends[0] + 1]
    assert ends[1] == len(ids) - 1
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "".join(text + END_OF_TEXT for text in TEXTS)
    texts = train.Texts(ids, starts, ids, 1)
    first, second = islice(train._windows(texts, settings(train)), 2)
    again = next(iter(train._windows(texts, settings(train))))
    assert first.shape == (16, train.N_WINDOW + 1)
    assert (first == again).all()
    assert not (first == second).all()
    heads = {tuple(ids[start : start + 20].tolist()) for start in starts}
    assert sum(tuple(row[:20].tolist()) in heads for row in first) >= 2


def test_learning_rate_rises_and_falls(train: Any) -> None:
    import torch

    run = object.__new__(train.Run)
    run.settings, run.n_steps = settings(train), 1000
    run.optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    found = []
    for step in (0, 49, 500, 999):
        run._set_learning_rate(step)
        found.append(run.optimiser.param_groups[0]["lr"])
    assert found == pytest.approx([0.02, 1.0, 0.51, 0.02], abs=0.01)


def test_only_matrices_decay(train: Any) -> None:
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Conv1d(2, 2, 4))
    groups = train._optimiser(network, settings(train)).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 1), (0.0, 3)]


def test_sublayers_drop_in_training_mode_only() -> None:
    import torch

    from conformance.models.pydoc.network import add_dropout

    network = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(64, 64), "up_proj": torch.nn.Linear(64, 64)})
    add_dropout(network, 0.5)
    ones = torch.ones(1, 64)
    assert (network["down_proj"].train()(ones) == 0).sum() > 10
    assert (network["down_proj"].eval()(ones) == 0).sum() == 0
    assert (network["up_proj"].train()(ones) == 0).sum() == 0
