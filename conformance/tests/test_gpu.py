from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance import gpu
from conformance.gpu import DeviceMemoryMeter, Gpu, free_memory_n_bytes, this_gpu
from conformance.tests.fakes import write_nvidia_smi

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _ask_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let the only nvidia-smi be the one that a test writes."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    this_gpu.cache_clear()
    yield
    this_gpu.cache_clear()


def test_the_first_gpu_is_described(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, "printf 'NVIDIA H200, 143771, 580.159.03\\nOther, 1, 580.159.03\\n'")
    assert this_gpu() == Gpu(name="NVIDIA H200", memory_n_bytes=143771 * MIB, driver="580.159.03")


def test_memory_that_the_driver_does_not_state_is_none(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, "echo 'NVIDIA GB10, [N/A], 580.95'")
    assert this_gpu() == Gpu(name="NVIDIA GB10", memory_n_bytes=None, driver="580.95")
    with DeviceMemoryMeter() as meter:
        pass
    assert meter.peak_n_bytes is None


def test_free_memory_is_the_first_gpu_s(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, "printf '130000\\n7\\n'")
    assert free_memory_n_bytes() == 130_000 * MIB
    write_nvidia_smi(tmp_path, "echo '[N/A]'")
    assert free_memory_n_bytes() is None
    write_nvidia_smi(tmp_path, "exit 9")
    assert free_memory_n_bytes() is None


@pytest.mark.parametrize("script", ["echo 'NVIDIA-SMI has failed'; exit 9", "echo 'No devices were found'", ""])
def test_without_a_gpu_there_is_none(tmp_path: Path, script: str) -> None:
    write_nvidia_smi(tmp_path, script)
    assert this_gpu() is None


def test_the_growth_of_the_gpu_that_grew_most_is_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_INTERVAL_S", 0.01)
    used, sampled = tmp_path / "used", tmp_path / "sampled"
    write_nvidia_smi(tmp_path, f"cat {used}; echo x >> {sampled}")
    used.write_text("0, 500\n1, 30\n")
    with DeviceMemoryMeter() as meter:
        for text in ("0, 510\n1, 16109\n", "0, 505\n1, 30\n"):
            used.write_text(text)
            _wait_for_lines(sampled, 6 + len(sampled.read_text().splitlines()))
    assert meter.peak_n_bytes == (16109 - 30) * MIB


def test_the_peak_of_a_run_too_short_to_sample_is_none(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, "echo '0, 500'")
    with DeviceMemoryMeter() as meter:
        pass
    assert meter.peak_n_bytes is None


def test_a_meter_that_is_not_active_asks_nobody(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, f"touch {tmp_path / 'asked'}; echo '0, 5'")
    with DeviceMemoryMeter(False) as meter:
        pass
    assert meter.peak_n_bytes is None
    assert not (tmp_path / "asked").exists()


def _wait_for_lines(path: Path, n_lines: int) -> None:
    deadline = time.monotonic() + 20
    while len(path.read_text().splitlines()) < n_lines and time.monotonic() < deadline:
        time.sleep(0.01)
