from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from conformance.bench.op_benchmarks import OPS, capture_calls
from conformance.bench.ops import OpsRecord, render_ops, run_op_benchmarks, write_ops_record
from conformance.bench.verify import verify_paths
from conformance.errors import ConformanceError
from conformance.fixtures import identify
from conformance.scenario import ScenarioFile


@pytest.fixture(scope="module")
def ops_record(short: ScenarioFile) -> OpsRecord:
    model = short.path.parent / "tiny.gguf"
    return run_op_benchmarks(model, identify(model, short.scenario.model))


def test_a_decode_step_calls_every_op(short: ScenarioFile) -> None:
    calls = capture_calls(short.path.parent / "tiny.gguf")
    assert calls.keys() == set(OPS)
    function, arguments = calls["rms_norm"]
    assert function(*arguments).x.shape == arguments[0].shape


def test_every_op_has_its_samples(ops_record: OpsRecord) -> None:
    assert [one.op for one in ops_record.ops] == list(OPS)
    for one in ops_record.ops:
        assert len(one.time_s) >= 5
        assert one.median_s == median(one.time_s) > 0
    assert f"{ops_record.ops[0].median_s * 1e6:.1f}" in render_ops(ops_record)


def test_an_edited_op_is_found(ops_record: OpsRecord, tmp_path: Path) -> None:
    path = write_ops_record(ops_record, tmp_path)
    assert verify_paths([tmp_path]) == ([], 1)
    data = json.loads(path.read_text())
    data["ops"][2]["median_s"] *= 2
    path.write_text(json.dumps(data))
    found, _ = verify_paths([path])
    assert [text.split(": ")[1].split()[0] for text in found] == ["record.ops[2]", "record.ops[2].median_s"]


def test_benchmarks_that_cannot_run_are_one_line(short: ScenarioFile, tmp_path: Path) -> None:
    identity = identify(short.path.parent / "tiny.gguf", short.scenario.model)
    with pytest.raises(ConformanceError, match=r"the op benchmarks failed \(crashed\): ") as caught:
        run_op_benchmarks(tmp_path / "none.gguf", identity)
    assert "\n" not in str(caught.value)
