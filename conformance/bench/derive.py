"""What follows from a bench record's measurements: figures, parity of flags, verdicts. Pure functions of the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from conformance.bench.records import (
    BenchComparison,
    BenchRecord,
    Figure,
    Metric,
    ParityRow,
    Run,
    SubjectRecord,
    TokensVerdict,
)
from conformance.bench.stats import MIN_SAMPLES, Ratio, Verdict, bootstrap_ratio, verdict_of
from engine.generate import token_ids_le64_sha256

CLOCK_TOLERANCE = 0.05
"""How far the medians of the clocks of two runs may lie apart."""
_NORMAL = "sw_power_cap"  # how a busy card runs; whether it cost anything is seen by the clocks
_BENCH = "llama-bench"
_N_CTX_EXEMPT = "llama-bench sizes its context to its test, which is smaller: no disadvantage to it"
_THREADS_EXEMPT = "all layers are on the GPU: threads compute nothing"


def derive(record: BenchRecord) -> BenchRecord:
    """Return `record` with the figures and comparisons that follow from its measurements."""
    figures = [figure for subject in record.subjects for figure in _figures(record, subject)]
    return record.model_copy(update={"figures": figures, "comparisons": list(_comparisons(record))})


def samples_of(record: BenchRecord, subject: SubjectRecord, metric: Metric) -> dict[int, float]:
    """Return the time of each timed round by one metric, ns per sample: a decode step, a prompt, a first token, all."""
    take = _TIMES[metric]
    mode = "token_major" if metric == "prefill_token_major" else "layer_major"
    found = {}
    for run in subject.runs:
        time_ns = take(run) if run.round and run.prefill == mode and run.error is None else None
        if time_ns is not None:
            found[run.round] = time_ns
    return found


def tokens_verdict(record: BenchRecord, subject: SubjectRecord) -> tuple[TokensVerdict, str]:
    """Say whether every run of `subject` gave the right tokens, and if not, which did not and how.

    "failed": a run gave nothing; "none": the program has no tokens that could be right.
    """
    failed = next((run for run in subject.runs if run.error is not None), None)
    if failed is not None:
        return "failed", f"round {failed.round}, {failed.prefill}: {failed.error}"
    if subject.name.startswith(_BENCH):
        return "none", "llama-bench generates no tokens that could be compared"
    if record.expected is None:
        return "wrong", "there are no right tokens to compare with"
    if token_ids_le64_sha256(subject.token_ids) != record.expected.generated_token_ids_le64_sha256:
        return "wrong", f"its first run has other tokens than {record.expected.source}{_where(record, subject)}"
    logits = record.expected.final_logits_le32_sha256 if subject.role == "engine" else None
    for run in subject.runs:
        n_asked = _n_asked(record, run)
        if run.n_generated != n_asked:
            return "wrong", f"round {run.round}, {run.prefill}: {run.n_generated} of {n_asked} tokens"
        if run.generated_token_ids_le64_sha256 != token_ids_le64_sha256(subject.token_ids[: run.n_generated]):
            return "wrong", f"round {run.round}, {run.prefill}: other tokens than in its reference run"
        if logits is not None and run.final_logits_le32_sha256 != logits:
            return "wrong", f"round {run.round}, {run.prefill}: other logits after the prompt than expected"
    return "right", "every run has the right tokens"


def _n_asked(record: BenchRecord, run: Run) -> int:
    """Return how many ids a run was asked for."""
    if run.round == 0:
        return record.n_predict
    return record.plan.n_decode + 1 if run.prefill == "layer_major" else 1


def _where(record: BenchRecord, subject: SubjectRecord) -> str:
    """Say where the ids of `subject` part from right ones, if another subject has them."""
    assert record.expected is not None
    for other in record.subjects:
        if token_ids_le64_sha256(other.token_ids) == record.expected.generated_token_ids_le64_sha256:
            pairs = zip(subject.token_ids, other.token_ids, strict=False)
            return f", from position {next((i for i, (a, b) in enumerate(pairs) if a != b), len(subject.token_ids))} on"
    return ""


def parity(record: BenchRecord, engine: SubjectRecord, baseline: SubjectRecord) -> list[ParityRow]:
    """Compare the settings in force on both sides, one row each."""
    ours, theirs = engine.settings.model_dump(), baseline.settings.model_dump()
    return [
        ParityRow(
            setting=name,
            engine=ours[name],
            baseline=theirs[name],
            equal=ours[name] is not None and ours[name] == theirs[name],
            exempt=_exemption(name, record, baseline),
        )
        for name in ours
    ]


def _exemption(setting: str, record: BenchRecord, baseline: SubjectRecord) -> str | None:
    if setting == "n_ctx" and baseline.name.startswith(_BENCH):
        return _N_CTX_EXEMPT
    return _THREADS_EXEMPT if setting == "n_threads" and record.backend == "cuda" else None


def _decode_time(run: Run) -> float | None:
    return sum(run.decode_time_ns) / run.n_decoded if run.n_decoded else None


_TIMES: dict[Metric, Callable[[Run], float | None]] = {
    "decode": _decode_time,
    "prefill_layer_major": lambda run: run.prefill_time_ns,
    "prefill_token_major": lambda run: run.prefill_time_ns,
    "first_token": lambda run: run.first_token_time_ns,
    "client_first_token": lambda run: run.client_first_token_time_ns,
    "end_to_end": lambda run: run.wall_time_ns,
}


def _n_tokens(record: BenchRecord, metric: Metric) -> int:
    """Return how many tokens one sample stands for."""
    n_prompt = len(record.prompt_token_ids)
    by_metric = {"decode": 1, "first_token": 1, "client_first_token": 1, "end_to_end": record.plan.n_decode + 1}
    return by_metric.get(metric, n_prompt)


def _figures(record: BenchRecord, subject: SubjectRecord) -> Iterator[Figure]:
    """Yield the subject's speeds; none for a subject whose tokens are wrong or missing."""
    if tokens_verdict(record, subject)[0] in ("wrong", "failed"):
        return
    for metric in subject.metrics:
        samples = samples_of(record, subject, metric)
        if not samples:
            continue
        n_tokens, time_ns = _n_tokens(record, metric), float(median(samples.values()))
        gb_per_s = record.resident_weights_n_bytes / time_ns if metric == "decode" else None
        ceiling = record.read_ceiling_gb_per_s
        yield Figure(
            subject=subject.name,
            metric=metric,
            n_samples=len(samples),
            n_tokens=n_tokens,
            time_ns=time_ns,
            tok_per_s=n_tokens / (time_ns * 1e-9),
            ms_per_token=time_ns * 1e-6 / n_tokens,
            gb_per_s=gb_per_s,
            ceiling_fraction=gb_per_s / ceiling if gb_per_s and ceiling else None,
        )


