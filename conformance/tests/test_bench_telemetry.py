from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

import pytest

from conformance.bench.telemetry import NvmlSensor, Sample, Watch, open_sensor, slowing_reasons
from conformance.tests.bench_fakes import FakeSensor


class FakeNvmlError(Exception):
    """What the fake library raises."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names of nvidia-ml-py that are used, for one GPU."""
    module: Any = ModuleType("pynvml")
    module.NVMLError = FakeNvmlError
    module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM, module.NVML_TEMPERATURE_GPU = 1, 2, 0
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByIndex = lambda index: f"gpu{index}"
    module.nvmlSystemGetCudaDriverVersion = lambda: 13020
    module.nvmlDeviceGetClockInfo = lambda device, kind: {1: 1980, 2: 2619}[kind]
    module.nvmlDeviceGetTemperature = lambda device, kind: 41
    module.nvmlDeviceGetPowerUsage = lambda device: 412_000
    module.nvmlDeviceGetCurrentClocksEventReasons = lambda device: 0x4
    module.nvmlDeviceGetMemoryInfo = lambda device: type("Memory", (), {"used": 1 << 30})
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.mark.usefixtures("nvml")
def test_a_sensor_reads_the_first_gpu() -> None:
    sensor, why = open_sensor()
    assert isinstance(sensor, NvmlSensor)
    assert why is None
    assert (sensor.cuda_driver, sensor.sample()) == ("13.2", Sample(1980, 2619, 41, 412_000, 0x4, 1 << 30))


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetPowerUsage"])
def test_a_driver_that_does_not_say_is_not_measured(nvml: Any, name: str) -> None:
    def fail(*args: Any) -> None:
        raise FakeNvmlError("Not Supported")

    setattr(nvml, name, fail)
    assert open_sensor() == (None, "NVML: Not Supported")


def test_without_the_library_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_sensor() == (None, "nvidia-ml-py is not installed: install the extra cuda12 or cuda13")


def test_a_watch_samples_before_during_and_after() -> None:
    with Watch(FakeSensor()) as watch:
        time.sleep(0.2)
    assert watch.telemetry is not None
    assert 3 <= watch.telemetry.n_samples <= 6


def test_idle_and_fixed_clocks_slow_nothing_down() -> None:
    assert slowing_reasons([0x1, 0x2, 0x100]) == []
    assert slowing_reasons([0x1, 0x8, 0x80]) == ["hw_slowdown", "hw_power_brake"]
