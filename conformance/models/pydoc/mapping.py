"""Tensors of a Qwen3.5 checkpoint under GGUF's names and in llama.cpp's layout, and back.

What differs besides names: llama.cpp wants norm weights with the model's 1 already added, -exp(A_log) in place of
A_log, the convolution without its middle axis of 1, and the value heads tiled. In the checkpoint the value heads of
one key head stand together; in the file value head v reads key head v mod n_k_heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.models.spec import ModelSpec

__all__ = ["HeadLayout", "from_gguf", "spec_of", "to_gguf"]

Tensors = Mapping[str, NDArray[Any]]

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
_ONE_ADDED = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_HEAD_DIM_ROWS = ("attn_qkv", "attn_gate", "ssm_conv1d")
_SINGLE_ROWS = ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a")
_HEAD_DIM_COLUMNS = ("ssm_out",)


@dataclass(frozen=True)
class HeadLayout:
    """The heads of a Gated-DeltaNet layer; head_dim is that of keys and values alike."""

    n_k_heads: int
    n_v_heads: int
    head_dim: int

    def order(self, n_elements: int, per_head: int, *, to_file: bool) -> NDArray[np.intp]:
        """Return which element goes to each place along an axis that ends with `per_head` elements a value head.

        The elements before those (queries and keys in attn_qkv and the convolution) stay. to_file: from the
        checkpoint's order to the file's, else back.
        """
        n_before = n_elements - self.n_v_heads * per_head
        heads = np.arange(self.n_v_heads).reshape(self.n_k_heads, -1).T.ravel()
        heads = heads if to_file else np.argsort(heads)
        moved = heads[:, None] * per_head + np.arange(per_head) + n_before
        return np.concatenate([np.arange(n_before), moved.ravel()])


def to_gguf(tensors: Tensors, heads: HeadLayout) -> dict[str, NDArray[Any]]:
    """Return the tensors of a checkpoint as llama.cpp's: GGUF name -> array, rows last, dtypes kept.

    Raises KeyError for a name that the architecture does not have.
    """
    return {_gguf_name(name): _to_file(_stem(_gguf_name(name)), tensor, heads) for name, tensor in tensors.items()}


def from_gguf(tensors: Tensors, heads: HeadLayout) -> dict[str, NDArray[Any]]:
    """Invert `to_gguf`. Norms come back to within the rounding of the added 1, A_log to within that of exp and log.

    Raises KeyError for a name that the architecture does not have.
    """
    return {_checkpoint_name(name): _to_checkpoint(_stem(name), tensor, heads) for name, tensor in tensors.items()}


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """Return the hyperparameters under GGUF's names from a checkpoint's config.json, with its value heads' layout.

    Raises ValueError if keys and values differ in head size, or rotation is not that of the real models.
    """
    spec = ModelSpec(
        name="pydoc",
        n_layer=config["num_hidden_layers"],
        n_embd=config["hidden_size"],
        n_ff=config["intermediate_size"],
        n_vocab=config["vocab_size"],
        n_head=config["num_attention_heads"],
        n_head_kv=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        n_k_heads=config["linear_num_key_heads"],
        n_v_heads=config["linear_num_value_heads"],
        ssm_d_state=config["linear_key_head_dim"],
        seed=0,
        ssm_d_conv=config["linear_conv_kernel_dim"],
        rope_freq_base=config["rope_parameters"]["rope_theta"],
        rms_eps=config["rms_norm_eps"],
        n_ctx_train=config["max_position_embeddings"],
        tied_output=config["tie_word_embeddings"],
    )
    if config["linear_value_head_dim"] != spec.ssm_d_state:
        raise ValueError(f"linear_value_head_dim is {config['linear_value_head_dim']}, expected {spec.ssm_d_state}")
    if config["rope_parameters"]["partial_rotary_factor"] * spec.head_dim != spec.n_rot:
        raise ValueError(f"rope_parameters turn other dims than {spec.n_rot} of {spec.head_dim}")
    kinds = ["linear_attention" if spec.is_recurrent(layer) else "full_attention" for layer in range(spec.n_layer)]
    if config["layer_types"] != kinds:
        raise ValueError(f"layer_types is {config['layer_types']}, expected {kinds}")
    return spec


def _to_file(stem: str, tensor: NDArray[Any], heads: HeadLayout) -> NDArray[Any]:
    if stem in _ONE_ADDED:
        tensor = tensor + np.float32(1)
    elif stem == "ssm_a":
        tensor = -np.exp(tensor)
    elif stem == "ssm_conv1d":
        tensor = tensor[:, 0, :]
    return _reordered(stem, tensor, heads, to_file=True)


def _to_checkpoint(stem: str, tensor: NDArray[Any], heads: HeadLayout) -> NDArray[Any]:
    tensor = _reordered(stem, tensor, heads, to_file=False)
    if stem in _ONE_ADDED:
        return tensor - np.float32(1)
    if stem == "ssm_a":
        return np.log(-tensor)
    return tensor[:, None, :] if stem == "ssm_conv1d" else tensor


def _reordered(stem: str, tensor: NDArray[Any], heads: HeadLayout, *, to_file: bool) -> NDArray[Any]:
    if stem in _HEAD_DIM_ROWS:
        return tensor[heads.order(tensor.shape[0], heads.head_dim, to_file=to_file)]
    if stem in _SINGLE_ROWS:
        return tensor[heads.order(tensor.shape[0], 1, to_file=to_file)]
    if stem in _HEAD_DIM_COLUMNS:
        return tensor[:, heads.order(tensor.shape[1], heads.head_dim, to_file=to_file)]
    return tensor


def _gguf_name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return f"blk.{layer[1]}.{_LAYER[layer[2]]}" if layer else _WHOLE[name]


def _checkpoint_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    table = _LAYER if layer else _WHOLE
    found = {theirs: ours for ours, theirs in table.items()}[layer[2] if layer else name]
    return f"model.layers.{layer[1]}.{found}" if layer else found


def _stem(name: str) -> str:
    """Return a GGUF name without its block and suffix: `ffn_down` of `blk.3.ffn_down.weight`."""
    return re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", name)
