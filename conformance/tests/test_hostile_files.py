"""Malformed model files: one exact line for each, quickly, in little memory, and before any device is opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baselines.llama_cpp.build import BuildOptions, ensure_build
from baselines.llama_cpp.progress import PlainProgress
from conformance.hostile import gguf_bytes
from conformance.hostile.cases import CASES, Case
from conformance.hostile.engine_runs import REACHED, EngineRun, run_engine
from conformance.hostile.verdicts import (
    DATA_PATH,
    PAGE_PATH,
    engine_commands,
    explained,
    llama_verdicts,
    make_all,
    read_verdicts,
    render_page,
)
from engine.errors import ModelFileError
from engine.generate import load_engine
from engine.gguf.reader import open_model
from engine.gguf.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MIN_N_CASES = 60
MAX_CPU_TIME_S = 1.0
MAX_PEAK_N_BYTES = 200_000_000
MAX_FILE_N_BYTES = 1_000_000


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = make_all(tmp_path_factory.mktemp("hostile"))
    return {case.id: path for case, path in zip(CASES, made, strict=True)}


def runs_by_id(paths: dict[str, Path], *options: str) -> dict[str, EngineRun]:
    return dict(zip(paths, run_engine(engine_commands(list(paths.values()), *options)), strict=True))


@pytest.fixture(scope="module")
def runs(paths: dict[str, Path]) -> dict[str, EngineRun]:
    """What the command line does with each file on the NumPy backend."""
    return runs_by_id(paths)


@pytest.fixture(scope="module")
def cuda_runs(paths: dict[str, Path]) -> dict[str, EngineRun]:
    """The same on the CUDA backend, with what would open the device replaced by what says so."""
    return runs_by_id(paths, "--backend", "cuda")


def test_the_corpus_is_large_and_its_files_are_small(paths: dict[str, Path]) -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= MIN_N_CASES
    sizes = [path.stat().st_size for path in paths.values() if path.is_file()]
    assert max(sizes) < MAX_FILE_N_BYTES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_file_gets_its_verdict(case: Case, paths: dict[str, Path], runs: dict[str, EngineRun]) -> None:
    run = runs[case.id]
    expected = (0, "") if case.is_accepted else (1, case.error(paths[case.id]))
    assert (run.exit_code, run.err.strip()) == expected
    assert run.cpu_time_s < MAX_CPU_TIME_S
    assert run.peak_memory_n_bytes < MAX_PEAK_N_BYTES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_only_a_sound_file_reaches_the_device(case: Case, cuda_runs: dict[str, EngineRun]) -> None:
    run = cuda_runs[case.id]
    assert run.exit_code == (3 if case.is_accepted else 1)
    assert (REACHED in run.err) == case.is_accepted


def test_a_message_names_file_and_what_is_expected() -> None:
    messages = {case.id: case.message for case in CASES if case.message is not None}
    plain = ("expected", "truncated: ", "is missing", "cannot fit into", "cannot be opened", "is unknown in")
    assert [id_ for id_, message in messages.items() if not any(part in message for part in plain)] == []
    assert all(message.isprintable() for message in messages.values())


def test_every_cut_of_the_header_is_refused(tmp_path: Path) -> None:
    content = gguf_bytes.sound().build()
    path = tmp_path / "cut.gguf"
    for n_bytes in range(gguf_bytes.sound().boundaries()["padding"]):
        path.write_bytes(content[:n_bytes])
        with pytest.raises(ModelFileError, match=r"^cut\.gguf: (truncated: |not a GGUF file: |28 tensors and 25 keys)"):
            open_model(path)


def test_a_byte_changed_anywhere_in_the_header_is_no_other_error(tmp_path: Path) -> None:
    content = gguf_bytes.sound().build()
    path = tmp_path / "changed.gguf"
    n_refused = 0
    for at in range(gguf_bytes.sound().boundaries()["padding"]):
        changed = bytearray(content)
        changed[at] ^= 0xFF
        path.write_bytes(changed)
        try:
            Tokenizer.from_model(open_model(path))
        except ModelFileError:
            n_refused += 1
    assert n_refused > 1000


# A file that shrinks while it is in use: reading what is gone would end the process with SIGBUS.


def shrunk(path: Path, n_bytes: int) -> str:
    os.truncate(path, n_bytes)
    return f"case.gguf: the file shrank to {n_bytes} bytes while it was in use, expected 74848"


def test_a_file_that_shrinks_before_loading(paths: dict[str, Path], tmp_path: Path) -> None:
    path = CASES[0].make(tmp_path)
    model = open_model(path)
    message = shrunk(path, 4096)
    with pytest.raises(ModelFileError) as caught:
        load_engine(model, n_ctx=8)
    assert str(caught.value) == message
    assert Tokenizer.from_model(model).encode("ab") == [28]  # the header is a copy


def test_a_file_that_shrinks_between_two_tokens(tmp_path: Path) -> None:
    path = CASES[0].make(tmp_path)
    engine = load_engine(path, n_ctx=8, n_threads=1)
    message = shrunk(path, 0)
    with pytest.raises(ModelFileError) as caught:
        engine.run([0], 3)
    assert str(caught.value) == message
    path = CASES[0].make(tmp_path)
    engine = load_engine(path, n_ctx=8, n_threads=1)
    with pytest.raises(ModelFileError) as caught:
        engine.run([0], 3, on_token=lambda token: os.truncate(path, 0))
    assert str(caught.value) == message


# llama.cpp beside it


def test_the_page_is_what_the_recorded_verdicts_make() -> None:
    verdicts = read_verdicts(ROOT / DATA_PATH)
    assert list(verdicts.cases) == [case.id for case in CASES]
    assert (ROOT / PAGE_PATH).read_text() == render_page(verdicts)


def test_every_disagreement_is_explained() -> None:
    theirs = read_verdicts(ROOT / DATA_PATH).cases
    assert [case.id for case in CASES if not explained(case, theirs[case.id])] == []


@pytest.mark.baseline
def test_llama_cpp_does_what_was_recorded() -> None:
    build = ensure_build(BuildOptions(), PlainProgress(print))
    recorded = read_verdicts(ROOT / DATA_PATH)
    found = llama_verdicts(build, PlainProgress(print))
    if found.architecture == recorded.architecture:
        assert {id_: one.verdict for id_, one in found.cases.items()} == {
            id_: one.verdict for id_, one in recorded.cases.items()
        }
    else:  # a division by zero, say, traps on some processors only
        assert {id_ for id_, one in found.cases.items() if one.verdict == "refuses"} >= {
            id_ for id_, one in recorded.cases.items() if one.verdict == "refuses"
        }
