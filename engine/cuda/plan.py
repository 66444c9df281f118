"""Which kernels a model needs: a pure function of its tensor directory, so it works without a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine import quants
from engine.cuda import argmax, attention, gated_delta, gemv, packs, rms_norm, streams
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
    return sorted(names | set(packs.expressions()) | set(argmax.expressions()) | {IQ3S_GRID})


def step_expressions(config: ModelConfig, tensors: Mapping[str, TensorInfo], target: streams.Target) -> list[str]:
    """Return those of a pass of one token, without the norm before the head."""
    names = set(_matrix_kernels(config, tensors, target)) | set(argmax.expressions())
    names |= set(gated_delta.expressions(config, 1)) if config.n_layer_recurrent else set()
    names |= set(attention.expressions(config, 1)) if config.n_layer_attn else set()
    return sorted(names)


def _matrix_kernels(config: ModelConfig, tensors: Mapping[str, TensorInfo], target: streams.Target) -> Iterator[str]:
    for il in range(config.n_layer):
        blk, recurrent = f"blk.{il}", config.is_recurrent(il)
        yield _project(
            [tensors[f"{blk}.{name}.weight"].type for name in _PROJECTIONS[recurrent]], config.n_embd, target
        )
        for name in (_OUTPUTS[recurrent], "ffn_down"):
            info = tensors[f"{blk}.{name}.weight"]
            yield _project_add(info.type, info.shape[0], target)
        yield _gate_up(tensors[f"{blk}.ffn_gate.weight"], tensors[f"{blk}.ffn_up.weight"].type, target)
    head = tensors["token_embd.weight" if config.tied_output else "output.weight"].type
    yield gemv.gemv_expression(head, config.n_embd, gemv.LOGITS)


def _project(types: Sequence[str], n_in: int, target: streams.Target) -> str:
    if streams.takes_any(n_in, types):
        return streams.project_expression(types, n_in, target)
    return gemv.project_expression(types, n_in)


def _project_add(type_name: str, n_in: int, target: streams.Target) -> str:
    if streams.takes(n_in, type_name):
        return streams.gemv_expression(type_name, n_in, target)
    return gemv.gemv_expression(type_name, n_in, gemv.ADD_RESIDUAL)


def _gate_up(gate: TensorInfo, up: str, target: streams.Target) -> str:
    n_in, n_ff = gate.shape
    if streams.takes_gate_up(n_in, n_ff, gate.type, up):
        return streams.gate_up_expression(gate.type, up, n_in, target)
    return gemv.gate_up_expression(gate.type, up, n_in)
