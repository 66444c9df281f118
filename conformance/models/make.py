"""Write a fixture model to disk, streaming, with constant memory."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFWriter, LlamaFileType

from conformance.models.planted import Groups, plant_groups
from conformance.models.presets import PRESETS
from conformance.models.spec import ModelSpec, PlannedTensor, plan_tensors
from conformance.models.vocabulary import Vocabulary, build_vocabulary
from conformance.models.weights import tensor_chunks

Progress = Callable[[int, int], None]
ARCH = "qwen35"


@dataclass(frozen=True)
class ModelSummary:
    """What was written; sha256 is None for a sparse file, whose weights are holes."""

    path: Path
    sha256: str | None
    n_bytes: int
    n_tensors: int
    spec: ModelSpec


def make_model(
    kind: str,
    out: Path,
    seed: int | None = None,
    *,
    sparse: bool = False,
    progress: Progress | None = None,
) -> ModelSummary:
    """Write the preset `kind` (tiny, small or 27b) to `out`; `seed` replaces the preset's own.

    See `write_model` for `sparse`, `progress` and what is raised; ValueError also for an unknown kind.
    """
    if kind not in PRESETS:
        raise ValueError(f"no fixture model named {kind!r}, expected one of {', '.join(PRESETS)}")
    spec = PRESETS[kind]
    if seed not in (None, spec.seed):
        spec = replace(spec, seed=seed, redraws=())  # redraws fit the preset's own seed only
    return write_model(spec, out, sparse=sparse, progress=progress)


def write_model(spec: ModelSpec, out: Path, *, sparse: bool = False, progress: Progress | None = None) -> ModelSummary:
    """Write the model described by `spec` to `out`, replacing a file there only once the new one is complete.

    sparse: write header and directory, leave the weights a hole of the right size (for `inspect` and sums).
    progress: called with (bytes written, bytes in all) after each chunk.
    Raises OSError when the disk has no room or `out` cannot be written.
    """
    plan = plan_tensors(spec)
    partial = out.with_name(out.name + ".partial")
    try:
        _write_directory(spec, plan, partial)
        n_header = partial.stat().st_size
        n_bytes = n_header + sum(_padded(tensor.n_bytes) for tensor in plan)
        if sparse:
            os.truncate(partial, n_bytes)
            digest = None
        else:
            _require_room(partial, n_bytes - n_header)
            digest = _append_weights(spec, plan, partial, n_bytes, progress)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return ModelSummary(out, digest, n_bytes, len(plan), spec)


def _write_directory(spec: ModelSpec, plan: list[PlannedTensor], path: Path) -> None:
    """Write everything before the weights, padded to where they start."""
    writer = GGUFWriter(path, ARCH)
    name = f"Fixture {spec.name}, seed {spec.seed}, random weights"
    add_hyperparameters(writer, spec, name, LlamaFileType.MOSTLY_Q4_K_M)
    _add_tokenizer(writer, build_vocabulary(spec.n_vocab))
    for tensor in plan:
        # the dtype argument only matters without raw_dtype; uint8 would be taken for a shape in bytes
        writer.add_tensor_info(
            tensor.name,
            tensor.shape[::-1],
            np.dtype(np.float32),
            tensor.n_bytes,
            raw_dtype=GGMLQuantizationType[tensor.type],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, _padded(path.stat().st_size))


def add_hyperparameters(writer: GGUFWriter, spec: ModelSpec, name: str, file_type: LlamaFileType) -> None:
    """Add the keys the converter writes for a Qwen3.5 text model, in its order; `name` is the model's."""
    writer.add_type("model")
    writer.add_name(name)
    writer.add_block_count(spec.n_layer + int(spec.has_mtp_block))
    writer.add_context_length(spec.n_ctx_train)
    writer.add_embedding_length(spec.n_embd)
    writer.add_feed_forward_length(spec.n_ff)
    writer.add_head_count(spec.n_head)
    writer.add_head_count_kv(spec.n_head_kv)
    writer.add_rope_dimension_sections(spec.rope_sections)
    writer.add_rope_freq_base(spec.rope_freq_base)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_file_type(file_type)
    writer.add_uint32(f"{ARCH}.ssm.conv_kernel", spec.ssm_d_conv)
    writer.add_uint32(f"{ARCH}.ssm.state_size", spec.ssm_d_state)
    writer.add_uint32(f"{ARCH}.ssm.group_count", spec.n_k_heads)
    writer.add_uint32(f"{ARCH}.ssm.time_step_rank", spec.n_v_heads)
    writer.add_uint32(f"{ARCH}.ssm.inner_size", spec.ssm_d_inner)
    writer.add_uint32(f"{ARCH}.full_attention_interval", spec.full_attention_interval)
    writer.add_rope_dimension_count(spec.n_rot)
    if spec.has_mtp_block:
        writer.add_uint32(f"{ARCH}.nextn_predict_layers", 1)
    writer.add_quantization_version(2)


def _add_tokenizer(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_eos_token_id(vocabulary.id_of("<|im_end|>"))
    writer.add_pad_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_add_bos_token(False)


def _append_weights(
    spec: ModelSpec, plan: list[PlannedTensor], path: Path, n_bytes: int, progress: Progress | None
) -> str:
    """Append all tensors to the directory in `path`; return the SHA256 of the whole file."""
    digest = hashlib.sha256(path.read_bytes())
    groups = plant_groups(spec, build_vocabulary(spec.n_vocab).speakable_ids)
    with path.open("ab") as file:
        for chunk in _file_chunks(spec, plan, groups):
            file.write(chunk)
            digest.update(chunk)
            if progress is not None:
                progress(file.tell(), n_bytes)
    return digest.hexdigest()


def _file_chunks(spec: ModelSpec, plan: list[PlannedTensor], groups: Groups) -> Iterator[bytes]:
    """Yield the data section: each tensor's chunks, then its padding."""
    for tensor in plan:
        for chunk in tensor_chunks(spec, tensor, groups):
            yield chunk.tobytes()
        padding = _padded(tensor.n_bytes) - tensor.n_bytes
        if padding:
            yield bytes(padding)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // GGUF_DEFAULT_ALIGNMENT) * GGUF_DEFAULT_ALIGNMENT


def _require_room(path: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < n_bytes:
        raise OSError(f"{path.parent}: {n_bytes:,} bytes needed for the model, {free:,} free")
