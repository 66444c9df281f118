from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import RequestError
from engine.gguf.inventory import padded_n_bytes, take_inventory
from engine.gguf.reader import TensorInfo, open_model
from engine.inspect import inspect_report
from engine.tests.tiny_gguf import keys, shapes, write_gguf

TOKEN_EMBD = TensorInfo("token_embd.weight", (5120, 248320), "Q4_K", 0, 248320 * 20 * 144)
OUTPUT = TensorInfo("output.weight", (5120, 248320), "Q6_K", 0, 248320 * 20 * 210)
NORM = TensorInfo("output_norm.weight", (5120,), "F32", 0, 20480)
ODD = TensorInfo("blk.0.ssm_a", (48,), "F32", 0, 192)
NEXTN = TensorInfo("blk.1.nextn.enorm.weight", (5120,), "F32", 0, 20480)


@pytest.fixture
def tiny_nextn(tmp_path: Path) -> Path:
    changed = keys(block_count=5, nextn_predict_layers=1)
    return write_gguf(tmp_path / "m.gguf", changed, shapes(n_nextn=1))


def test_regions_of_the_article() -> None:
    inventory = take_inventory([TOKEN_EMBD, ODD, NEXTN, NORM, OUTPUT], n_layer=1)
    assert {name: region.total.n_bytes for name, region in inventory.regions.items()} == {
        "token_embd": 715_161_600,
        "blk.0..0": 192,
        "output_norm": 20_480,
        "output": 1_042_944_000,
        "nextn": 20_480,
    }
    assert inventory.resident_n_bytes == 256 + 20_480 + 1_042_944_000
    assert inventory.n_bytes == 715_161_600 + 192 + 20_480 + 1_042_944_000 + 20_480
    assert not inventory.tied_output


def test_a_tied_output_makes_the_embedding_resident() -> None:
    inventory = take_inventory([TOKEN_EMBD, ODD, NORM], n_layer=1)
    assert inventory.tied_output
    assert inventory.resident_n_bytes == 715_161_600 + 256 + 20_480
    assert "output" not in inventory.regions


def test_counts_by_type_and_kind(tiny_nextn: Path) -> None:
    inventory = take_inventory(open_model(tiny_nextn).tensors.values(), n_layer=4)
    trunk = inventory.regions["blk.0..3"]
    assert trunk.by_type["Q6_K"].n_tensors == 4 + 2
    assert trunk.by_type["Q6_K"].n_bytes == 4 * 256 * 2 * 210 + 2 * 128 * 210
    assert trunk.by_type["IQ3_S"].n_tensors == 3
    assert inventory.by_kind["attn_k.weight"] == {"Q6_K": 2}  # the trunk's attention layer and the MTP block
    assert inventory.by_kind["ssm_out.weight"] == {"IQ3_S": 3}
    assert inventory.by_kind["token_embd.weight"] == {"Q4_K": 1}
    assert sum(region.total.n_bytes for region in inventory.regions.values()) == inventory.n_bytes
    assert sum(total.n_bytes for total in inventory.by_type.values()) == inventory.n_bytes
    assert inventory.regions["nextn"].total.n_tensors == 5 + 6 + 4


def test_padding() -> None:
    assert [padded_n_bytes(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_report_as_text_and_as_data(tiny_nextn: Path) -> None:
    report = inspect_report(tiny_nextn, n_ctx=512)
    text = report.render()
    for region in report.inventory.regions.values():
        assert f"{region.total.n_bytes:,}" in text
    assert f"{report.inventory.resident_n_bytes:,}" in text
    assert "MTP, not read in plain decoding" in text
    assert "3 Gated DeltaNet, 1 attention; 1 MTP left out" in text
    data = json.loads(json.dumps(report.to_dict()))
    assert data["hyperparameters"]["n_layer"] == 4
    assert data["hyperparameters"]["rope_sections"] == [5, 5, 6, 0]
    assert data["inventory"]["regions"]["token_embd"]["n_bytes"] == 300 * 144
    assert data["memory_plan"]["n_ctx"] == 512
    assert data["memory_plan"]["fits"] is None


def test_report_of_a_plan_that_does_not_fit(tiny_nextn: Path) -> None:
    report = inspect_report(tiny_nextn, n_ctx=512, vram_budget_n_bytes=1000)
    assert report.to_dict()["memory_plan"]["fits"] is False
    assert "does not fit, short of" in report.render()


def test_report_refuses_an_empty_context(tiny_nextn: Path) -> None:
    with pytest.raises(RequestError, match="the context size is 0, expected at least 1"):
        inspect_report(tiny_nextn, n_ctx=0)
