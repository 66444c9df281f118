"""Write a trained checkpoint as a GGUF file: `python -m conformance.models.pydoc.convert DIR OUT.gguf`.

DIR holds model.safetensors and config.json, and in it or above it tokenizer.json. Matrices stay F16; vectors, the
convolutions and the two small matrices of the gates are F32, as llama.cpp keeps them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType
from numpy.typing import NDArray

from conformance.models.make import ARCH, add_hyperparameters
from conformance.models.pydoc.mapping import HeadLayout, Tensors, spec_of, to_gguf

__all__ = ["convert", "read_checkpoint", "write_model_file"]

_F32_MATRICES = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_conv1d.weight")
_NAME = "Python documentation topics"


def convert(folder: Path, out: Path) -> None:
    """Convert the checkpoint in `folder` to the GGUF file `out`; raises OSError, ValueError, KeyError."""
    tokenizer = next(path for path in (folder / "tokenizer.json", folder.parent / "tokenizer.json") if path.is_file())
    tensors, config = read_checkpoint(folder)
    write_model_file(tensors, config, json.loads(tokenizer.read_text(encoding="utf-8")), out)


def read_checkpoint(folder: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the tensors (F16 matrices, F32 vectors) and config.json of a checkpoint."""
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def write_model_file(tensors: Tensors, config: dict[str, Any], tokenizer: dict[str, Any], out: Path) -> None:
    """Write the GGUF file. tensors: those of the checkpoint; tokenizer: the content of tokenizer.json.

    Raises KeyError for a tensor that the architecture does not have, ValueError for a shape it cannot have.
    """
    spec = spec_of(config)
    heads = HeadLayout(spec.n_k_heads, spec.n_v_heads, spec.ssm_d_state)
    writer = GGUFWriter(out, ARCH)
    add_hyperparameters(writer, spec, _NAME, LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, tokenizer, config["eos_token_id"])
    for name, tensor in sorted(to_gguf(tensors, heads).items()):
        is_f32 = tensor.ndim == 1 or name.endswith(_F32_MATRICES)
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32 if is_f32 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], end_of_text_id: int) -> None:
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids: dict[str, int] = tokenizer["model"]["vocab"] | added
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in added else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(end_of_text_id)
    writer.add_pad_token_id(end_of_text_id)
    writer.add_add_bos_token(False)


def main() -> None:
    """Convert what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m conformance.models.pydoc.convert", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    given = parser.parse_args()
    convert(given.folder, given.out)


if __name__ == "__main__":
    main()
