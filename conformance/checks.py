"""The checks: each takes values and arrays and says what it found, what is allowed, and whether it passed.

Values that are not finite fail before any metric is taken of them. `evaluate` applies the checks of a scenario.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from conformance import scenario as specs
from conformance.oracle import F64, nmse
from conformance.scenario import CheckSpec, Data, Scenario
from conformance.subject import Measurement
from engine.generate import logits_le32_sha256, token_ids_le64_sha256

F32: TypeAlias = NDArray[np.float32]
SECOND_RUN = "second_run_token_ids_equal"


class CheckResult(Data):
    """What one check found. passed is None when it could not be measured; detail then says why."""

    name: str
    value: int | float | str | None
    limit: int | float | str | None
    unit: str
    passed: bool | None
    detail: str | None
    because: str


class Difference(Data):
    """The first position at which two engines chose different ids. Gaps are in logits, between the largest two."""

    position: int
    token_id: int
    reference_token_id: int
    top2_gap: float | None
    reference_top2_gap: float | None
    declared_margin: float | None
    gap_under_margin: bool | None


class Comparison(Data):
    """How the ids and logits of one run lie to those of another, `against`.

    n_equal counts ids before the first difference; n_equal_teacher_forced counts positions at which the other chooses
    the same id when it is fed ours. largest_logit_difference is over the positions that follow equal ids.
    """

    against: str
    n_equal: int
    n_equal_teacher_forced: int | None
    largest_logit_difference: float | None
    first_difference: Difference | None


@dataclass(frozen=True)
class Reference:
    """llama.cpp's run. logits (n_predict, n_vocab) f32 belong to its own ids, forced_logits to the engine's."""

    token_ids: Sequence[int]
    logits: F32
    forced_logits: F32


@dataclass(frozen=True)
class Evidence:
    """Everything the checks of one engine look at.

    reference, comparison (with the reference) and oracle, (n_predict, n_vocab) f64 after the engine's own ids, are
    None without a run of llama.cpp; missing then says why. other_hashes: token hash by scenario name.
    """

    engine: Measurement
    other_hashes: Mapping[str, str]
    reference: Reference | None = None
    comparison: Comparison | None = None
    oracle: F64 | None = None
    missing: str = ""


@dataclass(frozen=True)
class IdsEvidence:
    """What the checks of an engine that gives no logits look at; see Evidence."""

    token_ids: Sequence[int]
    second_token_ids: Sequence[int]
    other_hashes: Mapping[str, str]
    comparison: Comparison | None
    missing: str


def evaluate(checks: Sequence[CheckSpec], evidence: Evidence) -> list[CheckResult]:
    """Apply the engine's checks, `finite` first; those on llama.cpp alone are left to `evaluate_baseline`."""
    applied = [_APPLY[type(check)](check, evidence) for check in checks if type(check) in _APPLY]
    return [finite(evidence.engine.logits), *applied]


def evaluate_baseline(
    scenario: Scenario, logits: F32, gaps: Sequence[float], effective: Mapping[str, Any]
) -> list[CheckResult]:
    """Apply the checks on llama.cpp's own run, `finite` and `settings_honoured` first."""
    of_gap = [check for check in scenario.checks if isinstance(check, specs.SmallestTop2Gap)]
    flags: dict[str, Any] = {
        "n_ctx": scenario.n_ctx,
        "type_k": scenario.type_k,
        "type_v": scenario.type_v,
        "flash_attn": {"on": "enabled", "off": "disabled"}[scenario.baseline.flash_attn],
        "n_threads": scenario.baseline.threads,
    }
    if scenario.baseline.n_gpu_layers:
        flags["layers_offloaded"] = _offloaded(scenario.baseline.n_gpu_layers, effective)
    return [finite(logits), settings_honoured(flags, effective), *(smallest_top2_gap(c, gaps) for c in of_gap)]


def _offloaded(n_gpu_layers: int, effective: Mapping[str, Any]) -> str:
    """Return what llama.cpp must state for n_gpu_layers, of which it takes no more than the model has."""
    _, _, n_layer = str(effective.get("layers_offloaded")).partition("/")
    return f"{min(n_gpu_layers, int(n_layer))}/{n_layer}" if n_layer else str(n_gpu_layers)


