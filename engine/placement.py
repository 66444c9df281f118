"""Memory plan: what lives on the device, what stays on the host, and whether it fits.

A pure function of configuration and tensor directory; no device is asked. Sizes, each padded to 256 bytes:

weights       every trunk tensor except token_embd, of which a token needs one row; that table stays on the
              host, unless the output is tied to it: then each step reads all of it and it is resident
gdn_state     n_v_heads x d x d f32 in each Gated-DeltaNet layer, d = ssm_d_state
conv_state    (ssm_d_conv - 1) x conv_channels f32 in each Gated-DeltaNet layer
kv_cache      keys and values, f16: n_ctx x n_head_kv x head_dim each in each attention layer
residual      N_CHUNK x n_embd f32: layer-major prefill carries a chunk of prompt tokens through one layer at a time
activations   f32, for a pack of 4 tokens: a normalised row (n_embd), the wider of the two mixers' inputs (q,
              gate, k, v, or the convolution's input and output, z, alpha, beta) and its output, gate and up
              rows (n_ff), and for one token the attention partials: n_head x n_splits x (head_dim + 2)
quantised     for a pack of 4 tokens: the widest matrix input in groups of 32 int8, an f32 scale, an int32 sum
logits        one row of n_vocab f32
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.errors import PlacementError, RequestError
from engine.gguf.inventory import padded_n_bytes, take_inventory
from engine.gguf.reader import TensorInfo
from engine.model.config import ModelConfig
from engine.numerics import KV_SPLIT, SUB_BLOCK

__all__ = ["N_CHUNK", "N_PACK", "MemoryPlan", "plan_memory"]

N_PACK = 4
"""Tokens that layer-major prefill takes through a matrix together."""
N_CHUNK = 128
"""Prompt tokens that layer-major prefill takes through one layer before the next."""

_F32, _F16 = 4, 2
_GROUP_N_BYTES = SUB_BLOCK + 2 * 4  # the int8 values, their scale and their sum


@dataclass(frozen=True)
class MemoryPlan:
    """Device and host memory of one model at one context size; all sizes in bytes.

    device: what the device must hold, by purpose. host_n_bytes: the token_embd table read from the file's
    memory map. vram_budget_n_bytes: None when no budget was given; then there is no headroom to speak of.
    """

    n_ctx: int
    device: dict[str, int]
    host_n_bytes: int
    tied_output: bool
    vram_budget_n_bytes: int | None

    @property
    def total_n_bytes(self) -> int:
        """Device memory needed in all."""
        return sum(self.device.values())

    @property
    def headroom_n_bytes(self) -> int | None:
        """What is left of the budget; negative when the plan does not fit."""
        return None if self.vram_budget_n_bytes is None else self.vram_budget_n_bytes - self.total_n_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits the budget; None without one."""
        return None if self.headroom_n_bytes is None else self.headroom_n_bytes >= 0

    def require_fit(self) -> None:
        """Raise PlacementError with the numbers if the plan exceeds its budget."""
        if self.headroom_n_bytes is not None and self.headroom_n_bytes < 0:
            weights = self.device["weights"]
            parts = f"weights {weights:,} + buffers {self.total_n_bytes - weights:,} at -c {self.n_ctx}"
            raise PlacementError(
                f"needs {self.total_n_bytes:,} bytes of device memory ({parts}), "
                f"the budget is {self.vram_budget_n_bytes:,}: {-self.headroom_n_bytes:,} bytes short"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "n_ctx": self.n_ctx,
            "device_n_bytes": self.device,
            "device_total_n_bytes": self.total_n_bytes,
            "host_n_bytes": self.host_n_bytes,
            "token_embd_resident": self.tied_output,
            "vram_budget_n_bytes": self.vram_budget_n_bytes,
            "headroom_n_bytes": self.headroom_n_bytes,
            "fits": self.fits,
        }


def plan_memory(
    config: ModelConfig, tensors: Iterable[TensorInfo], n_ctx: int, vram_budget_n_bytes: int | None = None
) -> MemoryPlan:
    """Plan a model with the given tensors at a context of n_ctx positions; RequestError if n_ctx < 1."""
    if n_ctx < 1:
        raise RequestError(f"the context size is {n_ctx}, expected at least 1")
    inventory = take_inventory(tensors, config.n_layer)
    n_recurrent, d = config.n_layer_recurrent, config.ssm_d_state
    n_conv = (config.ssm_d_conv - 1) * config.conv_channels
    device = {
        "gdn_state": n_recurrent * padded_n_bytes(config.n_v_heads * d * d * _F32),
        "conv_state": n_recurrent * padded_n_bytes(n_conv * _F32),
        "kv_cache": config.n_layer_attn * 2 * padded_n_bytes(n_ctx * config.n_embd_kv * _F16),
        "residual": padded_n_bytes(min(n_ctx, N_CHUNK) * config.n_embd * _F32),
        "activations": padded_n_bytes(_n_activations(config, n_ctx) * _F32),
        "quantised": padded_n_bytes(N_PACK * -(-_widest_input(config) // SUB_BLOCK) * _GROUP_N_BYTES),
        "logits": padded_n_bytes(config.n_vocab * _F32),
    }
    token_embd = inventory.regions["token_embd"].total.n_bytes
    return MemoryPlan(
        n_ctx=n_ctx,
        device={"weights": inventory.resident_n_bytes, **device},
        host_n_bytes=0 if config.tied_output else token_embd,
        tied_output=config.tied_output,
        vram_budget_n_bytes=vram_budget_n_bytes,
    )


def _n_activations(config: ModelConfig, n_ctx: int) -> int:
    """Count the f32 values of a pack of tokens on its way through a layer."""
    recurrent = 2 * config.conv_channels + config.value_dim + 2 * config.n_v_heads
    attention = 2 * config.n_embd_q + 2 * config.n_embd_kv
    mixed = max(config.value_dim, config.n_embd_q)
    row = config.n_embd + max(recurrent, attention) + mixed + 2 * config.n_ff
    n_splits = -(-n_ctx // KV_SPLIT)
    return N_PACK * row + config.n_head * n_splits * (config.head_dim + 2)


def _widest_input(config: ModelConfig) -> int:
    return max(config.n_embd, config.n_ff, config.value_dim, config.n_embd_q)
