"""Our tokenizer on the real Qwen3.5 vocabulary, against llama.cpp b8763 and the package it comes from."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from baselines.llama_cpp.build import BuildOptions, ensure_build
from baselines.llama_cpp.progress import PlainProgress
from baselines.llama_cpp.worker import tokenize
from conformance.tests.qwen_vocabulary import N_VOCAB, load, qwen_keys, texts, unreachable_words
from engine.gguf.reader import open_model
from engine.gguf.tokenizer import Tokenizer
from engine.tests.tiny_gguf import AWKWARD, KEYS, write_gguf

TEXTS = [*AWKWARD, *texts(10_000)]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return load()


@pytest.fixture(scope="module")
def model(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("qwen") / "vocabulary.gguf", KEYS | qwen_keys(theirs), {})


@pytest.fixture(scope="module")
def ours(model: Path) -> Tokenizer:
    return Tokenizer.from_model(open_model(model))


def test_vocabulary_is_the_real_one(ours: Tokenizer) -> None:
    assert len(ours.vocabulary) == N_VOCAB
    assert ours.encode("<|im_end|>") == [248046]


@pytest.mark.baseline
def test_ids_equal_llama_cpp(ours: Tokenizer, theirs: Any, model: Path) -> None:
    all_texts = [*TEXTS, *unreachable_words(theirs)]
    expected = tokenize(ensure_build(BuildOptions(), PlainProgress(print)), model, all_texts)
    differing = [text for text, ids in zip(all_texts, expected, strict=True) if ours.encode(text) != ids]
    assert differing == []


def test_ids_equal_the_package_s(ours: Tokenizer, theirs: Any) -> None:
    # the package composes characters (NFC) before it splits, llama.cpp and we take the text as it is
    composed = [unicodedata.normalize("NFC", text) for text in TEXTS]
    differing = [text for text in composed if ours.encode(text) != theirs.encode(text)]
    assert differing == []


def test_words_that_only_the_package_has_as_one_token(ours: Tokenizer, theirs: Any) -> None:
    words = unreachable_words(theirs)
    assert len(words) == 83
    assert {len(theirs.encode(word)) for word in words} == {1}
    assert min(len(ours.encode(word)) for word in words) > 1


def test_decoding_gives_the_text_back(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode_bytes(ids, special=True).decode() == text
        assert theirs.decode(ids) == text
