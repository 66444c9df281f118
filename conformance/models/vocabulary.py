"""A byte-level BPE vocabulary of our own for the fixtures: `gpt2` model, pre-tokenizer `qwen35`.

Order of ids as in the real vocabulary: 256 bytes, merges by rank, further words, control tokens, unused padding.
The merges are learned from the word list below; the further words are invented and only fill the table (no merge
leads to them), so that every generated id still prints as text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from gguf import TokenType

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_N_UNUSED = 13
_MAX_MERGES = 800
_CONSONANTS = "bcdfghjklmnprstvwxyz"
_VOWELS = "aeiou"

_WORDS = """
the a of and to in is it that was for on are as with his they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over
did down only way find use may water long little very after words called just where most know get through back much
before go good new write our used me man too any day same right look think also around another came come work three
word must because does part even place well such here take why things help put years different away again off went
old number great tell men say small every found still between name should home big give air line set own under read
last never us left end along while might next sound below saw something thought both few those always looked show
large often together asked house world going want school important until form food keep children feet land side
without boy once animals life enough took sometimes four head above kind began almost live page got earth need far
hand high year mother light parts country father let night following picture being study second eyes soon times
story boys since white days ever paper hard near sentence better best across during today others however sure means
knew try told young miles sun ways thing whole hear example heard several change answer room sea against top turned
learn point city play toward five using himself usually river garden window bread stone silver winter summer engine
layer token weight kernel memory tensor vector matrix prompt model graph state cache scale block value query logit
der die das und nicht ist ein eine mit für auf dem den von sich auch über Straße Brücke schön grün Fenster Garten
le la les des est une pour dans que qui sur avec pas plus élève forêt château garçon être naïve façade
el los las una por con para como pero más también señor mañana niño corazón árbol
il che non per sono della città perché più così
и в не на что он как это по но из за так все мы вы дом река город книга время жизнь слово
της είναι στο νερό ήλιος θάλασσα δέντρο φως
的 是 不 了 在 人 有 我 他 这 中 大 来 上 国 水 河 山 天气 今天 明天 我们 他们 世界 语言 模型 引擎
の は を に が と で する ある いる これ それ 言葉 今日 水 山 川
그 이 저 나는 우리 물 산 하늘 오늘 나라
şehir güneş çiçek için değil gölge
żółw źródło światło człowiek książka
def return import self for while class print None True False if else
"""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the byte alphabet of GPT-2, their GGUF types, merges by rank, and the ids with a role."""

    tokens: list[str]
    types: list[TokenType]
    merges: list[str]
    speakable_ids: list[int]

    def id_of(self, token: str) -> int:
        """Return the id of a token; raises ValueError if there is none."""
        return self.tokens.index(token)


def byte_alphabet() -> dict[int, str]:
    """Map each byte to the printable character that stands for it in token texts (GPT-2's convention)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update({byte: chr(256 + position) for position, byte in enumerate(hidden)})
    return alphabet


@cache
def build_vocabulary(n_vocab: int) -> Vocabulary:
    """Build the vocabulary of n_vocab ids (at least 512)."""
    alphabet = byte_alphabet()
    n_merges = min(_MAX_MERGES, (n_vocab - 256 - len(CONTROL_TOKENS) - _N_UNUSED) // 2)
    merges = learn_merges()[:n_merges]
    tokens = [*alphabet.values(), *("".join(pair) for pair in merges)]
    n_filler = n_vocab - len(tokens) - len(CONTROL_TOKENS) - _N_UNUSED
    tokens += _invented_words(n_filler, set(tokens), alphabet[0x20])
    n_normal = len(tokens)
    tokens += CONTROL_TOKENS
    tokens += [f"[PAD{number}]" for number in range(len(tokens), n_vocab)]
    types = [TokenType.NORMAL] * n_normal + [TokenType.CONTROL] * len(CONTROL_TOKENS)
    types += [TokenType.UNUSED] * (n_vocab - len(types))
    to_byte = {character: byte for byte, character in alphabet.items()}
    speakable = [number for number in range(n_normal) if _is_printable_text(tokens[number], to_byte)]
    return Vocabulary(tokens, types, [" ".join(pair) for pair in merges], speakable)


@cache
def learn_merges() -> list[tuple[str, str]]:
    """Learn byte pairs from the word list, most frequent first; ties go to the pair that sorts first.

    Pairs that spell a token which exists already are passed over: every id has a text of its own.
    """
    alphabet = byte_alphabet()
    words = [[alphabet[byte] for byte in text.encode()] for word in _WORDS.split() for text in (word, " " + word)]
    taken = set(alphabet.values())
    merges: list[tuple[str, str]] = []
    while len(merges) < _MAX_MERGES:
        counts = Counter(pair for word in words for pair in pairwise(word))
        fresh = [pair for pair in counts if pair[0] + pair[1] not in taken]
        if not fresh:
            break
        best = min(fresh, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        taken.add(best[0] + best[1])
        words = [_apply_merge(word, best) for word in words]
    return merges


def _apply_merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    if pair[0] not in word:
        return word
    merged: list[str] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def _invented_words(n: int, taken: set[str], space: str) -> list[str]:
    """Return n distinct words of three syllables, each with a leading space, none of them in `taken`."""
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    n_all = len(syllables) ** 3
    words: list[str] = []
    index = 0
    while len(words) < n:
        first, rest = divmod(index, len(syllables) ** 2)
        second, third = divmod(rest, len(syllables))
        word = space + syllables[first] + syllables[second] + syllables[third]
        if word not in taken:
            words.append(word)
        index = (index + 387_421) % n_all  # coprime to n_all: neighbours differ, none repeats
    return words


def _is_printable_text(token: str, to_byte: dict[str, int]) -> bool:
    """Return whether the token's bytes are whole UTF-8 characters without control characters."""
    try:
        text = bytes(to_byte[character] for character in token).decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable()
