from __future__ import annotations

import dataclasses
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baselines.errors import BuildError, WrongBuildError
from baselines.llama_cpp import build, toolchain
from baselines.llama_cpp.__main__ import app
from baselines.llama_cpp.build import BuildOptions, build_key, ensure_build
from baselines.llama_cpp.progress import PlainProgress
from baselines.llama_cpp.toolchain import Toolchain

TOOLS = Toolchain("cc", "c++", None, ("cc 12.2", "c++ 12.2"))

# stands for cmake: counts its calls, fails if told to, else leaves the files that a real build leaves
_FAKE_CMAKE = """#!{python}
import sys
from pathlib import Path
folder = Path({folder!r})
with open(folder / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if (folder / "fail").exists():
    print("[3/7] Building x.o")
    print("x.cpp:1: error: no such thing")
    sys.exit(1)
if "--build" in sys.argv:
    bin_folder = Path(sys.argv[sys.argv.index("--build") + 1]) / "bin"
    bin_folder.mkdir(exist_ok=True)
    for target in sys.argv[sys.argv.index("--target") + 1:]:
        (bin_folder / target).touch()
    (bin_folder / "libllama.so").touch()
    (bin_folder / "libllama.so").rename(bin_folder / "libllama.so.0.0.{number}")
    link = bin_folder / "libllama.so"
    link.symlink_to("libllama.so.0.0.{number}")
"""


def quiet() -> PlainProgress:
    return PlainProgress(lambda line: None)


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_library(folder: Path, number: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"libllama.so.0.0.{number}").touch()
    (folder / "libllama.so").symlink_to(f"libllama.so.0.0.{number}")
    return folder


@pytest.fixture
def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the toolchain and the source; returns the folder that holds the fake cmake's `calls` and `fail`."""
    folder = tmp_path / "tools"
    folder.mkdir()
    text = _FAKE_CMAKE.format(python=sys.executable, folder=str(folder), number=8763)
    cmake = write_program(folder / "cmake", text)
    monkeypatch.setattr(build, "find_toolchain", lambda *, cuda: TOOLS)
    monkeypatch.setattr(build, "find_build_tool", lambda name: str(cmake))
    monkeypatch.setattr(build, "ensure_source", lambda cache, report: folder)
    return folder


def n_calls(folder: Path) -> int:
    calls = folder / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_key_is_the_same_for_equal_inputs() -> None:
    key = build_key(BuildOptions(), TOOLS, None)
    assert key == build_key(BuildOptions(), dataclasses.replace(TOOLS), None)
    assert key.startswith("b8763-cpu-")


def test_key_ignores_what_changes_no_library() -> None:
    key = build_key(BuildOptions(), TOOLS, None)
    assert build_key(BuildOptions(full=True, jobs=3, cache_dir=Path("elsewhere")), TOOLS, None) == key


@pytest.mark.parametrize(
    "options",
    [
        BuildOptions(native=True),
        BuildOptions(cuda=True),
        BuildOptions(cuda=True, cuda_architectures=("90",)),
        BuildOptions(cuda=True, cuda_architectures=("90", "120a")),
        BuildOptions(source=Path("src")),
    ],
)
def test_key_depends_on_options(options: BuildOptions) -> None:
    others = [BuildOptions(), BuildOptions(cuda=True, cuda_architectures=("86",))]
    assert build_key(options, TOOLS, None) not in {build_key(other, TOOLS, None) for other in others}


def test_key_depends_on_compiler_flags_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build_key(BuildOptions(), TOOLS, None)}
    keys.add(build_key(BuildOptions(), dataclasses.replace(TOOLS, versions=("cc 13", "c++ 13")), None))
    with monkeypatch.context() as patch:
        patch.setenv("CXXFLAGS", "-O1")
        keys.add(build_key(BuildOptions(), TOOLS, None))
    monkeypatch.setattr(build, "machine_id", lambda: "another machine")
    keys.add(build_key(BuildOptions(), TOOLS, None))
    assert len(keys) == 4


def test_second_call_builds_nothing(fake_tools: Path, tmp_path: Path) -> None:
    options = BuildOptions(cache_dir=tmp_path / "cache")
    first = ensure_build(options, quiet())
    assert (first.build_number, n_calls(fake_tools)) == (8763, 2)
    assert ensure_build(options, quiet()) == first
    assert n_calls(fake_tools) == 2


