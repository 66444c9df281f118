from __future__ import annotations

from pathlib import Path

import pytest

from baselines.errors import BuildError
from baselines.llama_cpp.build import BuildOptions, LlamaBuild
from baselines.llama_cpp.progress import Progress
from conformance import llama_builds
from conformance.errors import BaselineUnavailableError
from conformance.gpu import Gpu
from conformance.llama_builds import LlamaBuilds
from conformance.tests.fakes import Silent


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BuildOptions]:
    """Record the builds that are asked for, on a machine with a GPU and nvcc."""
    asked: list[BuildOptions] = []

    def build(options: BuildOptions, progress: Progress) -> LlamaBuild:
        asked.append(options)
        return LlamaBuild(tmp_path, tmp_path, 8763, {}, (), "c++ 1.0", tmp_path / "build.log")

    monkeypatch.setattr(llama_builds, "ensure_build", build)
    monkeypatch.setattr(llama_builds, "find_toolchain", lambda cuda: None)
    monkeypatch.setattr(llama_builds, "this_gpu", lambda: Gpu(name="Fake GPU", memory_n_bytes=1, driver="1"))
    return asked


def test_each_device_has_its_build_and_it_is_made_once(built: list[BuildOptions], tmp_path: Path) -> None:
    builds = LlamaBuilds(BuildOptions(cache_dir=tmp_path), ("90",), Silent())
    assert [builds.open(device).compiler for device in ("cpu", "cuda", "cuda", "cpu")] == ["c++ 1.0"] * 4
    assert built == [
        BuildOptions(cache_dir=tmp_path),
        BuildOptions(native=True, cuda=True, cuda_architectures=("90",), cache_dir=tmp_path),
    ]


def test_a_build_of_one_s_own_serves_both_if_it_has_cuda(built: list[BuildOptions], tmp_path: Path) -> None:
    builds = LlamaBuilds(BuildOptions(llama_cpp=tmp_path), (), Silent())
    with pytest.raises(BaselineUnavailableError, match="given by --llama-cpp is built without CUDA"):
        builds.open("cuda")
    (tmp_path / "libggml-cuda.so").touch()
    assert builds.open("cuda").build_number == builds.open("cpu").build_number == 8763
    assert set(built) == {BuildOptions(llama_cpp=tmp_path)}


def test_no_gpu_and_no_nvcc_are_no_errors_of_the_build(
    built: list[BuildOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cuda: bool) -> None:
        raise BuildError("no CUDA compiler found (nvcc): install the CUDA toolkit, or set CUDACXX")

    monkeypatch.setattr(llama_builds, "find_toolchain", fail)
    builds = LlamaBuilds(BuildOptions(), (), Silent())
    with pytest.raises(BaselineUnavailableError, match=r"cannot be built for CUDA: no CUDA compiler found \(nvcc\)"):
        builds.open("cuda")
    monkeypatch.setattr(llama_builds, "this_gpu", lambda: None)
    with pytest.raises(BaselineUnavailableError, match="needs an NVIDIA GPU"):
        builds.open("cuda")
    assert built == []


def test_a_build_that_fails_is_an_error(built: list[BuildOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: BuildOptions, progress: Progress) -> None:
        raise BuildError("building llama.cpp b8763 failed")

    monkeypatch.setattr(llama_builds, "ensure_build", fail)
    with pytest.raises(BuildError, match="failed"):
        LlamaBuilds(BuildOptions(), (), Silent()).open("cuda")