def evaluate_ids(checks: Sequence[CheckSpec], evidence: IdsEvidence) -> list[CheckResult]:
    """Apply the checks on ids to an engine that gives no logits; first, whether it answers twice the same."""
    applied = [_APPLY_TO_IDS[type(check)](check, evidence) for check in checks if type(check) in _APPLY_TO_IDS]
    return [second_run_token_ids_equal(evidence.token_ids, evidence.second_token_ids), *applied]


def labels_for(checks: Sequence[CheckSpec], role: str) -> set[str]:
    """Return the names of those of a scenario's checks that a record of this role must have."""
    if role == "baseline":
        return {check.label for check in checks if isinstance(check, specs.SmallestTop2Gap)}
    if role == "subject":
        return {check.label for check in checks if type(check) in _APPLY_TO_IDS} | {SECOND_RUN}
    return {check.label for check in checks if type(check) in _APPLY}


def second_run_token_ids_equal(ids: Sequence[int], second: Sequence[int]) -> CheckResult:
    """Count the ids before the first that a second request gives otherwise."""
    n_equal = n_equal_ids(ids, second)
    same = n_equal == len(ids)
    return CheckResult(
        name=SECOND_RUN,
        value=n_equal,
        limit=len(ids),
        unit="tokens",
        passed=same,
        detail=None if same else f"position {n_equal}: id {ids[n_equal]} first, {second[n_equal]} then",
        because="an engine that answers the same question in two ways cannot be compared",
    )


