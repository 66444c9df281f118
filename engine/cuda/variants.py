"""What makes the engine fast, one surgery at a time, and what stands in its place when it is switched off.

Every variant gives the same bits. A variant replaces parts of the kernel sources (files of engine/cuda/kernels by files
of engine/cuda/kernels/variants), chooses other kernels, or launches differently; nothing of it is in the kernels that
the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cuda.dispatch import Policy
from engine.errors import RequestError


@dataclass(frozen=True)
class Variant:
    """One way to run a decode step.

    surgery: the number that the ablation table groups by; without: what is switched off, and what runs instead.
    parts: (file of the sources, file that takes its place). checks: a separate finite check after each op.
    scheduling: how the host waits, None for as the engine was opened.
    """

    name: str
    surgery: int
    without: str
    parts: tuple[tuple[str, str], ...] = ()
    policy: Policy = "rounds"
    overlaps: bool = True
    checks: bool = False
    scheduling: str | None = None


def _part(name: str, variant: str) -> tuple[tuple[str, str], ...]:
    return ((name, f"variants/{variant}"),)


FULL = Variant("full", 0, "nothing")
VARIANTS = (
    FULL,
    Variant(
        "norm-two-pass",
        1,
        "loads of norm input and weight ahead of the reduction: two loops, each loading what it uses",
        parts=_part("norm_row.cuh", "norm_row_two_pass.cuh"),
    ),
    Variant(
        "rows", 2, "streams of one block a multiprocessor: a warp a row in small blocks, the norm apart", policy="rows"
    ),
    Variant(
        "rows-shared",
        2,
        "streams: four warps share the sub-blocks of four rows, sums through shared memory, the norm apart",
        parts=_part("row_sums.cuh", "row_sums_shared.cuh"),
        policy="rows",
    ),
    Variant("no-rounds", 2, "choice of the kernels by rounds: streams for everything that they take", policy="streams"),
    Variant(
        "half-loop",
        3,
        "conversion of f16 by the hardware: from its bits, a loop for denormals",
        parts=_part("half.cuh", "half_loop.cuh"),
    ),
    Variant(
        "delta-row-by-row",
        4,
        "all rows of a warp through the delta rule together: one row after the other",
        parts=_part("delta_step.cuh", "delta_step_row_by_row.cuh"),
    ),
    Variant(
        "norms-in-turn",
        4,
        "convolution and norm of q, k and v in three warps: in one, one after the other",
        parts=_part("conv_task.cuh", "conv_task_in_turn.cuh"),
    ),
    Variant(
        "values-late",
        4,
        "attention values asked for ahead of the scores: after them, one 16-byte load at a time",
        parts=_part("value_tile.cuh", "value_tile_late.cuh"),
    ),
    Variant(
        "softmax-serial",
        4,
        "softmax of a split by a warp a head: by a thread a head",
        parts=_part("split_softmax.cuh", "split_softmax_serial.cuh"),
    ),
    Variant(
        "check-nodes",
        5,
        "checks for NaN and infinity inside the kernels alone: a node for each op's result besides",
        parts=_part("", "finite_check.cu"),
        checks=True,
    ),
    Variant("plain-launch", 5, "programmatic dependent launch: each node after the one before", overlaps=False),
    Variant("auto-wait", 5, "a host that spins while it waits: the driver's choice", scheduling="auto"),
)


def variant(name: str) -> Variant:
    """Return the variant of that name; RequestError lists them."""
    for one in VARIANTS:
        if one.name == name:
            return one
    raise RequestError(f"there is no variant {name!r}, expected one of: {', '.join(one.name for one in VARIANTS)}")
