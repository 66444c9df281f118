"""What quantisation costs: `python -m conformance.models.pydoc.quality CHECKPOINT F16.gguf QUANTISED.gguf`.

The reference is transformers, in float32, on the F16 checkpoint; the text is that of held-out topics, in windows of
199 tokens, each from an empty context. Every engine is fed the same tokens one by one. Printed for each: the mean KL
divergence from the reference in nats, how often its largest logit is the reference's, and the loss on the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from baselines.llama_cpp.build import BuildOptions
from baselines.llama_cpp.progress import show_progress
from baselines.llama_cpp.worker import WorkerRequest
from conformance.llama_builds import LlamaBuilds
from conformance.models.pydoc.compare import forced_logits, transformers_logits
from conformance.models.pydoc.corpus import Corpus, load_corpus
from conformance.models.pydoc.figures import write_figures
from conformance.runner import Baseline
from engine.generate import load_engine
from engine.gguf.reader import open_model
from engine.gguf.tokenizer import Tokenizer

__all__ = ["Quality", "quality"]

METHOD = (
    "every engine is fed the text token by token; kl: mean divergence in nats from transformers (float32, CPU, on the "
    "F16 checkpoint); top1: share of positions with its largest logit; loss: nats a token on the text"
)
N_WINDOW = 199
_N_CTX = 256
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Quality:
    """Means over all positions: KL divergence in nats, share of equal top-1, loss in nats a token."""

    kl: float
    top1: float
    loss: float


def quality(logits: F32, reference: F32, next_ids: NDArray[np.int64]) -> Quality:
    """Compare `logits` with `reference`, both (n_positions, n_vocab); next_ids (n_positions): what the text has."""
    found, wanted = _log_softmax(logits), _log_softmax(reference)
    kl = (np.exp(wanted) * (wanted - found)).sum(axis=-1)
    same = logits.argmax(axis=-1) == reference.argmax(axis=-1)
    return Quality(float(kl.mean()), float(same.mean()), float(-found[np.arange(len(next_ids)), next_ids].mean()))


def main() -> None:
    """Print the table for the files of the command line."""
    given = _arguments()
    corpus = load_corpus()
    windows = _windows(corpus, given.quantised, given.windows)
    inputs, next_ids = [window[:-1] for window in windows], np.array([window[1:] for window in windows]).ravel()
    reference = np.concatenate([transformers_logits(given.checkpoint, ids) for ids in inputs])
    rows = [("transformers, checkpoint", quality(reference, reference, next_ids))]
    with show_progress() as progress:
        builds = LlamaBuilds(BuildOptions(), tuple(given.cuda_arch), progress)
        for name, run in _engines(given, builds):
            progress.step(name)
            logits = np.concatenate([run(ids) for ids in inputs])
            rows.append((name, quality(logits, reference, next_ids)))
    table = [(name, f"{found.kl:.6f}", f"{found.top1:.2%}", f"{found.loss:.4f}") for name, found in rows]
    text = (
        f"{len(next_ids)} positions in {len(windows)} windows of the held-out topics of Python {corpus.python_version}"
    )
    print(text)
    print(tabulate(table, headers=("engine", "mean KL, nats", "top-1", "loss, nats"), disable_numparse=True))
    if given.out is not None:
        files = [given.checkpoint / "model.safetensors", given.f16, given.quantised]
        write_figures(given.out, f"{METHOD}; {text}", files, [{"variant": name, **asdict(row)} for name, row in rows])


def _engines(given: argparse.Namespace, builds: LlamaBuilds) -> Iterator[tuple[str, Callable[[list[int]], F32]]]:
    """Yield each engine's name and what runs it; llama.cpp is built when its turn comes."""
    for kind, model in (("F16", given.f16), ("quantised", given.quantised)):
        engine = load_engine(model, n_ctx=_N_CTX, backend=given.backend)
        yield f"engine-{given.backend}, {kind}", partial(forced_logits, engine)
    for device in ("cpu", "cuda") if given.backend == "cuda" else ("cpu",):
        yield f"llama.cpp-{device}, quantised", partial(_llama_logits, builds.open(device), given.quantised, device)


def _llama_logits(llama: Baseline, model: Path, device: str, ids: list[int]) -> F32:
    request = WorkerRequest(
        model,
        ids[:1],
        n_predict=len(ids),
        n_ctx=_N_CTX,
        prefill="single",
        force_ids=ids[1:],
        n_gpu_layers=99 if device == "cuda" else 0,
        repack=False,
    )
    result = llama.run(request)
    if result.logits is None:
        raise RuntimeError(f"llama.cpp on {device} did not end well ({result.status}): {result.log_tail}")
    return result.logits


def _windows(corpus: Corpus, model: Path, n_windows: int) -> list[list[int]]:
    """Return the first `n_windows` windows of N_WINDOW + 1 ids of the held-out topics, one topic after the other."""
    tokenizer = Tokenizer.from_model(open_model(model))
    ids = [id_ for text in corpus.held_out.values() for id_ in tokenizer.encode(text)]
    return [ids[at : at + N_WINDOW + 1] for at in range(0, len(ids) - N_WINDOW, N_WINDOW)][:n_windows]


def _log_softmax(logits: F32) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.models.pydoc.quality", description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of the checkpoint")
    parser.add_argument("f16", metavar="F16", type=Path)
    parser.add_argument("quantised", metavar="QUANTISED", type=Path)
    parser.add_argument("--windows", type=int, default=30, help="windows of 199 tokens (default 30, all there are)")
    parser.add_argument("--backend", default="numpy", help="numpy (default), or cuda: then llama.cpp on CUDA, too")
    parser.add_argument("--cuda-arch", action="append", default=[], help="CUDA architecture of llama.cpp's build")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file as well")
    return parser.parse_args()


if __name__ == "__main__":
    main()
