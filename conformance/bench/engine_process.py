"""Our engine as a process that stays up: one line of JSON in, one generation, two lines of JSON out.

`python -m conformance.bench.engine_process REQUEST.json` loads what the request file asks for and says so; then every
line {"prefill": MODE, "n_predict": N} on standard input is one generation from an empty state, answered twice: as soon
as the first id is known, and at the end. It ends with standard input. `... read-ceiling` measures the read ceiling of
the device instead, before a model takes the memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from conformance.subject import SubjectRequest, backend_versions, effective_settings, load_subject
from engine.decoder import Decoder, Run
from engine.errors import EngineError, NonFiniteError
from engine.generate import Engine, PrefillMode
from engine.ops import Ops
from engine.placement import N_CHUNK
from engine.wrap import WrappedOps

READ_CEILING = "read-ceiling"
_EXIT_FAILED = 4


def main(argv: Sequence[str]) -> int:
    """Serve the request file argv[0], or measure the read ceiling; an expected failure is one line and exit code 4."""
    try:
        if argv[0] == READ_CEILING:
            _say(_read_ceiling())
        else:
            _serve(json.loads(Path(argv[0]).read_text()))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_FAILED
    return 0


class SlowedOps(WrappedOps):
    """The backend's ops, with a part of every decode step's own time slept after it: a known slowdown."""

    def __init__(self, inner: Ops, part: float) -> None:
        super().__init__(inner)
        self._part = part

    def append(self, run: Run, state: object, tokens: Sequence[int], pack: int) -> Any:
        """Append as the backend does."""
        return self.inner.append(run, state, tokens, pack)

    def decoder(self, run: Run, state: object) -> Any:
        """Return the backend's own decoder, slowed."""
        return _SlowedDecoder(self.inner.decoder(run, state), self._part)


class _SlowedDecoder:
    def __init__(self, inner: Decoder, part: float) -> None:
        self._inner, self._part = inner, part

    def step(self, token: int) -> int:
        start = time.perf_counter()
        chosen = self._inner.step(token)
        time.sleep(self._part * (time.perf_counter() - start))
        return chosen


def generate(
    engine: Engine, prompt_ids: Sequence[int], prefill: PrefillMode, n_predict: int, on_first: Callable[[int], None]
) -> dict[str, Any]:
    """Generate once; return ids, hash of the logits after the prompt, and times in ns. on_first gets the first id."""
    first_token_time_ns = 0
    start = time.perf_counter_ns()

    def note_first(token: int) -> None:
        nonlocal first_token_time_ns
        if not first_token_time_ns:
            first_token_time_ns = time.perf_counter_ns() - start
            on_first(token)

    generation = engine.run(prompt_ids, n_predict, prefill=prefill, on_token=note_first)
    return {
        "wall_time_ns": time.perf_counter_ns() - start,
        "first_token_time_ns": first_token_time_ns,
        "prefill_time_ns": generation.prefill_time_ns,
        "decode_time_ns": generation.step_time_ns,
        "token_ids": generation.generated_token_ids,
        "final_logits_le32_sha256": generation.final_logits_le32_sha256,
    }


def _serve(values: dict[str, Any]) -> None:
    slowed_by = values.pop("slowed_by")
    request = SubjectRequest(**{**values, "model": Path(values["model"])})
    engine = load_subject(request)
    if slowed_by:
        engine = replace(engine, ops=cast(Ops, SlowedOps(engine.ops, slowed_by)))
    _say(_describe(engine, request))
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            _say(generate(engine, request.prompt_ids, asked["prefill"], asked["n_predict"], _say_first))
        except NonFiniteError as error:
            _say({"error": str(error)})


def _describe(engine: Engine, request: SubjectRequest) -> dict[str, Any]:
    n_layers = engine.config.n_layer + 1  # as llama.cpp counts: the output layer is one more
    effective = effective_settings(engine, request) | {
        "flash_attn": "enabled",  # attention goes through the cache in splits, no row of scores is ever stored
        "n_prompt_per_pass": N_CHUNK,
        "layers_offloaded": f"{n_layers if request.backend == 'cuda' else 0}/{n_layers}",
    }
    compile_time_ns = None
    if request.backend == "cuda":
        from engine.cuda.compile import compile_time_ns as waited

        compile_time_ns = waited()
    return {
        "load_time_ns": engine.load_time_ns,
        "compile_time_ns": compile_time_ns,
        "effective": effective,
        "versions": backend_versions(request.backend) | _toolkit(request.backend),
    }


def _toolkit(backend: str) -> dict[str, str]:
    """Return the version of the CUDA runtime that CuPy has loaded."""
    if backend != "cuda":
        return {}
    from cupy.cuda import runtime

    version = int(runtime.runtimeGetVersion())
    return {"cuda_runtime": f"{version // 1000}.{version % 1000 // 10}"}


def _read_ceiling() -> dict[str, Any]:
    from engine.cuda.device import open_device

    open_device()
    from engine.cuda.ceiling import read_ceiling

    return {"gb_per_s": read_ceiling()}


def _say_first(token: int) -> None:
    _say({"first_token_id": token})


def _say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
