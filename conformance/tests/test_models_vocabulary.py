from __future__ import annotations

import pytest
from gguf import TokenType

from conformance.models import PRESETS, prompt_ids
from conformance.models.vocabulary import CONTROL_TOKENS, build_vocabulary, byte_alphabet


@pytest.mark.parametrize("n_vocab", [512, 2048, 16384])
def test_tokens_are_distinct_and_fill_the_vocabulary(n_vocab: int) -> None:
    vocabulary = build_vocabulary(n_vocab)
    assert len(vocabulary.tokens) == len(vocabulary.types) == len(set(vocabulary.tokens)) == n_vocab
    controls = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.CONTROL]
    assert tuple(controls) == CONTROL_TOKENS


def test_byte_alphabet_is_the_one_of_gpt2() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet.values())) == 256
    assert (alphabet[0x41], alphabet[0x20], alphabet[0x0A], alphabet[0xAD]) == ("A", "Ġ", "Ċ", "Ń")


def test_each_merge_joins_known_tokens_to_a_known_token() -> None:
    vocabulary = build_vocabulary(2048)
    known = set(byte_alphabet().values())
    for merge in vocabulary.merges:
        left, right = merge.split(" ")
        assert {left, right} <= known
        known.add(left + right)
    assert known <= set(vocabulary.tokens)


def test_merges_cover_more_than_one_script() -> None:
    to_byte = {character: byte for byte, character in byte_alphabet().items()}
    texts = [bytes(to_byte[c] for c in token) for token in build_vocabulary(2048).tokens[256:1056]]
    decoded = [text.decode(errors="ignore") for text in texts]
    assert " the" in decoded
    assert any("\u0400" <= character < "\u0500" for text in decoded for character in text)
    assert any("\u4e00" <= character < "\ua000" for text in decoded for character in text)


def test_speakable_ids_decode_to_printable_text() -> None:
    vocabulary = build_vocabulary(2048)
    to_byte = {character: byte for byte, character in byte_alphabet().items()}
    for token_id in vocabulary.speakable_ids:
        assert bytes(to_byte[c] for c in vocabulary.tokens[token_id]).decode().isprintable()


def test_prompts_are_pinned() -> None:
    assert prompt_ids(PRESETS["tiny"], 0)[:8] == [616, 256, 580, 1288, 1105, 658, 1679, 1472]
    assert prompt_ids(PRESETS["tiny"], 1) != prompt_ids(PRESETS["tiny"], 0)


@pytest.mark.parametrize("kind", PRESETS)
def test_prompts_have_70_printable_ids(kind: str) -> None:
    ids = prompt_ids(PRESETS[kind])
    assert len(ids) == 70
    assert set(ids) <= set(build_vocabulary(PRESETS[kind].n_vocab).speakable_ids)
