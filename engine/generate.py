"""Load a model on a backend, run a prompt, generate greedily."""

from __future__ import annotations

import codecs
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from engine.decoder import Decoder
from engine.errors import RequestError
from engine.finite import check_finite
from engine.gguf.reader import ModelFile, open_model
from engine.model.config import ModelConfig, check_tensors
from engine.model.forward import forward
from engine.model.state import DecodeState, new_state
from engine.model.weights import LoadProgress, Weights, load_weights
from engine.ops import Array, Ops
from engine.placement import N_CHUNK, N_PACK, MemoryPlan, plan_memory
from engine.reference.ops import NumpyOps

PrefillMode = Literal["layer_major", "token_major"]
BACKENDS = ("numpy", "cuda")
MAX_N_CTX = 1_600_000
"""Positions up to which the reduction of the RoPE angle is exact (docs/numerics.md)."""
MAX_N_THREADS = 1024
SCHEDULING = ("spin", "auto")
STEPS = ("graph", "persistent")


def token_ids_le64_sha256(ids: Sequence[int]) -> str:
    """Return the SHA256 of the ids written one after the other as little-endian 64-bit integers."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


def logits_le32_sha256(logits: NDArray[np.float32]) -> str:
    """Return the SHA256 of the logits written as little-endian binary32."""
    return hashlib.sha256(np.ascontiguousarray(logits, dtype="<f4").tobytes()).hexdigest()


@dataclass(frozen=True)
class Generation:
    """One greedy run: what was asked, what came out, how long each part took.

    final_logits (n_vocab) f32 are those after the last prompt token, from which the first id was taken. logits
    (n_generated, n_vocab) f32 has the row behind every generated id when `keep_logits` was set.
    """

    prompt_token_ids: list[int]
    generated_token_ids: list[int]
    final_logits: NDArray[np.float32]
    prefill_time_ns: int
    step_time_ns: list[int]
    logits: NDArray[np.float32] | None = field(default=None, repr=False)

    @property
    def generated_token_ids_le64_sha256(self) -> str:
        """Hash of the generated ids."""
        return token_ids_le64_sha256(self.generated_token_ids)

    @property
    def final_logits_le32_sha256(self) -> str:
        """Hash of the logits after the last prompt token."""
        return logits_le32_sha256(self.final_logits)

    @property
    def final_greedy_token_id(self) -> int:
        """The id chosen after the last prompt token, lowest on a tie."""
        return int(np.argmax(self.final_logits))


@dataclass(frozen=True)
class Engine:
    """A model ready to run; holds no sequence state, so runs are independent of each other."""

    model: ModelFile
    config: ModelConfig
    ops: Ops
    weights: Weights
    n_ctx: int
    load_time_ns: int

    def prefill(
        self, prompt_ids: Sequence[int], mode: PrefillMode = "layer_major", pack: int = N_PACK
    ) -> tuple[DecodeState, NDArray[np.float32]]:
        """Run the prompt from an empty state; return the state and the logits (n_vocab) f32 after its end.

        `pack` is the number of tokens that share one read of a matrix in layer-major mode; it changes no bit.
        """
        check_request(self.config, self.n_ctx, prompt_ids, 1)
        state = new_state(self.config, self.ops, self.n_ctx)
        chunk, pack = (N_CHUNK, pack) if mode == "layer_major" else (1, 1)

        def run(tokens: Sequence[int]) -> Array:
            return forward(self.ops, self.weights, state, tokens, pack)

        with _quiet_single_blas():
            for i in range(0, len(prompt_ids), chunk):
                self.model.check_whole()
                logits = self.ops.append(run, state, prompt_ids[i : i + chunk], pack)
        return state, self.ops.to_host(logits)[-1]

    def decoder(self, state: DecodeState) -> Decoder:
        """Return what appends tokens to `state`: op by op, or a captured graph where the backend has one."""
        return self.ops.decoder(lambda tokens: forward(self.ops, self.weights, state, tokens), state)

    def greedy(self, logits: NDArray[np.float32]) -> int:
        """Return the id that the backend chooses from logits (n_vocab) f32: the lowest among the largest."""
        return self.ops.argmax(self.ops.from_host(logits[None]))

    def run(
        self,
        prompt_ids: Sequence[int],
        n_predict: int,
        *,
        prefill: PrefillMode = "layer_major",
        end_ids: frozenset[int] = frozenset(),
        force_ids: Sequence[int] | None = None,
        keep_logits: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Generate up to `n_predict` ids greedily after `prompt_ids` and return what happened.

        Stops after an id of `end_ids` (empty: never). `force_ids` (teacher forcing) are fed in place of the
        ids chosen; the chosen ones are still those returned. Raises RequestError before any work when the
        prompt is empty, an id is out of range, or the context is too small.
        """
        check_request(self.config, self.n_ctx, prompt_ids, n_predict)
        if force_ids is not None:
            _check_forced(self.config, force_ids, n_predict)
        start = time.perf_counter_ns()
        state, final_logits = self.prefill(prompt_ids, prefill)
        prefill_time_ns = time.perf_counter_ns() - start
        ids: list[int] = []
        kept: list[NDArray[np.float32]] = []
        step_time_ns: list[int] = []
        token = self.greedy(final_logits)
        decoder = self.decoder(state) if n_predict > 1 else None
        with _quiet_single_blas():
            while True:
                ids.append(token)
                if keep_logits:
                    kept.append(decoder.logits() if decoder and step_time_ns else final_logits)
                if on_token:
                    on_token(token)
                if decoder is None or len(ids) == n_predict or token in end_ids:
                    break
                self.model.check_whole()
                start = time.perf_counter_ns()
                token = decoder.step(force_ids[len(ids) - 1] if force_ids is not None else token)
                step_time_ns.append(time.perf_counter_ns() - start)
        stacked = np.stack(kept) if keep_logits else None
        return Generation(list(prompt_ids), ids, final_logits, prefill_time_ns, step_time_ns, stacked)


