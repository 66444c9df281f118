"""Build libllama and llama-worker once per pin, options, compiler and machine, or take the user's own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baselines.errors import BuildError, WrongBuildError
from baselines.llama_cpp import pin
from baselines.llama_cpp.process import CappedLog, run_process, telling_line
from baselines.llama_cpp.progress import Progress
from baselines.llama_cpp.source import cache_dir, cache_lock, check_source, ensure_source
from baselines.llama_cpp.toolchain import Toolchain, find_build_tool, find_toolchain, machine_id, n_cpus

WORKER = "llama-worker"
FULL_TARGETS = ("llama-server", "llama-bench", "llama-quantize")
BUILD_DEADLINE_S = 6 * 3600.0  # several CUDA architectures on two cores take hours
_PROJECT_FOLDER = Path(__file__).parent
_PROJECT_FILES = ("CMakeLists.txt", "worker.cpp")
_ARCHITECTURE = re.compile(r"^(\d+[af]?(-real|-virtual)?|native|all|all-major)$")


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    native: use every instruction of this CPU, as upstream does by default. Off, the build is the same program on
    every x86-64 machine with AVX2: its token ids then do not depend on where they were computed, and it runs where
    the operating system withholds newer instructions (AMX was seen to end in SIGILL under a hypervisor).
    Comparisons of speed turn it on.
    cuda_architectures: CMake's names, empty for the GPUs of this machine. full: add FULL_TARGETS.
    source: an unpacked source in place of the one pip fetches. llama_cpp: a shared libllama of the pinned build;
    only the worker is compiled, against the headers of the pinned source. cache_dir: replaces the default cache.
    """

    native: bool = False
    cuda: bool = False
    cuda_architectures: tuple[str, ...] = ()
    full: bool = False
    source: Path | None = None
    llama_cpp: Path | None = None
    jobs: int | None = None
    cache_dir: Path | None = None

    def targets(self) -> tuple[str, ...]:
        """Return the programs that the build must contain."""
        return (WORKER, *FULL_TARGETS) if self.full and self.llama_cpp is None else (WORKER,)

    def cmake_options(self) -> dict[str, str]:
        """Return the options that decide what libllama computes, llama.cpp's own names."""
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "BUILD_SHARED_LIBS": "ON",
            "LLAMA_BUILD_NUMBER": str(pin.BUILD_NUMBER),
            "LLAMA_BUILD_COMMIT": f"b{pin.BUILD_NUMBER}",
            "LLAMA_OPENSSL": "OFF",
            "LLAMA_ALL_WARNINGS": "OFF",
            "GGML_NATIVE": "ON" if self.native else "OFF",
            "GGML_CUDA": "ON" if self.cuda else "OFF",
        }
        if self.cuda:
            options["CMAKE_CUDA_ARCHITECTURES"] = ";".join(self.cuda_architectures) or "native"
        return options


@dataclass(frozen=True)
class LlamaBuild:
    """A verified build: folder holds the programs we built, library_folder the libllama they load."""

    folder: Path
    library_folder: Path
    build_number: int
    options: dict[str, str]
    targets: tuple[str, ...]
    compiler: str
    log: Path
    tool_folders: tuple[Path, ...] = field(default=())

    @property
    def worker(self) -> Path:
        """Path of llama-worker."""
        return self.folder / "bin" / WORKER

    def tool(self, name: str) -> Path:
        """Return the path of an upstream program such as llama-bench; raise BuildError if there is none."""
        for folder in self.tool_folders:
            if (folder / name).is_file():
                return folder / name
        raise BuildError(f"this build of llama.cpp has no {name}: build it with --full")


def ensure_build(options: BuildOptions, progress: Progress) -> LlamaBuild:
    """Return a build for options, building only what is missing in the cache.

    Raises BuildError (tools missing, build failed), SourceError (pin not met), WrongBuildError (another
    build number).
    """
    _check_options(options)
    cache = cache_dir(options.cache_dir)
    library_folder = None if options.llama_cpp is None else find_library(options.llama_cpp).parent
    if library_folder is not None:
        require_pinned(library_folder)
    tools = find_toolchain(cuda=options.cuda)
    folder = cache / "build" / build_key(options, tools, library_folder)
    if not _is_complete(folder, options):
        with cache_lock(cache, progress.step):
            if not _is_complete(folder, options):  # another process may have built it meanwhile
                source = _source(options, cache, progress)
                configure = _configure_argv(options, tools, folder, source, library_folder)
                _build(options, folder, configure, progress)
                require_pinned(library_folder or folder / "bin")
                _write_stamp(folder, options)
    libraries = library_folder or folder / "bin"
    return LlamaBuild(
        folder=folder,
        library_folder=libraries,
        build_number=require_pinned(libraries),
        options={} if library_folder else options.cmake_options(),
        targets=options.targets(),
        compiler=tools.versions[1].splitlines()[0],
        log=folder / "build.log",
        tool_folders=_tool_folders(folder, options),
    )


