"""What the GPU did while something was timed: clocks, temperature, power, reasons for lower clocks, memory in use."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from types import TracebackType
from typing import Protocol

from conformance.scenario import Data

_INTERVAL_S = 0.05
_SLOWING = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
"""Bits of NVML's clock event reasons that mean lower clocks than asked for; idle and fixed clocks are none of them."""


@dataclass(frozen=True)
class Sample:
    """One look at the device; reasons are NVML's bits."""

    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_mw: int
    reasons: int
    used_n_bytes: int


class Sensor(Protocol):
    """A device that can be looked at."""

    cuda_driver: str

    def sample(self) -> Sample:
        """Look at the device now."""


class Telemetry(Data):
    """The samples of one run: medians of clocks and power, the highest temperature, every reason that was seen.

    used_n_bytes are of the whole device, everybody's: at the start of the run, and the most that was seen.
    """

    n_samples: int
    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_mw: int
    slowed_by: list[str]
    used_before_n_bytes: int
    used_peak_n_bytes: int


class NvmlSensor:
    """The first device, through NVIDIA's management library."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
        version = int(pynvml.nvmlSystemGetCudaDriverVersion())
        self.cuda_driver = f"{version // 1000}.{version % 1000 // 10}"

    def sample(self) -> Sample:
        """Look at the device now."""
        nvml, device = self._nvml, self._device
        return Sample(
            sm_mhz=nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            memory_mhz=nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
            temperature_c=nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            power_mw=nvml.nvmlDeviceGetPowerUsage(device),
            reasons=nvml.nvmlDeviceGetCurrentClocksEventReasons(device),
            used_n_bytes=nvml.nvmlDeviceGetMemoryInfo(device).used,
        )


def open_sensor() -> tuple[Sensor | None, str | None]:
    """Return the sensor of the first GPU, or why there is none."""
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed: install the extra cuda12 or cuda13"
    try:
        sensor = NvmlSensor()
        sensor.sample()  # some drivers, WSL2's among them, leave single values out
        return sensor, None
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"


@dataclass
class Watch:
    """Samples `sensor` while a `with` block runs; without a sensor nothing is measured."""

    sensor: Sensor | None
    _samples: list[Sample] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self.sensor is not None:
            self._samples.append(self.sensor.sample())
            self._thread = threading.Thread(target=self._watch, args=(self.sensor,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None and self.sensor is not None:
            self._thread.join()
            self._samples.append(self.sensor.sample())

    @property
    def telemetry(self) -> Telemetry | None:
        """The samples in short, None without a sensor."""
        return summarise(self._samples) if self._samples else None

    def _watch(self, sensor: Sensor) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._samples.append(sensor.sample())


def summarise(samples: list[Sample]) -> Telemetry:
    """Return the samples of one run in short; the first is from before it."""
    return Telemetry(
        n_samples=len(samples),
        sm_mhz=median_low(s.sm_mhz for s in samples),
        memory_mhz=median_low(s.memory_mhz for s in samples),
        temperature_c=max(s.temperature_c for s in samples),
        power_mw=median_low(s.power_mw for s in samples),
        slowed_by=slowing_reasons(s.reasons for s in samples),
        used_before_n_bytes=samples[0].used_n_bytes,
        used_peak_n_bytes=max(s.used_n_bytes for s in samples),
    )


def slowing_reasons(reasons: Iterable[int]) -> list[str]:
    """Return the names of the bits that mean lower clocks than asked for, over all of `reasons`."""
    seen = 0
    for bits in reasons:
        seen |= bits
    return [name for bit, name in _SLOWING.items() if seen & bit]
