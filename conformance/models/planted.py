"""The planted margin: token embeddings and output rows that make greedy decoding decisive.

Random weights alone give near-ties, and then two correct engines part ways. Here `group_size` ids share one random
sign vector, their code, with code +-1 per dimension:

    token_embd row of id t  = code of the group after t + noise     (so x starts as a known code)
    output row of id u      = code of u's own group + a row of u's own

The next group is then certain, and which member of it wins depends on what all layers added to x. Groups form a
ring; member k of a group leads k + 1 groups on, so 129 tokens never meet the same group twice. A group on the way
of a scenario can be given other rows of its own (`ModelSpec.redraws`), for a wider margin at that step.

With tied output the two matrices are one. Codes then fill the first half of the dimensions and smaller rows of their
own the second half, a token leads to its own group, and output_norm (weights.py) is negative in the second half, so
that a token argues against itself and the layers choose among the rest of the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance.models.blocks import Bytes, encode_floats, half, scale_steps
from conformance.models.spec import ModelSpec
from conformance.models.streams import RandomStream

_N_LEVELS = {"Q4_K": 16, "Q5_K": 32, "Q6_K": 64, "Q8_0": 256, "F32": 64, "F16": 64, "BF16": 64}


@dataclass(frozen=True)
class Groups:
    """Which ids belong together, where each id leads, and the codes.

    group_of, next_group: (n_vocab,) i64; group_of is -1 for ids that are never generated. sign_bits: (n_groups,
    n_embd / 8) u8, bit set = code +1.
    """

    group_of: NDArray[np.int64]
    next_group: NDArray[np.int64]
    sign_bits: Bytes

    def signs(self, groups: NDArray[np.int64]) -> Bytes:
        """Return the codes of the given groups as (len(groups), n_embd) u8, 1 for +1 and 0 for -1."""
        return np.unpackbits(self.sign_bits[groups], axis=1)


def plant_groups(spec: ModelSpec, speakable_ids: list[int]) -> Groups:
    """Deal the speakable ids into groups at random; left-over and other ids get a place to lead to, but no group."""
    stream = RandomStream(spec.seed, "groups")
    n_groups = len(speakable_ids) // spec.group_size
    dealt = np.array(speakable_ids)[stream.permutation(len(speakable_ids))][: n_groups * spec.group_size]
    place = np.arange(dealt.size)
    group_of = np.full(spec.n_vocab, -1, dtype=np.int64)
    group_of[dealt] = place // spec.group_size
    next_group = np.arange(spec.n_vocab) % n_groups
    step = 0 if spec.tied_output else 1 + place % spec.group_size
    next_group[dealt] = (group_of[dealt] + step) % n_groups
    return Groups(group_of, next_group, stream.bytes((n_groups, spec.n_embd // 8)))


def embedding_rows(spec: ModelSpec, groups: Groups, ids: NDArray[np.int64], stream: RandomStream) -> Bytes:
    """Return the token_embd rows of `ids` in `spec.token_embd_type`, (len(ids), row bytes) u8."""
    signs = groups.signs(groups.next_group[ids])
    n_levels = _n_levels(spec.token_embd_type)
    noise = stream.bytes(signs.shape)
    levels = signs * np.uint8(n_levels // 2) + np.uint8(n_levels // 8) + (noise & np.uint8(n_levels // 4 - 1))
    if spec.tied_output:
        own_half = slice(spec.n_embd // 2, None)
        levels[:, own_half] = np.uint8(n_levels * 3 // 8) + (noise[:, own_half] & np.uint8(n_levels // 4 - 1))
        levels[groups.group_of[ids] < 0] ^= np.uint8(n_levels - 1)  # the opposite code: never generated
    # x keeps the code visible under what the layers add, about 0.7 of variance each at unit-variance weights
    return _encode(spec.token_embd_type, levels, math.sqrt(spec.n_layer / 2), RandomStream(spec.seed, "embd scales"))


def output_rows(spec: ModelSpec, groups: Groups, ids: NDArray[np.int64], stream: RandomStream) -> Bytes:
    """Return the output.weight rows of `ids` in `spec.output_type`, (len(ids), row bytes) u8.

    Rows of ids without a group are constant and near zero: their logits stay far below any group's.
    """
    signs = groups.signs(groups.group_of[ids])
    n_levels = _n_levels(spec.output_type)
    own = stream.bytes(signs.shape)
    draws = dict(spec.redraws)
    for row in np.flatnonzero(np.isin(groups.group_of[ids], list(draws))).tolist():
        own[row] = redrawn_bytes(spec, int(ids[row]), draws[int(groups.group_of[ids[row]])])
    levels = signs * np.uint8(n_levels // 2) + (own & np.uint8(n_levels // 2 - 1))
    levels[groups.group_of[ids] < 0] = n_levels // 2
    return _encode(spec.output_type, levels, 2 / math.sqrt(spec.n_embd), RandomStream(spec.seed, "output scales"))


def redrawn_bytes(spec: ModelSpec, token_id: int, draw: int) -> Bytes:
    """Return draw number `draw` of the (n_embd,) random bytes behind the own row of one id."""
    return RandomStream(spec.seed, f"output row {token_id}, draw {draw}").bytes((spec.n_embd,))


def _n_levels(type_name: str) -> int:
    if type_name not in _N_LEVELS:
        raise ValueError(f"{type_name}: no writer for planted rows, expected one of {', '.join(_N_LEVELS)}")
    return _N_LEVELS[type_name]


def _encode(type_name: str, levels: Bytes, sigma: float, scale_stream: RandomStream) -> Bytes:
    """Store levels 0..L-1, meaning level - L / 2, in the format so that the weights' deviation is about sigma.

    Sub-block scales are drawn per column and are the same in every row, so codes keep their directions.
    """
    n_levels = _n_levels(type_name)
    step = sigma / (n_levels / 4 * math.sqrt(4 / 3))  # code and noise: (L/4)**2 and a third of it
    if type_name in ("F32", "F16", "BF16"):
        values = (2.0 * levels.astype(np.float32) - np.float32(n_levels - 1)) * np.float32(step / 2)
        return encode_floats(type_name, values).reshape(len(levels), -1)
    if type_name == "Q8_0":
        return _pack_q8_0(levels, step)
    n_blocks = levels.shape[1] // 256
    n_scales = 16 if type_name == "Q6_K" else 8
    scales = (scale_stream.bytes((n_blocks, n_scales)) & np.uint8(15)) + np.uint8(24)
    d = step / 32
    blocks = levels.reshape(len(levels), n_blocks, 256)
    if type_name == "Q6_K":
        return _pack_q6_k(blocks, scales, d).reshape(len(levels), -1)
    header = _k_quant_header(scales, d, (n_levels - 1) / 2)
    pack = _pack_q4_k if type_name == "Q4_K" else _pack_q5_k
    return pack(blocks, header).reshape(len(levels), -1)


def _half_bytes(target: float, factor: float = 1.0) -> Bytes:
    """Return the float16 nearest to target that has 6 bits, times factor, as two bytes."""
    mantissas, unit = scale_steps(target)
    return np.array([half(mantissas[4] * unit * factor)], dtype="<u2").view(np.uint8)


def _k_quant_header(scales: Bytes, d: float, centre: float) -> Bytes:
    """Return d, dmin = centre * d and the 12 packed bytes of scales (n_blocks, 8), mins equal to the scales."""
    header = np.empty((len(scales), 16), dtype=np.uint8)
    header[:, 0:2] = _half_bytes(d)
    header[:, 2:4] = _half_bytes(d, centre)
    low, high = scales[:, :4], scales[:, 4:]
    header[:, 4:8] = header[:, 8:12] = low | (high >> 4 << 6)
    header[:, 12:16] = (high & 15) | (high << 4)
    return header


def _pack_q4_k(levels: Bytes, header: Bytes) -> Bytes:
    """Pack (n_rows, n_blocks, 256) levels: pairs of 32 share 32 bytes, the first in the low nibbles."""
    pairs = levels.reshape(*levels.shape[:2], 4, 2, 32)
    blocks = np.empty((*levels.shape[:2], 144), dtype=np.uint8)
    blocks[..., :16] = header
    blocks[..., 16:] = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(*levels.shape[:2], 128)
    return blocks


def _pack_q5_k(levels: Bytes, header: Bytes) -> Bytes:
    """Pack as Q4_K plus 32 bytes of fifth bits: bit s of byte j belongs to weight j of sub-block s."""
    blocks = np.empty((*levels.shape[:2], 176), dtype=np.uint8)
    low = _pack_q4_k(levels & np.uint8(15), header)
    blocks[..., :16] = header
    blocks[..., 48:] = low[..., 16:]
    fifth = (levels >> 4).reshape(*levels.shape[:2], 8, 32)
    blocks[..., 16:48] = np.packbits(fifth, axis=2, bitorder="little")[..., 0, :]
    return blocks


def _pack_q6_k(levels: Bytes, scales: Bytes, d: float) -> Bytes:
    """Pack (n_rows, n_blocks, 256) levels: per half of 128, 64 bytes of low nibbles and 32 of high bit pairs."""
    quarters = levels.reshape(*levels.shape[:2], 2, 4, 32)
    low = quarters & np.uint8(15)
    high = quarters >> 4
    blocks = np.empty((*levels.shape[:2], 210), dtype=np.uint8)
    blocks[..., :128] = (low[..., 0:2, :] | (low[..., 2:4, :] << 4)).reshape(*levels.shape[:2], 128)
    pairs = high[..., 0, :] | (high[..., 1, :] << 2) | (high[..., 2, :] << 4) | (high[..., 3, :] << 6)
    blocks[..., 128:192] = pairs.reshape(*levels.shape[:2], 64)
    blocks[..., 192:208] = scales
    blocks[..., 208:] = _half_bytes(d)
    return blocks


def _pack_q8_0(levels: Bytes, step: float) -> Bytes:
    """Pack (n_rows, n_in) levels as int8 level - 128, with -127 for the -128 that quantisers never write."""
    blocks = np.empty((len(levels), levels.shape[1] // 32, 34), dtype=np.uint8)
    blocks[..., :2] = _half_bytes(step)
    blocks[..., 2:] = np.maximum(levels, 1).reshape(blocks[..., 2:].shape) ^ np.uint8(0x80)
    return blocks.reshape(len(levels), -1)
