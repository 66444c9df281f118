"""The trained model's parts that need neither PyTorch nor the model: corpus, vocabulary, comparison of logits."""

from __future__ import annotations

import hashlib
import json
from pydoc_data.topics import topics

import numpy as np
import pytest

from conformance.models.pydoc.compare import agreement
from conformance.models.pydoc.corpus import HELD_OUT, load_corpus
from conformance.models.pydoc.quality import quality
from conformance.models.pydoc.vocabulary import END_OF_TEXT, learn_vocabulary

LOGITS = np.log(np.array([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]], dtype=np.float32))


def test_corpus_is_all_topics_split_in_two() -> None:
    corpus = load_corpus()
    assert set(corpus.held_out) == set(HELD_OUT)
    assert corpus.training | corpus.held_out == topics
    assert list(corpus.training) == sorted(corpus.training)
    assert corpus.sha256 == hashlib.sha256(json.dumps(topics, sort_keys=True).encode()).hexdigest()


def test_held_out_topics_repeat_nothing_of_the_training_text() -> None:
    corpus = load_corpus()
    known = {text[at : at + 60] for text in corpus.training.values() for at in range(len(text) - 59)}
    pieces = [text[at : at + 60] for text in corpus.held_out.values() for at in range(len(text) - 59)]
    assert sum(piece in known for piece in pieces) / len(pieces) < 0.01


def test_vocabulary_has_bytes_merges_and_the_end_of_text() -> None:
    tokenizer = learn_vocabulary(["for the while the for"] * 9, 280)
    vocabulary = tokenizer.get_vocab()
    assert vocabulary[END_OF_TEXT] == len(vocabulary) - 1 <= 279
    assert "Ġthe" in vocabulary
    text = "  the Ünknown 漢字\n\t42"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_equal_logits_agree() -> None:
    found = agreement(LOGITS, LOGITS)
    assert found.nmse.tolist() == [0, 0]
    assert np.isinf(found.reference_gap).all()


def test_another_winner_is_reported_with_the_reference_s_gap() -> None:
    found = agreement(LOGITS[:, ::-1].copy(), LOGITS)
    assert found.nmse[0] > 0.5
    assert found.reference_gap[0] == pytest.approx(np.log(0.5 / 0.3))
    assert np.isinf(found.reference_gap[1])


def test_quality_of_the_reference_itself() -> None:
    found = quality(LOGITS + 3, LOGITS, np.array([0, 2]))
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.top1 == 1
    assert found.loss == pytest.approx(-(np.log(0.5) + np.log(0.1)) / 2)


def test_quality_of_other_logits() -> None:
    other = np.log(np.array([[0.2, 0.6, 0.2], [0.2, 0.7, 0.1]], dtype=np.float32))
    found = quality(other, LOGITS, np.array([1, 1]))
    assert found.kl == pytest.approx((0.5 * np.log(0.5 / 0.2) + 0.3 * np.log(0.3 / 0.6)) / 2)
    assert found.top1 == 0.5
    assert found.loss == pytest.approx(-(np.log(0.6) + np.log(0.7)) / 2)
