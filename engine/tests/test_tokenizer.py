from __future__ import annotations

import json
import sys
import unicodedata
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFileError, RequestError
from engine.gguf.reader import open_model
from engine.gguf.tokenizer import Tokenizer
from engine.gguf.vocabulary import byte_alphabet
from engine.tests.tiny_gguf import AWKWARD, KEYS, SPECIALS, vocabulary, vocabulary_keys, write_gguf

TOKENS = vocabulary()[0]
IDS = {name: TOKENS.index(name) for name in SPECIALS}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def make(**changes: Any) -> Tokenizer:
        return Tokenizer.from_model(open_model(write_gguf(tmp_path / "m.gguf", KEYS | vocabulary_keys(**changes), {})))

    return make


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "m.gguf"
    return Tokenizer.from_model(open_model(write_gguf(path, KEYS | vocabulary_keys(), {})))


# Ids that llama.cpp b8763 gave for the same vocabulary; conformance compares the whole of AWKWARD with it.
GOLDEN = {
    "hello": [262, 75, 75, 78],
    " hello  world   !": [220, 262, 75, 75, 78, 220, 269, 263, 75, 67, 293, 220, 0],
    "The quick brown fox jumps over the lazy dog.": [314, 573, 567, 500, 569, 572, 294, 570, 504, 13],
    "a\nb\n\nc\r\nd\re\n\n\n": [64, 198, 65, 287, 66, 201, 198, 67, 201, 68, 518],
    "trailing spaces   ": [83, 81, 64, 72, 75, 327, 70, 290, 79, 64, 66, 68, 82, 293, 220],
    "\r\n\r\n  x": [201, 198, 201, 198, 220, 291],
    "déjà vu naïve façade señor coração": [67, 395, 254, 452, 571, 588, 594, 568],
    "a\u0301b\u0301c\u0301": [64, 397, 65, 397, 66, 397],
    "大模型在显存中运行,逐位相等。": [615, 11, 603, 515],
    "日本語のテキスト カタカナ ガ": [602, 488, 388, 230, 220, 267, 104, 267, 123, 267, 104, 282, 232, 220, 267, 105],
    " !  !!   !!!": [220, 0, 220, 220, 0, 0, 293, 220, 0, 0, 0],
    "x\u00a0y\u2003z\u3000w\u2028v\u0085u\u202ft": [
        *(87, 126, 254, 88, 266, 225, 89, 281, 222, 86, 266, 101, 85, 126, 227, 84, 266, 107, 83),
    ],
    "new in Unicode 16: \u1c89\ua7cb\U00010d40\U000116d0 x": [
        *(335, 86, 220, 327, 220, 52, 77, 72, 66, 78, 273, 220, 16, 21, 25, 220, 157, 110, 231, 166, 253, 233),
        *(172, 238, 113, 222, 172, 239, 249, 238, 291),
    ],
    "<|im_start|> <|im_start <|im <|im_end|>>": [618, 220, 622, 62, 82, 83, 315, 83, 220, 622, 220, 619, 29],
    "a<|endoftext|>'s b": [64, 617, 301, 220, 65],
}


