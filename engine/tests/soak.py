"""Generate again and again in one process, and see whether it takes more and more memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

N_SAMPLES = 10
_MAX_HOST_GROWTH_N_BYTES = 4 << 20


@dataclass(frozen=True)
class SoakFigures:
    """Memory in bytes after each tenth of the calls; device: None without one."""

    n_calls: int
    wall_time_s: float
    resident_n_bytes: list[int]
    device_n_bytes: list[int] | None

    def require_no_growth(self) -> None:
        """Fail if the process grew by more than 4 MiB after the first tenth, or what the device holds at all."""
        grown = max(self.resident_n_bytes) - self.resident_n_bytes[0]
        assert grown <= _MAX_HOST_GROWTH_N_BYTES, f"{grown:,} bytes more after {self.n_calls} calls: {self}"
        if self.device_n_bytes is not None:
            assert max(self.device_n_bytes) <= self.device_n_bytes[0], f"the device holds more: {self}"


def generate_often(
    generate: Callable[[], list[int]], n_calls: int, device_n_bytes: Callable[[], int] | None = None
) -> SoakFigures:
    """Call `generate` n_calls times, a multiple of 10; each call must give the ids of the first."""
    process, start = psutil.Process(), time.monotonic()
    resident: list[int] = []
    device: list[int] = []
    right = generate()
    for number in range(2, n_calls + 1):
        assert generate() == right
        if number % (n_calls // N_SAMPLES) == 0:
            resident.append(process.memory_info().rss)
            device += [device_n_bytes()] if device_n_bytes else []
    return SoakFigures(n_calls, time.monotonic() - start, resident, device if device_n_bytes else None)
