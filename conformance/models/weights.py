"""The bytes of one tensor, in chunks: which generator and which spread each kind of tensor gets.

Matrices have variance 1 / n_in, so that a normalised input gives outputs of about 1; vectors are drawn uniformly
around the centre that such a tensor has in real models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from conformance.models.blocks import Bytes, encode_floats, random_rows
from conformance.models.planted import Groups, embedding_rows, output_rows
from conformance.models.spec import ModelSpec, PlannedTensor
from conformance.models.streams import RandomStream

_N_CHUNK_WEIGHTS = 1 << 20  # part of the format: the split into chunks decides which random word goes where

# centre and half width of the uniform distribution of a vector's elements
_VECTORS = {
    "ssm_dt": (-2.5, 2.5),  # memory of a few to a few hundred tokens
    "ssm_a": (-0.55, 0.5),
}
_NORM = (1.0, 0.25)
# Rotated dims weigh more in q and k: scores get a deviation of about 2, so that attention picks a few positions and
# forgetting one or rotating too far shows in the tokens.
_ROTATED_NORM = 2.0
# factor on the deviation of 1 / sqrt(n_in)
_GAINS = {
    "attn_output": 4.0,  # gated averages over positions come out small, and few layers attend
    "ssm_conv1d": 1.15,
}


def tensor_chunks(spec: ModelSpec, tensor: PlannedTensor, groups: Groups) -> Iterator[Bytes]:
    """Yield the bytes of `tensor` in file order, a few MB at a time."""
    stream = RandomStream(spec.seed, tensor.name)
    if len(tensor.shape) == 1:
        yield encode_floats("F32", _vector(spec, tensor, stream))
        return
    n_chunk_rows = max(1, _N_CHUNK_WEIGHTS // tensor.shape[0])
    for first in range(0, tensor.n_rows, n_chunk_rows):
        ids = np.arange(first, min(first + n_chunk_rows, tensor.n_rows))
        if tensor.name == "token_embd.weight":
            yield embedding_rows(spec, groups, ids, stream)
        elif tensor.name == "output.weight":
            yield output_rows(spec, groups, ids, stream)
        else:
            yield _matrix_rows(tensor, stream, len(ids))


def _matrix_rows(tensor: PlannedTensor, stream: RandomStream, n_rows: int) -> Bytes:
    n_in = tensor.shape[0]
    sigma = _GAINS.get(_stem(tensor.name), 1.0) / math.sqrt(n_in)
    return random_rows(tensor.type, stream, n_rows, n_in, sigma)


def _vector(spec: ModelSpec, tensor: PlannedTensor, stream: RandomStream) -> NDArray[np.float32]:
    stem = _stem(tensor.name)
    centre, half_width = _VECTORS.get(stem, _NORM)
    n = tensor.shape[0]
    values: NDArray[np.float32] = np.float32(centre) + np.float32(half_width) * stream.symmetric(n)
    if stem in ("attn_q_norm", "attn_k_norm"):
        values[: spec.n_rot] *= np.float32(_ROTATED_NORM)
    if spec.tied_output and tensor.name == "output_norm.weight":
        values[n // 2 :] *= np.float32(-1)  # a token argues against itself, see planted.py
    return values


def _stem(name: str) -> str:
    """Return the tensor's own name: `blk.3.ffn_down.weight` -> `ffn_down`."""
    return name.removeprefix("blk.").lstrip("0123456789.").removesuffix(".weight").removesuffix(".bias")
