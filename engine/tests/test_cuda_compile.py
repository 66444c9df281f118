"""Compiling without a GPU: what decides the machine code, the cache, errors, and the report of resources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.errors import ModelFileError
from engine.gguf.reader import open_model
from engine.tests.models import Shape, write_model

pytest.importorskip("cupy", reason="CuPy is not installed: compilation not measured", exc_type=ImportError)

from engine.cuda import compile as compiler
from engine.cuda import report
from engine.cuda.compile import CompileError, Cubin, Resources, compile_kernels, compile_time_ns, n_compiled

ARCH = "sm_90"
QUICK = ["argmax", "repack<Q8_0>"]
LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodi' for 'sm_90'
ptxas info    : Function properties for _Z4goodi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compiling entry function '_Z3badi' for 'sm_90'
ptxas info    : Function properties for _Z3badi
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 16 bytes stack
"""
GOOD, BAD = Resources("good<1>", 40, 128, 0, 0), Resources("bad", 255, 0, 8, 16)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(cache_dir: Path) -> Cubin:
    return compile_kernels(QUICK, ARCH, cache_dir)


# The cache


def test_a_second_compilation_comes_from_the_cache(compiled: Cubin, cache_dir: Path) -> None:
    before, waited_ns = n_compiled(), compile_time_ns()
    again = compile_kernels(QUICK, ARCH, cache_dir)
    assert (compiled.was_cached, again.was_cached) == (False, True)
    assert (n_compiled(), compile_time_ns()) == (before, waited_ns)
    assert (again.code, again.lowered, again.log) == (compiled.code, compiled.lowered, compiled.log)


def test_the_compiler_is_counted(compiled: Cubin, tmp_path: Path) -> None:
    before, waited_ns = n_compiled(), compile_time_ns()
    compile_kernels(["repack<Q8_0>"], ARCH, tmp_path)
    assert n_compiled() == before + 1
    assert compile_time_ns() > waited_ns


