"""A small scenario on the tiny fixture, and stand-ins for llama.cpp and for the engine's own process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baselines.llama_cpp.worker import WorkerRequest, WorkerResult
from conformance.checks import top2_gap
from conformance.golden import compute_golden, write_golden
from conformance.models import PRESETS, make_model, prompt_ids
from conformance.scenario import ScenarioFile, load_scenario
from conformance.subject import Measurement, ReportProgress, SubjectRequest, SubjectResult, load_subject, measure
from engine.generate import load_engine

N_PROMPT, N_PREDICT = 38, 4
BASELINE_NAME = "llama.cpp-b8763-cpu"


class Silent:
    """Progress that nobody sees."""

    def step(self, text: str) -> None: ...
    def describe(self, text: str) -> None: ...
    def update(self, done: int, total: int) -> None: ...


def content(model: str, sha256: str) -> dict[str, Any]:
    """Return a scenario with every check, its golden values not set yet."""
    return {
        "name": "short",
        "asks": "Does it run?",
        "default": False,
        "model": {"file": model, "sha256": sha256},
        "prompt_token_ids": prompt_ids(PRESETS["tiny"])[:N_PROMPT],
        "n_predict": N_PREDICT,
        "n_ctx": 256,
        "type_k": "f16",
        "type_v": "f16",
        "n_threads": 1,
        "vram_budget_n_bytes": None,
        "baseline": {
            "threads": 1,
            "n_gpu_layers": 0,
            "override_tensor": None,
            "split_mode": "layer",
            "flash_attn": "on",
            "batch_size": 512,
            "ubatch_size": 512,
            "repack": False,
        },
        "backends": ["numpy", "cuda"],
        "prefill": ["layer_major", "token_major"],
        "controls": True,
        "deadline_s": 60,
        "checks": [
            {"check": "final_logits_bitwise_equal", "against": "token_major", "because": "a"},
            {"check": "final_logits_bitwise_equal", "against": "second_run", "because": "b"},
            {"check": "final_logits_le32_sha256", "expected": "0" * 64, "because": "c"},
            {"check": "final_greedy_token_id", "expected": 0, "because": "d"},
            {"check": "generated_token_ids_le64_sha256", "expected": "0" * 64, "because": "e"},
            {"check": "generated_token_ids_equal", "against": "llama.cpp", "because": "f"},
            {"check": "lowest_id_on_tie", "because": "g"},
            {"check": "smallest_top2_gap", "min": 0.0001, "because": "h"},
            {"check": "oracle_nmse", "against": "llama.cpp", "max_ratio": 1.0, "because": "i"},
        ],
    }


def write_scenario(path: Path, values: dict[str, Any]) -> Path:
    """Write `values` as YAML, of which JSON with one key per line is a part."""
    path.write_text(json.dumps(values, indent=1))
    return path


def on_gpu(short: ScenarioFile, **changes: Any) -> ScenarioFile:
    """Write the short scenario anew beside itself, with a GPU for both engines and without controls."""
    values = short.scenario.model_dump(mode="json") | {"name": "gpu", "backends": ["cuda"], "controls": False}
    values["baseline"] |= {"n_gpu_layers": 99, "override_tensor": "token_embd.weight=CPU", "split_mode": "none"}
    values |= {"vram_budget_n_bytes": 1 << 30} | changes
    return load_scenario(write_scenario(short.path.parent / f"{values['name']}.yaml", values))


def make_scenario(folder: Path) -> ScenarioFile:
    """Make the tiny model and a short scenario with the right golden values in `folder`."""
    made = make_model("tiny", folder / "tiny.gguf")
    path = write_scenario(folder / "short.yaml", content("tiny.gguf", str(made.sha256)))
    write_golden(path, compute_golden(load_scenario(path), made.path, str(made.sha256), lambda token: None))
    return load_scenario(path)


def run_here(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
    """Measure in this process, or take what the same request gave before."""
    return SubjectResult("ok", None, "", _measure_once(request))


@cache
def _measure_once(request: SubjectRequest) -> Measurement:
    return measure(load_subject(request), request, lambda done, total: None)


@cache
def _logits_once(
    model: Path, n_ctx: int, prompt_ids: tuple[int, ...], n_predict: int, force_ids: tuple[int, ...] | None
) -> NDArray[np.float32]:
    engine = load_engine(model, n_ctx=n_ctx)
    generation = engine.run(prompt_ids, n_predict, force_ids=force_ids, keep_logits=True)
    assert generation.logits is not None
    return generation.logits


def run_harmless(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
    """Measure the right engine, whatever control was asked for."""
    return run_here(replace(request, control=None), deadline_s, report)


def run_gpu(request: SubjectRequest, deadline_s: float, report: ReportProgress) -> SubjectResult:
    """Stand in for a GPU with the NumPy backend, and describe one."""
    result = run_here(replace(request, backend="numpy", vram_budget_n_bytes=None), deadline_s, report)
    if request.backend == "numpy" or result.measurement is None:
        return result
    described = {"device": "Fake GPU", "arch": "sm_90", "vram_budget_n_bytes": request.vram_budget_n_bytes}
    measurement = replace(
        result.measurement,
        effective=result.measurement.effective | {"backend": "cuda"} | described,
        prepare_time_ns=11_000,
        versions={"cupy": "14.2.0", "nvrtc": "13.0"},
    )
    return replace(result, measurement=measurement)


def write_nvidia_smi(folder: Path, script: str) -> Path:
    """Write a shell script as the nvidia-smi of `folder`, to be put on PATH."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@dataclass
class FakeLlama:
    """The engine in the place of llama.cpp; `noise` (n_vocab) f32 is added to every row of its logits."""

    build_number: int = 8763
    compiler: str = "cc 1.0"
    noise: NDArray[np.float32] | float = 0.0
    status: str = "ok"
    layers_offloaded: str | None = None
    requests: list[WorkerRequest] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)

    def open(self, device: str) -> FakeLlama:
        """Give itself, whatever the device."""
        self.devices.append(device)
        return self

    def run(self, request: WorkerRequest) -> WorkerResult:
        """Run the engine, or fail with `status`."""
        self.requests.append(request)
        logits = _logits_once(
            request.model,
            request.n_ctx,
            tuple(request.prompt_ids),
            request.n_predict,
            None if request.force_ids is None else tuple(request.force_ids),
        )
        result = worker_result(logits + np.float32(self.noise), status=self.status)
        return replace(result, effective=result.effective | {"layers_offloaded": self.layers_offloaded})


def worker_result(logits: NDArray[np.float32], status: str = "ok", **values: Any) -> WorkerResult:
    """Return what llama.cpp would give for these logits."""
    ok = status == "ok"
    ids: Sequence[int] = logits.argmax(axis=1).tolist() if ok else []
    found: dict[str, Any] = {
        "status": status,
        "exit_code": 0 if ok else -11,
        "log_tail": "llama_model_load: loading /home/someone/models/tiny.gguf",
        "token_ids": ids,
        "logits": logits if ok else None,
        "top2_gap": top2_gap(logits).tolist() if ok else [],
        "n_non_finite": 0,
        "prefill_time_ns": 1,
        "decode_time_ns": [1] * (len(ids) - 1),
        "load_time_ns": 1,
        "wall_time_ns": 1,
        "build_number": 8763,
        "requested": {"model": "tiny.gguf"},
        "effective": {"n_ctx": 256, "type_k": "f16", "type_v": "f16", "flash_attn": "enabled", "n_threads": 1},
        "log": "",
    }
    return WorkerResult(**(found | values))
