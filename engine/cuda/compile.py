"""Compile all kernels of a model into one cubin with NVRTC, once per source, options and architecture.

CuPy's own compiler wrapper always adds -ftz=true, which flushes denormals; NVRTC is therefore called directly.
Works without a GPU: only the driver is missing then, not the compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import platformdirs

from engine.errors import EngineError

KERNELS_DIR = Path(__file__).with_name("kernels")
HEADERS = (
    "numerics.cuh",
    "half.cuh",
    "quads.cuh",
    "norm.cuh",
    "norm_row.cuh",
    "formats.cuh",
    "row_dot.cuh",
    "row_sums.cuh",
    "copies.cuh",
    "stream.cuh",
    "conv_task.cuh",
    "delta_step.cuh",
    "value_tile.cuh",
    "split_softmax.cuh",
    "fragments.cuh",
    "mma_rows.cuh",
)
OPTIONS = (
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--std=c++17",
    "--device-as-default-execution-space",  # NVRTC 13.0 takes a generic lambda for a host function otherwise
    "--ptxas-options=-v",
)
Parts: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of a source file, or "", and of what is read instead, both below KERNELS_DIR."""
CACHE_VARIABLE = "HYBRID_CACHE_DIR"

_n_compiled = 0
_compile_time_ns = 0


class CompileError(EngineError):
    """NVRTC refused a kernel; the message holds its log with file and line."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, static shared memory, spilled bytes, stack bytes."""

    name: str
    n_registers: int
    shared_n_bytes: int
    spill_n_bytes: int
    stack_n_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture: `lowered` maps a name expression to its symbol.

    ptx_n_bytes: size of the PTX that it was assembled from.
    """

    code: bytes
    arch: str
    lowered: dict[str, str]
    log: str
    ptx_n_bytes: int
    was_cached: bool

    def resources(self) -> list[Resources]:
        """Return the resources of every kernel, by name expression, from the assembler's report."""
        names = {symbol: name for name, symbol in self.lowered.items()}
        return [_resources(names[symbol], text) for symbol, text in _entries(self.log) if symbol in names]


@cache
def source(parts: Parts = ()) -> str:
    """Return all headers and kernels as one text; #line directives keep the compiler's messages readable.

    `parts` are read in the place of the files that they name first, or added at the end where they name none.

    Splicing the text in (instead of #include) makes it part of the cache key, so that an edited header cannot
    leave a stale cubin behind.
    """
    kernels = sorted(path.name for path in KERNELS_DIR.glob("*.cu"))
    replaced = {old: new for old, new in parts if old}
    assert replaced.keys() <= {*HEADERS, *kernels}, f"there is no source file for one of {replaced}"
    added = [new for old, new in parts if not old]
    texts = []
    for name in (*(replaced.get(name, name) for name in (*HEADERS, *kernels)), *added):
        text = (KERNELS_DIR / name).read_text(encoding="utf-8").replace("#pragma once", "")
        texts.append(f'#line 1 "{name}"\n{text}')
    return "\n".join(texts)


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version; raises CompileError when the library cannot be loaded."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def _nvrtc() -> Any:
    """Return CuPy's binding of NVRTC, with the library behind it loaded."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        raise CompileError(f"NVRTC cannot be loaded ({error}): install the extra cuda12 or cuda13") from None
    return nvrtc


def n_compiled() -> int:
    """Return how often this process has run the compiler: a start that finds all in the cache does not."""
    return _n_compiled


def compile_time_ns() -> int:
    """Return how long this process has waited for the compiler, ns."""
    return _compile_time_ns


def compile_kernels(expressions: Sequence[str], arch: str, cache_dir: Path | None = None, parts: Parts = ()) -> Cubin:
    """Return the cubin with `expressions` (such as "gemv<Q4_K, 5120, 1, 0>") for `arch` (such as "sm_90").

    `parts` as for `source`. Looks in the cache first. Raises CompileError with the compiler's log.
    """
    global _compile_time_ns
    folder = (cache_dir or default_cache_dir()) / "cubin"
    key = cache_key(expressions, arch, parts)
    code_path, info_path = folder / f"{key}.cubin", folder / f"{key}.json"
    if code_path.exists() and info_path.exists():
        info = json.loads(info_path.read_text())
        return Cubin(code_path.read_bytes(), arch, **info, was_cached=True)
    start = time.perf_counter_ns()
    cubin = _compile(expressions, arch, parts)
    _compile_time_ns += time.perf_counter_ns() - start
    folder.mkdir(parents=True, exist_ok=True)
    _write(code_path, cubin.code)
    info = {"lowered": cubin.lowered, "log": cubin.log, "ptx_n_bytes": cubin.ptx_n_bytes}
    _write(info_path, json.dumps(info).encode())
    return cubin


def cache_key(expressions: Sequence[str], arch: str, parts: Parts = ()) -> str:
    """Return the digest of everything that decides the machine code."""
    decisive = (source(parts), *OPTIONS, arch, str(nvrtc_version()), *expressions)
    return hashlib.sha256("\0".join(decisive).encode()).hexdigest()[:32]


def default_cache_dir() -> Path:
    """Return the cache folder: $HYBRID_CACHE_DIR, else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else platformdirs.user_cache_path("hybrid-engine-conformance")


def _compile(expressions: Sequence[str], arch: str, parts: Parts) -> Cubin:
    global _n_compiled
    nvrtc = _nvrtc()
    _n_compiled += 1
    program = nvrtc.createProgram(source(parts), "kernels.cu", (), ())
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, [f"--gpu-architecture={arch}", *OPTIONS])
        except nvrtc.NVRTCError:
            raise CompileError(f"kernels do not compile for {arch}:\n{nvrtc.getProgramLog(program)}") from None
        lowered = {name: _text(nvrtc.getLoweredName(program, name)) for name in expressions}
        log, ptx_n_bytes = nvrtc.getProgramLog(program), len(nvrtc.getPTX(program))
        return Cubin(nvrtc.getCUBIN(program), arch, lowered, log, ptx_n_bytes, was_cached=False)
    finally:
        nvrtc.destroyProgram(program)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _write(path: Path, data: bytes) -> None:
    """Write under a temporary name, then rename: two processes may compile the same kernels."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def _entries(log: str) -> list[tuple[str, str]]:
    parts = re.split(r"Compiling entry function '([^']+)'", log)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _resources(name: str, text: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    return Resources(
        name,
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes smem"),
        number(r"(\d+) bytes spill stores"),
        number(r"(\d+) bytes stack frame"),
    )