def test_the_key_covers_all_that_decides_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {compiler.cache_key(QUICK, ARCH), compiler.cache_key(QUICK, "sm_80"), compiler.cache_key(QUICK[:1], ARCH)}
    assert len(keys) == 3
    source = compiler.source()
    for name, change in {
        "source": lambda parts: source + " ",
        "OPTIONS": (*compiler.OPTIONS, "--use_fast_math"),
        "nvrtc_version": lambda: (0, 1),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(compiler, name, change)
            keys.add(compiler.cache_key(QUICK, ARCH))
    assert len(keys) == 6


def test_every_file_is_part_of_the_source() -> None:
    source = compiler.source()
    files = sorted(path for path in compiler.KERNELS_DIR.iterdir() if path.suffix in (".cu", ".cuh"))
    assert len(files) > 8
    for path in files:
        assert f'#line 1 "{path.name}"' in source
        assert path.read_text(encoding="utf-8").splitlines()[-1] in source


def test_nothing_may_be_fused_flushed_or_approximated() -> None:
    assert {"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"} <= set(compiler.OPTIONS)
    assert not [option for option in compiler.OPTIONS if "fast" in option]


# What comes out


def test_a_kernel_is_found_by_its_name_expression(compiled: Cubin) -> None:
    assert set(compiled.lowered) == set(QUICK)
    assert len(set(compiled.lowered.values())) == 2
    assert compiled.code.startswith(b"\x7fELF")
    assert {r.name for r in compiled.resources()} == set(QUICK)
    assert all(0 < r.n_registers < 64 for r in compiled.resources())
    argmax = next(r for r in compiled.resources() if r.name == "argmax")
    assert argmax.shared_n_bytes == 64  # eight warps, a 64-bit key each


def test_resources_are_read_from_the_assemblers_report() -> None:
    cubin = Cubin(b"", ARCH, {"good<1>": "_Z4goodi", "bad": "_Z3badi"}, LOG, 0, was_cached=False)
    assert cubin.resources() == [GOOD, BAD]


def test_an_error_has_the_compilers_log_with_file_and_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = compiler.source() + '\n#line 7 "broken.cu"\n__global__ void broken() { undeclared = 1; }\n'
    monkeypatch.setattr(compiler, "source", lambda parts: broken)
    with pytest.raises(CompileError, match=r"(?s)do not compile for sm_90.*broken\.cu\(7\).*undeclared"):
        compile_kernels(["broken"], ARCH, tmp_path)
    assert not list(tmp_path.rglob("*.cubin"))


def test_an_unknown_kernel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no_such_kernel"):
        compile_kernels(["no_such_kernel<1>"], ARCH, tmp_path)


# The report


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(n_v_heads=4, n_vocab=256, types=("Q8_0",), token_embd="Q8_0", output=None)
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", shape)


def test_the_kernels_of_several_models_are_listed_once(path: Path, tmp_path: Path) -> None:
    other = open_model(write_model(tmp_path / "other.gguf", Shape(types=("Q4_K",), n_v_heads=4, n_vocab=256)))
    model = open_model(path)
    names = report.model_expressions([model, other], ARCH)
    assert names == sorted(set(names)) == sorted(set(report.model_expressions([model], ARCH)) | set(names))
    assert {f"repack<{t}>" for t in ("Q8_0", "Q4_K", "Q6_K")} == {n for n in names if n.startswith("repack")}


def test_the_table_has_a_row_a_kernel_and_names_what_spills() -> None:
    reports = [
        report.ArchReport("sm_80", (Resources("bad", 200, 0, 0, 0), GOOD), 1000, was_cached=False),
        report.ArchReport("sm_90", (BAD, GOOD), 1000, was_cached=True),
    ]
    lines = report.render(reports).splitlines()
    assert lines[0].split() == ["kernel", "sm_80", "sm_90", "shared", "spilled", "stack"]
    assert lines[2].split() == ["bad", "200", "255", "0", "8", "16"]
    assert lines[3].split() == ["good<1>", "40", "40", "128", "0", "0"]
    assert lines[-1] == "sm_90: bad spills 8 bytes, stack 16 bytes"
    assert report.render(reports[:1]).splitlines()[-1] == "no kernel spills"


def test_reports_of_two_architectures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    found = {one.arch: one for one in report.compile_reports({"sm_80": QUICK, "sm_120": QUICK}, n_jobs=2)}
    assert set(found) == {"sm_80", "sm_120"}
    for one in found.values():
        assert [r.name for r in one.resources] == QUICK
        assert one.spilling == ()
        assert one.code_n_bytes > 1000


def test_an_error_in_a_process_is_passed_on() -> None:
    with pytest.raises(CompileError, match="no_such_kernel"):
        list(report.compile_reports({ARCH: ["no_such_kernel<1>"]}, n_jobs=1))


# The command


def run_command(monkeypatch: pytest.MonkeyPatch, reports: list[report.ArchReport], *arguments: str) -> Any:
    monkeypatch.setattr(report, "compile_reports", lambda expressions, n_jobs: iter(reports))
    return CliRunner().invoke(app, ["kernels", *arguments])


@pytest.mark.parametrize(("of_kernel", "exit_code"), [(GOOD, 0), (BAD, 1)])
def test_a_spill_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, path: Path, of_kernel: Resources, exit_code: int
) -> None:
    reports = [report.ArchReport("sm_90", (of_kernel,), 1000, was_cached=False)]
    result = run_command(monkeypatch, reports, str(path), "--arch", "sm_90")
    assert result.exit_code == exit_code
    assert of_kernel.name in result.stdout
    plain = run_command(monkeypatch, reports, str(path), "--arch", "sm_90", "--json")
    assert plain.exit_code == exit_code
    assert json.loads(plain.stdout)["sm_90"]["kernels"][0]["n_registers"] == of_kernel.n_registers


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"nothing")
    result = CliRunner().invoke(app, ["kernels", str(file)])
    assert isinstance(result.exception, ModelFileError)
