"""Small GGUF files for tests: a complete `qwen35` header with tiny tensors, and a multilingual vocabulary."""
# ruff: noqa: RUF001 - characters that look alike are what the awkward texts are made of

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

Shapes = Mapping[str, tuple[tuple[int, ...], str]]

KEYS: dict[str, Any] = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 4,
    "qwen35.context_length": 4096,
    "qwen35.embedding_length": 256,
    "qwen35.feed_forward_length": 512,
    "qwen35.attention.head_count": 4,
    "qwen35.attention.head_count_kv": 2,
    "qwen35.attention.key_length": 64,
    "qwen35.attention.value_length": 64,
    "qwen35.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen35.rope.freq_base": 10_000_000.0,
    "qwen35.rope.dimension_count": 32,
    "qwen35.rope.dimension_sections": [5, 5, 6, 0],
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.inner_size": 256,
    "qwen35.ssm.state_size": 64,
    "qwen35.ssm.time_step_rank": 4,
    "qwen35.ssm.group_count": 2,
    "qwen35.full_attention_interval": 4,
}

_FEED_FORWARD: Shapes = {
    "attn_norm.weight": ((256,), "F32"),
    "post_attention_norm.weight": ((256,), "F32"),
    "ffn_gate.weight": ((256, 512), "Q4_K"),
    "ffn_up.weight": ((256, 512), "Q5_K"),
    "ffn_down.weight": ((512, 256), "Q6_K"),
}
_ATTENTION: Shapes = {
    "attn_q.weight": ((256, 512), "Q4_K"),
    "attn_k.weight": ((256, 128), "Q6_K"),
    "attn_v.weight": ((256, 128), "Q6_K"),
    "attn_output.weight": ((256, 256), "IQ4_XS"),
    "attn_q_norm.weight": ((64,), "F32"),
    "attn_k_norm.weight": ((64,), "F32"),
}
_RECURRENT: Shapes = {
    "attn_qkv.weight": ((256, 512), "Q4_K"),
    "attn_gate.weight": ((256, 256), "Q8_0"),
    "ssm_conv1d.weight": ((4, 512), "F32"),
    "ssm_dt.bias": ((4,), "F32"),
    "ssm_a": ((4,), "F32"),
    "ssm_beta.weight": ((256, 4), "F32"),
    "ssm_alpha.weight": ((256, 4), "F32"),
    "ssm_norm.weight": ((64,), "F32"),
    "ssm_out.weight": ((256, 256), "IQ3_S"),
}
_NEXTN: Shapes = {
    "nextn.eh_proj.weight": ((512, 256), "Q4_K"),
    "nextn.enorm.weight": ((256,), "F32"),
    "nextn.hnorm.weight": ((256,), "F32"),
    "nextn.shared_head_norm.weight": ((256,), "F32"),
}


def keys(**changes: Any) -> dict[str, Any]:
    """Return KEYS with `qwen35.` keys changed; `__` in a name stands for a dot, None removes the key."""
    result = dict(KEYS)
    for name, value in changes.items():
        result["qwen35." + name.replace("__", ".")] = value
    return {name: value for name, value in result.items() if value is not None}


def shapes(n_layer: int = 4, n_nextn: int = 0, tied: bool = False, n_vocab: int = 300) -> dict[str, Any]:
    """Return name -> (shape, type) of a model as KEYS describes it."""
    result: dict[str, Any] = {"token_embd.weight": ((256, n_vocab), "Q4_K")}
    for il in range(n_layer + n_nextn):
        mixer = _ATTENTION if (il + 1) % 4 == 0 or il >= n_layer else _RECURRENT
        nextn = _NEXTN if il >= n_layer else {}
        result.update({f"blk.{il}.{name}": entry for name, entry in {**_FEED_FORWARD, **mixer, **nextn}.items()})
    result["output_norm.weight"] = ((256,), "F32")
    return result if tied else {**result, "output.weight": ((256, n_vocab), "Q6_K")}


