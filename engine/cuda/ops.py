"""The CUDA backend: `engine.ops.Ops` as launches on one stream, all buffers fixed before the first token.

Where one kernel covers several ops of the protocol, the earlier ones return what they were given and the last
one launches: the convolution, the delta rule and the gated norm are one kernel, attention and its gate another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from engine import numerics, quants
from engine.cuda import argmax, attention, embed, faults, gated_delta, gemv, layout, packs, rms_norm, streams
from engine.cuda.buffers import DeviceActivation
from engine.cuda.build import Build, make_build
from engine.cuda.decoder import GraphDecoder, PassGraph, append_in_packs
from engine.cuda.device import Device
from engine.cuda.faults import Op
from engine.cuda.memory import DeviceMemory, Pool
from engine.cuda.upload import Uploader, mapped
from engine.cuda.variants import FULL, Variant
from engine.decoder import Run
from engine.gguf.inventory import take_inventory
from engine.gguf.reader import ModelFile
from engine.model.config import ModelConfig
from engine.ops import KVCache
from engine.placement import N_CHUNK


@dataclass(frozen=True)
class _Convolution:
    qkv: cupy.ndarray
    weight: cupy.ndarray
    state: cupy.ndarray


@dataclass(frozen=True)
class _Delta:
    convolution: _Convolution
    alpha: cupy.ndarray
    beta: cupy.ndarray
    dt: cupy.ndarray
    a: cupy.ndarray
    state: cupy.ndarray


@dataclass(frozen=True)
class _Attention:
    q: cupy.ndarray
    cache: KVCache
    control: cupy.ndarray


class CudaOps:
    """Runs one model on one device with a context of n_ctx positions."""

    def __init__(
        self, model: ModelFile, config: ModelConfig, device: Device, n_ctx: int, vram_budget_n_bytes: int | None
    ) -> None:
        self._config, self._device, self._n_ctx = config, device, n_ctx
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.memory = DeviceMemory(vram_budget_n_bytes)
        self._tensors = model.tensors
        self.use(self.build(FULL))
        self._weights = Pool(self.memory, take_inventory(model.tensors.values(), config.n_layer).resident_n_bytes)
        self._planned = layout.buffers(config, n_ctx, N_CHUNK)
        room_n_bytes = sum(buffer.n_bytes for buffer in self._planned.values())
        self._uploader: Uploader | None = Uploader(self.kernels, self.memory, room_n_bytes)
        self._layer = 0
        self._after_first_layer: Callable[[], None] | None = None

    def build(self, variant: Variant) -> Build:
        """Return the kernels of a variant, compiled for this model and device."""
        return make_build(variant, self._config, self._tensors, self._device)

    def use(self, build: Build) -> None:
        """Run everything from now on with the kernels of `build`; weights and buffers stay."""
        self._build, self.kernels = build, build.kernels
        self.dispatch, self._streams = build.dispatch, build.streams

    def load_matrix(self, type_name: str, raw: NDArray[np.uint8]) -> gemv.DeviceMatrix:
        """Copy a matrix to the device, its blocks repacked into strips of the same size."""
        assert self._uploader is not None
        return self._uploader.matrix(type_name, raw, self._weights.take(raw.size))

    def load_vector(self, type_name: str, raw: NDArray[np.uint8]) -> cupy.ndarray:
        """Copy a small F32 tensor to the device."""
        values = quants.dequantize(type_name, raw)
        block = self._weights.take(values.nbytes)
        array = cupy.ndarray(values.shape[1:] if values.shape[0] == 1 else values.shape, np.float32, block.data)
        array.set(values.reshape(array.shape))
        return array

    def end_loading(self) -> None:
        """Wait for the copies, free the slices they went through, and allocate the working buffers."""
        assert self._uploader is not None
        self._uploader.finish()
        self._uploader = None
        self._allocate()

    def _allocate(self) -> None:
        self._buffers: dict[str, cupy.ndarray] = {}
        for name, buffer in self._planned.items():
            self._buffers[name] = self._placed(buffer)
        self._bind(self._buffers)
        self._row_stage = mapped((self._hidden.nbytes,), np.uint8)  # F32 rows are the longest
        self._control_stage = mapped(self._control.shape, np.int32)
        self._outcome = mapped((2,), np.int32)
        self.staged = cupy.cuda.Event(block=False, disable_timing=True)
        self._table: NDArray[np.uint8] | None = None
        self._first_position = 0
        for array, table in zip((self._rope.cos, self._rope.sin), self._rope_tables(), strict=True):
            array.set(table, stream=self.stream)

    def _placed(self, buffer: layout.Buffer) -> cupy.ndarray:
        """Return the array of a buffer, in memory of its own or in that of one placed before."""
        if buffer.inside is None:
            return self.memory.array(buffer.shape, buffer.dtype)
        place = self._buffers[buffer.inside].data + buffer.offset_n_bytes
        return cupy.ndarray(buffer.shape, buffer.dtype, place)

    def _bind(self, b: dict[str, cupy.ndarray]) -> None:
        """Give the working buffers the names and forms that the ops use."""
        self._hidden, self._control, self._q = b["hidden"], b["control"], b["q"]
        self._projected = [array for name, array in b.items() if name.startswith("projected.")]
        self._normed, self._mixed, self._ffn = (
            DeviceActivation(*(b[f"{name}.{part}"] for part in ("x", "q", "scales")))
            for name in ("normed", "mixed", "ffn")
        )
        self._scratch = attention.scratch(self._config, self._n_ctx, b["splits"])
        self._rope = attention.RopeTables(b["rope.cos"], b["rope.sin"])
        self._tickets, self._argmax_scratch, self._chosen = b["tickets"], b["argmax_scratch"], b["chosen"]
        self._done, self._tiles = b["gate_up_done"], b["tiles"]
        self._logits, self._given = b["logits"], b["given_logits"]
        self._next_token, self.fault = b["outcome"][:1], b["outcome"][1:].view(np.uint32)

    def _rope_tables(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        c = self._config
        frequencies = numerics.rope_frequencies(c.n_rot, c.rope_freq_base, c.rope_sections)
        return numerics.rope_table(np.arange(self._n_ctx), frequencies)

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> cupy.ndarray:
        """Return the zeroed buffer of that name; there is room for one sequence."""
        buffer = self._buffers[name]
        assert (buffer.shape, buffer.dtype) == (shape, dtype), f"{name} was planned as {buffer.dtype} {buffer.shape}"
        buffer.data.memset_async(0, buffer.nbytes, self.stream)
        return buffer

    def begin_layer(self, il: int) -> None:
        """Remember the layer for the fault word."""
        self._layer = il
        if il == 1 and self._after_first_layer is not None:
            self._after_first_layer()

    @contextmanager
    def behind_first_layer(self, act: Callable[[], None]) -> Iterator[None]:
        """Call `act` once the first layer of a pass inside has been launched, if others follow it."""
        self._after_first_layer = act
        try:
            yield
        finally:
            self._after_first_layer = None

    def embed(
        self, type_name: str, table: NDArray[np.uint8], tokens: Sequence[int], first_position: int
    ) -> cupy.ndarray:
        """Stage rows and control words and dequantise on the device; in a capture, only record the launch."""
        self.stream.use()  # another engine of this process may have put its own in use
        n, row_n_bytes = len(tokens), table.shape[1]
        self._table, self._first_position = table, first_position
        if not self.stream.is_capturing():
            self.stage(tokens, first_position)
        rows, words = self._row_stage.device[: n * row_n_bytes], self._control_stage.device[:n]
        rows = rows.reshape(n, row_n_bytes)
        x = embed.embed(self.kernels, type_name, rows, words, self._hidden[:n], self._control[:n])
        if not self.stream.is_capturing():
            self.staged.record(self.stream)
        return x

    def stage(self, tokens: Sequence[int], first_position: int) -> None:
        """Write the embedding rows and control words of `tokens` to the pinned memory that the kernel reads."""
        assert self._table is not None
        self.staged.synchronize()
        row_n_bytes = self._table.shape[1]
        for i, token in enumerate(tokens):
            self._row_stage.host[i * row_n_bytes : (i + 1) * row_n_bytes] = self._table[token]
        words = self._control_stage.host[: len(tokens)]
        words[:, 0] = tokens
        words[:, 1] = np.arange(first_position, first_position + len(tokens))

    def rms_norm(self, x: cupy.ndarray, weight: cupy.ndarray) -> streams.NormInput:
        """Hand the inputs on: what streams its weights normalises the token itself."""
        self._normed.first(x.shape[0])  # refuses a pack that there is no room for
        return streams.NormInput(x, weight, self._config.rms_eps)

    def _normalised(self, h: streams.NormInput) -> DeviceActivation:
        """Normalise and quantise in a launch of its own."""
        return rms_norm.rms_norm(self.kernels, h.x, h.weight, h.eps, self._normed.first(h.x.shape[0]))

    def project(self, matrices: Sequence[gemv.DeviceMatrix], h: streams.NormInput) -> tuple[cupy.ndarray, ...]:
        """Return W h for each matrix, in buffers that the next call overwrites."""
        n_tokens = h.x.shape[0]
        outs = [
            buffer[: n_tokens * matrix.n_out].reshape(n_tokens, matrix.n_out)
            for matrix, buffer in zip(matrices, self._projected, strict=False)
        ]
        if n_tokens > 1:
            return packs.project(self.kernels, matrices, self._normalised(h), outs, self._tiles)
        types, n_outs = [matrix.type_name for matrix in matrices], [matrix.n_out for matrix in matrices]
        if self.dispatch.streams_project(matrices[0].n_in, types, n_outs):
            return self._streams.project(matrices, h, outs)
        return gemv.project(self.kernels, matrices, self._normalised(h), outs)

    def project_add(self, matrix: gemv.DeviceMatrix, h: DeviceActivation, residual: cupy.ndarray) -> cupy.ndarray:
        """Add W h to `residual` in place."""
        if residual.shape[0] > 1:
            return packs.project(self.kernels, [matrix], h, [residual], self._tiles, add=True)[0]
        if self.dispatch.streams_add(matrix.n_in, matrix.type_name, matrix.n_out):
            return self._streams.gemv(matrix, h, residual)
        return gemv.gemv(self.kernels, matrix, h, residual, fault=self.fault, mode=gemv.ADD_RESIDUAL)

    def gate_up_silu(self, gate: gemv.DeviceMatrix, up: gemv.DeviceMatrix, h: streams.NormInput) -> DeviceActivation:
        """Return silu(gate h) * (up h), quantised."""
        n_tokens = h.x.shape[0]
        out, k, fault, op = self._ffn.first(n_tokens), self.kernels, self.fault, self._op(Op.GATE_UP_SILU)
        if n_tokens > 1:
            return packs.gate_up_silu(k, gate, up, self._normalised(h), out, self._tiles, fault=fault, op=op)
        if self.dispatch.streams_gate_up(gate.n_in, gate.n_out, gate.type_name, up.type_name):
            return self._streams.gate_up_silu(gate, up, h, out, done=self._done, fault=fault, op=op)
        return gemv.gate_up_silu(k, gate, up, self._normalised(h), out, done=self._done, fault=fault, op=op)

    def conv_silu(self, qkv: cupy.ndarray, weight: cupy.ndarray, conv_state: cupy.ndarray) -> _Convolution:
        """Hand the inputs on to gated_norm."""
        return _Convolution(qkv, weight, conv_state)

    def gated_delta(
        self,
        qkv: _Convolution,
        alpha: cupy.ndarray,
        beta: cupy.ndarray,
        dt: cupy.ndarray,
        a: cupy.ndarray,
        ssm_state: cupy.ndarray,
    ) -> _Delta:
        """Hand the inputs on to gated_norm."""
        return _Delta(qkv, alpha, beta, dt, a, ssm_state)

    def gated_norm(self, o: _Delta, z: cupy.ndarray, weight: cupy.ndarray) -> DeviceActivation:
        """Convolve, advance the delta rule, normalise and quantise in one launch."""
        conv = o.convolution
        return gated_delta.gated_delta(
            self.kernels,
            self._config,
            gated_delta.GatedDeltaWeights(conv.weight, o.dt, o.a, weight),
            gated_delta.GatedDeltaState(conv.state, o.state, self._tickets),
            conv.qkv,
            z,
            o.alpha,
            o.beta,
            self._mixed_of(self._config.value_dim, z.shape[0]),
            fault=self.fault,
            op=self._op(Op.GATED_DELTA),
        )

    def qk_norm_rope(
        self,
        qg: cupy.ndarray,
        k: cupy.ndarray,
        v: cupy.ndarray,
        q_norm: cupy.ndarray,
        k_norm: cupy.ndarray,
        positions: Sequence[int],
        cache: KVCache,
    ) -> tuple[cupy.ndarray, cupy.ndarray]:
        """Normalise, rotate and append; the gate stays where it is, inside qg."""
        q = self._q[: len(positions)]
        control = self._control_of(positions)
        c = self._config
        attention.qk_norm_rope_append(self.kernels, c, qg, k, v, q_norm, k_norm, self._rope, control, cache, q)
        return q, qg

    def attention(self, q: cupy.ndarray, cache: KVCache, positions: Sequence[int]) -> _Attention:
        """Hand the inputs on to sigmoid_gate."""
        return _Attention(q, cache, self._control_of(positions))

    def sigmoid_gate(self, o: _Attention, gate: cupy.ndarray) -> DeviceActivation:
        """Attend, gate and quantise."""
        return attention.attention(
            self.kernels,
            self._config,
            o.q,
            gate,
            o.cache,
            o.control,
            self._scratch,
            self._mixed_of(self._config.n_embd_q, o.q.shape[0]),
            fault=self.fault,
            op=self._op(Op.ATTENTION),
        )

    def head(self, matrix: gemv.DeviceMatrix, h: streams.NormInput) -> cupy.ndarray:
        """Return the logits in their one buffer."""
        op = int(faults.kernel_argument(Op.HEAD))
        x, logits = self._normalised(h), self._logits
        return gemv.gemv(self.kernels, matrix, x, logits, fault=self.fault, mode=gemv.LOGITS, op=op)

    def choose(self, logits: cupy.ndarray) -> None:
        """Launch argmax; wait_for_choice() returns the id."""
        self.stream.use()
        op = faults.kernel_argument(Op.ARGMAX)
        argmax.argmax(
            self.kernels,
            logits[-1],
            self._control[0],
            1,
            self._argmax_scratch,
            self._next_token,
            self._chosen,
            self._outcome.device,
            fault=self.fault,
            op=op,
        )

    def argmax(self, logits: cupy.ndarray) -> int:
        """Return the lowest id among the largest logits; NonFiniteError if the step left a fault."""
        self.choose(logits)
        return self.wait_for_choice()

    def wait_for_choice(self) -> int:
        """Wait for the stream and return the id that argmax left; NonFiniteError if it found a fault by then."""
        self.stream.synchronize()
        token, fault = (int(word) for word in self._outcome.host)
        self.raise_fault(fault)
        return token

    def check_fault(self) -> None:
        """Wait for the stream; NonFiniteError if a kernel left a fault."""
        self.raise_fault(int(self.fault.get(stream=self.stream)[0]))

    def raise_fault(self, word: int) -> None:
        """Raise NonFiniteError for a fault word other than 0, and clear it."""
        if word:
            self.fault.fill(0)
        faults.raise_if_set(word & 0xFFFFFFFF)

    def append(self, run: Run, state: Any, tokens: Sequence[int], pack: int) -> cupy.ndarray:
        """Append tokens by replaying one graph a pack."""
        return append_in_packs(lambda n_tokens: self._graph(n_tokens, run, state), state, tokens, pack)

    def decoder(self, run: Run, state: Any) -> GraphDecoder:
        """Return what replays the pass of one token, captured at the first call."""
        return GraphDecoder(self, self._graph(1, run, state), state)

    def _graph(self, n_tokens: int, run: Run, state: Any) -> PassGraph:
        """Return the pass of n_tokens, captured at the first call; it serves every sequence."""
        graphs = self._build.graphs
        if n_tokens not in graphs:
            graphs[n_tokens] = PassGraph(self, run, state, n_tokens)
        return graphs[n_tokens]

    def from_host(self, x: NDArray[np.float32]) -> cupy.ndarray:
        """Copy logits (1, n_vocab) to the device."""
        self._given.set(x, stream=self.stream)
        return self._given

    def to_host(self, x: cupy.ndarray) -> NDArray[np.float32]:
        """Copy an array to the host; NonFiniteError if a kernel before it left a fault."""
        host: NDArray[np.float32] = x.get(stream=self.stream)
        self.check_fault()
        return host

    def describe(self) -> dict[str, Any]:
        """Return the device and what was taken of its memory."""
        weights = self._weights.used_n_bytes
        free, total = cupy.cuda.runtime.memGetInfo()
        return {
            "device": self._device.name,
            "arch": self._device.arch,
            "resident_weights_n_bytes": weights,
            "arena_n_bytes": self.memory.n_bytes - weights,
            "state_n_bytes": self._taken_n_bytes("conv_state", "gdn_state"),
            "kv_cache_n_bytes": self._taken_n_bytes("kv_cache"),
            "vram_budget_n_bytes": self.memory.budget_n_bytes,
            "device_free_n_bytes": int(free),
            "device_total_n_bytes": int(total),
        }

    def _taken_n_bytes(self, *regions: str) -> int:
        """Return what the buffers of these lines of the memory plan took, which is what was planned for them."""
        return sum(buffer.n_bytes for buffer in self._planned.values() if buffer.region in regions)

    def _op(self, op: Op) -> Any:
        return faults.kernel_argument(op, self._layer)

    def _control_of(self, positions: Sequence[int]) -> cupy.ndarray:
        return self._control[positions[0] - self._first_position]

    def _mixed_of(self, n: int, n_tokens: int) -> DeviceActivation:
        """Return the mixers' output buffer as rows of n."""

        def rows(array: cupy.ndarray, width: int) -> cupy.ndarray:
            return array.reshape(-1)[: n_tokens * width].reshape(n_tokens, width)

        m = self._mixed
        return DeviceActivation(rows(m.x, n), rows(m.q, n), rows(m.scales, 2 * (n // 32)))
