from __future__ import annotations

from baselines.llama_cpp.effective import parse_effective

# lines of a run of the tiny model; only the shape of the lines matters
CPU_LOG = """\
print_info: file type   = all F32 (guessed)
print_info: arch                  = qwen35
print_info: model type            = ?B
print_info: vocab type            = no vocab
load_tensors: layer   0 assigned to device CPU, is_swa = 0
load_tensors: layer   1 assigned to device CPU, is_swa = 0
tensor blk.0.ssm_a (0 MiB f32) buffer type overridden to CPU
load_tensors:   CPU_Mapped model buffer size =     0.99 MiB
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 768
llama_context: n_ctx_seq     = 768
llama_context: n_batch       = 512
llama_context: n_ubatch      = 256
llama_context: flash_attn    = enabled
llama_kv_cache:        CPU KV buffer size =     0.06 MiB
llama_kv_cache: size =    0.06 MiB (   768 cells,   1 layers,  1/1 seqs), K (f16):    0.03 MiB, V (q8_0):    0.03 MiB
llama_memory_recurrent:        CPU RS buffer size =     0.07 MiB
sched_reserve: fused Gated Delta Net (autoregressive) enabled
sched_reserve: fused Gated Delta Net (chunked) not supported, set to disabled
sched_reserve:        CPU compute buffer size =     2.90 MiB
sched_reserve: graph splits = 1
"""

GPU_LINES = """\
load_tensors: layer  64 assigned to device CUDA0, is_swa = 0
load_tensors: offloaded 65/65 layers to GPU
llama_context: flash_attn    = auto
sched_reserve: Flash Attention was auto, set to enabled
"""


def test_cpu_log() -> None:
    effective = parse_effective(CPU_LOG)
    assert {key: value for key, value in effective.items() if value not in (None, {})} == {
        "n_ctx": 768,
        "n_ctx_seq": 768,
        "n_batch": 512,
        "n_ubatch": 256,
        "n_seq_max": 1,
        "flash_attn": "enabled",
        "type_k": "f16",
        "type_v": "q8_0",
        "n_kv_cells": 768,
        "n_kv_layers": 1,
        "fused_gdn_autoregressive": "enabled",
        "fused_gdn_chunked": "not supported",
        "arch": "qwen35",
        "file_type": "all F32 (guessed)",
        "model_type": "?B",
        "vocab_type": "no vocab",
        "graph_splits": "1",
        "layer_devices": {"CPU": 2},
        "overridden_tensors": {"CPU": 1},
        "buffers_mib": {"model CPU_Mapped": 0.99, "KV CPU": 0.06, "RS CPU": 0.07, "compute CPU": 2.9},
    }
    assert effective["layers_offloaded"] is None


def test_gpu_lines() -> None:
    effective = parse_effective(GPU_LINES)
    assert effective["layers_offloaded"] == "65/65"
    assert effective["layer_devices"] == {"CUDA0": 1}
    assert effective["flash_attn"] == "enabled"


def test_an_empty_log_states_nothing() -> None:
    assert set(map(repr, parse_effective("").values())) == {"None", "{}"}
