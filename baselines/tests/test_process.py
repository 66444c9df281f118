from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from baselines.llama_cpp.process import CappedLog, ProcessResult, run_process

# starts a sleeper that leaves the session, prints its id, and stays or goes itself
_SPAWN = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session={detached}, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep({stay})
"""


def run_python(code: str, deadline_s: float = 30.0) -> ProcessResult:
    return run_process([sys.executable, "-c", code], deadline_s=deadline_s)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ok_run_keeps_both_streams_in_order() -> None:
    result = run_python("import sys; print('one', flush=True); print('two', file=sys.stderr)")
    assert (result.status, result.exit_code, result.log) == ("ok", 0, "one\ntwo\n")


def test_exit_code_becomes_a_crash_with_the_last_lines() -> None:
    result = run_python("print('\\n'.join(map(str, range(50)))); raise SystemExit(3)")
    assert (result.status, result.exit_code) == ("crashed", 3)
    assert result.log_tail(2) == "48\n49"


def test_signal_becomes_a_crash() -> None:
    result = run_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (result.status, result.exit_code) == ("crashed", -signal.SIGSEGV)


def test_deadline_ends_a_run_that_ignores_sigterm() -> None:
    start = time.monotonic()
    result = run_python(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)",
        deadline_s=1.0,
    )
    assert (result.status, result.exit_code, result.log) == ("timeout", -signal.SIGKILL, "up\n")
    assert 1.0 <= time.monotonic() - start < 10.0


@pytest.mark.parametrize("detached", [False, True], ids=["same-session", "own-session"])
@pytest.mark.parametrize("stay", [0, 60], ids=["parent-ended", "parent-hangs"])
def test_grandchild_does_not_survive(detached: bool, stay: int) -> None:
    result = run_python(_SPAWN.format(detached=detached, stay=stay), deadline_s=1.0 if stay else 30.0)
    assert result.status == ("timeout" if stay else "ok")
    assert is_gone(int(result.log))


def test_interrupt_while_waiting_leaves_nothing_running() -> None:
    lines: list[str] = []

    def interrupt_once_up() -> None:
        if lines:
            raise KeyboardInterrupt

    code = _SPAWN.format(detached=True, stay=60)
    with pytest.raises(KeyboardInterrupt):
        run_process([sys.executable, "-c", code], deadline_s=30, on_line=lines.append, on_tick=interrupt_once_up)
    assert is_gone(int(lines[0]))


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", "out_of_memory"),
        ("alloc_tensor_range: failed to allocate CUDA0 buffer of size 16460000000", "out_of_memory"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "out_of_memory"),
        ("ggml_backend_sched_alloc_splits: failed to allocate graph, reserving", "crashed"),
        ("failed to allocate 12.00 MiB of pinned memory: unsupported", "crashed"),
    ],
)
def test_memory_words_of_a_failed_run(line: str, status: str) -> None:
    assert run_python(f"print({line!r}); raise SystemExit(1)").status == status


def test_memory_words_of_a_good_run_mean_nothing() -> None:
    assert run_python("print('out of memory')").status == "ok"


def test_capped_log_keeps_head_and_tail() -> None:
    log = CappedLog(head_n_bytes=4, tail_n_bytes=6)
    for part in (b"ab", b"cdef", b"ghijkl", b"mn"):
        log.write(part)
    assert log.text() == "abcd\n[... 4 bytes dropped ...]\nijklmn"


def test_short_log_is_kept_whole() -> None:
    log = CappedLog(head_n_bytes=4, tail_n_bytes=6)
    log.write(b"0123456789")
    assert log.text() == "0123456789"


def test_missing_program_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-program"):
        run_process([tmp_path / "no-such-program"], deadline_s=1)
