from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from engine.errors import ModelFileError
from engine.gguf.reader import ModelFile, open_model
from engine.tests.tiny_gguf import KEYS, keys, shapes, vocabulary_keys, write_gguf

Q4_K, Q3_K = 12, 11


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", KEYS, shapes())


def edited(source: Path, target: Path, at: int, data: bytes) -> Path:
    content = bytearray(source.read_bytes())
    content[at : at + len(data)] = data
    target.write_bytes(content)
    return target


def entry_offsets(path: Path, tensor: str) -> dict[str, int]:
    """Return where the directory entry of a two-dimensional tensor has its fields."""
    name = struct.pack("<Q", len(tensor)) + tensor.encode()
    end = path.read_bytes().index(name) + len(name)
    return {"name": end - len(tensor), "n_dims": end, "n_in": end + 4, "type": end + 20, "offset": end + 24}


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path.name}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path.name}: ")


def test_directory_and_bytes_agree_with_the_gguf_package(tiny: Path) -> None:
    model = open_model(tiny)
    expected = GGUFReader(tiny).tensors
    assert list(model.tensors) == [tensor.name for tensor in expected]
    for tensor in expected:
        info, raw = model.tensors[tensor.name], model.raw(tensor.name)
        assert info.type == tensor.tensor_type.name
        assert (info.shape, info.offset, info.n_bytes) == (
            tuple(tensor.shape),
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert raw.shape == (info.n_rows, info.row_n_bytes)
        assert raw.tobytes() == tensor.data.tobytes()
        assert not raw.flags.writeable


def test_sizes_of_a_tensor(tiny: Path) -> None:
    info = open_model(tiny).tensor("blk.1.ffn_down.weight")
    assert (info.shape, info.type) == ((512, 256), "Q6_K")
    assert (info.n_rows, info.row_n_bytes, info.n_bytes) == (256, 2 * 210, 256 * 2 * 210)
    assert (info.n_elements, info.block) == (512 * 256, 1)
    assert open_model(tiny).tensor("output_norm.weight").block is None


def test_metadata_comes_as_python_values(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {
        "general.architecture": "qwen35",
        "a.int": 7,
        "a.float": 0.5,
        "a.bool": True,
        "a.text": "größe 模型",
        "a.numbers": [1, 2, 3],
        "a.floats": [0.25, -1.0],
        "a.texts": ["", "x", "é\n"],
        "a.flags": [True, False],
    }
    metadata = open_model(write_gguf(tmp_path / "m.gguf", wanted, {})).metadata
    assert dict(metadata) == wanted
    assert [type(value) for value in metadata.values()] == [type(value) for value in wanted.values()]
    assert metadata.array_length("a.texts") == 3
    assert metadata.array_length("a.int") is None
    assert metadata.array_length("b") is None


def test_require_and_optional(tiny: Path) -> None:
    model = open_model(tiny)
    assert model.require("qwen35.block_count", int) == 4
    assert model.optional("qwen35.nothing", int, 3) == 3
    assert model.optional("qwen35.nothing", int) is None
    assert model.require_array("qwen35.rope.dimension_sections", int) == [5, 5, 6, 0]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda m: m.require("qwen35.nothing", str), "key qwen35.nothing is missing, expected a string"),
        (lambda m: m.require("qwen35.block_count", str), "key qwen35.block_count is 4, expected a string"),
        (lambda m: m.require("qwen35.rope.dimension_sections", int), "is an array of 4, expected an integer"),
        (lambda m: m.require_array("qwen35.rope.dimension_sections", str), "is an array of 5 and the like"),
        (lambda m: m.tensor("blk.9.attn_norm.weight"), "tensor blk.9.attn_norm.weight is missing"),
    ],
)
def test_what_a_file_lacks_is_named(tiny: Path, call: Callable[[ModelFile], object], expected: str) -> None:
    with pytest.raises(ModelFileError, match=f"tiny.gguf: .*{expected}"):
        call(open_model(tiny))


