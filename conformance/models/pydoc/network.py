"""The network: transformers' Qwen3.5 text model in a small size, its start values, and its checkpoint on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from conformance.models.pydoc.vocabulary import N_VOCAB

__all__ = [
    "CHECKPOINT",
    "add_dropout",
    "build_network",
    "load_network",
    "network_config",
    "save_checkpoint",
    "stored_tensors",
]

CHECKPOINT = "model.safetensors"
_CONFIG = "config.json"
_SHORTEST_STEP, _LONGEST_STEP = 0.001, 0.1


def network_config(end_of_text_id: int) -> Qwen3_5TextConfig:
    """Return the sizes: 8 layers, every fourth full attention, six value heads on two key heads.

    Every row length is a multiple of 256, the superblock of the K-quants.
    """
    return Qwen3_5TextConfig(
        vocab_size=N_VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
        eos_token_id=end_of_text_id,
    )


def build_network(config: Qwen3_5TextConfig, seed: int) -> Qwen3_5ForCausalLM:
    """Build the network on the CPU with random weights from `seed`, attention by PyTorch's fused op."""
    torch.manual_seed(seed)
    network = Qwen3_5ForCausalLM._from_config(config, attn_implementation="sdpa")
    for layer, kind in zip(network.model.layers, config.layer_types, strict=True):
        if kind == "linear_attention":
            _start_with_long_memory(layer.linear_attn)
    return network


def _start_with_long_memory(layer: Any) -> None:
    """Draw dt_bias so that softplus(dt_bias) lies between the two steps: most heads then remember tens of tokens.

    The library's start value of 1 makes them forget within one.
    """
    low, high = math.log(_SHORTEST_STEP), math.log(_LONGEST_STEP)
    step = torch.exp(low + (high - low) * torch.rand_like(layer.dt_bias))
    with torch.no_grad():
        layer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def add_dropout(network: Qwen3_5ForCausalLM, rate: float) -> None:
    """Drop this share of what every sublayer adds to the residual stream, while in training mode.

    The text is read many times over; without this the network learns it by heart and little else.
    """

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, rate, module.training)

    for name, module in network.named_modules():
        if name.endswith(("out_proj", "o_proj", "down_proj")):
            module.register_forward_hook(drop)


def stored_tensors(network: Qwen3_5ForCausalLM) -> dict[str, torch.Tensor]:
    """Return name -> tensor as the checkpoint holds them: matrices F16, vectors and convolutions F32.

    The output head is the embedding table and not among them.
    """
    return {
        name: tensor.detach().to("cpu", torch.float16 if tensor.ndim == 2 else torch.float32).contiguous()
        for name, tensor in network.state_dict().items()
        if name != "lm_head.weight"
    }


def save_checkpoint(network: Qwen3_5ForCausalLM, folder: Path) -> None:
    """Write the stored tensors and the configuration into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored_tensors(network), folder / CHECKPOINT)
    (folder / _CONFIG).write_text(json.dumps(network.config.to_dict(), indent=2, default=str) + "\n")


def load_network(folder: Path) -> Qwen3_5ForCausalLM:
    """Return the checkpoint in `folder` as a float32 network in evaluation mode, attention written out plainly."""
    config = Qwen3_5TextConfig.from_dict(json.loads((folder / _CONFIG).read_text()))
    network = Qwen3_5ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    missing, unexpected = network.load_state_dict(load_file(folder / CHECKPOINT), strict=False)
    if unexpected or missing != ["lm_head.weight"]:
        raise ValueError(f"{folder / CHECKPOINT} lacks {missing} and has {unexpected} too many")
    return network.float().eval()
