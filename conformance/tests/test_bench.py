from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baselines.errors import ProcessError
from conformance.bench import bench as bench_module
from conformance.bench.bench import choose_residency, n_runs, turn
from conformance.bench.records import BenchComparison, BenchRecord
from conformance.bench.report import render_bench, render_claims
from conformance.bench.subjects import EngineRunError
from conformance.bench.telemetry import Sample, Watch, summarise
from conformance.scenario import ScenarioFile
from conformance.tests.bench_fakes import OPTIONS, SETTINGS, FakeSensor, FakeSubject, bench_of, pair


def decode_row(record: BenchRecord) -> BenchComparison:
    return next(row for row in record.comparisons if row.metric == "decode")


def test_rounds_go_forwards_and_backwards(short: ScenarioFile) -> None:
    subjects = pair(short)
    record = bench_of(short, subjects)
    timed = [line for line in subjects[0].log if line.endswith("layer_major 3")]
    assert [line.split()[0] for line in timed[:4]] == [
        "engine-numpy",
        "llama.cpp-b8763-cpu",
        "llama.cpp-b8763-cpu",
        "engine-numpy",
    ]
    orders = [run.order for subject in record.subjects for run in subject.runs]
    assert sorted(orders) == list(range(n_runs(subjects, OPTIONS))) == list(range(26))


def test_with_three_everyone_stands_everywhere_and_follows_everyone() -> None:
    assert ["".join(turn("AB", number)) for number in range(1, 5)] == ["AB", "BA", "AB", "BA"]
    rounds = ["".join(turn("ABC", number)) for number in range(1, 7)]
    assert rounds == ["ABC", "CBA", "BCA", "ACB", "CAB", "BAC"]
    within = [a + b for order in rounds for a, b in itertools.pairwise(order)]
    assert {pair: within.count(pair) for pair in within} == dict.fromkeys(["AB", "AC", "BA", "BC", "CA", "CB"], 2)
    across = [a[-1] + b[0] for a, b in itertools.pairwise([*rounds, rounds[0]])]
    assert [across.count(pair) for pair in ("AA", "BB", "CC")] == [1, 1, 1]


def test_figures_and_verdicts_follow_from_the_samples(short: ScenarioFile) -> None:
    record = bench_of(short, pair(short), ceiling=1000.0)
    row = decode_row(record)
    assert (row.verdict, row.n_rounds) == ("SLOWER", 6)
    assert row.ratio == pytest.approx(0.5, rel=0.01)
    assert {row.verdict for row in record.comparisons} == {"SLOWER"}
    decode = next(f for f in record.figures if (f.subject, f.metric) == ("llama.cpp-b8763-cpu", "decode"))
    assert decode.tok_per_s == pytest.approx(1e6, rel=0.01)
    assert decode.gb_per_s is not None
    assert decode.gb_per_s == pytest.approx(record.resident_weights_n_bytes / decode.time_ns)
    assert decode.ceiling_fraction == pytest.approx(decode.gb_per_s / 1000.0)
    prompt = next(f for f in record.figures if (f.subject, f.metric) == ("engine-numpy", "prefill_layer_major"))
    assert (prompt.n_tokens, prompt.n_samples) == (38, 6)
    assert prompt.tok_per_s == pytest.approx(38 / (8000e-9), rel=0.01)


def test_a_record_names_no_folder_and_every_sample_is_in_it(short: ScenarioFile) -> None:
    record = bench_of(short, pair(short))
    assert "/home" not in record.model_dump_json()
    runs = record.subjects[0].runs
    assert [run.round for run in runs] == [0, *(r for r in range(1, 7) for _ in range(2))]
    assert len(runs[0].decode_time_ns) == 3
    assert len(runs[1].decode_time_ns) == 2
    assert record.subjects[0].token_ids == record.subjects[1].token_ids


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"token_ids": [1, 2, 3, 4]},
            "correctness failed: engine-numpy: its first run has other tokens than the scenario, from position 0 on",
        ),
        ({"logits_sha256": "cd" * 32}, "correctness failed: engine-numpy: round 0, layer_major: other logits"),
        ({"fails": EngineRunError("layer 3: NaN"), "fails_at": 6}, "run failed: engine-numpy: round 2"),
        ({"settings": SETTINGS.model_copy(update={"n_threads": 1})}, "flags differ: n_threads is 1 here, 2 in"),
        ({"settings": SETTINGS.model_copy(update={"n_ctx": 512})}, "flags differ: n_ctx is 512 here, 256 in"),
        ({"settings": SETTINGS.model_copy(update={"type_v": None})}, "flags differ: type_v is None here, f16 in"),
    ],
)
def test_a_ratio_is_refused(short: ScenarioFile, changes: dict[str, Any], says: str) -> None:
    record = bench_of(short, pair(short, **changes))
    row = decode_row(record)
    assert (row.verdict, row.ratio, row.interval_low) == ("INVALID", None, None)
    assert row.reason.startswith(says)


