"""End a run of the suite at any moment, and look at what is left of it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baselines.tests.fakes import fake_build
from conformance.bench.records import MACHINE_FILE, broken_seals, load_json, read_bench_record
from conformance.records import read_record
from conformance.scenario import ScenarioFile, load_scenario
from conformance.tests.fakes import write_scenario

COMMANDS = {
    "run": (),
    "bench": ("-r", "1", "--decode", "2", "--warm-up", "0", "--baseline", "llama.cpp", "--baseline", "llama-server"),
}
WHOLE = {"run": 0, "bench": 2}
"""Exit codes of runs that nobody disturbs; a bench of one round is too short for a verdict."""
N_RECORDS = {"run": 2, "bench": 1}
_MARK = "HYBRID_KILL_TEST"
_GRACE_S = 20.0
_BEFORE_OURS = ("Fatal Python error: init_import_site", "Could not import runpy module")
"""What the interpreter says of Ctrl-C while it starts, before any line of the suite runs; its exit code is 1."""


@dataclass
class Arena:
    """A folder with a scenario, a fake of llama.cpp and records; `seed` decides the moments."""

    folder: Path
    seed: int
    took_s: dict[str, float] = field(default_factory=dict)

    def prepare(self, short: ScenarioFile, token_ids: list[int], n_vocab: int) -> None:
        """Write the scenario, without what takes long, and the programs."""
        values = short.scenario.model_dump(mode="json") | {"backends": ["numpy"], "controls": False}
        values["checks"] = [check for check in values["checks"] if check["check"] != "oracle_nmse"]
        write_scenario(self.scenario, values)
        (self.folder / "tiny.gguf").symlink_to(short.path.parent / "tiny.gguf")
        load_scenario(self.scenario)
        fake_build(self.folder, "none", token_ids, n_vocab)
        (self.folder / "tmp").mkdir()
        for command in COMMANDS:
            self.run_whole(command)

    @property
    def scenario(self) -> Path:
        return self.folder / "short.yaml"

    def out(self, command: str) -> Path:
        return self.folder / f"{command}-records"

    def run_whole(self, command: str) -> None:
        """Run without a disturbance: it works, whatever was before."""
        start = time.monotonic()
        end_code, text, _ = self.run(command, None, 0.0)
        took_s = time.monotonic() - start
        self.took_s[command] = min(took_s, self.took_s.get(command, took_s))
        assert end_code == WHOLE[command], text
        assert len(list(self.records(command))) >= N_RECORDS[command], text

    def kill_at_random(self, number: int) -> tuple[str, str, int]:
        """Kill the number-th run: command and signal take turns; return them and the exit code.

        The run may have ended before: then that is its own exit code.
        """
        moments = random.Random(self.seed * 1_000_003 + number)
        command = list(COMMANDS)[number % 2]
        with_signal = (signal.SIGKILL, signal.SIGINT)[number // 2 % 2]
        after_s = moments.uniform(0.0, self.took_s[command])
        exit_code, text, mark = self.run(command, with_signal, after_s)
        if exit_code == WHOLE[command]:
            self.took_s[command] = after_s  # less than when the machine was busier
        expected = {WHOLE[command], 130, -signal.SIGINT} if with_signal is signal.SIGINT else {WHOLE[command], -9}
        if with_signal is signal.SIGINT and text.startswith(_BEFORE_OURS):
            expected |= {1}
        assert exit_code in expected, f"kill {number}: exit code {exit_code}: {text}"
        if exit_code == 130:
            assert "Traceback" not in text, f"kill {number}: {text}"
            assert "error: interrupted" in text, f"kill {number}: {text}"
        self.check_nothing_left(mark, f"kill {number}")
        list(self.records(command))
        return command, with_signal.name, exit_code

    def run(self, command: str, with_signal: int | None, after_s: float) -> tuple[int, str, str]:
        """Run a command, end it with a signal after a while; return exit code, output and the mark of its processes."""
        mark = uuid.uuid4().hex
        argv: list[str | Path] = [
            sys.executable,
            "-m",
            "conformance.tests.fake_suite",
            self.folder,
            command,
            self.scenario,
        ]
        process = subprocess.Popen(
            [*argv, *COMMANDS[command], "--out", self.out(command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, _MARK: mark, "TMPDIR": str(self.folder / "tmp"), "CUDA_VISIBLE_DEVICES": ""},
            text=True,
            preexec_fn=_heed_ctrl_c,
        )
        try:
            if with_signal is not None:
                time.sleep(after_s)
                process.send_signal(with_signal)
            text, _ = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
        return process.returncode, text, mark

    def check_nothing_left(self, mark: str, what: str) -> None:
        """Fail if, after a while, there is a process, an open port or a temporary file of a run."""
        end = time.monotonic() + _GRACE_S
        while (left := [*_marked(mark), *map(str, (self.folder / "tmp").iterdir())]) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == [], f"{what}: left are {left}"
        ports = self.folder / "ports"
        for port in ports.read_text().split() if ports.is_file() else ():
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", int(port))) != 0, f"{what}: port {port} is open"
        ports.unlink(missing_ok=True)

    def records(self, command: str) -> Iterator[Path]:
        """Yield the records there are, each read and checked: it is whole."""
        for path in self.out(command).rglob("*.json"):
            if command == "run":
                read_record(path)
            elif path.name != MACHINE_FILE:
                read_bench_record(path)
                assert list(broken_seals(load_json(path))) == []
            yield path


def _heed_ctrl_c() -> None:
    """Take Ctrl-C as a program in the foreground does; what a shell has put into the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark:
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found