def build_key(options: BuildOptions, tools: Toolchain, library_folder: Path | None) -> str:
    """Return the name of the folder for a build: equal inputs give equal names, in every process.

    --full is not part of it (it adds programs to the same libraries), nor is the worker's text: the folder's
    stamp records both, and a changed worker is compiled anew without building libllama again.
    """
    inputs = {
        "wheel": pin.WHEEL_SHA256,
        "source": str(options.source.absolute()) if options.source else None,
        "cmake": {} if library_folder else options.cmake_options(),
        "library": _library_id(library_folder),
        "tools": tools.versions,
        "flags": {name: os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS")},
        "machine": machine_id(),
    }
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return f"b{pin.BUILD_NUMBER}-{'own' if library_folder else 'cuda' if options.cuda else 'cpu'}-{digest}"


def find_library(folder: Path) -> Path:
    """Return libllama in folder or in its bin, lib, lib64, build/bin; raise BuildError if there is none."""
    places = [folder, *(folder / name for name in ("bin", "lib", "lib64", "build/bin"))]
    for place in places:
        for name in ("libllama.so", "libllama.dylib", "libllama.so.0", "libllama.0.dylib"):
            if (place / name).exists():
                return (place / name).absolute()
    raise BuildError(
        f"no shared libllama in {folder} or its bin, lib, lib64, build/bin: build with BUILD_SHARED_LIBS=ON"
    )


def library_build_number(folder: Path) -> int | None:
    """Return the build number of the libllama in folder: from its file name, else from llama-server."""
    real_name = find_library(folder).resolve().name
    named = re.search(r"0\.0\.(\d+)", real_name)
    if named:
        return int(named.group(1))
    server = next((f / "llama-server" for f in (folder, folder.parent / "bin") if (f / "llama-server").is_file()), None)
    if server is None:
        return None
    stated = re.search(r"version: (\d+)", run_process([server, "--version"], deadline_s=60).log)
    return int(stated.group(1)) if stated else None


def require_pinned(folder: Path) -> int:
    """Return the build number of the libllama in folder; raise WrongBuildError if not the pinned one."""
    number = library_build_number(folder)
    if number == pin.BUILD_NUMBER:
        return number
    found = "a build that does not state its number" if number is None else f"build {number}"
    raise WrongBuildError(
        f"the libllama in {folder} is {found}, expected build {pin.BUILD_NUMBER}: "
        f"build the tag b{pin.BUILD_NUMBER}, or leave out --llama-cpp to have it built"
    )


def _check_options(options: BuildOptions) -> None:
    for architecture in options.cuda_architectures:
        if not _ARCHITECTURE.match(architecture):
            raise BuildError(f"'{architecture}' is not a CUDA architecture: expected one such as 90, 120a, native")
    if options.cuda_architectures and not options.cuda:
        raise BuildError("a CUDA architecture was given without --cuda")
    if options.llama_cpp is not None and (options.cuda or options.full):
        raise BuildError("--llama-cpp takes a build as it is: --cuda and --full do not apply to it")


def _library_id(folder: Path | None) -> list[str | int] | None:
    """Identify the user's own libllama, so that a rebuilt one gets a newly linked worker."""
    if folder is None:
        return None
    real = find_library(folder).resolve()
    return [str(real), real.stat().st_size, real.stat().st_mtime_ns]


def _tool_folders(folder: Path, options: BuildOptions) -> tuple[Path, ...]:
    if options.llama_cpp is None:
        return (folder / "bin",)
    own = find_library(options.llama_cpp).parent
    return (own, own.parent / "bin")


def _project_digest(folder: Path) -> str:
    return hashlib.sha256(b"\0".join((folder / name).read_bytes() for name in _PROJECT_FILES)).hexdigest()


def _is_complete(folder: Path, options: BuildOptions) -> bool:
    """Say whether the folder's stamp covers every target of options and the present text of the worker."""
    try:
        stamp = json.loads((folder / "stamp.json").read_text())
    except (OSError, ValueError):
        return False
    present = all((folder / "bin" / target).is_file() for target in options.targets())
    return (
        present
        and stamp["project"] == _project_digest(_PROJECT_FOLDER)
        and set(options.targets()) <= set(stamp["targets"])
    )


def _source(options: BuildOptions, cache: Path, progress: Progress) -> Path:
    """Return the folder of the pinned source: the user's own, checked, or the one in the cache."""
    if options.source is None:
        return ensure_source(cache, progress.step)
    check_source(options.source)
    return options.source.absolute()


def _build(options: BuildOptions, folder: Path, configure: Sequence[str | Path], progress: Progress) -> None:
    """Configure and build in folder; the log of both stays there as build.log."""
    _copy_project(folder)
    log = CappedLog(head_n_bytes=1 << 20, tail_n_bytes=1 << 20)
    progress.step(f"configuring llama.cpp b{pin.BUILD_NUMBER}")
    _run_step(configure, folder, log, progress)
    jobs = options.jobs or n_cpus()
    progress.step(f"building llama.cpp b{pin.BUILD_NUMBER} (--jobs {jobs})")
    compile_argv = [configure[0], "--build", folder, "--parallel", str(jobs), "--target", *options.targets()]
    _run_step(compile_argv, folder, log, progress)


def _write_stamp(folder: Path, options: BuildOptions) -> None:
    """Record what the folder holds; its presence says that the build came to its end."""
    digest = _project_digest(folder / "project")  # of what was compiled, should ours have been edited meanwhile
    stamp = {"project": digest, "targets": options.targets(), "cmake": options.cmake_options()}
    temporary = folder / "stamp.json.new"
    temporary.write_text(json.dumps(stamp, indent=1))
    temporary.replace(folder / "stamp.json")


def _copy_project(folder: Path) -> None:
    """Copy our project files into the build folder, leaving equal ones untouched: a date alone compiles nothing.

    A changed file voids the stamp; without one, what was built stays usable while more programs are added.
    """
    target = folder / "project"
    target.mkdir(parents=True, exist_ok=True)
    for name in _PROJECT_FILES:
        ours, theirs = _PROJECT_FOLDER / name, target / name
        if not theirs.is_file() or theirs.read_bytes() != ours.read_bytes():
            (folder / "stamp.json").unlink(missing_ok=True)
            shutil.copyfile(ours, theirs)


def _configure_argv(
    options: BuildOptions, tools: Toolchain, folder: Path, source: Path, library_folder: Path | None
) -> list[str | Path]:
    full = "ON" if options.full else "OFF"
    values = options.cmake_options() | {
        "LLAMA_SOURCE_DIR": str(source),
        "WORKER_PREBUILT_DIR": str(library_folder or ""),
        "CMAKE_MAKE_PROGRAM": find_build_tool("ninja"),
        "CMAKE_C_COMPILER": tools.cc,
        "CMAKE_CXX_COMPILER": tools.cxx,
        "LLAMA_BUILD_COMMON": full,
        "LLAMA_BUILD_TOOLS": full,
        "LLAMA_BUILD_SERVER": full,
        "LLAMA_BUILD_WEBUI": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
    }
    if tools.nvcc:
        values["CMAKE_CUDA_COMPILER"] = tools.nvcc
    flags = [f"-D{name}={value}" for name, value in values.items()]
    return [find_build_tool("cmake"), "-G", "Ninja", "-S", folder / "project", "-B", folder, "-Wno-dev", *flags]


def _run_step(argv: Sequence[str | Path], folder: Path, log: CappedLog, progress: Progress) -> None:
    """Run one build command; show Ninja's [n/m] as progress; raise BuildError with the log's last lines."""
    count = [0, 0]

    def watch(line: str) -> None:
        found = re.match(r"\[(\d+)/(\d+)\]", line)
        if found:
            count[:] = int(found.group(1)), int(found.group(2))

    result = run_process(
        argv, deadline_s=BUILD_DEADLINE_S, on_line=watch, on_tick=lambda: progress.update(*count), log=log
    )
    (folder / "build.log").write_text(result.log)
    if result.status != "ok":
        hint = "; try fewer --jobs" if result.status == "out_of_memory" else ""
        raise BuildError(
            f"building llama.cpp b{pin.BUILD_NUMBER} failed ({result.status}, exit code {result.exit_code}): "
            f"{telling_line(result.log)}{hint}; whole log: {folder / 'build.log'}"
        )
