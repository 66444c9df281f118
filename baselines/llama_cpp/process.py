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

from baselines.errors import ProcessError
from baselines.llama_cpp.guard import OWNER, RUN_ID_VARIABLE, carriers, kill, start_guard

Status = Literal["ok", "crashed", "timeout", "out_of_memory"]

_TICK_S = 0.5
_MAX_LINE_N_BYTES = 1 << 24
_MAX_WAITING_LINES = 1000
_MAX_SHOWN = 1000
# llama.cpp says "failed to allocate graph, reserving" and "... MiB of pinned memory" in runs that go well.
_MEMORY_WORDS = re.compile(
    r"out of memory|failed to allocate (?!graph|[\d.]+ MiB of pinned)|unable to allocate"
    r"|cannot allocate memory|insufficient memory|bad_alloc|Killed signal terminated program",
    re.IGNORECASE,
)
_TELLING = re.compile(r"error|fail|cannot|could not|unable|refuse|out of memory|no space", re.IGNORECASE)


class CappedLog:
    """Keep the first and the last bytes of a stream, and count what was dropped between them."""

    def __init__(self, head_n_bytes: int = 512 * 1024, tail_n_bytes: int = 128 * 1024) -> None:
        self._head_limit, self._tail_limit = head_n_bytes, tail_n_bytes
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_n_bytes = 0
        self._dropped_n_bytes = 0
        self._lock = threading.Lock()  # it is read while its program still writes

    def write(self, data: bytes) -> None:
        """Append data, dropping the oldest bytes that are not part of the head."""
        with self._lock:
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
        with self._lock:
            gap = b"\n[... %d bytes dropped ...]\n" % self._dropped_n_bytes if self._dropped_n_bytes else b""
            kept = bytes(self._head) + gap + b"".join(self._tail)
        return kept.decode("utf-8", errors="replace")


@dataclass(frozen=True)
class ProcessResult:
    """How a run ended; log holds its standard output and error together."""

    status: Status
    exit_code: int  # negative: the signal that ended it
    log: str
    wall_time_ns: int

    def log_tail(self, n_lines: int = 20) -> str:
        """Return the last non-empty lines of the log, each cut after 1,000 characters."""
        lines = [line.rstrip()[:_MAX_SHOWN] for line in self.log.splitlines() if line.strip()]
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
    run_id = _new_run_id()
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

    Used as a context manager: whatever happens inside, no process of it is left afterwards. One that failed is ended:
    an answer that comes too late must not be taken for that to the next question. name: of the program in messages,
    its file's if none is given. answers: whether its standard output has answers; if not, it is part of the log.
    Raises ProcessError if it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        name: str | None = None,
        answers: bool = True,
    ) -> None:
        self.name = name or Path(argv[0]).name
        self._run_id = _new_run_id()
        self._log = CappedLog()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._fault: str | None = None
        self._floods = False
        stderr = subprocess.PIPE if answers else subprocess.STDOUT
        try:
            self._process = _start(argv, self._run_id, env, cwd, stdin=subprocess.PIPE, stderr=stderr)
        except OSError as error:
            raise ProcessError(f"{self.name} cannot be started: {error.strerror}: {argv[0]}") from None
        log_stream = self._process.stderr if answers else self._process.stdout
        self._readers = [threading.Thread(target=_drain, args=(log_stream, self._log, None), daemon=True)]
        if answers:
            self._readers.append(threading.Thread(target=self._read_lines, args=(self._process.stdout,), daemon=True))
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
        if self._fault is not None:
            raise ProcessError(self._fault)
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise self.give_up(f"no answer after {deadline_s:g} s") from None
        if line is None:
            raise self.give_up(self._how_it_ended())
        return line

    def ask(self, line: str, deadline_s: float) -> str:
        """Write a line and return the next line of output; raises ProcessError."""
        assert self._process.stdin is not None
        with contextlib.suppress(queue.Empty):
            early = self._lines.get_nowait()
            raise self.give_up(self._how_it_ended() if early is None else "wrote a line that nobody asked for")
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # it has ended, or was given up
            raise self.give_up(self._how_it_ended()) from None
        return self.read(deadline_s)

    def require_running(self, grace_s: float = 0.0) -> None:
        """Raise ProcessError if the program has ended, or does so within grace_s."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
            raise self.give_up(self._how_it_ended())

    def give_up(self, why: str) -> ProcessError:
        """End the program and return the error to raise, now and at every later question: the first fault counts."""
        if self._fault is None:
            self._fault = f"{self.name}: {why}"
            self.close()
        return ProcessError(self._fault)

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
        """Take lines while somebody reads them; a program that floods its output waits, and is told from one that ends.

        What is left in the pipe when this stops keeps the program from writing on, and its deadline ends it.
        """
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in iter(lambda: stream.readline(_MAX_LINE_N_BYTES), b""):
                if len(line) == _MAX_LINE_N_BYTES or self._lines.qsize() >= _MAX_WAITING_LINES:
                    self._floods = True
                    break
                self._lines.put(line.decode("utf-8", errors="replace").rstrip())
        self._lines.put(None)

    def _how_it_ended(self) -> str:
        if self._floods:
            return f"floods its output: a line above {_MAX_LINE_N_BYTES >> 20} MiB, or lines that nobody asked for"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._readers[0].join(timeout=1)
        if self._process.returncode is None:
            return "closed its output without an answer"
        return describe_end(self._process.returncode, self.log)


def describe_end(exit_code: int, log: str) -> str:
    """Return one line on how a program ended, with the line of its log that says why if there is one.

    exit_code: negative for the signal that ended it.
    """
    said = telling_line(log)
    if exit_code == -signal.SIGKILL:
        return "ended by SIGKILL, not by this suite: most likely because memory ran out"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}: {said or 'no output'}"
    return f"ended by {_signal_name(-exit_code)}" + (f": {said}" if said and _TELLING.search(said) else "")


def telling_line(log: str) -> str:
    """Return the last line that speaks of a failure, else the last one, empty if there is none.

    What a program says last is often a place in its source or how it unwinds.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines[-20:]) if _TELLING.search(line)), lines[-1] if lines else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _new_run_id() -> str:
    """Return an id for what is about to be started, and see to it that it ends with this process."""
    start_guard()
    return f"{OWNER}-{uuid.uuid4().hex}"


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
        stragglers = carriers(run_id, session=process.pid)
        if not stragglers:
            return
        kill(stragglers)


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
