"""What `python -m engine inspect` shows: hyperparameters, byte inventory and memory plan of one file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from engine.gguf.inventory import Inventory, Total, take_inventory
from engine.gguf.reader import open_model
from engine.model.config import ModelConfig, check_tensors
from engine.placement import MemoryPlan, plan_memory

__all__ = ["InspectReport", "inspect_report", "render_plan"]

_MIB = 1 << 20
_READ_BY = {
    "token_embd": "one row a token; host, memory-mapped",
    "output_norm": "every token; device",
    "output": "every token; device",
    "nextn": "MTP, not read in plain decoding",
    "other": "not read",
}
_TIED = "one row a token, and all of it as the output; device"


@dataclass(frozen=True)
class InspectReport:
    """One file's hyperparameters, byte inventory and memory plan."""

    file: str
    file_n_bytes: int
    config: ModelConfig
    inventory: Inventory
    plan: MemoryPlan

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        return {
            "file": self.file,
            "file_n_bytes": self.file_n_bytes,
            "hyperparameters": asdict(self.config),
            "inventory": self.inventory.to_dict(),
            "memory_plan": self.plan.to_dict(),
        }

    def render(self) -> str:
        """Return the report as text tables; sizes in bytes and MiB."""
        sections = {
            f"{self.file}: {self.file_n_bytes:,} bytes": _table(_hyperparameter_rows(self.config), ()),
            "Regions": _table(self._region_rows(), ("region", "tensors", "bytes", "MiB", "types", "read by")),
            "Types": _table(_total_rows(self.inventory.by_type), ("type", "tensors", "bytes", "MiB")),
            "Kinds": _table(_kind_rows(self.inventory), ("tensor", "types")),
        }
        parts = [f"{title}\n{table}" for title, table in sections.items()]
        return "\n\n".join([*parts, render_plan(self.plan)])

    def _region_rows(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for name, region in self.inventory.regions.items():
            tied = name == "token_embd" and self.inventory.tied_output
            read_by = _TIED if tied else _READ_BY.get(name, "every token; device")
            types = ", ".join(region.by_type)
            rows.append((name, region.total.n_tensors, *_size(region.total.n_bytes), types, read_by))
        resident = "on the device, each tensor padded to 256 bytes"
        rows.append(("resident", "", *_size(self.inventory.resident_n_bytes), "", resident))
        return rows


def render_plan(plan: MemoryPlan) -> str:
    """Return a memory plan as a text table; sizes in bytes and MiB."""
    return f"Memory plan at -c {plan.n_ctx}\n" + _table(_plan_rows(plan), ("what", "bytes", "MiB"))


def inspect_report(path: str | Path, n_ctx: int, vram_budget_n_bytes: int | None = None) -> InspectReport:
    """Inspect the file at `path` for a context of n_ctx positions; reads the header only.

    A plan that exceeds the budget is reported, not raised. Raises ModelFileError for a file that cannot be
    run, RequestError for a context size below 1.
    """
    model = open_model(path)
    config = ModelConfig.from_model(model)
    check_tensors(model, config)
    tensors = model.tensors.values()
    plan = plan_memory(config, tensors, n_ctx, vram_budget_n_bytes)
    return InspectReport(model.name, model.n_bytes, config, take_inventory(tensors, config.n_layer), plan)


def _hyperparameter_rows(config: ModelConfig) -> list[tuple[Any, ...]]:
    layers = f"{config.n_layer_recurrent} Gated DeltaNet, {config.n_layer_attn} attention"
    return [
        *((name, _shown(value)) for name, value in asdict(config).items()),
        ("layers", layers + (f"; {config.n_layer_nextn} MTP left out" if config.n_layer_nextn else "")),
    ]


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _total_rows(totals: dict[str, Total]) -> list[tuple[Any, ...]]:
    ordered = sorted(totals.items(), key=lambda item: -item[1].n_bytes)
    return [(name, total.n_tensors, *_size(total.n_bytes)) for name, total in ordered]


def _kind_rows(inventory: Inventory) -> list[tuple[Any, ...]]:
    return [(kind, ", ".join(f"{n} {name}" for name, n in types.items())) for kind, types in inventory.by_kind.items()]


def _plan_rows(plan: MemoryPlan) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [(what, *_size(n_bytes)) for what, n_bytes in plan.device.items()]
    rows.append(("device total", *_size(plan.total_n_bytes)))
    if plan.headroom_n_bytes is not None and plan.vram_budget_n_bytes is not None:
        rows.append(("device budget", *_size(plan.vram_budget_n_bytes)))
        verdict = "headroom" if plan.fits else "does not fit, short of"
        rows.append((verdict, *_size(abs(plan.headroom_n_bytes))))
    where = "host (token_embd)" if not plan.tied_output else "host (tied: token_embd is on the device)"
    rows.append((where, *_size(plan.host_n_bytes)))
    return rows


def _size(n_bytes: int) -> tuple[str, str]:
    return f"{n_bytes:,}", f"{n_bytes / _MIB:,.2f}"


def _table(rows: list[tuple[Any, ...]], headers: tuple[str, ...]) -> str:
    align = ["right" if header in ("tensors", "bytes", "MiB") else "left" for header in headers]
    table: str = tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align or None)
    return table