def test_no_speed_is_printed_for_wrong_tokens(short: ScenarioFile) -> None:
    right, wrong = bench_of(short, pair(short)), bench_of(short, pair(short, token_ids=[1, 2, 3, 4]))
    assert not [figure for figure in wrong.figures if figure.subject == "engine-numpy"]
    lines = [line for line in render_bench([wrong]).splitlines() if line.startswith("short       engine-numpy")]
    assert "no speed: see below" in lines[0]
    assert "engine-numpy: no speed is given: its first run" in render_bench([wrong])
    assert "499.99 " not in render_bench([wrong])
    assert "no speed" not in render_bench([right])


def test_too_few_rounds_are_invalid(short: ScenarioFile) -> None:
    record = bench_of(short, pair(short), replace(OPTIONS, n_repetitions=4))
    assert decode_row(record).reason == "too few samples: 4 rounds, at least 5 are needed"


def test_one_changed_token_in_one_round_is_found(short: ScenarioFile) -> None:
    class Flips(FakeSubject):
        def run(self, prefill: Any, n_predict: int) -> dict[str, Any]:
            answer = super().run(prefill, n_predict)
            if self._n_runs == 8:
                answer["generated_token_ids_le64_sha256"] = "00" * 32
            return answer

    subjects = pair(short)
    flips = Flips(**{key: value for key, value in vars(subjects[0]).items() if not key.startswith("_")})
    row = decode_row(bench_of(short, [flips, subjects[1]]))
    assert (
        row.reason == "correctness failed: engine-numpy: round 3, layer_major: other tokens than in its reference run"
    )


def test_fewer_tokens_than_asked_are_no_faster(short: ScenarioFile) -> None:
    class Stops(FakeSubject):
        def run(self, prefill: Any, n_predict: int) -> dict[str, Any]:
            return super().run(prefill, n_predict - 1 if self._n_runs == 7 else n_predict)

    subjects = pair(short)
    stops = Stops(**{key: value for key, value in vars(subjects[1]).items() if not key.startswith("_")})
    row = decode_row(bench_of(short, [subjects[0], stops]))
    reason = "correctness failed: llama.cpp-b8763-cpu: round 3, layer_major: 2 of 3 tokens"
    assert (row.verdict, row.reason) == ("INVALID", reason)


def test_a_baseline_that_dies_leaves_a_record_that_says_so(short: ScenarioFile) -> None:
    ours, theirs = pair(short)
    theirs.fails, theirs.fails_at = ProcessError("ended by SIGILL: /home/someone/x"), 6
    record = bench_of(short, [ours, theirs])
    row = decode_row(record)
    assert row.reason == "run failed: llama.cpp-b8763-cpu: round 2, layer_major: ended by SIGILL: x"
    theirs = replace(theirs, refuses="no such program", fails=None)
    record = bench_of(short, [pair(short)[0], theirs])
    assert decode_row(record).reason == "run failed: llama.cpp-b8763-cpu: round 0, layer_major: no such program"
    assert {run.error for run in record.subjects[1].runs} == {"no such program"}


def test_ctrl_c_closes_every_program(short: ScenarioFile) -> None:
    subjects = pair(short, fails=KeyboardInterrupt, fails_at=3)
    with pytest.raises(KeyboardInterrupt):
        bench_of(short, subjects)
    assert not any(subject.is_open for subject in subjects)


def test_programs_take_turns_where_memory_is_short(short: ScenarioFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "choose_residency", lambda *args: ("alternating", "3 bytes are free"))
    subjects = pair(short)
    record = bench_of(short, subjects)
    opened = 0
    for line in subjects[0].log:
        opened += line.startswith("open") - line.startswith("close")
        assert opened in (0, 1) or subjects[0].log[-1].startswith("close")
    assert (record.plan.residency, record.plan.because) == ("alternating", "3 bytes are free")
    assert [subject.n_starts for subject in record.subjects] == [13, 13]
    assert decode_row(record).verdict == "SLOWER"


