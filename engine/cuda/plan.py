"""Which kernels a model needs: a pure function of its tensor directory, so it works without a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine import quants
from engine.cuda import argmax, attention, gated_delta, gemv, packs, rms_norm
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


def expressions(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the name expressions of every kernel that prefill and decode launch, sorted."""
    names = set(_matrix_kernels(config, tensors))
    names |= {gemv.repack_expression(t.type) for t in tensors.values() if quants.is_quantized(t.type)}
    names |= set(rms_norm.expressions(config, MAX_PACK))
    names |= set(gated_delta.expressions(config, MAX_PACK)) if config.n_layer_recurrent else set()
    names |= set(attention.expressions(config, MAX_PACK)) if config.n_layer_attn else set()
    return sorted(names | set(packs.expressions()) | set(argmax.expressions()) | {IQ3S_GRID})


def _matrix_kernels(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    def one(name: str, mode: int) -> str:
        info = tensors[f"{name}.weight"]
        return gemv.gemv_expression(info.type, info.shape[0], mode)

    for il in range(config.n_layer):
        blk, recurrent = f"blk.{il}", config.is_recurrent(il)
        types = [tensors[f"{blk}.{name}.weight"].type for name in _PROJECTIONS[recurrent]]
        yield gemv.project_expression(types, config.n_embd)
        yield one(f"{blk}.{_OUTPUTS[recurrent]}", gemv.ADD_RESIDUAL)
        yield one(f"{blk}.ffn_down", gemv.ADD_RESIDUAL)
        gate, up = tensors[f"{blk}.ffn_gate.weight"], tensors[f"{blk}.ffn_up.weight"]
        yield gemv.gate_up_expression(gate.type, up.type, gate.shape[0])
    yield one("token_embd" if config.tied_output else "output", gemv.LOGITS)
