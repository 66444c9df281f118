"""Byte-level BPE tokenizer built from a GGUF's own metadata; its ids equal those of llama.cpp b8763.

The `tokenizers` library splits words and merges. What llama.cpp does around that is done here: special tokens
are cut out of the text first, the longest first; characters are classed by Unicode 15.1 whatever version the
library knows; a piece that merges make but the vocabulary lacks becomes the ids of its ASCII characters.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import tokenizers
from tokenizers import models, pre_tokenizers

from engine.errors import RequestError
from engine.gguf.reader import ModelFile
from engine.gguf.vocabulary import Vocabulary, byte_alphabet

__all__ = ["SUPPORTED_PRE_TOKENIZERS", "Tokenizer", "word_splitter"]

SUPPORTED_PRE_TOKENIZERS = ("qwen35",)

_CLASSES_FILE = "unicode_15_1.json"
_WHITESPACE = r"\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_SINGLE_BYTES = "engine.gguf.single-bytes"


class Tokenizer:
    """Turns text into token ids and back; build one with `Tokenizer.from_model`."""

    def __init__(self, vocabulary: Vocabulary, bpe: _BytePairs, *, add_bos: bool, add_eos: bool) -> None:
        self.vocabulary = vocabulary
        self._bpe = bpe
        self._prefix = _present(vocabulary.bos_id if add_bos else None)
        self._suffix = _present(vocabulary.eos_id if add_eos else None)
        self._specials = [(id_, vocabulary.texts[id_]) for id_ in vocabulary.special_ids()]

    @classmethod
    def from_model(cls, model: ModelFile) -> Tokenizer:
        """Build the tokenizer `model` describes.

        Raises ModelFileError naming the key when the file has no tokenizer, one of another kind, or one whose
        token lists do not fit together.
        """
        _check_kind(model)
        vocabulary = Vocabulary(model)
        return cls(
            vocabulary,
            _BytePairs(vocabulary, model.require_array("tokenizer.ggml.merges", str)),
            add_bos=model.optional("tokenizer.ggml.add_bos_token", bool, False),
            add_eos=model.optional("tokenizer.ggml.add_eos_token", bool, False),
        )

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation: end of text, end of turn and their like."""
        return self.vocabulary.end_ids

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of `text`.

        add_special puts the bos and eos ids around it if the model asks for them. With parse_special, the
        text of a control token stands for that token; user-defined tokens are recognised either way.
        Escaped bytes (`surrogateescape`) that are not UTF-8 count as U+FFFD each. Raises RequestError for
        any other lone surrogate.
        """
        ids: list[int] = []
        for part in self._partition(_valid_text(text), parse_special):
            ids += [part] if isinstance(part, int) else self._bpe.encode(part)
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def token_bytes(self, token_id: int, special: bool = False) -> bytes:
        """Return the bytes of one token; control tokens are empty unless `special`. RequestError if no id."""
        if not 0 <= token_id < len(self.vocabulary):
            raise RequestError(f"token id {token_id} is not in the vocabulary of {len(self.vocabulary)} tokens")
        return self.vocabulary.token_bytes(token_id, special)

    def decode_bytes(self, ids: Iterable[int], special: bool = False) -> bytes:
        """Return the bytes of `ids`, which need not be valid UTF-8; control tokens as in `token_bytes`."""
        return b"".join(self.token_bytes(id_, special) for id_ in ids)

    def _partition(self, text: str, parse_special: bool) -> list[str | int]:
        """Split text around special tokens: strings are still to be encoded, integers are final ids."""
        parts: list[str | int] = [text]
        for id_, special in self._specials:
            if special in text and (parse_special or id_ not in self.vocabulary.control_ids):
                parts = [piece for part in parts for piece in _cut(part, special, id_)]
        return [part for part in parts if part != ""]


class _BytePairs:
    """Word splitting and merging, without special tokens.

    llama.cpp applies a merge even when the result is no token, and lets a character without a token block
    merges across it. Such pieces get ids past the vocabulary here, and each is replaced by the ids of its
    ASCII characters afterwards.
    """

    def __init__(self, vocabulary: Vocabulary, merges: list[str]) -> None:
        halves = (merge.partition(" ") for merge in merges)
        pairs = list({(left, right): None for left, _, right in halves if left and right})  # first one counts
        pieces = {piece for left, right in pairs for piece in (left, right, left + right)}
        missing = sorted(pieces.union(byte_alphabet()) - vocabulary.ids.keys())
        extra = {piece: len(vocabulary) + n for n, piece in enumerate(missing)}
        ascii_ids = {char: vocabulary.ids[char] for char in map(chr, range(128)) if char in vocabulary.ids}
        self._fallback = {id_: [ascii_ids[char] for char in piece if char in ascii_ids] for piece, id_ in extra.items()}
        self._backend = tokenizers.Tokenizer(models.BPE({**vocabulary.ids, **extra}, pairs))
        self._backend.pre_tokenizer = word_splitter()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text that holds no special token."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if not self._fallback or self._fallback.keys().isdisjoint(ids):
            return ids
        return [final for id_ in ids for final in self._fallback.get(id_, (id_,))]


def _check_kind(model: ModelFile) -> None:
    kind = model.require("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise model.error(f"key tokenizer.ggml.model is {kind!r}, expected 'gpt2' (byte-level BPE)")
    pre = model.require("tokenizer.ggml.pre", str)
    if pre not in SUPPORTED_PRE_TOKENIZERS:
        raise model.error(f"key tokenizer.ggml.pre is {pre!r}, expected {' or '.join(SUPPORTED_PRE_TOKENIZERS)}")


def _cut(part: str | int, special: str, special_id: int) -> list[str | int]:
    """Replace each occurrence of `special` in a piece of text by its id."""
    if isinstance(part, int):
        return [part]
    first, *rest = part.split(special)
    cut: list[str | int] = [first]
    for piece in rest:
        cut += (special_id, piece)
    return cut


def _present(token_id: int | None) -> list[int]:
    return [] if token_id is None else [token_id]


def _valid_text(text: str) -> str:
    """Replace escaped bytes that are not UTF-8 by U+FFFD, one for each byte as llama.cpp does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode("utf-8", _SINGLE_BYTES)
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise RequestError(f"the text has a lone surrogate, {found}, which UTF-8 cannot express") from None
    return text


def _replace_one_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd", error.start + 1


codecs.register_error(_SINGLE_BYTES, _replace_one_byte)


@cache
def word_splitter() -> pre_tokenizers.PreTokenizer:
    """Build the `qwen35` splitter: contractions, words with marks, single digits, symbols, whitespace."""
    classes = json.loads(files(__package__).joinpath(_CLASSES_FILE).read_text(encoding="ascii"))
    letter, mark, number = (_character_class(classes[category]) for category in "LMN")
    space = _WHITESPACE
    pattern = "|".join(
        (
            r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])",
            rf"[^\r\n{letter}{number}]?[{letter}{mark}]+",
            rf"[{number}]",
            rf"\x{{20}}?[^{space}{letter}{mark}{number}]+[\r\n]*",
            rf"[{space}]*[\r\n]+",
            rf"[{space}]+(?![^{space}])",
            rf"[{space}]+",
        )
    )
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    to_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_byte_level])


def _character_class(ranges: str) -> str:
    r"""Turn "41-5A AA" into the inside of a regex class, \x{41}-\x{5A}\x{AA}."""
    return "".join("-".join(rf"\x{{{end}}}" for end in span.split("-")) for span in ranges.split())
