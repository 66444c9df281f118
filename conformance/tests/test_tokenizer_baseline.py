"""Token ids of the engine against those of the pinned llama.cpp, on the same vocabulary."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest

from baselines.llama_cpp.build import BuildOptions, LlamaBuild, ensure_build
from baselines.llama_cpp.progress import PlainProgress
from baselines.llama_cpp.worker import tokenize
from engine.gguf.reader import open_model
from engine.gguf.tokenizer import Tokenizer
from engine.tests.tiny_gguf import AWKWARD, CORPUS, KEYS, SPECIALS, shapes, vocabulary, vocabulary_keys, write_gguf

pytestmark = pytest.mark.baseline

# Written as bytes: what a terminal or a file may hold although it is not UTF-8.
BROKEN = (b"a\xe4\xbdb\xff", b"\x80\x81 \xc3", b"ok \xf0\x9f\x98 \xe2\x82\xac", b"\xe6\xa8\xa1\xe5\x9e<|im_end|>\xff")


@pytest.fixture(scope="session")
def llama_build() -> LlamaBuild:
    return ensure_build(BuildOptions(), PlainProgress(print))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "m.gguf"
    return write_gguf(path, KEYS | vocabulary_keys(), shapes(n_vocab=len(vocabulary()[0])))


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary without some bytes and merge results, with merges twice, and bos and eos around a text."""
    tokens, types, merges = vocabulary()
    dropped = {"a", "Ġ", "the", tokens[300], tokens[320], tokens[340]}
    kept = [(token, kind) for token, kind in zip(tokens, types, strict=True) if token not in dropped]
    changed = vocabulary_keys(
        tokens=[*(token for token, _ in kept), "", "<0x41>", "<|fim_prefix|>"],
        token_type=[*(kind for _, kind in kept), 1, 6, 1],
        merges=[merges[5], *merges, merges[0]],
        bos_token_id=5,
        add_bos_token=True,
        add_eos_token=True,
    )
    path = tmp_path_factory.mktemp("tokenizer") / "odd.gguf"
    return write_gguf(path, KEYS | changed, shapes(n_vocab=len(kept) + 3))


def random_texts(n_texts: int) -> list[str]:
    """Mix ASCII, special tokens and assigned characters of every general category."""
    rng = random.Random(7)
    by_category: dict[str, list[str]] = {}
    for code in range(0x110000):
        by_category.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    del by_category["Cs"]
    pools = [[chr(code) for code in range(128)], list(" \n\t\r'"), list(SPECIALS), *by_category.values()]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 40))) for _ in range(n_texts)]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("which", ["model", "odd_model"])
def test_ids_equal_llama_cpp(
    llama_build: LlamaBuild, which: str, special: bool, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    texts = [*AWKWARD, *CORPUS, *random_texts(500)]
    assert len(AWKWARD) >= 40
    expected = tokenize(llama_build, path, texts, add_special=special, parse_special=special)
    tokenizer = Tokenizer.from_model(open_model(path))
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, special, special) == ids, repr(text)


def test_ids_of_broken_utf8_equal_llama_cpp(llama_build: LlamaBuild, model: Path) -> None:
    expected = tokenize(llama_build, model, BROKEN)
    tokenizer = Tokenizer.from_model(open_model(model))
    assert [tokenizer.encode(data.decode("utf-8", "surrogateescape")) for data in BROKEN] == expected
