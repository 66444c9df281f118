"""Run the engine's command line on many files, each in a process of its own, and measure each."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from engine import cli
from engine.cuda import device
from engine.errors import EngineError, NoDeviceError

__all__ = ["REACHED", "EngineRun", "run_engine"]

REACHED = "the device was reached"
"""What a run prints in place of opening a device."""
_DEADLINE_S = 20
_MAX_MORE_N_BYTES = 1 << 30


@dataclass(frozen=True)
class EngineRun:
    """How one command ended; times and memory are those of its process, memory with the interpreter's own."""

    exit_code: int  # negative: the signal that ended it
    out: str
    err: str
    cpu_time_s: float
    peak_memory_n_bytes: int


def run_engine(commands: Sequence[Sequence[str]]) -> list[EngineRun]:
    """Run each command line of `python -m engine` and return how it went; no device is ever opened.

    One interpreter imports the engine and forks for every command, which takes milliseconds instead of half a second.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "conformance.hostile"],
        input="\n".join(map(json.dumps, commands)),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=True,
    )
    return [EngineRun(**json.loads(line)) for line in done.stdout.splitlines()]


def serve() -> None:
    """Read command lines from standard input, one JSON list a line, and print an EngineRun for each."""
    with suppress(EngineError):  # what the first command imports is then imported for all
        cli.app(["inspect", os.devnull], standalone_mode=False)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                _run_here(json.loads(line), out.fileno(), err.fileno())
            _, status, usage = os.wait4(pid, 0)
            said, complained = (os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace") for file in (out, err))
            unit = 1 if sys.platform == "darwin" else 1024
            cpu_time_s, peak_n_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit
            ended = EngineRun(os.waitstatus_to_exitcode(status), said, complained, cpu_time_s, peak_n_bytes)
        print(json.dumps(asdict(ended)), flush=True)


def _run_here(command: list[str], out: int, err: int) -> None:
    """Run one command in this process and end it."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    signal.alarm(_DEADLINE_S)
    _limit_memory()
    sys.argv = ["engine", *command]
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    code = 99
    try:
        device.open_device = _no_device
        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # what the interpreter would print as a traceback
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _no_device(scheduling: str = "") -> NoReturn:
    raise NoDeviceError(REACHED)


def _limit_memory() -> None:
    """Keep a runaway allocation from taking the machine down; it then fails as out of memory."""
    if sys.platform == "linux":
        now_n_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = now_n_bytes + _MAX_MORE_N_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
