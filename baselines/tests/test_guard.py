"""What a killed process leaves behind is ended, by a guard that outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baselines.llama_cpp.guard import OWNER, RUN_ID_VARIABLE, carriers
from baselines.tests.test_process import is_gone

ROOT = Path(__file__).parents[2]

# starts a program that starts another in a session of its own, says their ids, and waits
_SUITE = """
import sys, time
from pathlib import Path
from baselines.llama_cpp.guard import scratch_folder
from baselines.llama_cpp.process import LiveProcess
folder = scratch_folder("scratch")
(Path(folder.name) / "logits").write_bytes(b"1")
code = "import subprocess as s, time; c = s.Popen(['sleep', '60'], start_new_session=True); print(c.pid, flush=True); "
process = LiveProcess([sys.executable, "-c", code + "time.sleep(60)"])
print(process.pid, process.read(30), folder.name, flush=True)
{then}
"""


def start(then: str) -> tuple[subprocess.Popen[str], list[int], Path]:
    suite = subprocess.Popen(
        [sys.executable, "-c", _SUITE.format(then=then)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert suite.stdout is not None
    *ids, folder = suite.stdout.readline().split()
    return suite, [int(text) for text in ids], Path(folder)


def await_end(ids: list[int], folder: Path) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if all(is_gone(pid) for pid in ids) and not folder.exists():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_suite_leaves_no_process_and_no_scratch_folder(with_signal: signal.Signals) -> None:
    suite, ids, folder = start("time.sleep(60)")
    assert len(ids) == 2
    assert folder.is_dir()
    assert all(psutil.pid_exists(pid) for pid in ids)
    with suite:
        suite.send_signal(with_signal)
    assert suite.returncode == -with_signal
    assert await_end(ids, folder)


def test_what_is_forgotten_is_ended_with_the_suite() -> None:
    suite, ids, folder = start("import os; os._exit(7)")
    with suite:
        pass
    assert suite.returncode == 7
    assert await_end(ids, folder)


def test_the_guard_ends_with_the_suite() -> None:
    code = "from baselines.llama_cpp.guard import start_guard, OWNER; start_guard(); print(OWNER)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    guards = [p for p in psutil.process_iter(["cmdline"]) if done.stdout.strip() in (p.info["cmdline"] or [])]
    assert guards == []


def test_only_what_is_marked_is_found() -> None:
    with subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_ID_VARIABLE: f"{OWNER}-1"}) as marked:
        with subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_ID_VARIABLE: f"x{OWNER}-1"}) as other:
            assert [process.pid for process in carriers(f"{OWNER}-1")] == [marked.pid]
            other.kill()
        marked.kill()
