"""The GPU of a run as NVIDIA's driver describes it: for records, and for what a process takes of its memory."""

from __future__ import annotations

import subprocess
import threading
from functools import cache
from types import TracebackType

from conformance.scenario import Data

_INTERVAL_S = 0.5
_LEAST_SAMPLES = 10
_DEADLINE_S = 30.0
_MIB = 1 << 20


class Gpu(Data):
    """The first GPU of the machine; memory_n_bytes is None where the driver does not say."""

    name: str
    memory_n_bytes: int | None
    driver: str


@cache
def this_gpu() -> Gpu | None:
    """Describe the first GPU; None where there is none, or no nvidia-smi to say so."""
    rows = _query("name", "memory.total", "driver_version")
    if not rows:
        return None
    name, memory_mib, driver = rows[0]
    return Gpu(name=name, memory_n_bytes=_n_bytes(memory_mib), driver=driver)


def free_memory_n_bytes() -> int | None:
    """Return what the first GPU has free now; None where there is none, or it does not say."""
    rows = _query("memory.free")
    return _n_bytes(rows[0][0]) if rows else None


class DeviceMemoryMeter:
    """Sample, while a `with` block runs, how much device memory is in use; everybody's use counts.

    Sampled from outside, so llama.cpp's process and ours are measured alike, the driver's own context included.
    """

    def __init__(self, active: bool = True) -> None:
        self._before: dict[str, int] = _used_n_bytes() if active else {}
        self._peak = dict(self._before)
        self._n_samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def peak_n_bytes(self) -> int | None:
        """The most that was in use beyond what was at the start, on the GPU where that grew most.

        None without a GPU, and for a run too short to have been sampled _LEAST_SAMPLES times: its peak was missed.
        """
        if self._n_samples < _LEAST_SAMPLES:
            return None
        return max((self._peak[gpu] - n_bytes for gpu, n_bytes in self._before.items()), default=None)

    def __enter__(self) -> DeviceMemoryMeter:
        if self._before:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._before:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._n_samples += 1
            for gpu, n_bytes in _used_n_bytes().items():
                self._peak[gpu] = max(n_bytes, self._peak.get(gpu, 0))


def _used_n_bytes() -> dict[str, int]:
    """Return the bytes in use by GPU, those left out that do not say."""
    found = {gpu: _n_bytes(used_mib) for gpu, used_mib in _query("index", "memory.used")}
    return {gpu: n_bytes for gpu, n_bytes in found.items() if n_bytes is not None}


def _query(*fields: str) -> list[list[str]]:
    """Return one row of values per GPU, none where nvidia-smi is missing or fails."""
    argv = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.decode(errors="replace").splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _n_bytes(mib: str) -> int | None:
    return int(mib) * _MIB if mib.isdecimal() else None
