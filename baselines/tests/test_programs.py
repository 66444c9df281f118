"""llama-server and llama-bench, with programs of our own in their place that speak as b8763 does."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from baselines.errors import AnswerError, BuildError, ProcessError
from baselines.llama_cpp.bench import llama_bench_argv, parse_llama_bench, run_llama_bench
from baselines.llama_cpp.build import LlamaBuild
from baselines.llama_cpp.server import LlamaServer, llama_server_argv, parse_completion
from baselines.llama_cpp.worker import WorkerRequest, WorkerSession
from baselines.tests.test_process import is_gone
from baselines.tests.test_worker import run_ok

PROMPT = list(range(1, 40))

_SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
argv = sys.argv
model, port, alias = (argv[argv.index(flag) + 1] for flag in ("-m", "--port", "-a"))
mode = open(os.path.join(os.path.dirname(__file__), "mode")).read()
print("llama_context: n_ctx         = 512", file=sys.stderr, flush=True)
if mode == "dies":
    sys.exit("error: no such model")
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def say(self, code, value):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def stream(self, *events):
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            time.sleep(0.3)
    def do_GET(self):
        if self.path == "/health":
            return self.say(200, {"status": "ok"})
        self.say(200, {"model_path": "/other/model.gguf" if mode == "other" else model, "model_alias": alias,
                       "build_info": "b8763-b8763"})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "n_probs" not in body and body["cache_prompt"] is False and body["ignore_eos"] is True
        if mode == "500":
            return self.say(500, {"error": {"message": "Failed to parse input"}})
        if mode == "hangs":
            time.sleep(60)
        n = body["n_predict"]
        timings = {"prompt_n": len(body["prompt"]) - (mode == "cached"), "prompt_ms": 12.5, "predicted_n": n,
                   "predicted_ms": 2.0 * (n - 1)}
        end = {"timings": timings, "model": alias}
        if body.get("stream"):
            return self.stream({"tokens": [0], "stop": False}, {"tokens": [], "stop": True, **end})
        self.say(200, {"tokens": list(range(n)), **end})
HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""

# the fields of b8763's JSON that are read, among others
BENCH_OUTPUT = """[
  {
    "build_commit": "b8763",
    "build_number": 8763,
    "n_batch": 512, "n_ubatch": 512, "n_threads": 2, "type_k": "f16", "type_v": "f16", "flash_attn": true,
    "n_prompt": 39, "n_gen": 0, "n_depth": 0,
    "samples_ns": [ 18702200 ],
    "samples_ts": [ 3742.88 ]
  },
  {
    "build_commit": "b8763",
    "build_number": 8763,
    "n_batch": 512, "n_ubatch": 512, "n_threads": 2, "type_k": "f16", "type_v": "f16", "flash_attn": true,
    "n_prompt": 0, "n_gen": 8, "n_depth": 0,
    "samples_ns": [ 90000000 ],
    "samples_ts": [ 88.88 ]
  }
]"""


@pytest.fixture
def build(tmp_path: Path) -> LlamaBuild:
    """A build whose programs are ours."""
    program(tmp_path, "llama-server", _SERVER)
    return LlamaBuild(tmp_path, tmp_path, 8763, {}, (), "cc", tmp_path / "log", tool_folders=(tmp_path,))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def program(folder: Path, name: str, code: str, mode: str = "") -> None:
    (folder / "mode").write_text(mode)
    (folder / name).write_text(f"#!{sys.executable}\n{code}")
    (folder / name).chmod(0o755)


def request(model: Path, deadline_s: float = 30.0) -> WorkerRequest:
    return WorkerRequest(model, PROMPT, 9, 512, deadline_s=deadline_s)


def test_a_completion_is_timed_by_client_and_server(build: LlamaBuild, model: Path) -> None:
    server = LlamaServer(build, request(model))
    completion = server.complete(PROMPT, 9)
    server.close()
    assert completion.token_ids == list(range(9))
    assert (completion.prompt_time_ns, completion.generation_time_ns) == (12_500_000, 16_000_000)
    assert completion.wall_time_ns > 0
    assert server.ready_time_ns > 0
    assert server.effective["n_ctx"] == 512
    assert is_gone(server.pid)


def test_a_first_token_is_timed_when_it_comes_and_not_at_the_end(build: LlamaBuild, model: Path) -> None:
    server = LlamaServer(build, request(model))
    start_ns = time.perf_counter_ns()
    first = server.first_token(PROMPT)
    whole_ns = time.perf_counter_ns() - start_ns
    server.close()
    assert first.token_id == 0
    assert first.time_ns is not None
    assert 0 < first.time_ns < whole_ns - 500_000_000


def test_http_500_is_named_and_the_server_stays(build: LlamaBuild, model: Path) -> None:
    (build.folder / "mode").write_text("500")
    server = LlamaServer(build, request(model))
    for _ in range(2):
        with pytest.raises(ProcessError, match=r"llama-server answered HTTP 500: .*Failed to parse input"):
            server.complete(PROMPT, 9)
        with pytest.raises(ProcessError, match=r"llama-server answered HTTP 500: .*Failed to parse input"):
            server.first_token(PROMPT)
    server.close()


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("dies", "ended with exit code 1: error: no such model"),
        ("other", r"serves /other/model\.gguf, expected model2\.gguf"),
    ],
)
def test_a_server_that_cannot_serve_is_ended(build: LlamaBuild, model: Path, mode: str, says: str) -> None:
    (build.folder / "mode").write_text(mode)
    other = model.rename(model.with_name("model2.gguf"))
    with pytest.raises(ProcessError, match=says):
        LlamaServer(build, request(other))


def test_every_request_has_a_deadline(build: LlamaBuild, model: Path) -> None:
    (build.folder / "mode").write_text("hangs")
    server = LlamaServer(build, request(model, deadline_s=1.0))
    with pytest.raises(ProcessError, match=r"gave no answer to /completion after 1 s"):
        server.complete(PROMPT, 9)
    server.close()
    assert is_gone(server.pid)


def test_a_prompt_from_a_cache_is_refused(build: LlamaBuild, model: Path) -> None:
    (build.folder / "mode").write_text("cached")
    server = LlamaServer(build, request(model))
    with pytest.raises(ProcessError, match="processed 38 prompt tokens of 39"):
        server.complete(PROMPT, 9)
    with pytest.raises(ProcessError, match="processed 38 prompt tokens of 39"):
        server.first_token(PROMPT)
    server.close()
    with pytest.raises(AnswerError, match="gave an answer that cannot be read: timings: Field required"):
        parse_completion(b'{"tokens": [], "model": "a"}', "a", 39, 9, 1)


def test_the_server_s_flags_are_the_worker_s(model: Path) -> None:
    argv = list(map(str, llama_server_argv(Path("llama-server"), request(model), 4321, "name")))
    for flag, value in request(model).shared_flags().items():
        assert argv[argv.index(flag) + 1] == value
    assert argv[argv.index("-np") + 1] == "1"
    assert argv[argv.index("-fit") + 1] == "off"
    assert "--no-cache-prompt" in argv


def test_llama_bench_gives_one_time_for_each_test(build: LlamaBuild, model: Path) -> None:
    log = "llama_context: flash_attn    = enabled"
    program(build.folder, "llama-bench", f"import sys\nprint({log!r}, file=sys.stderr)\nprint({BENCH_OUTPUT!r})")
    result = run_llama_bench(build, request(model))
    assert (result.prompt_time_ns, result.generation_time_ns) == (18_702_200, 90_000_000)
    assert (result.effective["flash_attn"], result.effective["n_threads"]) == ("enabled", 2)


def test_llama_bench_is_asked_for_the_same_lengths_and_flags(build: LlamaBuild, model: Path) -> None:
    program(build.folder, "llama-bench", "")
    argv = list(map(str, llama_bench_argv(build, request(model))))
    wanted = {"-p": "39", "-n": "8", "-r": "1", "-o": "json", "-fa": "1", "-ngl": "0", "-b": "512"}
    assert {flag: argv[argv.index(flag) + 1] for flag in wanted} == wanted
    assert "-c" not in argv


def test_a_llama_bench_that_fails_says_so(build: LlamaBuild, model: Path) -> None:
    program(build.folder, "llama-bench", "import sys\nprint('[')\nsys.exit('error: failed to load model')")
    with pytest.raises(ProcessError, match="ended with exit code 1: error: failed to load model"):
        run_llama_bench(build, request(model))
    with pytest.raises(AnswerError, match="gave no time for the test of 0 prompt and 8 generated tokens"):
        parse_llama_bench(BENCH_OUTPUT.replace('"n_gen": 8', '"n_gen": 0'), "", 1, request(model), 8763)


def test_a_build_without_the_program_says_how_to_get_it(tmp_path: Path, model: Path) -> None:
    bare = LlamaBuild(tmp_path, tmp_path, 8763, {}, (), "cc", tmp_path / "log", tool_folders=(tmp_path,))
    with pytest.raises(BuildError, match="no llama-server: build it with --full"):
        LlamaServer(bare, request(model))


@pytest.mark.baseline
def test_a_worker_that_stays_up_gives_what_a_new_one_gives(llama_build: LlamaBuild, tiny_model: Path) -> None:
    once = run_ok(llama_build, request(tiny_model))
    session = WorkerSession(llama_build, request(tiny_model))
    try:
        runs = [session.generate("batched", 9), session.generate("single", 9), session.generate("batched", 3)]
    finally:
        session.close()
    assert [run["token_ids"] for run in runs] == [once.token_ids, once.token_ids, once.token_ids[:3]]
    assert [len(run["decode_time_ns"]) for run in runs] == [8, 8, 2]
    for run in runs:
        assert 0 < run["prefill_time_ns"] <= run["first_token_time_ns"] <= run["wall_time_ns"]
    assert (session.effective["n_ctx"], session.effective["flash_attn"]) == (512, "enabled")
    assert is_gone(session.pid)


@pytest.mark.baseline
def test_a_worker_that_is_asked_nonsense_ends(llama_build: LlamaBuild, tiny_model: Path) -> None:
    session = WorkerSession(llama_build, request(tiny_model))
    with pytest.raises(ProcessError, match="'sideways 3' is not PREFILL N_PREDICT"):
        session.generate("sideways", 3)  # type: ignore[arg-type]
    session.close()
