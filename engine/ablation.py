"""What each surgery brings: decoding with it switched off, in alternation with the engine as it is.

Every pair of runs is one of the whole engine and one of the variant, on the same weights in the same process, so that
clocks and temperature are the same for both. That the bits are the same is checked on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from tabulate import tabulate

from engine.cuda.device import set_scheduling
from engine.cuda.variants import FULL, Variant
from engine.errors import RequestError
from engine.generate import Engine, Generation
from engine.ops import Ops

if TYPE_CHECKING:
    from engine.cuda.build import Build
    from engine.cuda.ops import CudaOps

Decode: TypeAlias = Callable[[Variant], tuple[float, str]]
"""Decodes by a variant; returns the time of a step, us, and the SHA256 of the ids."""
N_CHECKED = 8
"""Steps whose logits are compared bit by bit before anything is timed."""


@dataclass(frozen=True)
class Code:
    """What a variant was compiled to, and whether it launches the same as the whole engine on this device."""

    cubin_n_bytes: int
    ptx_n_bytes: int
    same_as_full: bool
    logits_sha256: str


@dataclass(frozen=True)
class AblationRow:
    """One surgery switched off; times of a step in us, a sample a run. difference_us above 0: the surgery pays."""

    name: str
    surgery: int
    without: str
    code: Code
    full_samples_us: list[float]
    samples_us: list[float]
    full_us: float
    without_us: float
    difference_us: float
    same_bits: bool


@dataclass(frozen=True)
class Ablation:
    """All surgeries that were switched off."""

    model: str
    n_ctx: int
    n_prompt: int
    n_steps: int
    device: dict[str, Any]
    full: Code
    rows: list[AblationRow]

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain data, for JSON."""
        return asdict(self)


def ablate(
    engine: Engine,
    prompt_ids: Sequence[int],
    n_steps: int,
    n_repetitions: int,
    variants: Sequence[Variant],
    progress: Callable[[int], None],
) -> Ablation:
    """Measure an engine with the backend cuda; progress gets 1 after each pair of runs."""
    ops = cast("CudaOps", engine.ops)
    builds = {one.name: ops.build(one) for one in (FULL, *variants)}

    def run(variant: Variant, n_predict: int, keep_logits: bool) -> Generation:
        set_scheduling(variant.scheduling or "spin")
        ops.use(builds[variant.name])
        return _engine_of(engine, variant).run(prompt_ids, n_predict, keep_logits=keep_logits)

    def decode(variant: Variant) -> tuple[float, str]:
        found = run(variant, n_steps + 1, False)
        return sum(found.step_time_ns) / n_steps * 1e-3, found.generated_token_ids_le64_sha256

    codes = {}
    for one in (FULL, *variants):  # captures the passes as well
        found = run(one, min(n_steps, N_CHECKED) + 1, True)
        codes[one.name] = _code(builds[one.name], builds[FULL.name], found.logits)
    rows = [alternate(one, codes[one.name], codes[FULL.name], n_repetitions, decode, progress) for one in variants]
    ops.use(builds[FULL.name])
    return Ablation(engine.model.name, engine.n_ctx, len(prompt_ids), n_steps, ops.describe(), codes[FULL.name], rows)


def alternate(
    variant: Variant, code: Code, full: Code, n_repetitions: int, decode: Decode, progress: Callable[[int], None]
) -> AblationRow:
    """Decode by the whole engine and by the variant in turn, the first of a pair in turn as well."""
    times: dict[str, list[float]] = {FULL.name: [], variant.name: []}
    hashes: dict[str, set[str]] = {FULL.name: set(), variant.name: set()}
    for repetition in range(n_repetitions):
        for one in (FULL, variant) if repetition % 2 == 0 else (variant, FULL):
            time_us, sha256 = decode(one)
            times[one.name].append(time_us)
            hashes[one.name].add(sha256)
        progress(1)
    full_us, without_us = median(times[FULL.name]), median(times[variant.name])
    same_ids = hashes[FULL.name] == hashes[variant.name] and len(hashes[FULL.name]) == 1
    return AblationRow(
        *(variant.name, variant.surgery, variant.without, code, times[FULL.name], times[variant.name]),
        *(full_us, without_us, without_us - full_us, same_ids and code.logits_sha256 == full.logits_sha256),
    )


def render(ablation: Ablation) -> str:
    """Return the table: what is switched off, the step with and without it, code sizes."""
    headers = ("surgery", "variant", "with us", "without us", "difference us", "%", "PTX kB", "bits", "switched off")
    rows = [_row(row) for row in ablation.rows]
    align = ["right", "left", *["right"] * 5, "left", "left"]
    table = tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align)
    where = f"{ablation.model}, {ablation.device['device']}, c={ablation.n_ctx}"
    how = f"{ablation.n_prompt} prompt tokens, {ablation.n_steps} steps, medians of {len(ablation.rows[0].samples_us)}"
    return f"{where}: {how}; PTX of the whole engine {ablation.full.ptx_n_bytes * 1e-3:.0f} kB\n\n{table}"


def _row(row: AblationRow) -> tuple[str, ...]:
    percent = f"{row.difference_us / row.full_us:+.1%}"
    bits = "same" if row.same_bits else "DIFFERENT"
    if row.code.same_as_full:
        bits += ", same kernels"
    times = (f"{row.full_us:.1f}", f"{row.without_us:.1f}", f"{row.difference_us:+.1f}", percent)
    return str(row.surgery), row.name, *times, f"{row.code.ptx_n_bytes * 1e-3:.0f}", bits, row.without


def check_variants(variants: Sequence[Variant]) -> None:
    """Raise RequestError if there is nothing to switch off."""
    if not variants or FULL in variants:
        raise RequestError(f"{FULL.name} is what variants are compared with, expected others")


def _engine_of(engine: Engine, variant: Variant) -> Engine:
    if not variant.checks:
        return engine
    from engine.cuda.checked import CheckedOps

    return replace(engine, ops=cast(Ops, CheckedOps(engine.ops)))


def _code(build: Build, full: Build, logits: Any) -> Code:
    """Describe what was built; the same code launched the same way is the same engine."""
    ours, theirs = build.kernels.cubin, full.kernels.cubin
    how = [(one.overlaps, one.checks, one.scheduling) for one in (build.variant, full.variant)]
    sha256 = hashlib.sha256(np.ascontiguousarray(logits, dtype="<f4").tobytes()).hexdigest()
    return Code(len(ours.code), ours.ptx_n_bytes, ours.code == theirs.code and how[0] == how[1], sha256)
