"""Recompute the golden values of a scenario, and edit them in its file.

Only the values change: the file keeps its comments, its layout and its declared margin, which is a decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from conformance.checks import top2_gap
from conformance.scenario import (
    FinalGreedyTokenId,
    FinalLogitsHash,
    GeneratedTokenIdsHash,
    Scenario,
    ScenarioFile,
    node_at,
)
from engine.cuda.device import open_device
from engine.generate import Generation, load_engine


@dataclass(frozen=True)
class Change:
    """One golden value: where it stands in the file, what it is, and what it should be."""

    name: str
    keys: tuple[str | int, ...]
    old: str | int
    new: str | int


@dataclass(frozen=True)
class Golden:
    """The golden values of a scenario, and the engine's smallest top-2 gap in logits, for whoever sets the margin."""

    changes: tuple[Change, ...]
    smallest_top2_gap: float


def golden_backend(scenario: Scenario) -> str:
    """Return the backend that the golden values come from: NumPy, which needs no GPU, or the first it is for."""
    return "numpy" if "numpy" in scenario.backends else scenario.backends[0]


def require_backend(scenario: Scenario) -> None:
    """Raise NoDeviceError if this machine cannot compute the golden values, before a model is made for it."""
    if golden_backend(scenario) == "cuda":
        open_device()


def compute_golden(file: ScenarioFile, model: Path, sha256: str, on_token: Callable[[int], None]) -> Golden:
    """Run the scenario with `model`, whose SHA256 is given; raises EngineError."""
    scenario = file.scenario
    engine = load_engine(
        model,
        n_ctx=scenario.n_ctx,
        backend=golden_backend(scenario),
        n_threads=scenario.n_threads,
        vram_budget=scenario.vram_budget_n_bytes,
    )
    generation = engine.run(
        scenario.prompt_token_ids,
        scenario.n_predict,
        prefill=scenario.prefill[0],
        keep_logits=True,
        on_token=on_token,
    )
    assert generation.logits is not None
    pinned = Change("model.sha256", ("model", "sha256"), scenario.model.sha256, sha256)
    return Golden((pinned, *_changes(file, generation)), float(top2_gap(generation.logits).min()))


def write_golden(path: Path, golden: Golden) -> None:
    """Put the new values into the scenario's file, leaving every other character as it is."""
    text = path.read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert root is not None  # the file has been loaded as a scenario
    spans = []
    for change in golden.changes:
        node, _ = node_at(root, change.keys)
        value = f'"{change.new}"' if isinstance(change.new, str) else str(change.new)
        spans.append((node.start_mark.index, node.end_mark.index, value))
    for start, end, value in sorted(spans, reverse=True):
        text = text[:start] + value + text[end:]
    path.write_text(text, encoding="utf-8")


def _changes(file: ScenarioFile, generation: Generation) -> list[Change]:
    found: list[Change] = []
    for i, check in enumerate(file.scenario.checks):
        keys = ("checks", i, "expected")
        if isinstance(check, FinalLogitsHash):
            found.append(Change(check.label, keys, check.expected, generation.final_logits_le32_sha256))
        elif isinstance(check, FinalGreedyTokenId):
            found.append(Change(check.label, keys, check.expected, generation.final_greedy_token_id))
        elif isinstance(check, GeneratedTokenIdsHash):
            found.append(Change(check.label, keys, check.expected, generation.generated_token_ids_le64_sha256))
    return found
