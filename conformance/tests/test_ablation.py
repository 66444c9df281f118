"""Records of an ablation, and the command where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conformance.bench import commands
from conformance.bench.ablation import AblationRecord, make_ablation_record, write_ablation_record
from conformance.bench.verify import verify_paths
from conformance.cli import app
from conformance.records import ModelIdentity
from engine.ablation import Ablation, AblationRow, Code

CODE = Code(1000, 2000, False, "a" * 64)
ROW = AblationRow("rows", 2, "streams", CODE, [10.0, 12.0, 11.0], [13.0, 14.0, 12.0], 11.0, 13.0, 2.0, True)


@pytest.fixture
def record() -> AblationRecord:
    ablation = Ablation("model.gguf", 512, 70, 128, {"device": "none"}, CODE, [ROW])
    return make_ablation_record(ablation, ModelIdentity(file="model.gguf", sha256="b" * 64, n_bytes=1))


def test_a_record_holds_and_can_be_read_again(record: AblationRecord, tmp_path: Path) -> None:
    path = write_ablation_record(record, tmp_path)
    assert path.parent.name == "ablation"
    assert verify_paths([tmp_path]) == ([], 1)
    again = AblationRecord.model_validate_json(path.read_text())
    assert again.ablation.rows[0] == ROW


def test_an_edited_figure_is_found(record: AblationRecord, tmp_path: Path) -> None:
    path = write_ablation_record(record, tmp_path)
    data = json.loads(path.read_text())
    data["ablation"]["rows"][0]["difference_us"] = 20.0
    path.write_text(json.dumps(data))
    found, _ = verify_paths([path])
    assert [text.split(": ")[1].split()[0] for text in found] == [
        "record.ablation.rows[0]",
        "record.ablation.rows[0].difference_us",
    ]


def test_without_a_gpu_nothing_is_measured_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "why_unavailable", lambda backend: "there is no GPU")
    result = CliRunner().invoke(app, ["ablation", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 3
    assert "not measured: there is no GPU" in result.output
    assert not (tmp_path / "out").exists()


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ablation", str(tmp_path / "model.gguf"), "--variant", "faster"])
    assert result.exit_code == 3
    assert "no variant 'faster'" in result.output
