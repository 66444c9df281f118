"""The model's own vocabulary: byte-level BPE over words split as Qwen3.5 splits them."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.gguf.tokenizer import word_splitter

__all__ = ["END_OF_TEXT", "N_VOCAB", "end_of_text_id", "learn_vocabulary"]

N_VOCAB = 2048
END_OF_TEXT = "<|endoftext|>"


def learn_vocabulary(texts: Iterable[str], n_vocab: int = N_VOCAB) -> Tokenizer:
    """Learn `n_vocab` tokens from `texts`: 256 bytes, merges by frequency, END_OF_TEXT as the last id.

    A short text gives fewer, when it has nothing left to merge.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = word_splitter()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id that closes every topic; raises KeyError if the vocabulary has none."""
    return int(tokenizer.get_vocab()[END_OF_TEXT])