def write_gguf(path: Path, keys: Mapping[str, Any], shapes: Shapes) -> Path:
    """Write a GGUF with the given keys and tensors of reproducible random bytes; returns the path."""
    writer = GGUFWriter(path, keys.get("general.architecture", ""))
    writer.kv_data = [{}]
    writer.data_alignment = keys.get("general.alignment", 32)
    for key, value in keys.items():
        _add(writer, key, value)
    rng = np.random.default_rng(0)
    for name, (shape, type_name) in shapes.items():
        kind = GGMLQuantizationType[type_name]
        block, n_bytes = GGML_QUANT_SIZES[kind]
        byte_shape = (*reversed(shape[1:]), shape[0] // block * n_bytes)
        writer.add_tensor(name, rng.integers(0, 256, byte_shape, dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's what we'll do, they've done, I'M sure you'd agree.",
    "Größe, Übermut und Straße; déjà vu, naïve façade, señor, coração, Ελληνικά, русский язык, עברית, العربية",
    "大模型在显存中运行,逐位相等。日本語のテキストも、한국어 문장도 있습니다. 你好,世界!",
    "def forward(x):\n    return x @ w  # 1234567890\n\n\n\tif x >= 3.14:\r\n\t\tprint('ok')\n",
    "🙂🚀👩‍👩‍👧‍👦 🇫🇷 e\u0301 a\u0308 हिन्दी நன்றி ไทย",
) * 3
"""Text the test vocabulary's merges are learnt from."""

SPECIALS = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<|fim_pad|>": 4, "<think>": 4, "<|im": 4}
"""Special tokens of the test vocabulary with their GGUF token type: 3 control, 4 user-defined."""


@cache
def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Return tokens, token types and merges of a byte-level vocabulary learnt from CORPUS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    learnt = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in learnt]
    types = [1] * len(tokens) + [*SPECIALS.values(), 5]
    model = json.loads(tokenizer.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return [*tokens, *SPECIALS, "[PAD]"], types, merges


def vocabulary_keys(**changes: Any) -> dict[str, Any]:
    """Return the tokenizer keys of the test vocabulary; `name=None` removes `tokenizer.ggml.name`."""
    tokens, types, merges = vocabulary()
    result: dict[str, Any] = {
        "model": "gpt2",
        "pre": "qwen35",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "eos_token_id": tokens.index("<|im_end|>"),
        "add_bos_token": False,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in result.items() if value is not None}


AWKWARD = (
    "",
    " ",
    "   ",
    "hello",
    " hello  world   !",
    "The quick brown fox jumps over the lazy dog.",
    "It's I'M we'LL they'Ve you'd 'tis 's'S 'ſ ''",
    "a\nb\n\nc\r\nd\re\n\n\n",
    "  \n  \n indented\n\t\ttabs \t mixed\t",
    "trailing spaces   ",
    "\n",
    "\r\n\r\n  x",
    "1234567890 3.14159 1,000,000 ٣٤٥ ४५६ ½ Ⅷ ²",
    "Größe Übermut Straße ẞ ﬁ ŉ",
    "déjà vu naïve façade señor coração",
    "e\u0301 a\u0308\u0323 n\u0303o \u0301 \u0301\u0302\u0303",
    "a\u0301b\u0301c\u0301",
    "Ελληνικά ΆΈΉ ς",
    "русский язык ЁЖИК",
    "עברית שָׁלוֹם",
    "العربية مُحَمَّد ـــ",
    "大模型在显存中运行,逐位相等。",
    "日本語のテキスト カタカナ ガ",
    "한국어 문장 \u1112\u1161\u11ab",
    "हिन्दी क्षत्रिय",
    "ไทยภาษาน้ำ",
    "🙂🚀👩‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️",
    "mixed混合смешанный مختلط123abc한글",
    "def f(x):\n    return x**2  # ok\n",
    '{"key": [1, 2.5, null, true]}',
    "!!!???...---___***###",
    " !  !!   !!!",
    "$100 + €20 = £±¥ ∑∞≠≤ ™®©",
    "x\u00a0y\u2003z\u3000w\u2028v\u0085u\u202ft",
    "zero\u200bwidth\u200djoin\u2060er\ufeffbom",
    "\u0000\u0001\u001c\u001f\u007f\u0080\u009f",
    "private \ue000\uf8ff and unassigned \u0378\U000e0fff",
    "new in Unicode 16: \u1c89\ua7cb\U00010d40\U000116d0 x",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 𐍈 \U0002ebf0",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|>",
    "<|im_start|> <|im_start <|im <|im_end|>>",
    "<think>\n\n</think> <|fim_pad|>x[PAD]",
    "a<|endoftext|>'s b",
    "https://example.org/?q=a%20b&c=d#e",
    "CamelCaseAndSNAKE_CASE_99 kebab-case",
    "ﷺ ﷽ ㍿ ㎏ ①②③",
    "\ufffd \ufffe \uffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the the the The THE tHe",
)
"""Texts on which tokenizers tend to disagree."""
