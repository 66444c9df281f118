"""Run one program in its own session, under a deadline, with a capped log; leave nothing of it running."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from baselines.errors import ProcessError

Status = Literal["ok", "crashed", "timeout", "out_of_memory"]

# Every process of a run inherits this variable; it finds those that left the session and lost their parent.
RUN_ID_VARIABLE = "HYBRID_RUN_ID"
_TICK_S = 0.5
# llama.cpp says "failed to allocate graph, reserving" and "... MiB of pinned memory" in runs that go well.
_MEMORY_WORDS = re.compile(
    r"out of memory|failed to allocate (?!graph|[\d.]+ MiB of pinned)|unable to allocate"
    r"|cannot allocate memory|insufficient memory|bad_alloc|Killed signal terminated program",
    re.IGNORECASE,
)


class CappedLog:
    """Keep the first and the last bytes of a stream, and count what was dropped between them."""

    def __init__(self, head_n_bytes: int = 512 * 1024, tail_n_bytes: int = 128 * 1024) -> None:
        self._head_limit, self._tail_limit = head_n_bytes, tail_n_bytes
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_n_bytes = 0
        self._dropped_n_bytes = 0

    def write(self, data: bytes) -> None:
        """Append data, dropping the oldest bytes that are not part of the head."""
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        rest = data[room:]
        if rest:
            self._tail.append(rest)
            self._tail_n_bytes += len(rest)
        while self._tail and self._tail_n_bytes > self._tail_limit:
            self._shorten()

    def _shorten(self) -> None:
        excess = self._tail_n_bytes - self._tail_limit
        first = self._tail.popleft()
        cut = min(excess, len(first))
        if cut < len(first):
            self._tail.appendleft(first[cut:])
        self._tail_n_bytes -= cut
        self._dropped_n_bytes += cut

    def text(self) -> str:
        """Return what was kept, with a line that says how much is missing."""
        gap = b"\n[... %d bytes dropped ...]\n" % self._dropped_n_bytes if self._dropped_n_bytes else b""
        return (bytes(self._head) + gap + b"".join(self._tail)).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class ProcessResult:
    """How a run ended; log holds its standard output and error together."""

    status: Status
    exit_code: int  # negative: the signal that ended it
    log: str
    wall_time_ns: int

    def log_tail(self, n_lines: int = 20) -> str:
        """Return the last non-empty lines of the log."""
        lines = [line.rstrip() for line in self.log.splitlines() if line.strip()]
        return "\n".join(lines[-n_lines:])


def run_process(
    argv: Sequence[str | Path],
    *,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    on_tick: Callable[[], None] | None = None,
    log: CappedLog | None = None,
) -> ProcessResult:
    """Run argv to its end or to the deadline and return how it ended.

    on_line gets every line of output (from another thread), on_tick is called twice a second while waiting.
    Whatever happens, KeyboardInterrupt included, no process of the run is left when this returns or raises.
    Raises OSError if the program cannot be started.
    """
    run_id = uuid.uuid4().hex
    log = log or CappedLog()
    n_kills_before = _oom_kill_count()
    start_ns = time.monotonic_ns()
    process = _start(argv, run_id, env, cwd, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    reader = threading.Thread(target=_drain, args=(process.stdout, log, on_line), daemon=True)
    try:
        reader.start()
        in_time = _wait(process, deadline_s, on_tick)
    finally:
        _kill_all(process, run_id)
        reader.join(timeout=5)
        if not reader.is_alive():
            process.stdout.close()
    wall_time_ns = time.monotonic_ns() - start_ns
    text = log.text()
    status = _status(process.returncode, in_time, text, _oom_kill_count() - n_kills_before)
    return ProcessResult(status, process.returncode, text, wall_time_ns)


class LiveProcess:
    """A program that stays up: one line in, one line out, under a deadline each; standard error is its log.

    Used as a context manager: whatever happens inside, no process of it is left afterwards.
    """

    def __init__(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._run_id = uuid.uuid4().hex
        self._log = CappedLog()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process = _start(argv, self._run_id, env, cwd, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_lines, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=_drain, args=(self._process.stderr, self._log, None), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Process id of the program."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What the program has written to standard error so far, the middle cut out if it is long."""
        return self._log.text()

    def read(self, deadline_s: float) -> str:
        """Return the next line of output; raises ProcessError if the program ended, or wrote none in time."""
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise ProcessError(f"no answer after {deadline_s:g} s") from None
        if line is None:
            self._lines.put(None)
            raise ProcessError(self._how_it_ended())
        return line

    def ask(self, line: str, deadline_s: float) -> str:
        """Write a line and return the next line of output; raises ProcessError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ProcessError(self._how_it_ended()) from None
        return self.read(deadline_s)

    def require_running(self) -> None:
        """Raise ProcessError if the program has ended."""
        if self._process.poll() is not None:
            raise ProcessError(self._how_it_ended())

    def close(self) -> None:
        """End the program and everything it started."""
        _kill_all(self._process, self._run_id)
        for reader in self._readers:
            reader.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not taken from the pipe cannot be flushed any more
                    stream.close()

    def __enter__(self) -> LiveProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_lines(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._lines.put(line.decode("utf-8", errors="replace").rstrip())
        self._lines.put(None)

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._readers[1].join(timeout=1)
        lines = [line for line in self.log.splitlines() if line.strip()]
        code = self._process.returncode
        how = f"ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return f"{how}: {lines[-1].strip()}" if lines else how


def _start(
    argv: Sequence[str | Path], run_id: str, env: Mapping[str, str] | None, cwd: Path | None, *, stdin: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start argv in a session of its own, marked by run_id."""
    return subprocess.Popen(
        [str(part) for part in argv],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**(os.environ if env is None else env), RUN_ID_VARIABLE: run_id},
        cwd=cwd,
        start_new_session=True,
    )


