"""Where the bytes of a model file are: totals by region, by quantisation type and by kind of tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.gguf.reader import TensorInfo

__all__ = ["RESIDENT_ALIGNMENT_N_BYTES", "Inventory", "Region", "Total", "padded_n_bytes", "take_inventory"]

RESIDENT_ALIGNMENT_N_BYTES = 256
"""What a tensor in device memory is padded to: the alignment of CUDA allocations."""


@dataclass
class Total:
    """A number of tensors and their bytes, without padding."""

    n_tensors: int = 0
    n_bytes: int = 0

    def add(self, info: TensorInfo) -> None:
        """Count one tensor."""
        self.n_tensors += 1
        self.n_bytes += info.n_bytes

    def to_dict(self) -> dict[str, int]:
        """Return the total as plain data."""
        return {"n_tensors": self.n_tensors, "n_bytes": self.n_bytes}


@dataclass
class Region:
    """A part of the file that is placed and read as one; `padded_n_bytes` rounds each tensor up to 256."""

    name: str
    total: Total = field(default_factory=Total)
    padded_n_bytes: int = 0
    by_type: dict[str, Total] = field(default_factory=dict)

    def add(self, info: TensorInfo) -> None:
        """Count one tensor."""
        self.total.add(info)
        self.padded_n_bytes += padded_n_bytes(info.n_bytes)
        self.by_type.setdefault(info.type, Total()).add(info)

    def to_dict(self) -> dict[str, Any]:
        """Return the region as plain data."""
        by_type = {name: total.to_dict() for name, total in self.by_type.items()}
        return {**self.total.to_dict(), "padded_n_bytes": self.padded_n_bytes, "by_type": by_type}


@dataclass(frozen=True)
class Inventory:
    """The byte account of one file.

    regions: in file order of reading: token_embd, the trunk's blocks, output_norm, output (absent when the
    output is tied to token_embd), MTP blocks (`nextn`), other. by_type and by_kind cover the whole file;
    by_kind counts tensors as kind -> type -> number, where `ffn_down.weight` is the kind of
    `blk.0.ffn_down.weight`. resident_n_bytes: what decoding keeps on the device, each tensor padded to 256
    bytes: everything in the trunk but token_embd, and token_embd too when the output is tied to it.
    """

    regions: dict[str, Region]
    by_type: dict[str, Total]
    by_kind: dict[str, dict[str, int]]
    n_bytes: int
    resident_n_bytes: int
    tied_output: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the inventory as plain data."""
        return {
            "regions": {name: region.to_dict() for name, region in self.regions.items()},
            "by_type": {name: total.to_dict() for name, total in self.by_type.items()},
            "by_kind": self.by_kind,
            "tensor_n_bytes": self.n_bytes,
            "resident_n_bytes": self.resident_n_bytes,
            "tied_output": self.tied_output,
        }


def take_inventory(tensors: Iterable[TensorInfo], n_layer: int) -> Inventory:
    """Account for `tensors`; blocks from n_layer on count as MTP blocks."""
    infos = list(tensors)
    tied = all(info.name != "output.weight" for info in infos)
    trunk = f"blk.0..{n_layer - 1}"
    regions = {name: Region(name) for name in ("token_embd", trunk, "output_norm", "output", "nextn", "other")}
    by_type: dict[str, Total] = {}
    by_kind: dict[str, Counter[str]] = {}
    for info in infos:
        regions[_region_name(info, trunk, n_layer)].add(info)
        by_type.setdefault(info.type, Total()).add(info)
        by_kind.setdefault(_kind(info), Counter())[info.type] += 1
    resident = [trunk, "output_norm", "output", *(["token_embd"] if tied else [])]
    return Inventory(
        regions={name: region for name, region in regions.items() if region.total.n_tensors},
        by_type=by_type,
        by_kind={kind: dict(types) for kind, types in by_kind.items()},
        n_bytes=sum(info.n_bytes for info in infos),
        resident_n_bytes=sum(regions[name].padded_n_bytes for name in resident),
        tied_output=tied,
    )


def padded_n_bytes(n_bytes: int) -> int:
    """Round a size up to the device's allocation alignment."""
    return -(-n_bytes // RESIDENT_ALIGNMENT_N_BYTES) * RESIDENT_ALIGNMENT_N_BYTES


def _region_name(info: TensorInfo, trunk: str, n_layer: int) -> str:
    if info.block is not None:
        return trunk if info.block < n_layer else "nextn"
    name = info.name.removesuffix(".weight")
    return name if name in ("token_embd", "output_norm", "output") else "other"


def _kind(info: TensorInfo) -> str:
    return info.name if info.block is None else info.name.split(".", 2)[-1]