@pytest.mark.parametrize(
    ("free_gib", "n_programs", "chosen"), [(15, 2, "alternating"), (138, 4, "together"), (None, 2, "alternating")]
)
def test_residency_is_chosen_by_what_is_free(
    monkeypatch: pytest.MonkeyPatch, free_gib: int | None, n_programs: int, chosen: str
) -> None:
    free = None if free_gib is None else free_gib << 30
    monkeypatch.setattr(bench_module, "free_memory_n_bytes", lambda: free)
    found, because = choose_residency("cuda", 16_000_000_000, n_programs)
    assert found == chosen
    assert ("does not say" if free is None else f"{free:,} bytes of device memory are free") in because
    assert choose_residency("numpy", 1000, 2)[0] == "together"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reasons": 0x40}, "throttled: hw_thermal_slowdown in round 1"),
        ({"sm_mhz": 1700}, "clocks moved: sm_mhz between 1700 and 1980"),
        ({"memory_mhz": 1200}, "clocks moved: memory_mhz between 1200 and 2619"),
        ({"reasons": 0x4}, None),
        ({"sm_mhz": 1900}, None),
    ],
)
def test_a_gpu_that_changed_makes_ratios_invalid(short: ScenarioFile, change: dict[str, int], says: str | None) -> None:
    good = Sample(1980, 2619, 40, 400_000, 0x1, 1 << 30)
    sensor = FakeSensor((*[good] * 12, *[replace(good, **change)] * 10, good))
    row = decode_row(bench_of(short, pair(short), sensor=sensor))
    assert (row.reason if says else row.verdict) == (says or "SLOWER")


def test_telemetry_is_in_the_record(short: ScenarioFile) -> None:
    subjects = pair(short)
    record = bench_of(short, subjects, sensor=FakeSensor(), backend="cuda")
    telemetry = record.subjects[0].runs[1].telemetry
    assert telemetry is not None
    assert (telemetry.sm_mhz, telemetry.temperature_c, telemetry.power_mw) == (1980, 40, 400_000)
    assert record.versions.cuda_driver == "13.0"
    assert record.subjects[0].memory.device_steady_n_bytes == 0
    assert bench_of(short, pair(short)).subjects[0].runs[1].telemetry is None


def test_samples_in_short() -> None:
    samples = [Sample(100 * k, 1000, 40 + k, 10 * k, 1 << k, 1000 * k) for k in (1, 2, 3)]
    found = summarise(samples)
    assert (found.sm_mhz, found.temperature_c, found.slowed_by) == (200, 43, ["sw_power_cap", "hw_slowdown"])
    assert (found.used_before_n_bytes, found.used_peak_n_bytes) == (1000, 3000)
    with Watch(None) as watch:
        pass
    assert watch.telemetry is None


def test_a_scenario_without_golden_hashes_takes_llama_cpp_s(short: ScenarioFile) -> None:
    checks = tuple(check for check in short.scenario.checks if not hasattr(check, "expected"))
    own = replace(short, scenario=short.scenario.model_copy(update={"checks": checks}))
    record = bench_of(own, pair(short))
    assert record.expected is not None
    assert record.expected.source == "llama.cpp-b8763-cpu"
    assert decode_row(record).verdict == "SLOWER"
    assert decode_row(bench_of(own, pair(short, token_ids=[5, 6, 7, 8]))).verdict == "INVALID"


def test_llama_bench_has_no_tokens_and_sizes_its_own_context(short: ScenarioFile) -> None:
    ours, theirs = pair(short)
    theirs.name, theirs.token_ids = "llama-bench-b8763-cpu", theirs.token_ids
    theirs.settings = SETTINGS.model_copy(update={"n_ctx": 128})
    row = decode_row(bench_of(short, [ours, theirs]))
    assert row.verdict == "SLOWER"
    assert next(r for r in row.parity if r.setting == "n_ctx").exempt


def test_claims_stand_beside_ours_and_in_no_ratio(short: ScenarioFile) -> None:
    text = render_claims()
    assert "Claimed by others, not measured here, part of no ratio" in text
    assert "24.94 tok_per_s" in text
    cuda = bench_of(short, pair(short), sensor=FakeSensor(), backend="cuda")
    assert text in render_bench([cuda])
    assert text not in render_bench([bench_of(short, pair(short))])


def test_the_record_of_a_run_is_json(short: ScenarioFile, tmp_path: Path) -> None:
    record = bench_of(short, pair(short))
    assert BenchRecord.model_validate_json(json.dumps(record.model_dump(mode="json"))) == record