@pytest.mark.parametrize("text", GOLDEN)
def test_ids_are_those_of_llama_cpp(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == GOLDEN[text]


@pytest.mark.parametrize("parse_special", [True, False])
def test_every_text_comes_back(tokenizer: Tokenizer, parse_special: bool) -> None:
    for text in AWKWARD:
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert tokenizer.decode_bytes(ids, special=True).decode() == text


def test_control_tokens_need_parse_special_and_user_defined_ones_do_not(tokenizer: Tokenizer) -> None:
    parsed = tokenizer.encode("<|im_end|><think>")
    plain = tokenizer.encode("<|im_end|><think>", parse_special=False)
    assert parsed == [IDS["<|im_end|>"], IDS["<think>"]]
    assert plain[0] == IDS["<|im"]  # a user-defined token that is the start of a control token
    assert plain[-1] == IDS["<think>"]
    assert IDS["<|im_end|>"] not in plain


def test_a_well_known_end_token_is_a_control_token_whatever_its_type(make: Any) -> None:
    tokenizer = make(token_type=[1] * len(TOKENS), eos_token_id=None)
    assert tokenizer.encode("<|im_end|>") == [IDS["<|im_end|>"]]
    assert tokenizer.token_bytes(IDS["<|im_end|>"]) == b""
    assert IDS["<|im_start|>"] not in tokenizer.encode("<|im_start|>")


def test_bytes_of_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(TOKENS.index("Ġ")) == b" "
    assert tokenizer.token_bytes(TOKENS.index("Ċ")) == b"\n"
    assert tokenizer.token_bytes(IDS["<|im_end|>"]) == b""
    assert tokenizer.token_bytes(IDS["<|im_end|>"], special=True) == b"<|im_end|>"
    assert tokenizer.token_bytes(IDS["<think>"]) == b"<think>"
    assert tokenizer.token_bytes(IDS["<|fim_pad|>"]) == b""  # user-defined, but known as a control token
    assert tokenizer.token_bytes(TOKENS.index("[PAD]")) == b""
    assert tokenizer.decode_bytes(tokenizer.encode("é🙂")) == "é🙂".encode()
    assert b"".join(tokenizer.token_bytes(id_) for id_ in tokenizer.encode("🙂 模")) == "🙂 模".encode()


def test_unusual_tokens_print_as_llama_cpp_prints_them(make: Any) -> None:
    tokens = [*TOKENS, "", "<0x41>", "a b"]
    types = [*vocabulary()[1], 1, 6, 1]
    tokenizer = make(tokens=tokens, token_type=types)
    assert tokenizer.token_bytes(len(TOKENS)) == f"[EMPTY_{len(TOKENS)}]".encode()
    assert tokenizer.token_bytes(len(TOKENS) + 1) == b"A"
    assert tokenizer.token_bytes(len(TOKENS) + 2) == b"a[UNK_BYTE_0x20a b]b"


def test_an_id_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    for id_ in (-1, len(TOKENS)):
        with pytest.raises(RequestError, match=f"token id {id_} is not in the vocabulary of {len(TOKENS)} tokens"):
            tokenizer.token_bytes(id_)


def test_end_ids(tokenizer: Tokenizer, make: Any) -> None:
    known = {IDS["<|endoftext|>"], IDS["<|im_end|>"], IDS["<|fim_pad|>"]}
    assert tokenizer.end_ids == known
    assert make(eos_token_id=7, eot_token_id=8).end_ids == known | {7, 8}
    assert make(eos_token_id=None).end_ids == known | {11}  # llama.cpp's default for such a vocabulary
    assert make(eos_token_id=10**6).end_ids == known | {11}


def test_bos_and_eos_are_added_when_the_file_says_so(make: Any) -> None:
    tokenizer = make(bos_token_id=5, add_bos_token=True, add_eos_token=True)
    assert tokenizer.encode("hello") == [5, 262, 75, 75, 78, IDS["<|im_end|>"]]
    assert tokenizer.encode("hello", add_special=False) == [262, 75, 75, 78]
    assert tokenizer.encode("") == [5, IDS["<|im_end|>"]]


def test_bytes_without_a_token_are_dropped_and_block_merges(make: Any) -> None:
    without_l = [token for token in TOKENS if token != "l"]
    tokenizer = make(tokens=without_l, token_type=[1] * len(without_l), eos_token_id=None)
    assert tokenizer.decode_bytes(tokenizer.encode("hello")) == b"heo"


def test_a_merge_without_a_token_falls_back_to_its_characters(make: Any) -> None:
    without_he = [token for token in TOKENS if token != "he"]
    tokenizer = make(tokens=without_he, token_type=[1] * len(without_he), eos_token_id=None)
    assert tokenizer.decode_bytes(tokenizer.encode("hello the")) == b"hello the"
    assert tokenizer.encode("he") == [TOKENS.index("h"), TOKENS.index("e")]


def test_of_equal_merges_the_first_counts(make: Any) -> None:
    merges = vocabulary()[2]
    assert make(merges=[*merges, *reversed(merges)]).encode(AWKWARD[5]) == GOLDEN[AWKWARD[5]]


def test_escaped_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    broken = b"a\xe4\xbdb\xff".decode("utf-8", "surrogateescape")
    assert tokenizer.encode(broken) == tokenizer.encode("a\ufffd\ufffdb\ufffd")
    whole = "模".encode().decode("ascii", "surrogateescape")
    assert tokenizer.encode(whole) == tokenizer.encode("模")


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate, U\+D800 at character 2"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": None}, "key tokenizer.ggml.model is missing, expected a string"),
        ({"model": "none"}, "key tokenizer.ggml.model is 'none', expected 'gpt2' (byte-level BPE)"),
        ({"pre": None}, "key tokenizer.ggml.pre is missing, expected a string"),
        ({"pre": "llama-bpe"}, "key tokenizer.ggml.pre is 'llama-bpe', expected qwen35"),
        ({"tokens": None}, "key tokenizer.ggml.tokens is missing, expected an array"),
        (
            {"tokens": [1, 2]},
            "key tokenizer.ggml.tokens is an array of 1 and the like, expected each entry to be a string",
        ),
        ({"tokens": ["a", "b", "a"]}, "key tokenizer.ggml.tokens has 'a' twice, expected distinct tokens"),
        ({"tokens": ["a", b"\xff"]}, "key tokenizer.ggml.tokens has entry 1 b'\\xff', expected UTF-8"),
        ({"token_type": [1, 1]}, f"key tokenizer.ggml.token_type has 2 entries, expected {len(TOKENS)}"),
        ({"merges": None}, "key tokenizer.ggml.merges is missing, expected an array"),
    ],
)
def test_files_without_a_usable_tokenizer(make: Any, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        make(**changes)
    assert str(caught.value) == f"m.gguf: {expected}"


def test_the_byte_alphabet_is_a_bijection() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["Ń"], alphabet["~"]) == (0x20, 0x0A, 0xAD, ord("~"))


def test_character_classes_are_those_of_unicode_15_1() -> None:
    """Compare with the running Python's tables where it has the same or an earlier version."""
    table = json.loads(files("engine.gguf").joinpath("unicode_15_1.json").read_text())
    classes = {code: name for name in "LMN" for span in table[name].split() for code in code_points(span)}
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category != "Cn" and unicodedata.unidata_version < "16":
            expected = category[0] if category[0] in "LMN" else None
            assert classes.get(code) == expected, f"U+{code:04X}"
    assert classes[0x2EBF0] == "L"  # new in 15.1
    assert 0x1C89 not in classes  # new in 16


def code_points(span: str) -> range:
    first, _, last = span.partition("-")
    return range(int(first, 16), int(last or first, 16) + 1)