def check_request(config: ModelConfig, n_ctx: int, prompt_ids: Sequence[int], n_predict: int) -> None:
    """Raise RequestError if a prompt and n_predict tokens cannot be served in n_ctx positions; needs no weights."""
    if n_predict < 1:
        raise RequestError(f"-n is {n_predict}, expected at least 1")
    if not prompt_ids:
        raise RequestError("the prompt has no tokens, expected at least 1")
    _check_range(config, prompt_ids)
    n_needed = len(prompt_ids) + n_predict - 1
    if n_needed > n_ctx:
        raise RequestError(
            f"{len(prompt_ids)} prompt tokens and {n_predict - 1} decode steps need -c {n_needed}, "
            f"the context has {n_ctx}"
        )


def _check_forced(config: ModelConfig, force_ids: Sequence[int], n_predict: int) -> None:
    _check_range(config, force_ids)
    if len(force_ids) < n_predict - 1:
        raise RequestError(f"{len(force_ids)} forced ids for {n_predict} tokens, expected {n_predict - 1}")


def _check_range(config: ModelConfig, ids: Sequence[int]) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < config.n_vocab:
            raise RequestError(f"token id {token} at position {position} is not in 0..{config.n_vocab - 1}")


@contextmanager
def _quiet_single_blas() -> Iterator[None]:
    """Keep BLAS to one thread (rows are split by the ops) and NumPy from warning of what `NonFiniteError` reports."""
    with threadpool_limits(limits=1, user_api="blas"), np.errstate(all="ignore"):
        yield


OpsWrapper = Callable[[Ops], Ops]
OnPlan = Callable[[MemoryPlan], None]


