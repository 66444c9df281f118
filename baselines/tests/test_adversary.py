"""llama.cpp's programs as adversaries: whatever they do, it ends in time, one line says what, nothing is left."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baselines.errors import BaselineError, ProcessError, WrongBuildError
from baselines.llama_cpp import server as server_module
from baselines.llama_cpp.bench import run_llama_bench
from baselines.llama_cpp.guard import OWNER, carriers
from baselines.llama_cpp.server import LlamaServer
from baselines.llama_cpp.worker import WorkerRequest, WorkerSession, run_worker
from baselines.tests.fakes import fake_build

PROMPT, N_PREDICT = (1, 2, 3), 6
KILLED = "ended by SIGKILL, not by this suite: most likely because memory ran out"
NOT_READ = "gave an answer that cannot be read: "
FLOOD = "floods its output: a line above 16 MiB, or lines that nobody asked for"
ENDS = {
    "exits": "ended with exit code 0: llama_kv_cache: size = 0.06 MiB \\( 256 cells",
    "refuses": "ended with exit code 1: error: failed to load model",
    "crashes": "ended by SIGSEGV",
    "killed": KILLED,
    "odd_signal": "ended by signal 40",
    "loses_gpu": "ended by SIGABRT: CUDA error: unspecified launch failure",
    "not_utf8": "ended with exit code 1: error: \ufffd\ufffd",
}
"""What the error says, for faults before any answer."""


@pytest.fixture
def request_(tmp_path: Path) -> WorkerRequest:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    return WorkerRequest(model, PROMPT, N_PREDICT, 512, deadline_s=20.0)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a process, or takes more than 100 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert carriers(OWNER) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def in_time(request: WorkerRequest, deadline_s: float = 1.0) -> WorkerRequest:
    return WorkerRequest(**{**vars(request), "deadline_s": deadline_s})


def serve(folder: Path, fault: str, request: WorkerRequest) -> list[int]:
    server = LlamaServer(fake_build(folder, fault), request)
    try:
        return server.complete(PROMPT, N_PREDICT).token_ids
    finally:
        server.close()


def stream(folder: Path, fault: str, request: WorkerRequest) -> int | None:
    server = LlamaServer(fake_build(folder, fault), request)
    try:
        return server.first_token(PROMPT).token_id
    finally:
        server.close()


def ask_session(folder: Path, fault: str, request: WorkerRequest) -> list[int]:
    session = WorkerSession(fake_build(folder, fault), request)
    try:
        session.generate("batched", N_PREDICT)
        ids: list[int] = session.generate("batched", N_PREDICT)["token_ids"]
    finally:
        session.close()
    return ids


def run_bench(folder: Path, fault: str, request: WorkerRequest) -> list[int]:
    result = run_llama_bench(fake_build(folder, fault), request)
    return [result.prompt_time_ns, result.generation_time_ns]


RUN: dict[str, Callable[[Path, str, WorkerRequest], list[int]]] = {
    "llama-worker": ask_session,
    "llama-server": serve,
    "llama-bench": run_bench,
}
programs = pytest.mark.parametrize("program", RUN)


@programs
def test_without_a_fault_there_is_an_answer(tmp_path: Path, request_: WorkerRequest, program: str) -> None:
    right = [1_000_000, 1_000_000] if program == "llama-bench" else [1, 2, 3, 4, 5, 6]
    assert RUN[program](tmp_path, "none", request_) == right


@programs
@pytest.mark.parametrize("fault", ENDS)
def test_one_that_ends_says_how(tmp_path: Path, request_: WorkerRequest, program: str, fault: str) -> None:
    with pytest.raises(ProcessError, match=f"^{program}: {ENDS[fault]}") as caught:
        RUN[program](tmp_path, fault, request_)
    assert "\n" not in str(caught.value)


@programs
@pytest.mark.parametrize("fault", ["hangs", "floods_log"])
def test_one_that_never_answers_is_ended(tmp_path: Path, request_: WorkerRequest, program: str, fault: str) -> None:
    start = time.monotonic()
    with pytest.raises(ProcessError):
        RUN[program](tmp_path, fault, in_time(request_))
    assert time.monotonic() - start < 15


def test_a_first_token_is_streamed_or_held_back(tmp_path: Path, request_: WorkerRequest) -> None:
    assert stream(tmp_path, "none", request_) == 1
    assert stream(tmp_path, "no_tokens", request_) is None


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("comma", NOT_READ),
        ("answers_not_utf8", NOT_READ),
        ("omits_tokens", f"{NOT_READ}tokens: Field required"),
        ("huge_ids", f"{NOT_READ}tokens.0: Input should be less than"),
        ("a_list", NOT_READ),
        ("another_answers", "another program answers on llama-server's port"),
        ("breaks_off", "streamed nothing|gave no answer to /completion"),
        ("floods_answer", "gave no answer to /completion: more than 16 MiB"),
        ("dies_later", "ended with exit code 1: error: worn out"),
        ("drips", "gave no answer to /completion after 1 s"),
        ("hangs_later", "gave no answer to /completion after 1 s"),
    ],
)
def test_a_stream_that_cannot_be_used_is_refused(
    tmp_path: Path, request_: WorkerRequest, fault: str, says: str
) -> None:
    with pytest.raises(BaselineError, match=says) as caught:
        stream(tmp_path, fault, in_time(request_, 1.0) if "after 1 s" in says else request_)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("program", "fault", "says"),
    [
        ("llama-worker", "floods_output", f"{NOT_READ}|wrote a line that nobody asked for"),
        ("llama-worker", "endless_line", FLOOD),
        ("llama-bench", "floods_output", "wrote 1000 lines and no end of its JSON"),
        ("llama-bench", "endless_line", FLOOD),
        ("llama-worker", "comma", NOT_READ),
        ("llama-worker", "comma_text", f"{NOT_READ}prefill_time_ns: Input should be a valid integer"),
        ("llama-worker", "answers_not_utf8", NOT_READ),
        ("llama-worker", "omits_tokens", f"{NOT_READ}token_ids: Field required"),
        ("llama-worker", "no_tokens", "gave 0 of 6 tokens"),
        ("llama-worker", "too_few", "gave 3 of 6 tokens"),
        ("llama-worker", "no_time", f"{NOT_READ}prefill_time_ns: Input should be greater than 0"),
        ("llama-worker", "huge_ids", f"{NOT_READ}token_ids.0: Input should be less than or equal to 2147483647"),
        ("llama-worker", "huge_time", f"{NOT_READ}prefill_time_ns: Input should be less than"),
        ("llama-server", "huge_ids", f"{NOT_READ}tokens.0: Input should be less than"),
        ("llama-server", "huge_time", f"{NOT_READ}timings.prompt_ms: Input should be less than"),
        # Its line may come behind the next question, and is then read as the answer to that.
        ("llama-worker", "says_more", f"{NOT_READ}Invalid JSON|wrote a line that nobody asked for"),
        ("llama-worker", "hangs_later", "no answer after 1 s"),
        ("llama-worker", "dies_later", "ended with exit code 1: error: worn out"),
        ("llama-server", "comma", NOT_READ),
        ("llama-server", "comma_text", f"{NOT_READ}timings.prompt_ms: Input should be a valid number"),
        ("llama-server", "answers_not_utf8", NOT_READ),
        ("llama-server", "omits_tokens", f"{NOT_READ}tokens: Field required"),
        ("llama-server", "no_tokens", "gave 0 of 6 tokens"),
        ("llama-server", "too_few", "gave 3 of 6 tokens"),
        ("llama-server", "no_time", f"{NOT_READ}timings.prompt_ms: Input should be greater than 0"),
        ("llama-server", "a_list", NOT_READ),
        ("llama-server", "build_0", "says that it is build b0-unknown, expected b8763"),
        ("llama-server", "other_model", r"serves /elsewhere/other\.gguf, expected model\.gguf"),
        ("llama-server", "other_server", "another program answers on llama-server's port"),
        ("llama-server", "another_answers", "another program answers on llama-server's port"),
        ("llama-server", "hangs_later", "gave no answer to /completion after 1 s"),
        ("llama-server", "drips", "gave no answer to /completion after 1 s"),
        ("llama-server", "floods_answer", "gave no answer to /completion"),
        ("llama-server", "dies_later", "ended with exit code 1: error: worn out"),
        ("llama-server", "breaks_off", "ended with exit code 1"),
        ("llama-bench", "comma", NOT_READ),
        ("llama-bench", "no_time", NOT_READ),
        ("llama-bench", "too_few", "gave no time for the test of 0 prompt and 5 generated tokens"),
        ("llama-bench", "build_0", "says that it is build 0, expected 8763"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, request_: WorkerRequest, program: str, fault: str, says: str
) -> None:
    deadline_s = 1.0 if "1 s" in says else 20.0
    with pytest.raises(BaselineError, match=says) as caught:
        RUN[program](tmp_path, fault, in_time(request_, deadline_s))
    assert str(caught.value).startswith((program, "another program"))
    assert "\n" not in str(caught.value)


def test_a_program_that_stays_after_its_answer_is_ended(tmp_path: Path, request_: WorkerRequest) -> None:
    assert run_bench(tmp_path, "stays", request_) == [1_000_000, 1_000_000]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("exits", "llama-worker ended well, but wrote no out.json: No such file or directory"),
        ("comma_text", f"llama-worker {NOT_READ}prefill_time_ns: Input should be a valid integer"),
        ("omits_tokens", f"llama-worker {NOT_READ}token_ids: Field required"),
        ("no_tokens", "llama-worker gave 0 of 6 tokens"),
        ("too_few", "llama-worker gave 3 of 6 tokens"),
        ("no_logits", "llama-worker ended well, but wrote no logits.f32: No such file or directory"),
        ("full_disk", "llama-worker wrote 284 bytes of logits, expected 384: is the disk full?"),
        ("lies", "llama-worker gave tokens that are not those of its own logits"),
    ],
)
def test_a_run_that_ends_well_without_a_result_is_failed(
    tmp_path: Path, request_: WorkerRequest, fault: str, says: str
) -> None:
    result = run_worker(fake_build(tmp_path, fault), request_)
    assert (result.status, result.problem, result.token_ids, result.logits) == ("failed", says, [], None)


@pytest.mark.parametrize(
    ("fault", "status"),
    [("hangs", "timeout"), ("floods_log", "timeout"), ("floods_output", "timeout"), ("endless_line", "timeout")],
)
def test_a_run_has_a_deadline_and_a_capped_log(
    tmp_path: Path, request_: WorkerRequest, fault: str, status: str
) -> None:
    result = run_worker(fake_build(tmp_path, fault), in_time(request_, 3.0))
    assert (result.status, result.problem) == (status, None)
    assert len(result.log) < 1_000_000
    assert len(result.log_tail) < 25_000


@pytest.mark.parametrize(("fault", "says"), [("build_0", "expected build 8763"), ("other_library", "expected the lib")])
def test_another_library_is_refused(tmp_path: Path, request_: WorkerRequest, fault: str, says: str) -> None:
    with pytest.raises(WrongBuildError, match=says):
        run_worker(fake_build(tmp_path, fault), request_)


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path, request_: WorkerRequest) -> None:
    build = fake_build(tmp_path, "none")
    (tmp_path / "bin" / "llama-server").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(ProcessError, match=r"^llama-server cannot be started: Exec format error: "):
        LlamaServer(build, request_)


def test_a_port_that_is_taken_meanwhile(
    tmp_path: Path, request_: WorkerRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=_answer_health, args=(other,), daemon=True).start()
        monkeypatch.setattr(server_module, "_free_port", lambda: other.getsockname()[1])
        with pytest.raises(ProcessError, match=r"Address already in use|another program answers"):
            serve(tmp_path, "none", request_)


def _answer_health(listener: socket.socket) -> None:
    """Say that all is well, and of what model, as another llama-server would."""
    said = b'{"status": "ok", "model_path": "model.gguf", "model_alias": "x", "build_info": "b8763-b8763"}'
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said)


def test_a_late_answer_is_not_taken_for_the_next_one(tmp_path: Path, request_: WorkerRequest) -> None:
    session = WorkerSession(fake_build(tmp_path, "none"), in_time(request_, 0.5))
    with pytest.raises(ProcessError, match=r"no answer after 0\.5 s"):
        session.generate("batched", 100)  # takes a second
    time.sleep(1.0)
    with pytest.raises(ProcessError, match=r"no answer after 0\.5 s"):
        session.generate("batched", 2)
    session.close()


def test_no_room_for_the_input_is_one_line(
    tmp_path: Path, request_: WorkerRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = fake_build(tmp_path, "none")

    def no_room(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_room)
    with pytest.raises(ProcessError, match=r"prompt-ids cannot be written: No space left on device: point TMPDIR to"):
        run_worker(build, request_)
