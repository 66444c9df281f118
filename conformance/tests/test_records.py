from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from conformance.checks import CheckResult, Comparison, Difference
from conformance.errors import RecordError
from conformance.gpu import Gpu
from conformance.machine import Machine, Versions, engine_source_sha256, without_paths
from conformance.records import (
    ModelIdentity,
    Output,
    Record,
    RequestTimes,
    Timings,
    json_schema,
    read_record,
    read_records,
    record_path,
    remove_records,
    write_record,
)

RESULTS = Path(__file__).parents[2] / "results"
MODELS = (
    *(Record, Output, Timings, RequestTimes, ModelIdentity, Comparison, Difference, CheckResult, Machine, Gpu),
    Versions,
)


def test_a_record_is_read_back_as_it_was_written(records: list[Record], tmp_path: Path) -> None:
    for record in records:
        path = write_record(record, tmp_path)
        assert path == record_path(tmp_path, "short", record.engine)
        assert read_record(path) == record
    assert sorted(r.engine for r in read_records(tmp_path)) == sorted(r.engine for r in records)


def test_keys_are_sorted(records: list[Record], tmp_path: Path) -> None:
    pairs: list[list[str]] = []
    text = write_record(records[1], tmp_path).read_text()
    json.loads(text, object_pairs_hook=lambda items: pairs.append([key for key, _ in items]))
    assert pairs
    assert all(keys == sorted(keys) for keys in pairs)


def test_a_failed_write_leaves_the_old_record_and_nothing_else(
    records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_record(records[1], tmp_path)
    before = path.read_bytes()

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RecordError, match=r"engine-numpy\.json: cannot be written: No space left"):
        write_record(records[1].model_copy(update={"reason": "new"}), tmp_path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_the_record_appears_by_renaming(records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[tuple[str, str]] = []
    real = Path.replace

    def watch(self: Path, target: Path) -> Path:
        json.loads(self.read_text())  # complete before it gets its name
        renamed.append((self.name, Path(target).name))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", watch)
    write_record(records[0], tmp_path)
    assert renamed == [(f"{records[0].engine}.json.{records[0].run_id}.partial", f"{records[0].engine}.json")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a record"),
        ("[]", "schema_version is None, expected 1"),
        ('{"schema_version": 2}', "schema_version is 2, expected 1"),
        ('{"schema_version": 1}', "run_id: Field required"),
    ],
)
def test_an_unreadable_record_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=re.escape(says)) as caught:
        read_record(path)
    assert "\n" not in str(caught.value)


def test_unknown_keys_are_refused(records: list[Record]) -> None:
    with pytest.raises(ValidationError, match="extra"):
        Record.model_validate_json(json.dumps(json.loads(records[0].model_dump_json()) | {"speed": 1}))


def test_removing_records_touches_only_the_named_scenarios(records: list[Record], tmp_path: Path) -> None:
    write_record(records[0], tmp_path)
    other = write_record(records[0].model_copy(update={"scenario": "other"}), tmp_path)
    remove_records(tmp_path, ["short"])
    assert list(tmp_path.rglob("*.json")) == [other]


def test_records_hold_no_absolute_path(records: list[Record]) -> None:
    for record in records:
        text = record.model_dump_json()
        assert tempfile.gettempdir() not in text
        assert not re.search(r'"/[A-Za-z]', text)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("loading /srv/models/x.gguf: bad", "loading x.gguf: bad"),
        ("'/srv/x.gguf'", "'x.gguf'"),
        ("a=/srv/data/x", "a=x"),
        ("12/34 tok/s https://host/a/b", "12/34 tok/s https://host/a/b"),
        (r"C:\models\x.gguf", "x.gguf"),
    ],
)
def test_paths_are_cut_to_their_base_name(text: str, cut: str) -> None:
    assert without_paths({"k": [text, 3, None]}) == {"k": [cut, 3, None]}


def test_a_home_folder_with_a_space_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann other")
    assert without_paths("loading /home/ann other/models/x.gguf now") == "loading x.gguf now"


def test_the_schema_on_disk_is_current() -> None:
    assert json.loads((RESULTS / "schema" / "record-v1.json").read_text()) == json_schema()


@pytest.mark.parametrize("model", MODELS)
def test_every_key_is_documented(model: type[BaseModel]) -> None:
    described = re.findall(r"^\| (.+?) \|", (RESULTS / "README.md").read_text(), re.MULTILINE)
    keys = {key for cell in described for key in re.findall(r"`(\w+)`", cell)}
    assert set(model.model_fields) <= keys


def test_all_models_of_a_record_are_covered_by_these_tests() -> None:
    assert {model.__name__ for model in MODELS} == {"Record", *json_schema()["$defs"]} - {"JsonValue"}


def test_the_engine_is_identified_by_its_source() -> None:
    assert re.fullmatch("[0-9a-f]{64}", engine_source_sha256())
    assert engine_source_sha256() == engine_source_sha256()


@pytest.mark.parametrize(
    ("changed", "whole", "numpy", "cuda"),
    [
        ("cuda/kernels/a.cu", True, False, True),
        ("reference/ops.py", True, True, False),
        ("numerics.py", True, True, True),
        ("cuda/tests/test_a.py", False, False, False),
        ("notes.txt", False, False, False),
    ],
)
def test_what_is_the_source_of_a_backend(tmp_path: Path, changed: str, whole: bool, numpy: bool, cuda: bool) -> None:
    for name in ("cuda/kernels/a.cu", "reference/ops.py", "numerics.py", "cuda/tests/test_a.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    before = [engine_source_sha256(backend, tmp_path) for backend in (None, "numpy", "cuda")]
    assert len({*before}) == 3
    (tmp_path / changed).write_text("b")
    after = [engine_source_sha256(backend, tmp_path) for backend in (None, "numpy", "cuda")]
    assert [a != b for a, b in zip(before, after, strict=True)] == [whole, numpy, cuda]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not a record: "),
        ("9" * 5000, "not a record: "),
        ("\xff", "not a record: "),
        ('{"schema_version": 1, "a\\nb": 1}', "Field required"),
    ],
)
def test_what_is_no_record_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordError, match=message) as caught:
        read_record(tmp_path / "r.json")
    assert str(caught.value).isprintable()
