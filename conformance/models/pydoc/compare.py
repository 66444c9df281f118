"""Is the engine right? `python -m conformance.models.pydoc.compare CHECKPOINT F16.gguf`.

Logits of the checkpoint by transformers, in float32, against those of the engine on the F16 file made from it: for each
prompt of the scenarios the 70 tokens and the 129 that the engine generates after them. Ends with 1 if an error is above
LIMIT, or another largest logit is no near-tie.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from conformance.models.pydoc.figures import write_figures
from conformance.oracle import nmse
from conformance.scenario import Scenario, all_scenarios
from engine.generate import Engine, load_engine

__all__ = ["LARGEST_TIE", "LIMIT", "Agreement", "agreement", "engine_logits", "forced_logits", "transformers_logits"]

METHOD = (
    "squared error over the variance of transformers' logits (float32, CPU, on the F16 checkpoint) at every position "
    "of the prompt and of the 129 tokens that the engine generates after it; widest_tie: distance of transformers' two "
    "largest logits where the engine has another largest one"
)

LIMIT = 1e-6
"""NMSE per position that f16 keys and values and another order of sums may cause."""

LARGEST_TIE = 1e-3
"""Where the two disagree on the largest logit, transformers' two largest must be this close."""


@dataclass(frozen=True)
class Agreement:
    """How close two sets of logits are, per position.

    nmse (n_positions): squared error over the reference's variance. reference_gap (n_positions): distance of the
    reference's two largest logits where the two disagree on the largest, else infinite.
    """

    nmse: NDArray[np.float64]
    reference_gap: NDArray[np.float64]


def transformers_logits(folder: Path, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits (len(ids), n_vocab) f32 after each of `ids`, of the checkpoint in `folder`, on the CPU."""
    import torch

    from conformance.models.pydoc.network import load_network

    with torch.no_grad():
        logits = load_network(folder)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return np.asarray(logits[0].float().numpy())


def engine_logits(model: Path, ids: Sequence[int], backend: str = "numpy") -> NDArray[np.float32]:
    """Return the logits (len(ids), n_vocab) f32 after each of `ids`, of the engine on `model`.

    Raises EngineError, NoDeviceError where the backend cannot run.
    """
    n_ctx = -(-len(ids) // 256) * 256
    return forced_logits(load_engine(model, n_ctx=n_ctx, backend=backend), ids)


def forced_logits(engine: Engine, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits (len(ids), n_vocab) f32 of `engine` after each of `ids`, from an empty context."""
    generation = engine.run(ids[:1], len(ids), force_ids=ids[1:], keep_logits=True)
    assert generation.logits is not None
    return generation.logits


def agreement(logits: NDArray[np.float32], reference: NDArray[np.float32]) -> Agreement:
    """Compare `logits` with `reference`, both (n_positions, n_vocab)."""
    exact = reference.astype(np.float64)
    errors = [nmse(row[None], wanted[None]) for row, wanted in zip(logits, exact, strict=True)]
    second, first = np.sort(exact, axis=-1)[:, -2:].T
    same = logits.argmax(axis=-1) == exact.argmax(axis=-1)
    return Agreement(np.array(errors), np.where(same, np.inf, first - second))


@dataclass(frozen=True)
class Row:
    """What the engine's logits on one text come to; widest_tie is None where every largest logit is the reference's."""

    variant: str
    prompt: str
    n_positions: int
    largest_nmse: float
    mean_nmse: float
    n_other_top1: int
    widest_tie: float | None

    @property
    def is_right(self) -> bool:
        """Whether both limits hold."""
        return self.largest_nmse <= LIMIT and (self.widest_tie is None or self.widest_tie < LARGEST_TIE)


def row_of(variant: str, prompt: str, found: Agreement) -> Row:
    """Sum up the agreement on one text."""
    ties = found.reference_gap[np.isfinite(found.reference_gap)]
    errors = found.nmse
    widest = float(ties.max()) if len(ties) else None
    return Row(variant, prompt, len(errors), float(errors.max()), float(errors.mean()), len(ties), widest)


def main() -> int:
    """Print the table for the files of the command line; exit code 0 if all is within the limits, else 1."""
    given = _arguments()
    rows = [
        row_of(f"engine-{given.backend}, F16", scenario.name, _agreement_on(scenario, given))
        for scenario in _scenarios()
    ]
    print(tabulate([asdict(row) for row in rows], headers="keys", floatfmt=".2e"))
    if given.out is not None:
        write_figures(given.out, METHOD, [given.checkpoint / "model.safetensors", given.f16], [asdict(r) for r in rows])
    return 0 if all(row.is_right for row in rows) else 1


def _scenarios() -> Iterator[Scenario]:
    """Yield one scenario for each prompt."""
    for file in all_scenarios():
        if file.scenario.model.file is not None and not file.scenario.compared_scenarios:
            yield file.scenario


def _agreement_on(scenario: Scenario, given: argparse.Namespace) -> Agreement:
    prompt = scenario.prompt_token_ids
    engine = load_engine(given.f16, n_ctx=scenario.n_ctx, backend=given.backend)
    ids = [*prompt, *engine.run(prompt, scenario.n_predict).generated_token_ids]
    return agreement(forced_logits(engine, ids), transformers_logits(given.checkpoint, ids))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.models.pydoc.compare", description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of the checkpoint")
    parser.add_argument("f16", metavar="F16", type=Path)
    parser.add_argument("--backend", default="numpy", help="numpy (default) or cuda")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file as well")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
