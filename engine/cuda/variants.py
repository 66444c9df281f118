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


FULL = Variant("full", 0, "nothing")
VARIANTS = (FULL,)


def variant(name: str) -> Variant:
    """Return the variant of that name; RequestError lists them."""
    for one in VARIANTS:
        if one.name == name:
            return one
    raise RequestError(f"there is no variant {name!r}, expected one of: {', '.join(one.name for one in VARIANTS)}")
