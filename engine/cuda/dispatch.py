"""Which of the two families of matrix kernels runs a decode step's matrices: a pure function of shapes and device.

A launch does rows in rounds: as many at a time as the device has warps for. The stream_* kernels hold one block a
multiprocessor (`engine.cuda.streams`), the others as many small blocks as fit (`engine.cuda.gemv`). The family whose
last round leaves fewer warps idle is taken; where both leave as many, the streams, which need no launch for the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine import quants
from engine.cuda import gemv, streams
from engine.cuda.streams import Target

Policy: TypeAlias = Literal["rounds", "streams", "rows"]


def n_row_slots(n_rows: int, rows_per_sm: int, n_sm: int) -> int:
    """Return the rows that whole rounds of rows_per_sm on each of n_sm multiprocessors have room for."""
    round_n_rows = rows_per_sm * n_sm
    return -(-n_rows // round_n_rows) * round_n_rows


@dataclass(frozen=True)
class Dispatch:
    """Chooses the family for one device: by rounds, or one family for everything that it takes."""

    target: Target
    policy: Policy = "rounds"

    def streams_project(self, n_in: int, type_names: Sequence[str], n_outs: Sequence[int]) -> bool:
        """Return whether one stream_project launch does these matrices of rows of n_in weights."""
        if not streams.takes_any(n_in, type_names):
            return False
        streamed = [n for n, name in zip(n_outs, type_names, strict=True) if quants.is_quantized(name)]
        n_warps = streams.STREAM_WARPS - (len(streamed) < len(n_outs))
        return self._fewer_idle(sum(streamed), n_warps, sum(n_outs), gemv.GEMV_WARPS * gemv.blocks_per_sm(n_in))

    def streams_add(self, n_in: int, type_name: str, n_out: int) -> bool:
        """Return whether stream_gemv does this matrix."""
        if not streams.takes(n_in, type_name):
            return False
        return self._fewer_idle(n_out, streams.STREAM_WARPS, n_out, gemv.GEMV_WARPS * gemv.blocks_per_sm(n_in))

    def streams_gate_up(self, n_in: int, n_ff: int, gate: str, up: str) -> bool:
        """Return whether stream_gate_up does these two matrices."""
        if not streams.takes_gate_up(n_in, n_ff, gate, up):
            return False
        return self._fewer_idle(n_ff, streams.STREAM_WARPS, n_ff, gemv.GATE_UP_WARPS * gemv.PAIR_BLOCKS_PER_SM)

    def _fewer_idle(self, n_streamed: int, stream_warps: int, n_rows: int, rows_per_sm: int) -> bool:
        """Compare the two families: rows to stream by stream_warps, and all rows by rows_per_sm warps."""
        if self.policy != "rounds":
            return self.policy == "streams"
        n_sm = self.target.n_sm
        idle = n_row_slots(n_streamed, stream_warps, n_sm) - n_streamed
        return idle <= n_row_slots(n_rows, rows_per_sm, n_sm) - n_rows
