"""Byte-level BPE tokenizer built from a GGUF's own metadata; ids equal those of llama.cpp b8763.

The `tokenizers` library splits words and merges. What llama.cpp does around it is done here: control and
user-defined tokens are cut out of the text first, longest first; a word that ends as a piece without an id
falls back to the ids of its ASCII characters; character classes are those of Unicode 15.1, whatever version
the library was built with.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.resources import files
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from engine.errors import ModelFileError, RequestError
from engine.gguf.reader import ModelFile

__all__ = ["SUPPORTED_PRE_TOKENIZERS", "TokenType", "Tokenizer"]

SUPPORTED_PRE_TOKENIZERS = ("qwen35",)

_NO_TOKENIZER = ("none", "no_vocab")
_DEFAULT_SPECIAL_ID = 11  # llama.cpp's bos and eos for a gpt2 vocabulary without those keys
_ONE_BYTE = "engine-one-byte"

# Texts llama.cpp takes for the end of a turn or text, wherever they occur in a vocabulary.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# Fill-in-the-middle roles: key suffix, then the texts that mark the role when the key is absent.
_INFILL_TEXTS = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>"),
        *("\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>"),
        *("\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>"),
        *("\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_OLD_INFILL_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_INFILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Special:
    """A token recognised by its text before any splitting; `hidden` ones only if parse_special."""

    id: int
    text: str
    hidden: bool


class Tokenizer:
    """Turns text into token ids and back; build one with `Tokenizer.from_model`."""

    def __init__(self, model: ModelFile) -> None:
        self._tokens = _token_texts(model)
        self._types = _token_types(model, len(self._tokens))
        self._ids = {text: id_ for id_, text in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            twice = next(text for id_, text in enumerate(self._tokens) if self._ids[text] != id_)
            raise model.error(f"key tokenizer.ggml.tokens holds {twice!r} twice, expected distinct tokens")
        infill = _infill_ids(model, self._ids)
        named = {self._ids[text] for text in _END_TEXTS if text in self._ids}
        marked = {id_ for text_id in infill.values() for id_ in text_id.found}
        self._hidden = named | marked | self._of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        self._specials = self._find_specials()
        self._bpe, self._phantoms = _byte_level_bpe(model, self._ids)
        self._bos_id = _special_id(model, "bos", len(self._tokens), _DEFAULT_SPECIAL_ID)
        eos_id = _special_id(model, "eos", len(self._tokens), _DEFAULT_SPECIAL_ID)
