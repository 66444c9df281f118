"""Loading, greedy runs, requests that cannot be served, hashes, and text from bytes."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelFileError, RequestError
from engine.generate import Engine, TextStream, load_engine, logits_le32_sha256, token_ids_le64_sha256
from engine.gguf.reader import open_model
from engine.tests.models import SHAPES, Shape, write_model
from engine.tests.scalar_twin import assert_same_bits

SMALL = Shape(n_v_heads=4, n_vocab=300)
PROMPT = [7, 299, 0, 41, 41, 8]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf", SMALL, seed=5)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return load_engine(path, n_ctx=64, n_threads=1)


# Greedy runs


@pytest.fixture(scope="module")
def run(engine: Engine) -> Any:
    return engine.run(PROMPT, 12, keep_logits=True)


def test_run_returns_what_was_asked_for(run: Any) -> None:
    assert run.prompt_token_ids == PROMPT
    assert len(run.generated_token_ids) == 12
    assert run.logits.shape == (12, 300)
    assert len(run.step_time_ns) == 11
    assert run.prefill_time_ns > 0
    assert min(run.step_time_ns) > 0


def test_each_id_is_the_largest_logit_of_its_row(run: Any) -> None:
    assert run.logits.argmax(axis=1).tolist() == run.generated_token_ids
    assert_same_bits(run.logits[0], run.final_logits)
    assert run.final_greedy_token_id == run.generated_token_ids[0]
    assert len(set(run.generated_token_ids)) > 1


def test_decoded_logits_equal_a_prefill_over_the_same_ids(engine: Engine, run: Any) -> None:
    for i in (1, 6, 11):
        _, logits = engine.prefill(PROMPT + run.generated_token_ids[:i])
        assert_same_bits(run.logits[i], logits)


def test_both_prefills_and_repeats_give_the_same_run(engine: Engine, run: Any) -> None:
    for prefill in ("layer_major", "token_major", "layer_major"):
        again = engine.run(PROMPT, 12, prefill=prefill, keep_logits=True)
        assert again.generated_token_ids == run.generated_token_ids
        assert_same_bits(again.logits, run.logits)


@pytest.mark.parametrize(("n_ctx", "n_threads"), [(17, 1), (2048, 2)])
def test_context_capacity_and_threads_do_not_matter(path: Path, run: Any, n_ctx: int, n_threads: int) -> None:
    again = load_engine(path, n_ctx=n_ctx, n_threads=n_threads).run(PROMPT, 12, keep_logits=True)
    assert again.generated_token_ids == run.generated_token_ids
    assert_same_bits(again.logits, run.logits)


def test_a_run_does_not_depend_on_the_one_before(engine: Engine, run: Any) -> None:
    other = engine.run([1, 2, 3], 5)
    assert other.generated_token_ids != run.generated_token_ids[:5]
    assert engine.run(PROMPT, 12).generated_token_ids == run.generated_token_ids


def test_prompts_longer_than_a_prefill_chunk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(path, n_ctx=64, n_threads=1)
    ids = [int(t) for t in np.random.default_rng(0).integers(0, 300, 23)]
    _, whole = engine.prefill(ids)
    monkeypatch.setattr("engine.generate.N_CHUNK", 10)
    state, chunked = engine.prefill(ids)
    assert state.n_past == 23
    assert_same_bits(chunked, whole)


def test_an_open_file_serves_as_well_as_its_path(path: Path, run: Any) -> None:
    engine = load_engine(open_model(path), n_ctx=64, n_threads=1)
    assert engine.run(PROMPT, 3).generated_token_ids == run.generated_token_ids[:3]


def test_logits_are_kept_only_on_request(engine: Engine) -> None:
    assert engine.run(PROMPT, 2).logits is None


def test_on_token_sees_every_id_in_order(engine: Engine, run: Any) -> None:
    seen: list[int] = []
    engine.run(PROMPT, 5, on_token=seen.append)
    assert seen == run.generated_token_ids[:5]


def test_an_end_id_is_the_last_one_generated(engine: Engine, run: Any) -> None:
    ids = run.generated_token_ids
    end = ids[4]
    stopped = engine.run(PROMPT, 12, end_ids=frozenset({end, 299}), keep_logits=True)
    assert stopped.generated_token_ids == ids[: ids.index(end) + 1]
    assert stopped.logits is not None
    assert len(stopped.logits) == len(stopped.generated_token_ids)
    assert len(stopped.step_time_ns) == len(stopped.generated_token_ids) - 1


def test_forced_ids_are_fed_and_chosen_ids_returned(engine: Engine, run: Any) -> None:
    forced = [3, 1, 4, 1, 5]
    taught = engine.run(PROMPT, 6, force_ids=forced, keep_logits=True)
    assert taught.logits is not None
    assert taught.generated_token_ids[0] == run.generated_token_ids[0]
    assert taught.generated_token_ids == taught.logits.argmax(axis=1).tolist()
    _, logits = engine.prefill(PROMPT + forced)
    assert_same_bits(taught.logits[5], logits)


def test_forcing_the_ids_of_a_free_run_changes_nothing(engine: Engine, run: Any) -> None:
    again = engine.run(PROMPT, 12, force_ids=run.generated_token_ids, keep_logits=True)
    assert again.generated_token_ids == run.generated_token_ids
    assert_same_bits(again.logits, run.logits)


def test_greedy_takes_the_lowest_id_on_a_tie(engine: Engine) -> None:
    assert engine.greedy(np.array([0, 3, 3, 1, 3], dtype=np.float32)) == 1
    assert engine.greedy(np.array([-1, -0.0, 0.0], dtype=np.float32)) == 1
    assert engine.greedy(np.array([-5, -5], dtype=np.float32)) == 0


def test_the_whole_context_can_be_used(path: Path) -> None:
    engine = load_engine(path, n_ctx=8, n_threads=1)
    assert len(engine.run(PROMPT, 3).generated_token_ids) == 3  # the last id needs no place
    assert engine.prefill([*PROMPT, 1, 2])[0].n_past == 8


# Requests that cannot be served


def message(engine: Engine, *args: Any, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        engine.run(*args, **options)
    return str(caught.value)


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    assert message(engine, [], 3) == "the prompt has no tokens, expected at least 1"
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        engine.prefill([])


def test_ids_out_of_range_are_refused(engine: Engine) -> None:
    assert message(engine, [1, 300], 3) == "token id 300 at position 1 is not in 0..299"
    assert message(engine, [-1], 3) == "token id -1 at position 0 is not in 0..299"


def test_a_context_too_small_is_refused(engine: Engine) -> None:
    assert message(engine, [1] * 60, 6) == ("60 prompt tokens and 5 decode steps need -c 65, the context has 64")
    with pytest.raises(RequestError) as caught:
        engine.prefill([1] * 65)
    assert str(caught.value) == "65 prompt tokens and 0 decode steps need -c 65, the context has 64"


def test_a_request_for_no_tokens_is_refused(engine: Engine) -> None:
    assert message(engine, [1], 0) == "-n is 0, expected at least 1"


def test_too_few_forced_ids_are_refused(engine: Engine) -> None:
    assert message(engine, [1], 4, force_ids=[1, 2]) == "2 forced ids for 4 tokens, expected 3"


def test_a_forced_id_out_of_range_is_refused(engine: Engine) -> None:
    assert message(engine, [1], 3, force_ids=[1, 300]).startswith("token id 300 at position 1 ")


def test_a_bad_context_or_backend_is_refused(path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        load_engine(path, n_ctx=0)
    assert str(caught.value) == "-c is 0, expected 1 to 1600000"
    with pytest.raises(RequestError, match=r"^--backend is 'metal', expected one of: numpy"):
        load_engine(path, n_ctx=8, backend="metal")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"^absent\.gguf: cannot be opened: "):
        load_engine(tmp_path / "absent.gguf", n_ctx=8)


def test_progress_adds_up_to_the_bytes_loaded(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tied.gguf", next(shape for shape in SHAPES.values() if shape.output is None))
    sizes: list[int] = []
    engine = load_engine(path, n_ctx=8, n_threads=1, progress=sizes.append)
    assert sum(sizes) == sum(info.n_bytes for info in engine.model.tensors.values())


# Hashes


def test_hash_of_ids_is_over_little_endian_64_bit_integers() -> None:
    ids = [0, 1, 248319]
    assert token_ids_le64_sha256(ids) == hashlib.sha256(struct.pack("<3q", *ids)).hexdigest()
    assert token_ids_le64_sha256([]) == hashlib.sha256(b"").hexdigest()


def test_hash_of_logits_is_over_little_endian_binary32(run: Any) -> None:
    packed = struct.pack("<300f", *run.final_logits.tolist())
    assert run.final_logits_le32_sha256 == hashlib.sha256(packed).hexdigest()
    assert logits_le32_sha256(np.array([0.0], np.float32)) != logits_le32_sha256(np.array([-0.0], np.float32))
    assert run.generated_token_ids_le64_sha256 == token_ids_le64_sha256(run.generated_token_ids)


# Text


def stream(pieces: list[bytes]) -> list[bytes]:
    text = TextStream()
    return [*(text.feed(piece) for piece in pieces), text.finish()]


def test_a_character_split_over_tokens_is_held_back() -> None:
    assert stream([b"a", b"\xe4", b"\xbd", b"\xa0!"]) == [b"a", b"", b"", "你!".encode(), b""]
    assert stream(["🙂".encode()[:2], "🙂".encode()[2:] + b"x"]) == [b"", "🙂x".encode(), b""]


def test_bytes_that_are_no_characters_are_kept() -> None:
    assert stream([b"a\xff", b"b"]) == [b"a\xff", b"b", b""]
    assert stream([b"\xe4\xbd", b"z"]) == [b"", b"\xe4\xbdz", b""]
    assert stream([b"\xed\xa0\x80", b"\xc0\x80"]) == [b"\xed\xa0\x80", b"\xc0\x80", b""]


def test_a_character_that_never_ends_comes_out_at_the_end() -> None:
    assert stream([b"ok\xf0\x9f"]) == [b"ok", b"\xf0\x9f"]
    assert stream([]) == [b""]
