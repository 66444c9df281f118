"""The weights of a model in a backend's own layout, under GGUF's tensor names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.gguf.reader import ModelFile
from engine.model.config import ModelConfig, expected_tensors
from engine.ops import Array, Matrix, Ops

LoadProgress = Callable[[int], None]
"""Called with the bytes of each tensor as it has been loaded."""


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU: down(silu(gate x) * (up x))."""

    post_attention_norm: Array  # (n_embd)
    ffn_gate: Matrix  # n_embd -> n_ff
    ffn_up: Matrix  # n_embd -> n_ff
    ffn_down: Matrix  # n_ff -> n_embd


@dataclass(frozen=True)
class RecurrentLayer:
    """A Gated DeltaNet layer."""

    attn_norm: Array  # (n_embd)
    attn_qkv: Matrix  # n_embd -> conv_channels
    attn_gate: Matrix  # n_embd -> value_dim
    ssm_alpha: Matrix  # n_embd -> n_v_heads
    ssm_beta: Matrix  # n_embd -> n_v_heads
    ssm_conv1d: Array  # (conv_channels, ssm_d_conv)
    ssm_dt: Array  # (n_v_heads)
    ssm_a: Array  # (n_v_heads)
    ssm_norm: Array  # (ssm_d_state)
    ssm_out: Matrix  # value_dim -> n_embd
    ffn: FeedForward


@dataclass(frozen=True)
class AttentionLayer:
    """A full-attention layer with an output gate."""

    attn_norm: Array  # (n_embd)
    attn_q: Matrix  # n_embd -> n_head * 2 * head_dim, q and gate alternating per head
    attn_k: Matrix  # n_embd -> n_head_kv * head_dim
    attn_v: Matrix  # n_embd -> n_head_kv * head_dim
    attn_q_norm: Array  # (head_dim)
    attn_k_norm: Array  # (head_dim)
    attn_output: Matrix  # n_head * head_dim -> n_embd
    ffn: FeedForward


@dataclass(frozen=True)
class HostTable:
    """The embedding table, left in the memory-mapped file: one row is read per token."""

    type_name: str
    rows: NDArray[np.uint8]  # (n_vocab, row_n_bytes)


@dataclass(frozen=True)
class Weights:
    """Everything that the forward pass reads."""

    token_embd: HostTable
    layers: tuple[RecurrentLayer | AttentionLayer, ...]
    output_norm: Array  # (n_embd)
    output: Matrix  # n_embd -> n_vocab


def loaded_n_bytes(model: ModelFile, config: ModelConfig) -> int:
    """Return the bytes that `load_weights` will report as loaded: the trunk, the embedding table only if tied."""
    names = set(expected_tensors(config)) - (set() if config.tied_output else {"token_embd.weight"})
    return sum(model.tensor(name).n_bytes for name in names)


class _Loader:
    def __init__(self, model: ModelFile, ops: Ops, progress: LoadProgress) -> None:
        self._model, self._ops, self._progress = model, ops, progress

    def matrix(self, name: str) -> Matrix:
        info = self._model.tensor(name)
        matrix = self._ops.load_matrix(info.type, self._model.raw(name))
        self._progress(info.n_bytes)
        return matrix

    def vector(self, name: str) -> Array:
        info = self._model.tensor(name)
        vector = self._ops.load_vector(info.type, self._model.raw(name))
        self._progress(info.n_bytes)
        return vector

    def ffn(self, blk: str) -> FeedForward:
        return FeedForward(
            post_attention_norm=self.vector(f"{blk}.post_attention_norm.weight"),
            ffn_gate=self.matrix(f"{blk}.ffn_gate.weight"),
            ffn_up=self.matrix(f"{blk}.ffn_up.weight"),
            ffn_down=self.matrix(f"{blk}.ffn_down.weight"),
        )

    def recurrent(self, blk: str) -> RecurrentLayer:
        return RecurrentLayer(
            attn_norm=self.vector(f"{blk}.attn_norm.weight"),
            attn_qkv=self.matrix(f"{blk}.attn_qkv.weight"),
            attn_gate=self.matrix(f"{blk}.attn_gate.weight"),
            ssm_alpha=self.matrix(f"{blk}.ssm_alpha.weight"),
            ssm_beta=self.matrix(f"{blk}.ssm_beta.weight"),
            ssm_conv1d=self.vector(f"{blk}.ssm_conv1d.weight"),
            ssm_dt=self.vector(f"{blk}.ssm_dt.bias"),
            ssm_a=self.vector(f"{blk}.ssm_a"),
            ssm_norm=self.vector(f"{blk}.ssm_norm.weight"),
            ssm_out=self.matrix(f"{blk}.ssm_out.weight"),
            ffn=self.ffn(blk),
        )

    def attention(self, blk: str) -> AttentionLayer:
        return AttentionLayer(
            attn_norm=self.vector(f"{blk}.attn_norm.weight"),
            attn_q=self.matrix(f"{blk}.attn_q.weight"),
            attn_k=self.matrix(f"{blk}.attn_k.weight"),
            attn_v=self.matrix(f"{blk}.attn_v.weight"),
            attn_q_norm=self.vector(f"{blk}.attn_q_norm.weight"),
            attn_k_norm=self.vector(f"{blk}.attn_k_norm.weight"),
            attn_output=self.matrix(f"{blk}.attn_output.weight"),
            ffn=self.ffn(blk),
        )


def load_weights(model: ModelFile, config: ModelConfig, ops: Ops, progress: LoadProgress) -> Weights:
    """Load the trunk of `model`, whose tensors `check_tensors` has found in order, through `ops`.

    A tied file has no output.weight: the head is then the embedding table, loaded as a matrix as well.
    """
    loader = _Loader(model, ops, progress)
    embedding = model.tensor("token_embd.weight")
    layers = tuple(
        loader.recurrent(f"blk.{il}") if config.is_recurrent(il) else loader.attention(f"blk.{il}")
        for il in range(config.n_layer)
    )
    output = loader.matrix(embedding.name if config.tied_output else "output.weight")
    output_norm = loader.vector("output_norm.weight")
    ops.end_loading()
    return Weights(HostTable(embedding.type, model.raw(embedding.name)), layers, output_norm, output)
