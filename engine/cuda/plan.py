"""Which kernels a model needs: a pure function of its tensor directory, so it works without a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine import quants
from engine.cuda import argmax, attention, gated_delta, gemv, rms_norm, streams
from engine.cuda.buffers import MAX_PACK
from engine.gguf.reader import TensorInfo
from engine.model.config import ModelConfig

_PROJECTIONS = {
    True: ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"),
    False: ("attn_q", "attn_k", "attn_v"),
}
_OUTPUTS = {True: "ssm_out", False: "attn_output"}
IQ3S_GRID = "&iq3s_grid"
"""Name expression of the device variable with the IQ3_S table."""


def expressions(config: ModelConfig, tensors: Mapping[str, TensorInfo], target: streams.Target) -> list[str]:
    """Return the name expressions of every kernel that prefill and decode launch, sorted.

    Of target, only the shared memory counts.
    """
    names = set(_matrix_kernels(config, tensors, target))
    names |= {gemv.repack_expression(t.type) for t in tensors.values() if quants.is_quantized(t.type)}
    names |= set(rms_norm.expressions(config, MAX_PACK))
    names |= set(gated_delta.expressions(config, MAX_PACK)) if config.n_layer_recurrent else set()
    names |= set(attention.expressions(config, MAX_PACK)) if config.n_layer_attn else set()
    return sorted(names | set(argmax.expressions()) | {IQ3S_GRID})


def _matrix_kernels(config: ModelConfig, tensors: Mapping[str, TensorInfo], target: streams.Target) -> Iterator[str]:
    for il in range(config.n_layer):
        blk, recurrent = f"blk.{il}", config.is_recurrent(il)
        types = [tensors[f"{blk}.{name}.weight"].type for name in _PROJECTIONS[recurrent]]
        yield from _project(types, config.n_embd, target)
        for name in (_OUTPUTS[recurrent], "ffn_down"):
            info = tensors[f"{blk}.{name}.weight"]
            yield from _project_add(info.type, info.shape[0], target)
        gate, up = tensors[f"{blk}.ffn_gate.weight"], tensors[f"{blk}.ffn_up.weight"]
        yield from _gate_up(gate.type, up.type, gate.shape, target)
    head = tensors["token_embd.weight" if config.tied_output else "output.weight"].type
    if streams.takes(config.n_embd, head):
        yield streams.gemv_expression(head, config.n_embd, gemv.LOGITS, True, target)
    else:
        yield gemv.gemv_expression(head, config.n_embd, 1, gemv.LOGITS)


def _project(types: Sequence[str], n_in: int, target: streams.Target) -> Iterator[str]:
    streamed = streams.takes_any(n_in, types)
    if streamed:
        yield streams.project_expression(types, n_in, target)
    yield from (gemv.project_expression(types, n_in, width) for width in _widths(streamed))


def _project_add(type_name: str, n_in: int, target: streams.Target) -> Iterator[str]:
    streamed = streams.takes(n_in, type_name)
    if streamed:
        yield streams.gemv_expression(type_name, n_in, gemv.ADD_RESIDUAL, False, target)
    yield from (gemv.gemv_expression(type_name, n_in, width, gemv.ADD_RESIDUAL) for width in _widths(streamed))


def _gate_up(gate: str, up: str, shape: Sequence[int], target: streams.Target) -> Iterator[str]:
    n_in, n_ff = shape
    streamed = streams.takes_gate_up(n_in, n_ff, gate, up)
    if streamed:
        yield streams.gate_up_expression(gate, up, n_in, target)
    yield from (gemv.gate_up_expression(gate, up, n_in, width) for width in _widths(streamed))


def _widths(streamed: bool) -> tuple[int, ...]:
    """Return the pack widths of the row kernels: a single token is left to the streaming ones where they take it."""
    return tuple(width for width in gemv.PACK_WIDTHS if width > 1 or not streamed)
