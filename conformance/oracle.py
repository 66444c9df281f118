"""An independent forward pass in float64: what the logits would be without any rounding but the file's own.

It shares no code with the engine: the `gguf` package reads and dequantises, libm computes, whole sequences are
processed at once, nothing is quantised and the KV cache stays in float64. Bit equality between backends says
that they agree; distance to this oracle says that they are right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_ROWS_AT_A_TIME = 8192


class Oracle:
    """The model of one file; `logits` runs a token sequence."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields

    def logits(self, ids: Sequence[int], positions: Sequence[int]) -> F64:
        """Return the logits after each of `positions` (indices into `ids`), (len(positions), n_vocab) f64."""
        x = self._rows("token_embd.weight", ids)
        for il in range(self._int("block_count")):
            blk = f"blk.{il}."
            h = self._rms_norm(x, f"{blk}attn_norm.weight")
            is_attention = f"{blk}attn_q.weight" in self._tensors
            x = x + (self._attention(blk, h) if is_attention else self._delta_net(blk, h))
            h = self._rms_norm(x, f"{blk}post_attention_norm.weight")
            gated = _silu(self._matmul(h, f"{blk}ffn_gate.weight")) * self._matmul(h, f"{blk}ffn_up.weight")
            x = x + self._matmul(gated, f"{blk}ffn_down.weight")
        h = self._rms_norm(x[list(positions)], "output_norm.weight")
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        return self._matmul(h, head)

    def _attention(self, blk: str, h: F64) -> F64:
        n_tokens, head_dim = h.shape[0], self._int("attention.key_length")
        n_head, n_head_kv = self._int("attention.head_count"), self._int("attention.head_count_kv")
        qg = self._matmul(h, f"{blk}attn_q.weight").reshape(n_tokens, n_head, 2 * head_dim)
        k = self._matmul(h, f"{blk}attn_k.weight").reshape(n_tokens, n_head_kv, head_dim)
        v = self._matmul(h, f"{blk}attn_v.weight").reshape(n_tokens, n_head_kv, head_dim)
        q = self._rope(self._rms_norm(qg[..., :head_dim], f"{blk}attn_q_norm.weight"))
        k = self._rope(self._rms_norm(k, f"{blk}attn_k_norm.weight"))
        group = n_head // n_head_kv
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(head_dim)
        scores[:, np.triu(np.ones((n_tokens, n_tokens), dtype=bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        o = np.einsum("hij,jhd->ihd", weights, v) * _sigmoid(qg[..., head_dim:])
        return self._matmul(o.reshape(n_tokens, -1), f"{blk}attn_output.weight")

    def _delta_net(self, blk: str, h: F64) -> F64:
        n_tokens, d = h.shape[0], self._int("ssm.state_size")
        n_k, n_v = self._int("ssm.group_count"), self._int("ssm.time_step_rank")
        mixed = self._convolve(self._matmul(h, f"{blk}attn_qkv.weight"), self._tensor(f"{blk}ssm_conv1d.weight"))
        q, k, v = np.split(mixed, [n_k * d, 2 * n_k * d], axis=1)
        eps = self._float("attention.layer_norm_rms_epsilon")
        q, k = (_l2_normalised(part.reshape(n_tokens, n_k, d), eps) for part in (q, k))
        # Value head i reads key head i % n_k: the key heads are repeated as a block, not one by one.
        q, k = (np.concatenate([part] * (n_v // n_k), axis=1) for part in (q, k))
        alpha = self._matmul(h, f"{blk}ssm_alpha.weight") + self._tensor(f"{blk}ssm_dt.bias")
        decay = np.exp(np.logaddexp(0.0, alpha) * self._tensor(f"{blk}ssm_a"))
        beta = _sigmoid(self._matmul(h, f"{blk}ssm_beta.weight"))
        o = _delta_rule(q, k, v.reshape(n_tokens, n_v, d), decay, beta)
        z = self._matmul(h, f"{blk}attn_gate.weight").reshape(o.shape)
        o = self._rms_norm(o, f"{blk}ssm_norm.weight") * _silu(z)
        return self._matmul(o.reshape(n_tokens, -1), f"{blk}ssm_out.weight")

    def _convolve(self, x: F64, kernel: F64) -> F64:
        d_conv = kernel.shape[1]
        padded = np.concatenate([np.zeros((d_conv - 1, x.shape[1])), x])
        return _silu(sum(kernel[:, t] * padded[t : t + x.shape[0]] for t in range(d_conv)))

    def _rope(self, x: F64) -> F64:
        n_rot, base = self._int("rope.dimension_count"), self._float("rope.freq_base")
        sections = self._value("rope.dimension_sections")
        n_pairs = n_rot // 2
        out = x.copy()
        for i in range(n_pairs):
            sector = i % sum(sections)
            if sector >= 3 * sections[sector % 3]:
                continue  # the fourth section: its position is 0 in text
            theta = np.arange(x.shape[0])[:, None] * base ** (-2.0 * i / n_rot)
            a, b = x[..., i], x[..., i + n_pairs]
            out[..., i] = a * np.cos(theta) - b * np.sin(theta)
            out[..., i + n_pairs] = a * np.sin(theta) + b * np.cos(theta)
        return out

    def _rms_norm(self, x: F64, name: str) -> F64:
        eps = self._float("attention.layer_norm_rms_epsilon")
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * self._tensor(name)

    def _matmul(self, x: F64, name: str) -> F64:
        tensor = self._tensors[name]
        n_out = int(tensor.shape[1])
        parts = [x @ self._dequantized(name, slice(i, i + _ROWS_AT_A_TIME)).T for i in range(0, n_out, _ROWS_AT_A_TIME)]
        return np.concatenate(parts, axis=1)

    def _rows(self, name: str, ids: Sequence[int]) -> F64:
        return self._dequantized(name, list(ids))

    def _dequantized(self, name: str, rows: slice | list[int]) -> F64:
        tensor = self._tensors[name]
        return np.asarray(dequantize(tensor.data[rows], tensor.tensor_type), dtype=np.float64)

    def _tensor(self, name: str) -> F64:
        return np.asarray(self._tensors[name].data, dtype=np.float64)

    def _value(self, key: str) -> Any:
        return self._fields[f"qwen35.{key}"].contents()

    def _int(self, key: str) -> int:
        return int(self._value(key))

    def _float(self, key: str) -> float:
        return float(self._value(key))


def nmse(logits: NDArray[Any], reference: F64) -> float:
    """Return the squared error over the reference's variance about its row means; 1 is as bad as a constant."""
    error = np.asarray(logits, dtype=np.float64) - reference
    spread = reference - reference.mean(axis=-1, keepdims=True)
    return float((error * error).sum() / (spread * spread).sum())


def _delta_rule(q: F64, k: F64, v: F64, decay: F64, beta: F64) -> F64:
    n_tokens, n_heads, d = v.shape
    state = np.zeros((n_heads, d, d))
    out = np.empty_like(v)
    for t in range(n_tokens):
        state *= decay[t][:, None, None]
        delta = (v[t] - np.einsum("hji,hi->hj", state, k[t])) * beta[t][:, None]
        state += delta[:, :, None] * k[t][:, None, :]
        out[t] = np.einsum("hji,hi->hj", state, q[t]) / math.sqrt(d)
    return out


def _l2_normalised(x: F64, eps: float) -> F64:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), eps)


def _sigmoid(x: F64) -> F64:
    return np.where(x >= 0, 1.0, np.exp(-np.abs(x))) / (1.0 + np.exp(-np.abs(x)))


def _silu(x: Any) -> F64:
    return np.asarray(x * _sigmoid(x))
