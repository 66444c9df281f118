"""A qwen35 model of four small F32 layers: enough for llama.cpp to load and run, written in milliseconds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

N_LAYER, N_EMBD, N_FF, N_VOCAB = 4, 64, 128, 320
N_HEAD, N_HEAD_KV, HEAD_DIM = 2, 1, 32
D_STATE, N_K_HEADS, N_V_HEADS, D_CONV = 32, 2, 4, 4
KEY_DIM, VALUE_DIM = D_STATE * N_K_HEADS, D_STATE * N_V_HEADS


def write_tiny_model(path: Path, *, with_tokenizer: bool = False, seed: int = 1) -> Path:
    """Write the model to path and return path; without a tokenizer its `tokenizer.ggml.model` is "none"."""
    writer = gguf.GGUFWriter(path, "qwen35")
    _add_hyperparameters(writer)
    if with_tokenizer:
        _add_byte_tokenizer(writer)
    else:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(N_VOCAB)
    rng = np.random.default_rng(seed)
    for name, shape in _tensor_shapes().items():
        writer.add_tensor(name, _values(rng, name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_hyperparameters(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(N_LAYER)
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_dimension_sections([6, 5, 5, 0])
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(VALUE_DIM)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(N_V_HEADS)
    writer.add_ssm_group_count(N_K_HEADS)
    writer.add_uint32("qwen35.full_attention_interval", 4)


def _add_byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add one token per byte, in the printable spelling of byte-level BPE, one merge and unused fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    spelling = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    tokens = [spelling[b] for b in range(256)] + ["ab"] + [f"<|filler_{i}|>" for i in range(257, N_VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (N_VOCAB - 257))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(N_VOCAB - 1)
    writer.add_add_bos_token(False)


def _tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Name every tensor with its NumPy shape, rows first."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (N_VOCAB, N_EMBD),
        "output_norm.weight": (N_EMBD,),
        "output.weight": (N_VOCAB, N_EMBD),
    }
    for il in range(N_LAYER):
        layer = _attention_shapes() if (il + 1) % 4 == 0 else _recurrent_shapes()
        layer |= {"attn_norm.weight": (N_EMBD,), "post_attention_norm.weight": (N_EMBD,)}
        layer |= {"ffn_gate.weight": (N_FF, N_EMBD), "ffn_up.weight": (N_FF, N_EMBD)}
        layer |= {"ffn_down.weight": (N_EMBD, N_FF)}
        shapes |= {f"blk.{il}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "attn_q.weight": (2 * N_HEAD * HEAD_DIM, N_EMBD),
        "attn_k.weight": (N_HEAD_KV * HEAD_DIM, N_EMBD),
        "attn_v.weight": (N_HEAD_KV * HEAD_DIM, N_EMBD),
        "attn_output.weight": (N_EMBD, N_HEAD * HEAD_DIM),
        "attn_q_norm.weight": (HEAD_DIM,),
        "attn_k_norm.weight": (HEAD_DIM,),
    }


def _recurrent_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "attn_qkv.weight": (2 * KEY_DIM + VALUE_DIM, N_EMBD),
        "attn_gate.weight": (VALUE_DIM, N_EMBD),
        "ssm_conv1d.weight": (2 * KEY_DIM + VALUE_DIM, D_CONV),
        "ssm_dt.bias": (N_V_HEADS,),
        "ssm_a": (N_V_HEADS,),
        "ssm_beta.weight": (N_V_HEADS, N_EMBD),
        "ssm_alpha.weight": (N_V_HEADS, N_EMBD),
        "ssm_norm.weight": (D_STATE,),
        "ssm_out.weight": (N_EMBD, VALUE_DIM),
    }


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Draw f32 values of a size that keeps every layer's output near one."""
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        return np.full(shape, -0.5, np.float32)
    scale = np.float32(shape[-1] ** -0.5)
    return np.asarray(rng.standard_normal(shape, np.float32) * scale, np.float32)
