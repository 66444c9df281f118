from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFileError, RequestError
from engine.gguf.reader import ModelFile, open_model
from engine.gguf.trunk import write_trunk
from engine.model.config import ModelConfig, check_tensors
from engine.tests.tiny_gguf import keys, shapes, vocabulary, vocabulary_keys, write_gguf

PER_BLOCK: dict[str, Any] = {"attention__head_count_kv": [2] * 5, "feed_forward_length": [512] * 5}


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    changed = keys(block_count=5, nextn_predict_layers=1, **PER_BLOCK) | vocabulary_keys()
    n_vocab = len(vocabulary()[0])
    return open_model(write_gguf(tmp_path / "full.gguf", changed, shapes(n_nextn=1, n_vocab=n_vocab)))


def test_the_copy_differs_only_in_the_mtp_block(model: ModelFile, tmp_path: Path) -> None:
    write_trunk(model, tmp_path / "trunk.gguf")
    trunk = open_model(tmp_path / "trunk.gguf")
    config = ModelConfig.from_model(trunk)
    check_tensors(trunk, config)
    assert (config.n_layer, config.n_layer_nextn) == (4, 0)
    assert list(trunk.tensors) == [name for name in model.tensors if not name.startswith("blk.4.")]
    for name, info in trunk.tensors.items():
        assert (info.shape, info.type) == (model.tensors[name].shape, model.tensors[name].type)
        assert trunk.raw(name).tobytes() == model.raw(name).tobytes()
    changed = {
        "qwen35.block_count": 4,
        "qwen35.attention.head_count_kv": [2] * 4,
        "qwen35.feed_forward_length": [512] * 4,
    }
    kept = {key: value for key, value in model.metadata.items() if key != "qwen35.nextn_predict_layers"}
    assert list(trunk.metadata) == list(kept)
    assert dict(trunk.metadata) == {**kept, **changed}
    for key in kept:
        assert trunk.metadata.value_type(key) == model.metadata.value_type(key)


def test_a_trunk_equals_the_file_that_never_had_an_mtp_block(tmp_path: Path) -> None:
    order = shapes(n_nextn=1)
    last = {name: order.pop(name) for name in list(order) if name.startswith("blk.4.")}
    full = keys(nextn_predict_layers=1) | {"qwen35.block_count": 5, "general.alignment": 64, "a.bytes": "é"}
    plain = full | {"qwen35.block_count": 4}
    del plain["qwen35.nextn_predict_layers"]
    write_gguf(tmp_path / "full.gguf", full, order | last)
    write_gguf(tmp_path / "plain.gguf", plain, order)
    write_trunk(open_model(tmp_path / "full.gguf"), tmp_path / "trunk.gguf")
    assert (tmp_path / "trunk.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()


def test_progress_adds_up_to_the_bytes_written(model: ModelFile, tmp_path: Path) -> None:
    seen: list[int] = []
    write_trunk(model, tmp_path / "trunk.gguf", progress=seen.append)
    assert sum(seen) == sum(info.n_bytes for info in open_model(tmp_path / "trunk.gguf").tensors.values())


def test_an_existing_file_is_kept_unless_told_otherwise(model: ModelFile, tmp_path: Path) -> None:
    out = tmp_path / "trunk.gguf"
    out.write_text("precious")
    with pytest.raises(RequestError, match=r"trunk.gguf: exists already.*--force"):
        write_trunk(model, out)
    assert out.read_text() == "precious"
    write_trunk(model, out, overwrite=True)
    assert ModelConfig.from_model(open_model(out)).n_layer == 4


def test_the_model_itself_is_never_the_target(model: ModelFile) -> None:
    with pytest.raises(RequestError, match=r"full.gguf: is the model itself"):
        write_trunk(model, model.path, overwrite=True)


def test_a_model_without_mtp_block_is_refused(tmp_path: Path) -> None:
    plain = open_model(write_gguf(tmp_path / "plain.gguf", keys(), shapes()))
    with pytest.raises(ModelFileError, match=r"plain.gguf: key qwen35.nextn_predict_layers is 0, expected 1 or"):
        write_trunk(plain, tmp_path / "trunk.gguf")
    assert not (tmp_path / "trunk.gguf").exists()


def test_an_interrupted_copy_leaves_nothing_behind(model: ModelFile, tmp_path: Path) -> None:
    def stop(n_bytes: int) -> None:
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        write_trunk(model, tmp_path / "trunk.gguf", progress=stop)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_does_not_exist(model: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"trunk.gguf: cannot be written: No such file or directory"):
        write_trunk(model, tmp_path / "absent" / "trunk.gguf")
