from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from conformance.models import PRESETS, ModelSpec, make_model, plan_tensors, write_model

TINY_SHA256 = "a44a48fb7d990d1232e0c9995ec5c00a5a6a15a8e03d691cbca382b3269619f4"
SMALL_SHA256 = "610f6b20c05aca403dda424afc29e97c2e274e71599b04d7bc436a7e642d6472"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny", tmp_path_factory.mktemp("models") / "tiny.gguf").path


def test_tiny_is_pinned_and_hashed_while_written(tiny: Path, tmp_path: Path) -> None:
    again = make_model("tiny", tmp_path / "again.gguf")
    assert again.sha256 == TINY_SHA256
    assert hashlib.sha256(tiny.read_bytes()).hexdigest() == TINY_SHA256
    assert again.n_bytes == tiny.stat().st_size


def test_small_is_pinned(tmp_path: Path) -> None:
    assert make_model("small", tmp_path / "small.gguf").sha256 == SMALL_SHA256


def test_the_seed_changes_weights_and_drops_redraws(tiny: Path, tmp_path: Path) -> None:
    other = make_model("tiny", tmp_path / "other.gguf", seed=PRESETS["tiny"].seed + 1)
    assert other.spec.redraws == ()
    assert other.sha256 != TINY_SHA256
    assert make_model("tiny", tmp_path / "same.gguf", seed=PRESETS["tiny"].seed).sha256 == TINY_SHA256


def test_the_reader_of_gguf_finds_what_was_planned(tiny: Path) -> None:
    reader = GGUFReader(tiny)
    found = [(t.name, tuple(t.shape.tolist()), t.tensor_type.name, t.n_bytes) for t in reader.tensors]
    assert found == [(t.name, t.shape, t.type, t.n_bytes) for t in plan_tensors(PRESETS["tiny"])]
    last = reader.tensors[-1]
    assert tiny.stat().st_size == -(-(last.data_offset + last.n_bytes) // 32) * 32


def test_metadata_has_the_keys_of_the_converter(tiny: Path) -> None:
    fields = GGUFReader(tiny).fields
    values = {key.removeprefix("qwen35."): field.contents() for key, field in fields.items()}
    assert values["general.architecture"] == "qwen35"
    expected = {
        "block_count": 5,
        "embedding_length": 256,
        "feed_forward_length": 768,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 16,
        "rope.dimension_sections": [3, 3, 2, 0],
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 768,
        "ssm.state_size": 64,
        "ssm.time_step_rank": 12,
        "ssm.group_count": 4,
        "full_attention_interval": 4,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: values[key] for key in expected} == expected
    tokens = values["tokenizer.ggml.tokens"]
    assert tokens[values["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert values["attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)


def test_matrices_have_variance_one_over_n_in(tiny: Path) -> None:
    for tensor in GGUFReader(tiny).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2 and "conv1d" not in tensor.name:
            gain = 4.0 if "attn_output" in tensor.name else 1.0
            values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
            deviation = values.astype(np.float64).std() * np.sqrt(int(tensor.shape[0]))
            assert deviation == pytest.approx(gain, rel=0.08), tensor.name


def test_vectors_are_where_real_models_have_them(tiny: Path) -> None:
    for tensor in GGUFReader(tiny).tensors:
        if tensor.name.endswith(".ssm_a"):
            assert (tensor.data < 0).all()
        if tensor.name.endswith(("attn_norm.weight", "output_norm.weight", "ssm_norm.weight")):
            assert np.abs(tensor.data - 1.0).max() <= 0.25


def test_sparse_27b_has_header_directory_and_full_size(tmp_path: Path) -> None:
    summary = make_model("27b", tmp_path / "27b.gguf", sparse=True)
    status = summary.path.stat()
    assert summary.sha256 is None
    assert status.st_size == summary.n_bytes > 16_102_434_816
    assert status.st_blocks * 512 < 100_000_000
    with summary.path.open("rb") as file:
        assert file.read(4) == b"GGUF"
        file.seek(-1_042_944_000, 2)
        assert not any(file.read(1000))


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 4, "n_k_heads": 2, "n_v_heads": 6, "ssm_d_state": 128},
        {"n_layer": 8, "n_k_heads": 16, "n_v_heads": 16, "head_dim": 256},
        {"tied_output": True, "group_size": 32, "token_embd_type": "Q6_K"},
        {"has_mtp_block": True, "token_embd_type": "Q8_0", "output_type": "BF16"},
        {"n_vocab": 512, "full_attention_interval": 2},
    ],
)
def test_other_shapes_are_written_whole(change: dict[str, object], tmp_path: Path) -> None:
    spec: ModelSpec = replace(PRESETS["tiny"], redraws=(), **change)  # type: ignore[arg-type]
    summary = write_model(spec, tmp_path / "model.gguf")
    reader = GGUFReader(summary.path)
    assert [t.name for t in reader.tensors] == [t.name for t in plan_tensors(spec)]
    assert all(np.isfinite(dequantize(t.data, t.tensor_type)).all() for t in reader.tensors)


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    summary = make_model("tiny", tmp_path / "tiny.gguf", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (summary.n_bytes, summary.n_bytes)
    assert calls == sorted(calls)


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no fixture model named 'huge', expected one of tiny, small, 27b"):
        make_model("huge", tmp_path / "x.gguf")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model("tiny", tmp_path / "tiny.gguf", progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(OSError, match="bytes needed for the model, 10 free"):
        make_model("tiny", tmp_path / "tiny.gguf")
    assert list(tmp_path.iterdir()) == []
