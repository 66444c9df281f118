"""Which kernels a model needs, and in which order a decode step launches them.

A pure function of a model's tensor directory, so it works without a device. `engine.cuda.ops` launches; that both agree
is checked wherever launches are noted (`engine.profile`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine import quants
from engine.cuda import argmax, attention, embed, gated_delta, gemv, packs, rms_norm, streams
from engine.cuda.buffers import MAX_PACK
from engine.cuda.dispatch import Dispatch
from engine.gguf.reader import TensorInfo
from engine.model.config import ModelConfig

LayerKind: TypeAlias = Literal["recurrent", "attention", "around"]

_PROJECTIONS = {
    True: ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"),
    False: ("attn_q", "attn_k", "attn_v"),
}
_OUTPUTS = {True: "ssm_out", False: "attn_output"}
IQ3S_GRID = "&iq3s_grid"
"""Name expression of the device variable with the IQ3_S table."""


@dataclass(frozen=True)
class Node:
    """One launch of a decode step: `tensors` are the matrices that it reads, n_bytes all that it must move."""

    expression: str
    layer: int | None
    kind: LayerKind
    tensors: tuple[TensorInfo, ...]
    n_bytes: int

    @property
    def op(self) -> str:
        """Name of the kernel."""
        return self.expression.partition("<")[0]

    @property
    def types(self) -> str:
        """The matrices' types, in their order."""
        return "+".join(tensor.type for tensor in self.tensors)

    @property
    def shape(self) -> str:
        """Rows of each matrix, and the length that they share, such as "1024+1024 x 5120"."""
        if not self.tensors:
            return ""
        return f"{'+'.join(str(tensor.n_rows) for tensor in self.tensors)} x {self.tensors[0].shape[0]}"

    @property
    def stems(self) -> str:
        """The matrices' names without layer and suffix."""
        names = (tensor.name.removesuffix(".weight") for tensor in self.tensors)
        return "+".join(name.rpartition(".")[2] for name in names)

    @property
    def weights_n_bytes(self) -> int:
        """Bytes of the matrices."""
        return sum(tensor.n_bytes for tensor in self.tensors)


def expressions(config: ModelConfig, tensors: Mapping[str, TensorInfo], dispatch: Dispatch) -> list[str]:
    """Return the name expressions of every kernel that prefill and decode launch, sorted."""
    names = {node.expression for node in step(config, tensors, dispatch)}
    names |= {gemv.repack_expression(t.type) for t in tensors.values() if quants.is_quantized(t.type)}
    names |= set(rms_norm.expressions(config, MAX_PACK))
    return sorted(names | set(packs.expressions()) | {IQ3S_GRID})