def test_a_boolean_is_not_an_integer(tmp_path: Path) -> None:
    model = open_model(write_gguf(tmp_path / "m.gguf", {"general.architecture": "x", "a": True}, {}))
    with pytest.raises(ModelFileError, match="key a is True, expected an integer"):
        model.require("a", int)


@pytest.mark.parametrize("n_missing", [1, 1000])
def test_truncated_data_says_how_many_bytes_are_missing(tiny: Path, tmp_path: Path, n_missing: int) -> None:
    last = open_model(tiny).tensor("output.weight")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[: last.offset + last.n_bytes - n_missing])
    assert refusal(cut).endswith(f": {n_missing} bytes are missing")
    assert "tensor output.weight ends at byte" in refusal(cut)


def test_padding_after_the_last_tensor_may_be_absent(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", KEYS, {"a": ((3, 1), "F32")})
    end = open_model(path).tensor("a").offset + 12
    os.truncate(path, end)
    assert open_model(path).raw("a").shape == (1, 12)


def test_every_cut_in_the_header_is_reported_as_such(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {**KEYS, **vocabulary_keys(tokens=["a"] * 40)}, shapes())
    content, cut = path.read_bytes(), tmp_path / "cut.gguf"
    header_n_bytes = min(info.offset for info in open_model(path).tensors.values())
    for n_bytes in range(4, header_n_bytes - 32, 97):
        cut.write_bytes(content[:n_bytes])
        message = refusal(cut)
        assert "truncated" in message or "cannot fit" in message


def test_a_cut_header_names_the_last_key_it_reached(tiny: Path, tmp_path: Path) -> None:
    at = tiny.read_bytes().index(b"qwen35.ssm.state_size") + len("qwen35.ssm.state_size")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[: at + 2])
    assert refusal(cut) == f"truncated: the file ends at byte {at + 2}, in the header after 'qwen35.ssm.state_size'"


@pytest.mark.parametrize(
    ("at", "data", "expected"),
    [
        (0, b"GGML", "not a GGUF file: starts with b'GGML', expected b'GGUF'"),
        (4, struct.pack("<I", 1), "GGUF version 1, expected 2 or 3"),
        (4, struct.pack("<I", 99), "GGUF version 99, expected 2 or 3"),
        (4, struct.pack(">I", 3), "big-endian GGUF, expected little-endian"),
        (8, struct.pack("<Q", 1 << 60), "cannot fit into"),
        (16, struct.pack("<Q", 1 << 60), "cannot fit into"),
    ],
)
def test_a_wrong_start(tiny: Path, tmp_path: Path, at: int, data: bytes, expected: str) -> None:
    assert expected in refusal(edited(tiny, tmp_path / "bad.gguf", at, data))


@pytest.mark.parametrize(
    ("field", "data", "expected"),
    [
        ("type", struct.pack("<I", 250), "has type number 250, expected one of F32, F16, BF16, Q8_0, Q4_K"),
        ("type", struct.pack("<I", Q3_K), "has type Q3_K, expected one of F32"),
        ("n_in", struct.pack("<Q", 255), "(Q4_K) has rows of 255, expected a multiple of 256"),
        ("n_in", struct.pack("<Q", 0), "has shape [0, 512], expected 1 to 4 positive sizes"),
        ("n_in", struct.pack("<Q", 1 << 62), "truncated: tensor blk.0.ffn_gate.weight ends at byte"),
        ("n_dims", struct.pack("<I", 1 << 30), "has 1073741824 dimensions, expected 1 to 4"),
        ("offset", struct.pack("<Q", 64), "starts at byte"),
        ("offset", struct.pack("<Q", 1 << 63), "starts at byte"),
        ("name", b"blk.0.ffn_down.weight", "tensor blk.0.ffn_down.weight occurs twice"),
        ("name", b"\xff" * 21, "expected UTF-8"),
    ],
)
def test_a_wrong_directory_entry(tiny: Path, tmp_path: Path, field: str, data: bytes, expected: str) -> None:
    at = entry_offsets(tiny, "blk.0.ffn_gate.weight")[field]
    assert expected in refusal(edited(tiny, tmp_path / "bad.gguf", at, data))


