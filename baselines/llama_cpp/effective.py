"""Read from llama.cpp's own log what it really did, to be stored beside what was asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

# key of the result -> (pattern with one group, type of its value); the last match in the log counts
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "n_ctx": (r"^llama_context: n_ctx +=\s*(\d{1,18})$", int),
    "n_ctx_seq": (r"^llama_context: n_ctx_seq +=\s*(\d{1,18})$", int),
    "n_batch": (r"^llama_context: n_batch +=\s*(\d{1,18})$", int),
    "n_ubatch": (r"^llama_context: n_ubatch +=\s*(\d{1,18})$", int),
    "n_seq_max": (r"^llama_context: n_seq_max +=\s*(\d{1,18})$", int),
    "flash_attn": (r"(?:^llama_context: flash_attn +=\s*|Flash Attention was auto, set to )(\w+)$", str),
    "type_k": (r"^llama_kv_cache: size .*\bK \((\w+)\)", str),
    "type_v": (r"^llama_kv_cache: size .*\bV \((\w+)\)", str),
    "n_threads": (r"^(?:system_info: |set_n_threads: )n_threads = (\d{1,18})", int),
    "n_kv_cells": (r"^llama_kv_cache: size .*\(\s*(\d{1,18}) cells", int),
    "n_kv_layers": (r"^llama_kv_cache: size .*cells,\s*(\d{1,18}) layers", int),
    "layers_offloaded": (r"offloaded (\d{1,9}/\d{1,9}) layers to GPU$", str),
    "fused_gdn_autoregressive": (r"fused Gated Delta Net \(autoregressive\) (enabled|not supported)", str),
    "fused_gdn_chunked": (r"fused Gated Delta Net \(chunked\) (enabled|not supported)", str),
    "arch": (r"^print_info: arch +=\s*(\S+)$", str),
    "file_type": (r"^print_info: file type +=\s*(.+)$", str),
    "model_type": (r"^print_info: model type +=\s*(.+)$", str),
    "vocab_type": (r"^print_info: vocab type +=\s*(.+)$", str),
    "graph_splits": (r"^sched_reserve: graph splits =\s*(.+)$", str),
}
_LAYER_DEVICE = re.compile(r"^load_tensors: layer +\d+ assigned to device (\w+)", re.MULTILINE)
_OVERRIDE = re.compile(r"buffer type overridden to (\w+)$", re.MULTILINE)
_BUFFER = re.compile(r"^\w+:\s+(\S+) (model|KV|RS|compute|output) buffer size =\s*(\d+(?:\.\d+)?) MiB", re.M)


def parse_effective(log: str) -> dict[str, Any]:
    """Return the settings a log of llama.cpp b8763 states; a setting it does not state is None.

    Besides scalars: layer_devices {device: number of layers, the output layer counted}, overridden_tensors
    {buffer type: number of tensors}, buffers_mib {"KIND BUFFER": MiB} for model, KV, RS, compute and output
    buffers.
    """
    result: dict[str, Any] = {}
    for key, (pattern, kind) in _SCALARS.items():
        found = re.findall(pattern, log, re.MULTILINE)
        result[key] = kind(found[-1].strip()) if found else None
    result["layer_devices"] = dict(Counter(_LAYER_DEVICE.findall(log)))
    result["overridden_tensors"] = dict(Counter(_OVERRIDE.findall(log)))
    result["buffers_mib"] = {f"{kind} {name}": float(mib) for name, kind, mib in _BUFFER.findall(log)}
    return result