def load_engine(
    model: Path | ModelFile,
    *,
    n_ctx: int,
    backend: str = "numpy",
    n_threads: int | None = None,
    vram_budget: int | None = None,
    scheduling: str = "spin",
    step: str = "graph",
    check_weights: bool = False,
    wrap_ops: OpsWrapper | None = None,
    on_plan: OnPlan | None = None,
    progress: LoadProgress | None = None,
) -> Engine:
    """Open `model` (a path or an open file) on `backend` with room for `n_ctx` positions.

    n_threads (numpy) defaults to the physical cores; results do not depend on it. vram_budget (cuda) is a hard
    limit in bytes on device memory; scheduling (cuda) is how the host waits, "spin" or "auto"; step
    (cuda) is how a single token is decoded, "graph", a kernel an op, or "persistent", one kernel; on_plan (cuda) gets
    the memory plan before anything is copied. check_weights reads the file once more, for NaN and infinity, before a
    device is opened. wrap_ops may put a wrapper around the backend's ops. Raises
    ModelFileError, RequestError, PlacementError, or NoDeviceError where the backend cannot run.
    """
    if not 1 <= n_ctx <= MAX_N_CTX:
        raise RequestError(f"-c is {n_ctx}, expected 1 to {MAX_N_CTX}")
    if n_threads is not None and not 1 <= n_threads <= MAX_N_THREADS:
        raise RequestError(f"-t is {n_threads}, expected 1 to {MAX_N_THREADS}")
    if backend not in BACKENDS:
        raise RequestError(f"--backend is {backend!r}, expected one of: {', '.join(BACKENDS)}")
    if scheduling not in SCHEDULING:
        raise RequestError(f"--scheduling is {scheduling!r}, expected one of: {', '.join(SCHEDULING)}")
    if step not in STEPS:
        raise RequestError(f"step is {step!r}, expected one of: {', '.join(STEPS)}")
    if vram_budget is not None and (vram_budget < 1 or backend == "numpy"):
        raise RequestError(f"--vram-budget is {vram_budget}, expected at least 1 byte, and a backend with a device")
    start = time.perf_counter_ns()
    file = model if isinstance(model, ModelFile) else open_model(model)
    config = ModelConfig.from_model(file)
    check_tensors(file, config)
    if check_weights:
        check_finite(file, config)
    if backend == "numpy":
        ops: Ops = NumpyOps(config, n_threads or psutil.cpu_count(logical=False) or 1)
    else:
        ops = _open_cuda(file, config, n_ctx, vram_budget, scheduling, step, on_plan)
    if wrap_ops:
        ops = wrap_ops(ops)
    with _quiet_single_blas():
        weights = load_weights(file, config, ops, progress or (lambda n_bytes: None))
    return Engine(file, config, ops, weights, n_ctx, time.perf_counter_ns() - start)


def _open_cuda(
    model: ModelFile,
    config: ModelConfig,
    n_ctx: int,
    vram_budget: int | None,
    scheduling: str,
    step: str,
    on_plan: OnPlan | None,
) -> Ops:
    """Open the device, check the memory plan, compile the kernels; CuPy is imported here and not before.

    Without a budget the plan must fit into what the device has free.
    """
    from engine.cuda.device import open_device

    device = open_device(scheduling)
    plan = plan_memory(
        config, model.tensors.values(), n_ctx, device.free_n_bytes if vram_budget is None else vram_budget
    )
    if on_plan:
        on_plan(plan)
    plan.require_fit()
    from engine.cuda.ops import CudaOps

    return CudaOps(model, config, device, n_ctx, vram_budget, step)


class TextStream:
    """Joins the bytes of tokens: a character split over tokens is held back until it is whole, no byte is changed.

    Bytes that are no UTF-8 come out as they are, as soon as it is clear that no character begins with them.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def feed(self, piece: bytes) -> bytes:
        """Return what is complete after `piece`."""
        return self._decoder.decode(piece).encode("utf-8", "surrogateescape")

    def finish(self) -> bytes:
        """Return what was held back."""
        return self._decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")
