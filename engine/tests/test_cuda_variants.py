"""Variants compile without spills, and replace what they say they replace; needs no device."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed: compilation not measured", exc_type=ImportError)

from engine.cuda import compile as compiler
from engine.cuda import streams
from engine.cuda.build import compile_for
from engine.cuda.variants import FULL, VARIANTS, variant
from engine.gguf.reader import open_model
from engine.model.config import ModelConfig
from engine.tests.models import Shape, write_model

ARCH = "sm_90"
TARGET = streams.Target.of(ARCH, 132)
CHANGED = {
    "norm-two-pass": ["rms_norm<5120>", streams.gate_up_expression("IQ4_XS", "IQ4_XS", 5120, TARGET)],
    "rows-shared": ["gemv<Q6_K, 5120, 2>", "gemv<Q4_K, 17408, 1>", "gate_up_silu<Q5_K, Q6_K, 5120>"],
    "half-loop": ["gemv<Q6_K, 5120, 2>", streams.gemv_expression("IQ3_S", 17408, TARGET)],
    "delta-row-by-row": ["gated_delta<128, 4, 16, 48>"],
    "norms-in-turn": ["gated_delta<128, 4, 16, 48>"],
    "values-late": ["attention_split<256, 24, 4>"],
    "softmax-serial": ["attention_split<256, 24, 4>"],
    "check-nodes": ["finite_check"],
}
"""Kernels of the 27B model that a variant with sources of its own changes or adds."""


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", CHANGED)
def test_a_variant_compiles_without_spills(name: str, cache_dir: Path) -> None:
    cubin = compiler.compile_kernels(CHANGED[name], ARCH, cache_dir, variant(name).parts)
    assert [(r.name, r.spill_n_bytes, r.stack_n_bytes) for r in cubin.resources()] == [
        (r.name, 0, 0) for r in cubin.resources()
    ]
    assert {r.name for r in cubin.resources()} == set(CHANGED[name])
    assert cubin.ptx_n_bytes > 0


def test_every_source_of_a_variant_is_used_and_tested() -> None:
    used = {new for one in VARIANTS for _, new in one.parts}
    assert used == {f"variants/{path.name}" for path in (compiler.KERNELS_DIR / "variants").iterdir()}
    assert {one.name for one in VARIANTS if one.parts} == set(CHANGED)


def test_a_part_takes_the_place_of_the_file_it_names() -> None:
    full, varied = compiler.source(), compiler.source(variant("half-loop").parts)
    assert '#line 1 "half.cuh"' in full
    assert '#line 1 "half.cuh"' not in varied
    assert varied.index('"variants/half_loop.cuh"') < varied.index('#line 1 "quads.cuh"')
    added = compiler.source(variant("check-nodes").parts)
    assert added.startswith(full)
    assert '#line 1 "variants/finite_check.cu"' in added
    with pytest.raises(AssertionError, match="no_such"):
        compiler.source((("no_such.cuh", "variants/half_loop.cuh"),))


def test_variants_do_not_share_machine_code() -> None:
    keys = {compiler.cache_key(["argmax"], ARCH, one.parts) for one in VARIANTS}
    assert len(keys) == len({one.parts for one in VARIANTS})


def test_the_hardware_converts_halves_in_less_code(cache_dir: Path) -> None:
    names = CHANGED["half-loop"]
    hardware, loop = (compiler.compile_kernels(names, ARCH, cache_dir, variant(n).parts) for n in ("full", "half-loop"))
    assert hardware.ptx_n_bytes < loop.ptx_n_bytes
    assert compiler.compile_kernels(names, ARCH, cache_dir).ptx_n_bytes == hardware.ptx_n_bytes  # from the cache


def test_the_cache_can_be_filled_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    asked = []

    def compile_kernels(names: list[str], arch: str, parts: compiler.Parts) -> compiler.Cubin:
        asked.append((names, arch, parts))
        return compiler.Cubin(b"", arch, {}, "", 0, was_cached=False)

    monkeypatch.setattr("engine.cuda.build.compile_kernels", compile_kernels)
    model = open_model(write_model(tmp_path / "model.gguf", Shape(n_embd=1024, n_ff=1024, d_state=128), seed=1))
    chosen = [FULL, variant("rows"), variant("check-nodes")]
    assert len(list(compile_for(chosen, ModelConfig.from_model(model), model.tensors, ARCH, 132))) == 3
    (full, _, _), (rows, _, _), (checks, _, parts) = asked
    assert any(name.startswith("stream_gate_up<") for name in full)
    assert not any(name.startswith("stream_") for name in rows)
    assert checks == sorted([*full, "finite_check"])
    assert parts == variant("check-nodes").parts