def test_rows_of_q8_0_are_multiples_of_32(tiny: Path, tmp_path: Path) -> None:
    at = entry_offsets(tiny, "blk.0.attn_gate.weight")["n_in"]
    path = edited(tiny, tmp_path / "bad.gguf", at, struct.pack("<Q", 250))
    assert "blk.0.attn_gate.weight (Q8_0) has rows of 250, expected a multiple of 32" in refusal(path)


def test_a_key_with_an_unknown_value_type(tiny: Path, tmp_path: Path) -> None:
    at = tiny.read_bytes().index(b"qwen35.ssm.state_size") + len("qwen35.ssm.state_size")
    path = edited(tiny, tmp_path / "bad.gguf", at, struct.pack("<I", 77))
    assert "key qwen35.ssm.state_size has value type 77, expected 0 to 12" in refusal(path)


def test_an_array_longer_than_the_file(tiny: Path, tmp_path: Path) -> None:
    at = tiny.read_bytes().index(b"dimension_sections") + len("dimension_sections") + 8
    for length in (1 << 40, (1 << 64) - 1):
        path = edited(tiny, tmp_path / "bad.gguf", at, struct.pack("<Q", length))
        assert "truncated" in refusal(path)


def test_a_duplicate_key(tiny: Path, tmp_path: Path) -> None:
    at = tiny.read_bytes().index(b"qwen35.ssm.state_size")
    path = edited(tiny, tmp_path / "bad.gguf", at, b"qwen35.ssm.inner_size")
    assert "key qwen35.ssm.inner_size occurs twice" in refusal(path)


def test_one_part_of_a_split_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys() | {"split.count": 3}, shapes())
    assert refusal(path) == "key split.count is 3, expected a single file: join the parts first"


def test_what_is_not_a_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.gguf") == "cannot be opened: No such file or directory"
    assert refusal(tmp_path) == "cannot be opened: Is a directory"
    (tmp_path / "empty.gguf").touch()
    assert refusal(tmp_path / "empty.gguf") == "not a GGUF file: starts with b'', expected b'GGUF'"


def test_opening_a_large_sparse_file_reads_only_its_header(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    writer = GGUFWriter(path, "qwen35")
    n_rows = 6_000_000  # 2880 bytes each: 17 GB
    writer.add_tensor_info(
        "token_embd.weight", (n_rows, 2880), np.dtype(np.uint8), n_rows * 2880, GGMLQuantizationType.Q4_K
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + n_rows * 2880)
    start = time.perf_counter()
    model = open_model(path)
    assert time.perf_counter() - start < 1.0
    assert model.raw("token_embd.weight").shape == (n_rows, 2880)
    assert model.raw("token_embd.weight")[-1].max() == 0
    assert path.stat().st_blocks * 512 < 1 << 20


def test_a_vocabulary_of_248320_tokens_opens_quickly(tmp_path: Path) -> None:
    tokens = [f"token {n}" for n in range(248_320)]
    path = write_gguf(tmp_path / "m.gguf", {**KEYS, **vocabulary_keys(tokens=tokens, merges=tokens)}, {})
    start = time.process_time()
    model = open_model(path)
    assert time.process_time() - start < 2.0  # 0.07 s measured; the plain GGUFReader took 16 s
    assert model.metadata["tokenizer.ggml.tokens"] == tokens


def test_a_header_that_claims_more_than_any_vocabulary_needs_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    path.write_bytes(start + struct.pack("<Q", 1) + b"x" + struct.pack("<IQ", 8, 1 << 32))
    os.truncate(path, 1 << 33)
    assert refusal(path) == "the header has more than 67108864 bytes after 'x', expected fewer"


def test_a_path_that_no_system_takes(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be opened: embedded null"):
        open_model(tmp_path / "a\0b")
