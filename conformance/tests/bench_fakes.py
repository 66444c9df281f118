"""Stand-ins for what a bench measures: programs with times of our choosing, and a GPU's sensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, get_args

from baselines.errors import ProcessError
from conformance.bench.bench import Bench, BenchOptions
from conformance.bench.records import BenchRecord, Metric, Settings
from conformance.bench.subjects import Cold, Subject
from conformance.bench.telemetry import Sample, Sensor
from conformance.scenario import FinalLogitsHash, ScenarioFile
from engine.generate import PrefillMode, load_engine, token_ids_le64_sha256

ALL_METRICS: tuple[Metric, ...] = get_args(Metric)
OPTIONS = BenchOptions(n_repetitions=6, n_decode=2, warm_up_s=0.0)
SETTINGS = Settings(
    n_ctx=256, n_prompt_passes=1, flash_attn="enabled", type_k="f16", type_v="f16", layers_on_gpu="none", n_threads=2
)


@dataclass
class FakeSubject:
    """Gives the ids and the times it was made with; times_ns: of one decode step, one after the other.

    fails: message of the error of every run from the `fails_at`-th; log: names of what was called, shared.
    """

    name: str
    role: Literal["engine", "baseline"]
    token_ids: list[int]
    times_ns: tuple[int, ...]
    logits_sha256: str | None = None
    settings: Settings = SETTINGS
    metrics: tuple[Metric, ...] = ALL_METRICS
    prefill: tuple[PrefillMode, ...] = ("layer_major", "token_major")
    fails: Exception | type[BaseException] | None = None
    fails_at: int = 1 << 30
    refuses: str | None = None
    log: list[str] = field(default_factory=list)
    is_open: bool = False
    _n_runs: int = 0
    _times: Iterator[int] | None = None

    def open(self) -> Cold:
        if self.refuses:
            raise ProcessError(self.refuses)
        self.is_open = True
        self.log.append(f"open {self.name}")
        return Cold(ready_time_ns=1000, load_time_ns=500)

    def run(self, prefill: PrefillMode, n_predict: int) -> dict[str, Any]:
        assert self.is_open
        self._n_runs += 1
        if self.fails is not None and self._n_runs >= self.fails_at:
            raise self.fails
        self._times = self._times or cycle(self.times_ns)
        time_ns, ids = next(self._times), self.token_ids[:n_predict]
        self.log.append(f"{self.name} {prefill} {n_predict}")
        return {
            "prefill_time_ns": 4 * time_ns,
            "first_token_time_ns": 5 * time_ns,
            "client_first_token_time_ns": 6 * time_ns,
            "decode_time_ns": [time_ns] * (len(ids) - 1),
            "wall_time_ns": (4 + len(ids)) * time_ns,
            "n_decoded": len(ids) - 1,
            "n_generated": len(ids),
            "generated_token_ids_le64_sha256": token_ids_le64_sha256(ids),
            "final_logits_le32_sha256": self.logits_sha256,
            "token_ids": ids,
        }

    def describe(self) -> dict[str, Any]:
        return {
            "programs": {self.name: "ab" * 32},
            "requested": {"model": "/home/someone/m.gguf"},
            "effective": {"n_ctx": 256},
            "settings": self.settings,
            "versions": {},
        }

    def peak_n_bytes(self) -> int | None:
        return 1 << 20

    def close(self) -> None:
        self.is_open = False
        self.log.append(f"close {self.name}")


@dataclass
class FakeSensor:
    """A GPU that gives the same sample again and again, or the next of `samples` at each look."""

    samples: tuple[Sample, ...] = (Sample(1980, 2619, 40, 400_000, 0, 1 << 30),)
    cuda_driver: str = "13.0"
    _next: int = 0

    def sample(self) -> Sample:
        found = self.samples[min(self._next, len(self.samples) - 1)]
        self._next += 1
        return found


def right_ids(short: ScenarioFile) -> list[int]:
    """Return the ids of the short scenario."""
    return list(_generate(short.path.parent / "tiny.gguf", short.scenario.prompt_token_ids, short.scenario.n_predict))


@cache
def _generate(model: Path, prompt_ids: tuple[int, ...], n_predict: int) -> list[int]:
    return load_engine(model, n_ctx=256, n_threads=1).run(prompt_ids, n_predict).generated_token_ids


def golden_logits(short: ScenarioFile) -> str:
    return next(check.expected for check in short.scenario.checks if isinstance(check, FinalLogitsHash))


def pair(short: ScenarioFile, **changes: Any) -> list[FakeSubject]:
    """Return our engine, twice as slow as llama.cpp, and llama.cpp; `changes` are ours."""
    ids, log = right_ids(short), []  # type: ignore[var-annotated]
    ours: dict[str, Any] = {"times_ns": (2000, 2010, 1990, 2002), "logits_sha256": golden_logits(short), "log": log}
    return [
        FakeSubject("engine-numpy", "engine", **({"token_ids": ids} | ours | changes)),
        FakeSubject("llama.cpp-b8763-cpu", "baseline", token_ids=ids, times_ns=(1000, 1001, 999), log=log),
    ]


def bench_of(
    short: ScenarioFile,
    subjects: list[Any],
    options: BenchOptions = OPTIONS,
    sensor: Sensor | None = None,
    backend: str = "numpy",
    ceiling: float | None = None,
) -> BenchRecord:
    """Measure fakes on the short scenario."""
    model = Path(short.path.parent / "tiny.gguf")
    measured: list[Subject] = subjects
    return Bench(short, model, backend, measured, options, lambda text: None, lambda: None, sensor, {}, ceiling).run()