def _drain(stream: IO[bytes], log: CappedLog, on_line: Callable[[str], None] | None) -> None:
    for line in iter(lambda: stream.readline(65536), b""):
        log.write(line)
        if on_line is not None:
            on_line(line.decode("utf-8", errors="replace").rstrip())


def _wait(process: subprocess.Popen[bytes], deadline_s: float, on_tick: Callable[[], None] | None) -> bool:
    """Wait for the end; return False if the deadline came first."""
    end = time.monotonic() + deadline_s
    while True:
        left = end - time.monotonic()
        try:
            process.wait(timeout=max(0.0, min(_TICK_S, left)))
            return True
        except subprocess.TimeoutExpired:
            if left <= 0:
                return False
        if on_tick is not None:
            on_tick()


def _kill_all(process: subprocess.Popen[bytes], run_id: str) -> None:
    """Kill the run's session and whatever else still carries its id, and reap the leader."""
    if process.poll() is None:  # once it is reaped, its number may be a stranger's
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for _ in range(10):
        stragglers = _carriers(process.pid, run_id)
        if not stragglers:
            return
        for straggler in stragglers:
            try:
                straggler.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(stragglers, timeout=0.5)


def _carriers(session: int, run_id: str) -> list[psutil.Process]:
    """Find the live processes of a session, and those outside it whose environment carries run_id."""
    found = []
    for candidate in psutil.process_iter():
        try:
            if candidate.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(candidate.pid) == session or candidate.environ().get(RUN_ID_VARIABLE) == run_id:
                found.append(candidate)
        except (psutil.Error, OSError):
            continue
    return found


def _status(exit_code: int, in_time: bool, log: str, n_oom_kills: int) -> Status:
    if not in_time:
        return "timeout"
    if exit_code == 0:
        return "ok"
    # A SIGKILL that was not ours is the kernel's memory killer if its counters moved.
    if exit_code == -signal.SIGKILL and n_oom_kills > 0:
        return "out_of_memory"
    return "out_of_memory" if _MEMORY_WORDS.search(log) else "crashed"


def _oom_kill_count() -> int:
    """Sum the kernel's counters of memory kills, of this machine and this control group, where readable."""
    total = 0
    for file in ("/proc/vmstat", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            counts = re.findall(r"^oom_kill (\d+)", Path(file).read_text(), re.MULTILINE)
            total += sum(map(int, counts))
        except OSError:
            continue
    return total
