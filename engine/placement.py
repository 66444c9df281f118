"""Memory plan: what lives on the device, what stays on the host, and whether it fits.

A pure function of configuration and tensor directory; no device is asked. Sizes, each padded to 256 bytes:

weights       every trunk tensor except token_embd, of which a token needs one row; that table stays on the
              host, unless the output is tied to it: then each step reads all of it and it is resident
the rest      every buffer of the CUDA backend, as `engine.cuda.layout` lists them, added up by purpose:
              conv_state, gdn_state   of each Gated DeltaNet layer, f32
              kv_cache                keys and values of each attention layer, f16
              residual                N_CHUNK rows of n_embd: layer-major prefill carries a chunk of prompt tokens
                                      through one layer before the next
              activations, quantised  one layer's intermediate rows for the widest pack, as f32 and as int8
              attention               partial results of the splits
              rope, logits, control   tables of n_ctx positions, two rows of n_vocab, token ids and counters
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.cuda.layout import buffers
from engine.errors import PlacementError, RequestError
from engine.gguf.inventory import take_inventory
from engine.gguf.reader import TensorInfo
from engine.model.config import ModelConfig

__all__ = ["N_CHUNK", "N_PACK", "MemoryPlan", "plan_memory"]

N_PACK = 72
"""Tokens that layer-major prefill takes through a matrix together."""
N_CHUNK = 128
"""Prompt tokens that layer-major prefill takes through one layer before the next."""


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
    device = {"weights": inventory.resident_n_bytes}
    for buffer in buffers(config, n_ctx, N_CHUNK).values():
        device[buffer.region] = device.get(buffer.region, 0) + buffer.n_bytes
    token_embd = inventory.regions["token_embd"].total.n_bytes
    return MemoryPlan(
        n_ctx=n_ctx,
        device=device,
        host_n_bytes=0 if config.tied_output else token_embd,
        tied_output=config.tied_output,
        vram_budget_n_bytes=vram_budget_n_bytes,
    )