def n_equal_ids(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return how many of two equally long lists of ids are equal before the first difference."""
    pairs = zip(ids, others, strict=True)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), len(ids))


def finite(logits: F32) -> CheckResult:
    """Count logits (n, n_vocab) that are NaN or infinite."""
    bad = np.argwhere(~np.isfinite(logits))
    detail = f"first at position {bad[0][0]}, id {bad[0][1]}" if len(bad) else None
    because = "a metric of values that are not finite says nothing"
    return CheckResult(
        name="finite", value=len(bad), limit=0, unit="logits", passed=not len(bad), detail=detail, because=because
    )


def settings_honoured(requested: Mapping[str, Any], effective: Mapping[str, Any]) -> CheckResult:
    """Count the settings that llama.cpp's log states otherwise than requested, or not at all."""
    differing = [
        f"{key}: requested {value}, effective {effective.get(key)}"
        for key, value in requested.items()
        if effective.get(key) != value
    ]
    return CheckResult(
        name="settings_honoured",
        value=len(differing),
        limit=0,
        unit="settings",
        passed=not differing,
        detail="; ".join(differing) or None,
        because="two engines are compared under the same settings or not at all",
    )


def final_logits_bitwise_equal(spec: specs.FinalLogitsBitwiseEqual, logits: F32, other: F32) -> CheckResult:
    """Compare the bits of two logit rows (n_vocab)."""
    differs = np.flatnonzero(_bits(logits) != _bits(other))
    detail = None
    if len(differs):
        worst = differs[np.argmax(np.abs(logits[differs].astype(np.float64) - other[differs]))]
        detail = f"worst at id {worst}: {logits[worst]!s} here, {other[worst]!s} in {spec.against}"
    return _result(spec, len(differs), 0, "logits", not len(differs), detail)


def final_logits_le32_sha256(spec: specs.FinalLogitsHash, logits: F32) -> CheckResult:
    """Compare the hash of the logits after the prompt, (n_vocab), with the golden one."""
    digest = logits_le32_sha256(logits)
    return _result(spec, digest, spec.expected, "sha256", digest == spec.expected)


def final_greedy_token_id(spec: specs.FinalGreedyTokenId, token_id: int) -> CheckResult:
    """Compare the first generated id with the golden one."""
    return _result(spec, token_id, spec.expected, "token id", token_id == spec.expected)


def generated_token_ids_le64_sha256(spec: specs.GeneratedTokenIdsHash, ids: Sequence[int]) -> CheckResult:
    """Compare the hash of all generated ids with the golden one."""
    digest = token_ids_le64_sha256(ids)
    return _result(spec, digest, spec.expected, "sha256", digest == spec.expected)


def generated_token_ids_equal(
    spec: specs.GeneratedTokenIdsEqual, ids: Sequence[int], comparison: Comparison
) -> CheckResult:
    """Report how far the ids are llama.cpp's, and what both engines saw where they part."""
    found = comparison.first_difference
    return _result(spec, comparison.n_equal, len(ids), "tokens", found is None, describe(found) if found else None)


def same_hash_at_both_n_ctx(spec: specs.SameHashAtBothNCtx, ids: Sequence[int], other_hash: str) -> CheckResult:
    """Compare the hash of the ids with that of the same question at another n_ctx."""
    digest = token_ids_le64_sha256(ids)
    return _result(spec, digest, other_hash, "sha256", digest == other_hash)


def smallest_top2_gap(spec: specs.SmallestTop2Gap, gaps: Sequence[float]) -> CheckResult:
    """Compare the smallest distance between llama.cpp's two largest logits with the declared margin."""
    position = int(np.argmin(gaps))
    smallest = gaps[position]
    if not math.isfinite(smallest):
        return _result(spec, None, spec.min, "logits", False, f"position {position} has a logit that is not finite")
    return _result(spec, smallest, spec.min, "logits", smallest >= spec.min, f"smallest at position {position}")


def oracle_nmse(spec: specs.OracleNmse, logits: F32, reference_logits: F32, oracle: F64) -> CheckResult:
    """Compare our distance to the oracle with llama.cpp's; all (n, n_vocab) after the same ids."""
    if not (np.isfinite(logits).all() and np.isfinite(reference_logits).all()):
        return _result(spec, None, None, "NMSE", False, "not computed: there are logits that are not finite")
    ours, limit = nmse(logits, oracle), spec.max_ratio * nmse(reference_logits, oracle)
    error = np.abs(logits - oracle)
    position, token = np.unravel_index(int(np.argmax(error)), error.shape)
    worst = f"worst at position {position}, id {token}: {logits[position, token]!s}, oracle "
    return _result(spec, ours, limit, "NMSE", ours <= limit, f"{worst}{oracle[position, token]:.6f}")


def lowest_id_on_tie(spec: specs.LowestIdOnTie, chosen: int, expected: int) -> CheckResult:
    """Compare the id chosen among equal logits with the lowest of them."""
    return _result(spec, chosen, expected, "token id", chosen == expected)


def compare(against: str, ids: Sequence[int], logits: F32, other: Reference, margin: float | None = None) -> Comparison:
    """Compare a run with another; logits (n, n_vocab), row i the one behind ids[i].

    other.forced_logits has n rows, or those up to the first difference where the other was not fed these ids.
    """
    n_equal = n_equal_ids(ids, other.token_ids)
    forced = other.forced_logits
    n_forced = int((forced.argmax(axis=1) == np.asarray(ids)).sum()) if len(forced) == len(ids) else None
    rows = zip(logits, forced, strict=False)  # one at a time: all of a large vocabulary in float64 is much memory
    with np.errstate(invalid="ignore"):
        largest = float(np.max([np.abs(ours.astype(np.float64) - theirs).max() for ours, theirs in rows]))
    return Comparison(
        against=against,
        n_equal=n_equal,
        n_equal_teacher_forced=n_forced,
        largest_logit_difference=largest if math.isfinite(largest) else None,
        first_difference=None if n_equal == len(ids) else _difference(n_equal, ids, logits, other, margin),
    )


def compare_ids(against: str, ids: Sequence[int], other: Reference, margin: float | None) -> Comparison:
    """Compare the ids of an engine that gives no logits; the other's logits still tell a near-tie from a fault."""
    n_equal = n_equal_ids(ids, other.token_ids)
    return Comparison(
        against=against,
        n_equal=n_equal,
        n_equal_teacher_forced=None,
        largest_logit_difference=None,
        first_difference=None if n_equal == len(ids) else _difference(n_equal, ids, None, other, margin),
    )


def _difference(
    position: int, ids: Sequence[int], logits: F32 | None, other: Reference, margin: float | None
) -> Difference:
    """Describe the first difference; the rows there come from both free runs, which are one up to that position."""
    gap = math.nan if logits is None else _gap_at(logits, position)
    other_gap = _gap_at(other.logits, position)
    return Difference(
        position=position,
        token_id=ids[position],
        reference_token_id=other.token_ids[position],
        top2_gap=gap if math.isfinite(gap) else None,
        reference_top2_gap=other_gap if math.isfinite(other_gap) else None,
        declared_margin=margin,
        gap_under_margin=None if margin is None else other_gap < margin,
    )


def describe(found: Difference) -> str:
    """Say in one line where two runs part and how close the choice was."""
    margin = "no margin is declared"
    if found.declared_margin is not None:
        margin = f"{'under' if found.gap_under_margin else 'not under'} the margin of {found.declared_margin:g}"
    gaps = ["?" if gap is None else f"{gap:.4g}" for gap in (found.top2_gap, found.reference_top2_gap)]
    return (
        f"position {found.position}: id {found.token_id} here (top-2 gap {gaps[0]}), {found.reference_token_id} in "
        f"llama.cpp (top-2 gap {gaps[1]}, {margin})"
    )


def _gap_at(logits: F32, position: int) -> float:
    return float(top2_gap(logits[position][None])[0])


def top2_gap(logits: F32) -> F64:
    """Return the distance between the largest two of each row of logits (n, n_vocab), (n,) f64."""
    largest = np.stack([np.partition(row, -2)[-2:] for row in logits]).astype(np.float64)
    return np.asarray(largest[:, 1] - largest[:, 0])


def _bits(x: F32) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def _result(
    spec: CheckSpec,
    value: int | float | str | None,
    limit: int | float | str | None,
    unit: str,
    passed: bool | None,
    detail: str | None = None,
) -> CheckResult:
    return CheckResult(
        name=spec.label,
        value=value,
        limit=limit,
        unit=unit,
        passed=passed,
        detail=detail,
        because=spec.because,
    )


def not_measured(spec: CheckSpec, why: str) -> CheckResult:
    """Return the result of a check that had nothing to look at."""
    return _result(spec, None, None, "", None, why)


def _apply_bitwise(spec: Any, evidence: Evidence) -> CheckResult:
    engine = evidence.engine
    return final_logits_bitwise_equal(spec, engine.logits[0], engine.final_logits[spec.against])


def _apply_equal(spec: Any, evidence: Evidence | IdsEvidence) -> CheckResult:
    if evidence.comparison is None:
        return not_measured(spec, evidence.missing)
    return generated_token_ids_equal(spec, _ids(evidence), evidence.comparison)


def _apply_same_hash(spec: Any, evidence: Evidence | IdsEvidence) -> CheckResult:
    if spec.against not in evidence.other_hashes:
        return not_measured(spec, f"{spec.against} gave no tokens on this backend")
    return same_hash_at_both_n_ctx(spec, _ids(evidence), evidence.other_hashes[spec.against])


def _ids(evidence: Evidence | IdsEvidence) -> Sequence[int]:
    return evidence.token_ids if isinstance(evidence, IdsEvidence) else evidence.engine.token_ids


def _apply_oracle(spec: Any, evidence: Evidence) -> CheckResult:
    if evidence.reference is None or evidence.oracle is None:
        return not_measured(spec, evidence.missing)
    return oracle_nmse(spec, evidence.engine.logits, evidence.reference.forced_logits, evidence.oracle)


_APPLY_TO_IDS: dict[type, Callable[[Any, Any], CheckResult]] = {
    specs.FinalGreedyTokenId: lambda spec, e: final_greedy_token_id(spec, _ids(e)[0]),
    specs.GeneratedTokenIdsHash: lambda spec, e: generated_token_ids_le64_sha256(spec, _ids(e)),
    specs.GeneratedTokenIdsEqual: _apply_equal,
    specs.SameHashAtBothNCtx: _apply_same_hash,
}
_APPLY: dict[type, Callable[[Any, Evidence], CheckResult]] = {
    specs.FinalLogitsBitwiseEqual: _apply_bitwise,
    specs.FinalLogitsHash: lambda spec, e: final_logits_le32_sha256(spec, e.engine.logits[0]),
    **_APPLY_TO_IDS,
    specs.OracleNmse: _apply_oracle,
    specs.LowestIdOnTie: lambda spec, e: lowest_id_on_tie(spec, *e.engine.tie),
}
