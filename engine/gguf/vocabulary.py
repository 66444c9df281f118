"""The token list of a GGUF: texts, types, special roles, and the bytes each token stands for.

Roles that the file does not name are found by the tokens' texts, as llama.cpp b8763 does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from engine.gguf.reader import ModelFile

__all__ = ["TokenType", "Vocabulary", "byte_alphabet"]

_N_BYTE_VALUES = 256
_BYTE_TEXT = re.compile("<0x([0-9A-Fa-f]{2})>")
_DEFAULT_SPECIAL_ID = 11  # what llama.cpp takes as bos and eos when a gpt2 vocabulary does not name them

# Texts that end a turn or a text wherever they occur in a vocabulary.
_END_TEXTS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
    *("<|calls|>", "<end_of_turn>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>"),
    *("<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


@dataclass(frozen=True)
class _InfillRole:
    """A fill-in-the-middle role: the keys that may name its token, the texts that mark it otherwise."""

    keys: tuple[str, ...]
    texts: tuple[str, ...]
    ends: bool = False


_INFILL_ROLES = (
    _InfillRole(
        ("prefix", "fim_pre"),
        (
            *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>"),
            *("<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
        ),
    ),
    _InfillRole(
        ("suffix", "fim_suf"),
        (
            *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>"),
            *("<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
        ),
    ),
    _InfillRole(
        ("middle", "fim_mid"),
        (
            *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>"),
            *("<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
        ),
    ),
    _InfillRole(("fim_pad",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), ends=True),
    _InfillRole(("fim_rep",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), ends=True),
    _InfillRole(("fim_sep",), ("<|file_sep|>",), ends=True),
)


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`; others count as tokens without bytes."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary:
    """Token texts and roles of one model; ids are positions in `tokenizer.ggml.tokens`.

    texts: the token texts as the file has them (byte-level alphabet for normal tokens). ids: text -> id.
    control_ids: tokens that text only stands for when special tokens are parsed, and that print as nothing.
    end_ids: tokens that end a generation. bos_id, eos_id: None if the file has none that is in range.
    """

    def __init__(self, model: ModelFile) -> None:
        texts = model.require_array("tokenizer.ggml.tokens", str)
        self.texts = [text or f"[EMPTY_{id_}]" for id_, text in enumerate(texts)]
        self.ids = {text: id_ for id_, text in enumerate(self.texts)}
        if len(self.ids) != len(self.texts):
            twice = next(text for id_, text in enumerate(self.texts) if self.ids[text] != id_)
            raise model.error(f"key tokenizer.ggml.tokens has {twice!r} twice, expected distinct tokens")
        self._types = _token_types(model, len(self.texts))
        self.bos_id = self._named_id(model, "bos", _DEFAULT_SPECIAL_ID)
        self.eos_id = self._named_id(model, "eos", _DEFAULT_SPECIAL_ID)
        self.control_ids, self.end_ids = self._roles(model)

    def __len__(self) -> int:
        return len(self.texts)

    def special_ids(self) -> list[int]:
        """Return the tokens recognised by their text before any splitting, longest text first."""
        user_defined = {id_ for id_, kind in enumerate(self._types) if kind == TokenType.USER_DEFINED}
        return sorted(user_defined | self.control_ids, key=lambda id_: (-len(self.texts[id_].encode()), id_))

    def token_bytes(self, token_id: int, special: bool = False) -> bytes:
        """Return the bytes a token stands for; control tokens are empty unless `special`."""
        text, kind = self.texts[token_id], self._types[token_id]
        if token_id in self.control_ids:
            return text.encode() if special else b""
        if kind == TokenType.USER_DEFINED:
            return text.encode()
        if kind == TokenType.NORMAL:
            return _from_byte_level(text)
        byte = _BYTE_TEXT.fullmatch(text) if kind == TokenType.BYTE else None
        return bytes.fromhex(byte[1]) if byte else b""

    def _roles(self, model: ModelFile) -> tuple[frozenset[int], frozenset[int]]:
        """Return control ids and end ids, from the file's keys and from well-known texts."""
        control = {id_ for id_, kind in enumerate(self._types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)}
        ends = {self.ids[text] for text in _END_TEXTS if text in self.ids}
        control |= ends
        for role in _INFILL_ROLES:
            named = [id_ for key in role.keys if (id_ := self._named_id(model, key)) is not None]
            found = [self.ids[text] for text in role.texts if text in self.ids][:1]
            if not named:
                control.update(found)
            if role.ends:
                ends.update(named or found)
        more = (self.eos_id, self._named_id(model, "eot"), self._named_id(model, "eom"))
        return frozenset(control), frozenset(ends.union(id_ for id_ in more if id_ is not None))

    def _named_id(self, model: ModelFile, role: str, default: int | None = None) -> int | None:
        """Return the id a `tokenizer.ggml.*_token_id` key names; one out of range counts as absent."""
        named = model.optional(f"tokenizer.ggml.{role}_token_id", int)
        id_ = named if named is not None and 0 <= named < len(self.texts) else default
        return id_ if id_ is not None and id_ < len(self.texts) else None


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte-level alphabet, character -> byte value.

    Printable Latin-1 characters stand for their own code; the other 68 byte values, in order, are U+0100 on.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [value for value in range(_N_BYTE_VALUES) if value not in own]
    shifted = {chr(_N_BYTE_VALUES + n): value for n, value in enumerate(rest)}
    return {**{chr(value): value for value in own}, **shifted}


def _from_byte_level(text: str) -> bytes:
    """Invert the byte-level alphabet; a character outside it is spelled out the way llama.cpp does."""
    alphabet = byte_alphabet()
    return b"".join(
        bytes([alphabet[char]]) if char in alphabet else f"[UNK_BYTE_0x{char.encode().hex()}{text}]".encode()
        for char in text
    )


def _token_types(model: ModelFile, n_tokens: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    if key not in model.metadata:
        return [TokenType.NORMAL] * n_tokens
    types = model.require_array(key, int)
    if len(types) != n_tokens:
        raise model.error(f"key {key} has {len(types)} entries, expected {n_tokens}")
    return types
