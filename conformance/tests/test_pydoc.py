"""The trained model's parts that need neither PyTorch nor the model: corpus, vocabulary, comparison of logits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from gguf import GGUFReader
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from conformance.bench.verify import verify_paths
from conformance.models.pydoc import figures
from conformance.models.pydoc.compare import LARGEST_TIE, LIMIT, agreement, row_of
from conformance.models.pydoc.corpus import HELD_OUT, load_corpus
from conformance.models.pydoc.quality import quality
from conformance.models.pydoc.vocabulary import END_OF_TEXT, learn_vocabulary

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "conformance" / "models" / "pydoc"
RESULTS = ROOT / "results" / "pydoc"
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


def test_the_shipped_file_is_the_one_of_the_card() -> None:
    content = (FOLDER / "pydoc.gguf").read_bytes()
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(content).hexdigest() in card
    assert f"{len(content):,} bytes" in card
    assert len(content) <= 8_000_000


def test_the_shipped_file_has_every_type_of_the_mix() -> None:
    types = {tensor.tensor_type.name for tensor in GGUFReader(FOLDER / "pydoc.gguf").tensors}
    assert types == {"Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "F32"}


def test_the_card_has_the_losses_of_the_run() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    losses = json.loads((FOLDER / "train.json").read_text(encoding="utf-8"))["losses"]
    best = min(losses, key=lambda row: row["held_out"])
    for row in (best, losses[-1]):
        assert f"| {row['step']} | {row['training']:.3f} | {row['held_out']:.3f} |" in card


def test_the_card_has_the_figures_that_were_measured() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    oracle, quality_ = (json.loads((RESULTS / f"{name}-numpy.json").read_text()) for name in ("oracle", "quality"))
    files = {**oracle["files"], **quality_["files"]}
    assert files["pydoc.gguf"] == hashlib.sha256((FOLDER / "pydoc.gguf").read_bytes()).hexdigest()
    assert files["last-f16.gguf"] in card
    assert f"NMSE at most {max(row['largest_nmse'] for row in oracle['rows']):.1e}".replace("e-0", "e-") in card
    assert [(row["n_positions"], row["n_other_top1"]) for row in oracle["rows"]] == [(199, 0)] * 5
    for row in quality_["rows"][2:]:
        assert f"| {row['kl']:.4f} | {row['top1']:.2%} | {row['loss']:.4f} |".replace("%", " %") in card


@pytest.mark.parametrize("builder", [WheelBuilder, SdistBuilder])
def test_packages_bring_the_model_and_its_licence(builder: type[WheelBuilder | SdistBuilder]) -> None:
    found = {file.distribution_path for file in builder(str(ROOT)).recurse_included_files()}
    names = ("pydoc.gguf", "README.md", "train.json", "LICENSE-PSF.txt")
    assert {f"conformance/models/pydoc/{name}" for name in names} <= found


def test_a_row_is_right_within_both_limits() -> None:
    equal = row_of("engine", "with", agreement(LOGITS, LOGITS))
    assert (equal.largest_nmse, equal.n_other_top1, equal.widest_tie, equal.is_right) == (0, 0, None, True)
    other = row_of("engine", "with", agreement(LOGITS[:, ::-1].copy(), LOGITS))
    assert (other.n_positions, other.n_other_top1, other.is_right) == (2, 1, False)
    assert other.widest_tie == pytest.approx(np.log(0.5 / 0.3))
    assert not replace(equal, largest_nmse=2 * LIMIT).is_right
    assert not replace(equal, widest_tie=LARGEST_TIE).is_right


def test_figures_are_written_with_what_they_are_of_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "version", lambda name: f"{name} 1")
    (tmp_path / "m.gguf").write_bytes(b"weights")
    out = tmp_path / "pydoc" / "quality-numpy.json"
    out.parent.mkdir()
    figures.write_figures(out, "counted", [tmp_path / "m.gguf"], [{"variant": "a", "kl": 0.5}])
    found = json.loads(out.read_text())
    assert found["files"] == {"m.gguf": hashlib.sha256(b"weights").hexdigest()}
    assert (found["rows"], found["versions"]["torch"]) == ([{"variant": "a", "kl": 0.5}], "torch 1")
    assert verify_paths([tmp_path]) == ([], 1)
    out.write_text(json.dumps(found | {"rows": []}))
    assert verify_paths([out]) == ([f"{out}: rows: List should have at least 1 item after validation, not 0"], 1)
