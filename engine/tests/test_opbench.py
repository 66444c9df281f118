"""What the benchmark of single kernels times and how it reports it; needs no device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from engine import opbench, quants
from engine.cli import app
from engine.cuda.plan import Node
from engine.cuda.random_weights import random_rows
from engine.cuda.variants import VARIANTS, variant
from engine.errors import NoDeviceError, RequestError
from engine.gguf.reader import TensorInfo, open_model
from engine.opbench import OpBench, bench_nodes, make_row, render
from engine.quants import FLOAT_FORMATS, QUANT_FORMATS
from engine.tests.models import SHAPES, write_model

NODE = Node(
    "gemv<Q6_K, 5120, 1>",
    0,
    "recurrent",
    (TensorInfo("blk.0.ffn_down.weight", (5120, 8), "Q6_K", 0, 33600),),
    4_000_000,
)


@pytest.mark.parametrize("type_name", [*QUANT_FORMATS, *FLOAT_FORMATS])
def test_random_weights_are_finite_and_not_constant(type_name: str) -> None:
    row_n_bytes = 256 // 32 * 34 if type_name == "Q8_0" else _row_n_bytes(type_name)
    raw = random_rows(type_name, 8192 * row_n_bytes, np.random.default_rng(1))
    assert raw.nbytes == 8192 * row_n_bytes
    weights = quants.dequantize(type_name, raw[: 512 * row_n_bytes].reshape(512, row_n_bytes))
    assert np.isfinite(weights).all()
    assert 0 < np.abs(weights).max() < 100
    assert len(np.unique(weights[:64])) > 64
    for values in quants.scales(type_name, raw.reshape(8192, row_n_bytes)).values():
        assert np.isfinite(values).all()


def _row_n_bytes(type_name: str) -> int:
    if type_name in QUANT_FORMATS:
        return QUANT_FORMATS[type_name].block.itemsize
    return 256 * (4 if type_name == "F32" else 2)


def test_each_shape_and_formats_is_timed_once_whatever_the_device(tmp_path: Path) -> None:
    model = open_model(write_model(tmp_path / "model.gguf", next(iter(SHAPES.values())), seed=1))
    nodes = bench_nodes(model)
    assert len({(node.shape, node.types) for node in nodes}) == len(nodes)
    assert [node.stems for node in nodes[:2]] == ["attn_qkv+attn_gate+ssm_alpha+ssm_beta", "ssm_out"]
    assert nodes[-1].stems == "output"
    assert [node.stems for node in bench_nodes(model, "sm_120", 170)] == [node.stems for node in nodes]


def test_a_row_holds_each_variant_plain_and_dependent() -> None:
    asked = []

    def time_node(node: Node, name: str, dependent: bool) -> list[float]:
        asked.append((name, dependent))
        return [99.0, 8.0 - dependent, 5.0]

    row = make_row(NODE, ["full", "rows"], 1000.0, time_node)
    assert asked == [("full", False), ("full", True), ("rows", False), ("rows", True)]
    assert (row.tensors, row.shape, row.types, row.floor_us) == ("ffn_down", "8 x 5120", "Q6_K", 4.0)
    plain, dependent = row.times[:2]
    assert (plain.time_us, plain.gb_per_s, plain.ceiling_fraction, plain.above_floor_us) == (8.0, 500.0, 0.5, 4.0)
    assert (dependent.time_us, dependent.above_floor_us, dependent.samples_us) == (7.0, 3.0, [99.0, 7.0, 5.0])


def test_the_tables_show_plain_and_dependent_launches() -> None:
    row = make_row(NODE, ["full", "rows"], 1000.0, lambda node, name, dependent: [8.0 - 3 * dependent])
    bench = OpBench("model.gguf", {"device": "none"}, 1000.0, [row])
    lines = [line.split() for line in render(bench).splitlines() if line.startswith("ffn_down")]
    columns = ["8.0", "500", "50.0%", "4.0"], ["5.0", "800", "80.0%", "1.0"]
    assert lines == [["ffn_down", "8", "x", "5120", "Q6_K", "4.00", "4.0", *cells * 2] for cells in columns]
    assert json.loads(json.dumps(bench.to_dict()))["rows"][0]["times"][1]["samples_us"] == [5.0]


def test_variants_have_names_of_their_own_and_parts_that_exist() -> None:
    assert len({one.name for one in VARIANTS}) == len(VARIANTS)
    assert set(opbench.VARIANT_NAMES) < {one.name for one in VARIANTS}
    assert {one.surgery for one in VARIANTS} == {0, 1, 2, 3, 4, 5}
    with pytest.raises(RequestError, match="no variant 'faster', expected one of: full, norm-two-pass"):
        variant("faster")


def test_without_a_device_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device() -> None:
        raise NoDeviceError("there is no device")

    monkeypatch.setattr(opbench, "open_device", no_device)
    path = write_model(tmp_path / "model.gguf", next(iter(SHAPES.values())), seed=1)
    assert isinstance(CliRunner().invoke(app, ["opbench", str(path)]).exception, NoDeviceError)
    result = CliRunner().invoke(app, ["opbench", str(path), "--variant", "faster"])
    assert isinstance(result.exception, RequestError)
