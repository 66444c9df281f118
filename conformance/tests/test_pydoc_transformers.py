"""The engine against transformers' own Qwen3.5, which shares no line with llama.cpp, on one checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.models.pydoc.compare import LARGEST_TIE, LIMIT, agreement, engine_logits, transformers_logits
from conformance.models.pydoc.convert import read_checkpoint, write_model_file
from conformance.models.pydoc.corpus import load_corpus
from conformance.models.pydoc.mapping import HeadLayout, spec_of
from conformance.models.pydoc.vocabulary import end_of_text_id, learn_vocabulary

pytestmark = pytest.mark.transformers

N_POSITIONS = 70 + 129


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained checkpoint whose vectors are random too, so that none of them can be left out unnoticed."""
    import torch

    from conformance.models.pydoc.network import build_network, network_config, save_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = learn_vocabulary(load_corpus().training.values())
    tokenizer.save(str(folder / "tokenizer.json"))
    network = build_network(network_config(end_of_text_id(tokenizer)), seed=3)
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            spread = 0.2 if parameter.ndim == 1 else 0.04
            parameter += spread * torch.randn(parameter.shape, generator=random)
    save_checkpoint(network, folder)
    return folder


@pytest.fixture(scope="module")
def ids(folder: Path) -> list[int]:
    return [int(id_) for id_ in np.random.default_rng(6).integers(0, 2048, N_POSITIONS)]


def write(folder: Path, name: str, **changes: Any) -> Path:
    tensors, config = read_checkpoint(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    write_model_file(tensors | changes, config, tokenizer, folder / name)
    return folder / name


def test_logits_are_those_of_transformers(folder: Path, ids: list[int]) -> None:
    found = agreement(engine_logits(write(folder, "f16.gguf"), ids), transformers_logits(folder, ids))
    assert found.nmse.max() <= LIMIT
    assert (found.reference_gap[np.isfinite(found.reference_gap)] < LARGEST_TIE).all()


@pytest.mark.parametrize("swapped", ["dt_bias", "A_log", "in_proj_z.weight"])
def test_value_heads_in_another_order_are_far_off(folder: Path, ids: list[int], swapped: str) -> None:
    name = f"model.layers.0.linear_attn.{swapped}"
    tensors, config = read_checkpoint(folder)
    spec = spec_of(config)
    heads = HeadLayout(spec.n_k_heads, spec.n_v_heads, spec.ssm_d_state)
    per_head = len(tensors[name]) // spec.n_v_heads
    wrong = tensors[name][heads.order(len(tensors[name]), per_head, to_file=True)]
    found = agreement(
        engine_logits(write(folder, "wrong.gguf", **{name: wrong}), ids), transformers_logits(folder, ids)
    )
    assert found.nmse.max() > 100 * LIMIT
