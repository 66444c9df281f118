"""End what a killed run leaves behind: a process of its own that outlives the run and cleans up after it.

Programs run in sessions of their own, so that a run can end them as a whole; nothing would end them if the run itself
is killed. `python -m baselines.llama_cpp.guard OWNER` waits for the end of its standard input, which comes with the end
of the process that started it, however that ends; then it kills every process and removes every scratch folder that is
marked with OWNER.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from functools import cache
from pathlib import Path

import psutil

# Every process of a run inherits this variable: OWNER-RUN. It finds those that left the session and lost their parent.
RUN_ID_VARIABLE = "HYBRID_RUN_ID"
OWNER = uuid.uuid4().hex
"""Marks what this process starts."""
_N_EMPTY_LOOKS, _LOOK_S = 3, 0.1
_LONGEST_S = 30.0


@cache
def start_guard() -> None:
    """Start the guard of this process, once; it ends with this process."""
    root = str(Path(__file__).parents[2])
    environment = {key: value for key, value in os.environ.items() if key != RUN_ID_VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    guard = subprocess.Popen(
        [sys.executable, "-m", "baselines.llama_cpp.guard", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=root,
        start_new_session=True,
    )
    atexit.register(_dismiss, guard)


def scratch_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder that goes with its context, and with this process if that is killed."""
    return tempfile.TemporaryDirectory(prefix=f"{prefix}-{OWNER}-")


def carriers(run_id: str, session: int | None = None) -> list[psutil.Process]:
    """Return the live processes whose run id begins with `run_id`, and those of a session."""
    found = []
    for candidate in psutil.process_iter():
        try:
            if candidate.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(candidate.pid) == session or candidate.environ().get(RUN_ID_VARIABLE, "").startswith(run_id):
                found.append(candidate)
        except (psutil.Error, OSError):
            continue
    return found


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes and wait a little for their end."""
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(processes, timeout=0.5)


def clean_up(owner: str, n_empty_looks: int) -> None:
    """Kill and remove what is marked with `owner`, until so many looks in a row find nothing."""
    n_empty, end = 0, time.monotonic() + _LONGEST_S
    while n_empty < n_empty_looks and time.monotonic() < end:
        found = carriers(owner)
        kill(found)
        n_empty = 0 if found else n_empty + 1
        time.sleep(0 if found or n_empty == n_empty_looks else _LOOK_S)
    for folder in Path(tempfile.gettempdir()).glob(f"*-{owner}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the end of standard input, then clean up after argv[1]."""
    said_goodbye = sys.stdin.buffer.read() != b""  # a run that was killed may just have been starting a program
    clean_up(sys.argv[1], 1 if said_goodbye else _N_EMPTY_LOOKS)


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    """End the guard in good order; what it would clean up has been ended by whoever started it, or is ended now."""
    with contextlib.suppress(OSError):  # it may have been ended by somebody
        guard.communicate(b"goodbye")


if __name__ == "__main__":
    main()