def step(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], dispatch: Dispatch, position: int = 0
) -> Iterator[Node]:
    """Yield the launches of the decode step for the token at `position`, in their order."""
    table = tensors["token_embd.weight"]
    moved = embed.bytes_moved(table.n_bytes // table.n_rows, config.n_embd)
    yield Node(embed.expression(table.type, config.n_embd), None, "around", (), moved)
    for il in range(config.n_layer):
        yield from _layer(config, tensors, dispatch, il, position)
    head = tensors["token_embd.weight" if config.tied_output else "output.weight"]
    yield _norm(config, None, "around")
    logits = gemv.gemv_expression(head.type, config.n_embd, gemv.LOGITS)
    moved = gemv.project_bytes_moved([head.type], config.n_embd, [head.n_rows], head.n_bytes)
    yield Node(logits, None, "around", (head,), moved)
    yield Node(argmax.expressions()[0], None, "around", (), argmax.bytes_moved(config.n_vocab))


def _layer(
    config: ModelConfig, tensors: Mapping[str, TensorInfo], dispatch: Dispatch, il: int, position: int
) -> Iterator[Node]:
    recurrent = config.is_recurrent(il)
    kind: LayerKind = "recurrent" if recurrent else "attention"

    def of(*stems: str) -> tuple[TensorInfo, ...]:
        return tuple(tensors[f"blk.{il}.{stem}.weight"] for stem in stems)

    yield from _project(config, dispatch, of(*_PROJECTIONS[recurrent]), il, kind)
    yield from _gated_delta(config, il) if recurrent else _attention(config, il, position)
    yield _add(dispatch, of(_OUTPUTS[recurrent]), il, kind)
    yield from _gate_up(config, dispatch, of("ffn_gate", "ffn_up"), il, kind)
    yield _add(dispatch, of("ffn_down"), il, kind)


def _norm(config: ModelConfig, il: int | None, kind: LayerKind) -> Node:
    return Node(rms_norm.expressions(config, 1)[0], il, kind, (), rms_norm.bytes_moved(config.n_embd))


def _project(
    config: ModelConfig, dispatch: Dispatch, matrices: tuple[TensorInfo, ...], il: int, kind: LayerKind
) -> Iterator[Node]:
    n_in, types, n_outs = config.n_embd, [m.type for m in matrices], [m.n_rows for m in matrices]
    n_bytes = sum(m.n_bytes for m in matrices)
    if dispatch.streams_project(n_in, types, n_outs):
        expression = streams.project_expression(types, n_in, dispatch.target)
        yield Node(expression, il, kind, matrices, streams.project_bytes_moved(n_in, n_outs, n_bytes))
        return
    yield _norm(config, il, kind)
    expression = gemv.project_expression(types, n_in)
    yield Node(expression, il, kind, matrices, gemv.project_bytes_moved(types, n_in, n_outs, n_bytes))


def _gated_delta(config: ModelConfig, il: int) -> Iterator[Node]:
    (expression,) = gated_delta.expressions(config, 1)
    yield Node(expression, il, "recurrent", (), gated_delta.bytes_moved(config))


def _attention(config: ModelConfig, il: int, position: int) -> Iterator[Node]:
    moved = (
        attention.append_bytes_moved(config),
        attention.split_bytes_moved(config, position),
        attention.combine_bytes_moved(config, position),
    )
    for expression, n_bytes in zip(attention.expressions(config, 1), moved, strict=True):
        yield Node(expression, il, "attention", (), n_bytes)


def _add(dispatch: Dispatch, matrices: tuple[TensorInfo, ...], il: int, kind: LayerKind) -> Node:
    (matrix,) = matrices
    name, n_in, n_out = matrix.type, matrix.shape[0], matrix.n_rows
    if dispatch.streams_add(n_in, name, n_out):
        expression = streams.gemv_expression(name, n_in, dispatch.target)
    else:
        expression = gemv.gemv_expression(name, n_in, gemv.ADD_RESIDUAL)
    return Node(expression, il, kind, matrices, gemv.add_bytes_moved(name, n_in, n_out, matrix.n_bytes))


def _gate_up(
    config: ModelConfig, dispatch: Dispatch, matrices: tuple[TensorInfo, ...], il: int, kind: LayerKind
) -> Iterator[Node]:
    gate, up = matrices
    n_in, n_ff, types = gate.shape[0], gate.n_rows, (gate.type, up.type)
    n_bytes = gate.n_bytes + up.n_bytes
    if dispatch.streams_gate_up(n_in, n_ff, *types):
        expression = streams.gate_up_expression(*types, n_in, dispatch.target)
        yield Node(expression, il, kind, matrices, streams.gate_up_bytes_moved(n_in, n_ff, n_bytes))
        return
    yield _norm(config, il, kind)
    expression = gemv.gate_up_expression(*types, n_in)
    yield Node(expression, il, kind, matrices, gemv.gate_up_bytes_moved(types, n_in, n_ff, n_bytes))


def matrix_nodes(nodes: Sequence[Node]) -> list[Node]:
    """Return the first node of each shape and formats of matrices, in order."""
    found: dict[tuple[str, str], Node] = {}
    for node in nodes:
        if node.tensors:
            found.setdefault((node.shape, node.types), node)
    return list(found.values())