def _comparisons(record: BenchRecord) -> Iterator[BenchComparison]:
    engines = [subject for subject in record.subjects if subject.role == "engine"]
    baselines = [subject for subject in record.subjects if subject.role == "baseline"]
    for engine in engines:
        for baseline in baselines:
            for metric in baseline.metrics:
                yield compare(record, engine, baseline, metric)


def compare(record: BenchRecord, engine: SubjectRecord, baseline: SubjectRecord, metric: Metric) -> BenchComparison:
    """Compare two subjects by one metric; INVALID, without a ratio, wherever one would mean nothing."""
    rows = parity(record, engine, baseline)
    ours, theirs = samples_of(record, engine, metric), samples_of(record, baseline, metric)
    rounds = sorted(ours.keys() & theirs.keys())
    ratio: Ratio | None = None
    verdict: Verdict = "INVALID"
    reason = next(_objections(record, (engine, baseline), rows, len(rounds)), None)
    if reason is None:
        ratio = bootstrap_ratio([ours[r] for r in rounds], [theirs[r] for r in rounds])
        verdict, reason = verdict_of(ratio)
    return BenchComparison(
        metric=metric,
        engine=engine.name,
        baseline=baseline.name,
        n_rounds=len(rounds),
        ratio=ratio.value if ratio else None,
        interval_low=ratio.low if ratio else None,
        interval_high=ratio.high if ratio else None,
        verdict=verdict,
        reason=reason,
        parity=rows,
    )


def _objections(
    record: BenchRecord, pair: Sequence[SubjectRecord], rows: Sequence[ParityRow], n_rounds: int
) -> Iterator[str]:
    """Yield every reason why a ratio of the two would mean nothing, the gravest first."""
    for subject in pair:
        tokens, why = tokens_verdict(record, subject)
        if tokens in ("wrong", "failed"):
            yield f"{'correctness' if tokens == 'wrong' else 'run'} failed: {subject.name}: {why}"
    for row in rows:
        if not row.equal and not row.exempt:
            yield f"flags differ: {row.setting} is {row.engine} here, {row.baseline} in {pair[1].name}"
    if n_rounds < MIN_SAMPLES:
        yield f"too few samples: {n_rounds} rounds, at least {MIN_SAMPLES} are needed"
    yield from _gpu_objections([run for subject in pair for run in subject.runs if run.round])


def _gpu_objections(runs: Sequence[Run]) -> Iterator[str]:
    seen = [(run.round, run.telemetry) for run in runs if run.telemetry is not None]
    for number, telemetry in seen:
        throttled = [reason for reason in telemetry.slowed_by if reason != _NORMAL]
        if throttled:
            yield f"throttled: {', '.join(throttled)} in round {number}"
    for name in ("sm_mhz", "memory_mhz"):
        clocks = [getattr(telemetry, name) for _, telemetry in seen]
        if clocks and min(clocks) < (1 - CLOCK_TOLERANCE) * max(clocks):
            yield f"clocks moved: {name} between {min(clocks)} and {max(clocks)}"