def test_changed_worker_is_built_again_in_the_same_folder(
    fake_tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BuildOptions(cache_dir=tmp_path / "cache")
    first = ensure_build(options, quiet())
    (first.library_folder / "libllama.so").unlink()
    project = tmp_path / "project"
    project.mkdir()
    for name in ("CMakeLists.txt", "worker.cpp"):
        (project / name).write_text("changed")
    monkeypatch.setattr(build, "_PROJECT_FOLDER", project)
    assert ensure_build(options, quiet()).folder == first.folder
    assert (first.folder / "project" / "worker.cpp").read_text() == "changed"
    assert n_calls(fake_tools) == 4


def test_full_adds_the_upstream_programs(fake_tools: Path, tmp_path: Path) -> None:
    options = BuildOptions(cache_dir=tmp_path / "cache")
    first = ensure_build(options, quiet())
    with pytest.raises(BuildError, match="has no llama-bench: build it with --full"):
        first.tool("llama-bench")
    (first.library_folder / "libllama.so").unlink()
    full = ensure_build(dataclasses.replace(options, full=True), quiet())
    assert full.tool("llama-bench") == first.folder / "bin" / "llama-bench"
    assert ensure_build(options, quiet()).folder == full.folder
    assert n_calls(fake_tools) == 4


def test_failed_build_shows_what_went_wrong_and_is_not_taken_for_done(fake_tools: Path, tmp_path: Path) -> None:
    options = BuildOptions(cache_dir=tmp_path / "cache")
    (fake_tools / "fail").touch()
    with pytest.raises(BuildError, match=r"^building .* exit code 1\): .*no such thing; whole log: .*build\.log$"):
        ensure_build(options, quiet())
    (fake_tools / "fail").unlink()
    assert ensure_build(options, quiet()).worker.is_file()


def test_cmake_gets_the_pinned_number_and_nothing_extra(fake_tools: Path, tmp_path: Path) -> None:
    ensure_build(BuildOptions(cache_dir=tmp_path / "cache", jobs=3), quiet())
    configure, compile_step = (fake_tools / "calls").read_text().splitlines()
    for flag in ("-DLLAMA_BUILD_NUMBER=8763", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_OPENSSL=OFF", "-DGGML_CUDA=OFF"):
        assert flag in configure.split()
    assert compile_step.endswith("--parallel 3 --target llama-worker")


@pytest.mark.parametrize("place", ["", "bin", "lib", "build/bin"])
def test_own_library_is_found_where_builds_put_it(tmp_path: Path, place: str) -> None:
    write_library(tmp_path / place, 8763)
    assert build.find_library(tmp_path) == tmp_path / place / "libllama.so"
    assert build.require_pinned(tmp_path / place) == 8763


def test_other_build_number_is_refused(tmp_path: Path) -> None:
    write_library(tmp_path / "bin", 9001)
    with pytest.raises(WrongBuildError, match="is build 9001, expected build 8763"):
        ensure_build(BuildOptions(llama_cpp=tmp_path, cache_dir=tmp_path / "cache"), quiet())


def test_number_comes_from_the_server_if_the_file_name_has_none(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").touch()
    with pytest.raises(WrongBuildError, match="does not state its number"):
        build.require_pinned(tmp_path)
    server = write_program(tmp_path / "llama-server", "#!/bin/sh\necho 'version: 8763 (abcdef0)'\n")
    assert build.require_pinned(tmp_path) == 8763
    server.write_text("#!/bin/sh\necho 'version: 8764 (abcdef1)'\n")
    with pytest.raises(WrongBuildError, match="build 8764"):
        build.require_pinned(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BuildOptions(cuda=True, cuda_architectures=("sm_90",)), "'sm_90' is not a CUDA architecture"),
        (BuildOptions(cuda_architectures=("90",)), "without --cuda"),
        (BuildOptions(llama_cpp=Path("somewhere"), full=True), "do not apply"),
        (BuildOptions(llama_cpp=Path("no-such-folder")), "no shared libllama in no-such-folder"),
    ],
)
def test_options_that_cannot_work(options: BuildOptions, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        ensure_build(options, quiet())


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match=r"no C compiler found \(looked for cc, gcc, clang\)"):
        toolchain.find_toolchain(cuda=False)
    monkeypatch.setenv("CC", "my-compiler")
    with pytest.raises(BuildError, match="CC=my-compiler is not a program"):
        toolchain.find_toolchain(cuda=False)


def test_build_tool_beside_the_interpreter_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        write_program(tmp_path / folder / "ninja", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert toolchain.find_build_tool("ninja") == str(tmp_path / "beside" / "ninja")
    (tmp_path / "beside" / "ninja").unlink()
    assert toolchain.find_build_tool("ninja") == str(tmp_path / "path" / "ninja")
    with pytest.raises(BuildError, match="cmake not found: install it with `python -m pip install cmake`"):
        toolchain.find_build_tool("cmake")


def test_cli_prints_one_line_for_an_expected_failure(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--llama-cpp", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: no shared libllama in {tmp_path}")


def test_cli_describes_the_build(fake_tools: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--cache-dir", str(tmp_path / "cache")])
    assert result.exit_code == 0
    assert "build number  8763" in result.stdout
    assert "option        LLAMA_BUILD_NUMBER=8763" in result.stdout


def test_cli_help_names_the_cache_variable() -> None:
    assert "HYBRID_CACHE_DIR" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
