from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from baselines.errors import ProcessError
from baselines.llama_cpp.process import LiveProcess
from baselines.tests.test_process import is_gone

_ECHO = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "die":
        sys.exit("worn out")
    if line.strip() != "hang":
        print("echo " + line.strip(), flush=True)
"""


def live(code: str = _ECHO) -> LiveProcess:
    return LiveProcess([sys.executable, "-c", code])


def test_a_line_in_gives_a_line_out() -> None:
    with live() as process:
        assert process.read(30) == "ready"
        assert [process.ask(word, 30) for word in ("one", "two")] == ["echo one", "echo two"]
        pid = process.pid
    assert is_gone(pid)


def test_no_answer_in_time_is_an_error() -> None:
    with live() as process:
        process.read(30)
        with pytest.raises(ProcessError, match=r"no answer after 0\.2 s"):
            process.ask("hang", 0.2)


def test_a_program_that_ends_says_how() -> None:
    with live() as process:
        process.read(30)
        with pytest.raises(ProcessError, match="ended with exit code 1: worn out"):
            process.ask("die", 30)
        with pytest.raises(ProcessError, match="ended with exit code 1: worn out"):
            process.ask("again", 30)
        with pytest.raises(ProcessError, match="ended with exit code 1"):
            process.require_running()


def test_a_signal_is_named() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    with live(code) as process, pytest.raises(ProcessError, match="ended by SIGILL"):
        process.read(30)


def test_everything_it_started_is_ended() -> None:
    code = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '60'], start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(60)"
    )
    with live(code) as process:
        child = int(process.read(30))
        assert psutil.pid_exists(child)
    assert is_gone(child)


def test_a_program_that_does_not_exist_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match=r"^none cannot be started: No such file or directory: "):
        LiveProcess([tmp_path / "none"])
