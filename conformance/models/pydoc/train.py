"""Train the model: `python -m conformance.models.pydoc.train --out DIR`; minutes on a GPU.

Needs PyTorch and transformers. DIR gets tokenizer.json, train.json (settings, losses, samples), last/ (the final
checkpoint) and best/ (the one with the lowest held-out loss). The seed fixes the start values and the order of the
text; GPUs may still round differently, so another run gives another checkpoint of the same quality.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from conformance.models.pydoc.corpus import Corpus, load_corpus
from conformance.models.pydoc.network import add_dropout, build_network, network_config, save_checkpoint
from conformance.models.pydoc.vocabulary import end_of_text_id, learn_vocabulary

__all__ = ["main"]

N_WINDOW = 256
_TOPIC_STARTS = 8
_N_TIMED_STEPS = 20
_N_EVALUATIONS = 20
_N_PROMPT, _N_SAMPLE = 16, 112


@dataclass(frozen=True)
class Settings:
    """What a run depends on; n_steps None: as many as fit into `seconds`, judged from the first steps."""

    seed: int
    n_steps: int | None
    seconds: float
    batch_size: int
    learning_rate: float
    weight_decay: float
    dropout: float
    device: str


@dataclass(frozen=True)
class Texts:
    """Token ids of the topics, each closed by END_OF_TEXT, one after the other; starts: where topics begin."""

    training: torch.Tensor
    starts: torch.Tensor
    held_out: torch.Tensor
    n_held_out_bytes: int


class Run:
    """One training run: the network, its optimiser and the log."""

    def __init__(self, settings: Settings, texts: Texts, tokenizer: Tokenizer, out: Path) -> None:
        self.settings, self.texts, self.tokenizer, self.out = settings, texts, tokenizer, out
        config = network_config(end_of_text_id(tokenizer))
        self.network = build_network(config, settings.seed).to(settings.device).train()
        add_dropout(self.network, settings.dropout)
        self.optimiser = _optimiser(self.network, settings)
        self.n_steps = settings.n_steps or 10**9
        self.losses: list[dict[str, float]] = []
        self.best_loss = math.inf

    def train(self) -> None:
        """Train to the last step, measuring and saving about _N_EVALUATIONS times on the way."""
        began, n_warm = time.monotonic(), 3
        total = torch.zeros((), device=self.settings.device)
        for step, window in enumerate(_windows(self.texts, self.settings)):
            self._set_learning_rate(step)
            total += self._step(window)
            if step == n_warm:
                _synchronize(self.settings.device)
                timed = time.monotonic()
            if self.settings.n_steps is None and step == n_warm + _N_TIMED_STEPS:
                _synchronize(self.settings.device)
                per_step = (time.monotonic() - timed) / _N_TIMED_STEPS
                left = self.settings.seconds - (time.monotonic() - began)
                self.n_steps = max(step + 1 + int(left / per_step), step + 2)
            every = max(self.n_steps // _N_EVALUATIONS, 1)
            if (step + 1) % every == 0 or step + 1 == self.n_steps:
                n_since = step + 1 - (self.losses[-1]["step"] if self.losses else 0)
                self._evaluate(step + 1, float(total) / n_since, time.monotonic() - began)
                total.zero_()
            if step + 1 == self.n_steps:
                return

    def _step(self, window: torch.Tensor) -> torch.Tensor:
        with self._mixed_precision():
            loss = _loss(self.network, window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    def _set_learning_rate(self, step: int) -> None:
        """Rise over the first steps, then half a cosine down to a fiftieth."""
        n_rise = 50
        done = min(step / self.n_steps, 1.0)
        factor = min((step + 1) / n_rise, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.learning_rate * factor

    def _evaluate(self, n_done: int, training_loss: float, seconds: float) -> None:
        self.network.eval()
        held_out = held_out_loss(self.network, self.texts.held_out)
        self.network.train()
        self.losses.append({"step": n_done, "seconds": seconds, "training": training_loss, "held_out": held_out})
        print(f"step {n_done} of {self.n_steps}, {seconds:.0f} s: loss {training_loss:.3f}, held out {held_out:.3f}")
        save_checkpoint(self.network, self.out / "last")
        if held_out < self.best_loss:
            self.best_loss = held_out
            save_checkpoint(self.network, self.out / "best")

    def _mixed_precision(self) -> torch.autocast:
        return torch.autocast(torch.device(self.settings.device).type, torch.bfloat16)


def main() -> None:
    """Train with the settings of the command line and write everything to --out."""
    settings, out = _settings()
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    corpus = load_corpus()
    tokenizer = learn_vocabulary(corpus.training.values())
    tokenizer.save(str(out / "tokenizer.json"))
    texts = _encode(corpus, tokenizer)
    run = Run(settings, texts, tokenizer, out)
    print(f"{len(texts.training)} training tokens, {len(texts.held_out)} held out, on {_device_name(settings.device)}")
    run.train()
    log = {**_facts(run, corpus), "losses": run.losses, "samples": _samples(run, corpus)}
    (out / "train.json").write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
    for sample in log["samples"]:
        print(f"--- {sample['topic']}\n{sample['prompt']} ||| {sample['continuation']}")


def held_out_loss(network: Any, ids: torch.Tensor) -> float:
    """Return the mean loss in nats a token over `ids`, cut into windows of N_WINDOW + 1 that overlap by one."""
    windows = [ids[at : at + N_WINDOW + 1] for at in range(0, len(ids) - N_WINDOW, N_WINDOW)]
    with torch.no_grad():
        return float(_loss(network, torch.stack(windows).to(network.device)))


def _loss(network: Any, window: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each window's tokens after the first, in nats."""
    logits = network(input_ids=window[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


def _optimiser(network: Any, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; only matrices decay, since a norm or a decay rate has no reason to be near zero."""
    matrices = [parameter for parameter in network.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in network.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = torch.device(settings.device).type == "cuda"
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)


def _windows(texts: Texts, settings: Settings) -> Iterator[torch.Tensor]:
    """Yield batches of N_WINDOW + 1 ids from random places; one window in _TOPIC_STARTS begins with a topic."""
    random = torch.Generator().manual_seed(settings.seed)
    ids = texts.training.to(settings.device)
    span = torch.arange(N_WINDOW + 1, device=settings.device)
    n_topics = settings.batch_size // _TOPIC_STARTS
    while True:
        anywhere = torch.randint(len(ids) - N_WINDOW, (settings.batch_size - n_topics,), generator=random)
        topic = torch.randint(len(texts.starts), (n_topics,), generator=random)
        starts = torch.cat([anywhere, texts.starts[topic]]).clamp(max=len(ids) - N_WINDOW - 1)
        yield ids[starts.to(settings.device)[:, None] + span]


def _encode(corpus: Corpus, tokenizer: Tokenizer) -> Texts:
    training, starts = _joined(corpus.training.values(), tokenizer)
    held_out, _ = _joined(corpus.held_out.values(), tokenizer)
    n_bytes = sum(len(text.encode()) for text in corpus.held_out.values())
    return Texts(training, starts, held_out, n_bytes)


def _joined(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of all texts in one row, each closed by END_OF_TEXT, and where each begins."""
    ids: list[int] = []
    starts: list[int] = []
    for text in texts:
        starts.append(len(ids))
        ids += [*tokenizer.encode(text, add_special_tokens=False).ids, end_of_text_id(tokenizer)]
    return torch.tensor(ids), torch.tensor(starts)


def _samples(run: Run, corpus: Corpus) -> list[dict[str, str]]:
    """Continue the first _N_PROMPT tokens of some topics greedily; the last three topics were not read."""
    topics = ["with", "while", "import", "string-methods", "typesmapping", "raise", "calls", "objects"]
    whole = {**corpus.training, **corpus.held_out}
    heads = [run.tokenizer.encode(whole[topic], add_special_tokens=False).ids[:_N_PROMPT] for topic in topics]
    ids = torch.tensor(heads, device=run.settings.device)
    run.network.eval()
    with torch.no_grad():
        for _ in range(_N_SAMPLE):
            logits = run.network(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    text = [(run.tokenizer.decode(row[:_N_PROMPT]), run.tokenizer.decode(row[_N_PROMPT:])) for row in ids.tolist()]
    return [
        {"topic": topic, "prompt": prompt, "continuation": rest}
        for topic, (prompt, rest) in zip(topics, text, strict=True)
    ]


def _facts(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Return what the run was: settings, sizes, versions, device, final losses."""
    texts = run.texts
    held_out = run.losses[-1]["held_out"]
    return {
        "settings": {**vars(run.settings), "n_steps": run.n_steps},
        "corpus_sha256": corpus.sha256,
        "python_version": corpus.python_version,
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "device": _device_name(run.settings.device),
        "n_parameters": sum(parameter.numel() for parameter in run.network.parameters()),
        "n_training_tokens": len(texts.training),
        "n_held_out_tokens": len(texts.held_out),
        "held_out_bits_per_byte": held_out / math.log(2) * len(texts.held_out) / texts.n_held_out_bytes,
    }


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else device


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _settings() -> tuple[Settings, Path]:
    parser = argparse.ArgumentParser(prog="python -m conformance.models.pydoc.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is written")
    parser.add_argument("--steps", type=int, help="train this many steps (else as many as fit into --seconds)")
    parser.add_argument("--seconds", type=float, default=90, help="time for training alone (default 90)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=48, help=f"windows of {N_WINDOW} tokens (default 48)")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1, help="of what each sublayer adds (default 0.1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    return Settings(
        seed=given.seed,
        n_steps=given.steps,
        seconds=given.seconds,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        weight_decay=given.weight_decay,
        dropout=given.dropout,
        device=given.device,
    ), given.out


if __name__ == "__main__":
    main()
