"""A program in the place of llama-worker, llama-server or llama-bench that goes wrong in a way of its own.

`python fake_llama.py PROGRAM FAULT FOLDER ARGUMENTS...`. It needs nothing but the standard library, so that it starts
fast. FOLDER/canned.json has what a right answer is: n_vocab and token_ids. Logits are 10 for the chosen id, else 0.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM, FAULT, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
ARGV = sys.argv[4:]
CANNED: dict[str, Any] = json.loads((FOLDER / "canned.json").read_text())
N_VOCAB: int = CANNED["n_vocab"] + (FAULT == "other_vocabulary")
STEP_S = 0.01


def value(flag: str) -> str:
    return ARGV[ARGV.index(flag) + 1]


def say(data: bytes, fd: int = 2) -> None:
    while data:
        data = data[os.write(fd, data) :]


def log_settings() -> None:
    n_ctx = value("-c") if "-c" in ARGV else "512"
    lines = (
        f"llama_context: n_ctx = {n_ctx}",
        "llama_context: n_batch = 512",
        "llama_context: n_ubatch = 512",
        "llama_context: flash_attn = enabled",
        "system_info: n_threads = 1",
        "load_tensors:   CPU_Mapped model buffer size =     0.99 MiB",
        "llama_kv_cache: size = 0.06 MiB ( 256 cells, 1 layers, 1/1 seqs), K (f16): 0.03 MiB, V (f16): 0.03 MiB",
    )
    say("".join(f"{line}\n" for line in lines).encode())


def fail() -> None:
    """Go wrong without an answer, if that is the fault."""
    if FAULT == "hangs":
        time.sleep(600)
    if FAULT == "floods_log":
        while True:
            say(b"GGML says the same again and again\n" * 2000)
    if FAULT == "floods_output":
        while True:
            say(b"[1, 2, 3]\n" * 6000, 1)
    if FAULT == "endless_line":
        while True:
            say(b"[" * 65536, 1)
    if FAULT == "exits":
        sys.exit(0)
    if FAULT == "refuses":
        sys.exit("error: failed to load model")
    if FAULT == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "odd_signal":
        os.kill(os.getpid(), 40)
    if FAULT == "loses_gpu":
        say(b"CUDA error: unspecified launch failure\n  current device: 0, in function step\n  ggml-cuda.cu:97\n")
        os.abort()
    if FAULT == "not_utf8":
        say(b"error: \xff\xfe \x1b[31mcannot read \x00 the model\n")
        sys.exit(1)


def generation(n_predict: int) -> dict[str, Any]:
    """Return what llama-worker says of a run, with the fault in it."""
    time.sleep(STEP_S * n_predict)
    ids = [0] * n_predict if FAULT == "repeats_eos" else CANNED["token_ids"][:n_predict]
    if FAULT == "too_few":
        ids = ids[: n_predict // 2]
    found = {
        "token_ids": ids,
        "top2_gap": [10.0] * len(ids),
        "n_non_finite": 0,
        "prefill_time_ns": 1000000,
        "first_token_time_ns": 1000001,
        "decode_time_ns": [1000000] * (n_predict - 1),
        "wall_time_ns": 5000000,
    }
    if FAULT == "omits_tokens":
        del found["token_ids"]
    if FAULT == "no_tokens":
        found["token_ids"] = []
    if FAULT == "no_time":
        found["prefill_time_ns"] = 0
    if FAULT == "huge_ids":
        found["token_ids"] = [2**70] * n_predict
    if FAULT == "huge_time":
        found["prefill_time_ns"] = 10**400
    return found


def loaded() -> dict[str, Any]:
    number = "0" if FAULT == "build_0" else "8763"
    folder = "/usr/lib" if FAULT == "other_library" else FOLDER / "bin"
    return {
        "load_time_ns": 1000,
        "n_vocab": N_VOCAB,
        "n_threads": 1,
        "system_info": "CPU",
        "libllama": f"{folder}/libllama.so.0.0.{number}",
        "compiler": "cc",
    }


def as_json(found: Any) -> bytes:
    text = json.dumps(found)
    if FAULT == "comma":
        text = text.replace("1000000,", "1000000,5,")
    if FAULT == "comma_text":
        text = text.replace("1000000,", '"1000000,5",')
    if FAULT == "answers_not_utf8":
        return text.encode().replace(b"token", b"\xff").replace(b"cc", b"\xff") + b"\n"
    return text.encode() + b"\n"


def worker() -> None:
    log_settings()
    fail()
    if "--serve" in ARGV:
        say(as_json(loaded()), 1)
        for line in sys.stdin:
            if FAULT == "hangs_later":
                time.sleep(600)
            if FAULT == "dies_later":
                sys.exit("error: worn out")
            say(as_json(generation(int(line.split()[1]))), 1)
            if FAULT == "says_more":
                say(b"one more line\n", 1)
        return
    n_predict = int(value("-n"))
    found = generation(n_predict)
    rows = b""
    for token in found.get("token_ids", []):
        row = [0.0] * N_VOCAB
        row[token % N_VOCAB] = 10.0
        rows += struct.pack(f"<{len(row)}f", *row)
    if FAULT == "full_disk":
        rows = rows[:-100]
    if FAULT == "lies":
        found["token_ids"] = [(token + 1) % N_VOCAB for token in found["token_ids"]]
    if FAULT != "no_logits":
        Path(value("--logits-out")).write_bytes(rows)
    Path(value("--out")).write_bytes(as_json(found | loaded()))


def bench() -> None:
    log_settings()
    fail()
    time.sleep(STEP_S)
    number = 0 if FAULT == "build_0" else 8763
    n_gen = int(value("-n")) // 2 if FAULT == "too_few" else int(value("-n"))
    times = [] if FAULT == "no_time" else [1000000]
    common = {"build_number": number, "type_k": "f16", "type_v": "f16", "n_threads": 1, "n_batch": 512, "n_ubatch": 512}
    tests = [
        {"samples_ns": times, "n_prompt": int(value("-p")), "n_gen": 0} | common,
        {"samples_ns": times, "n_prompt": 0, "n_gen": n_gen} | common,
    ]
    text = as_json(tests).strip().replace(b"1000000]", b"1000000,5]") if FAULT == "comma" else as_json(tests).strip()
    say(b"[\n" + text[1:-1] + b"\n]\n", 1)
    time.sleep(600 if FAULT == "stays" else 0)


def completion(body: dict[str, Any]) -> Any:
    found = generation(body["n_predict"])
    answer = {
        "model": "another" if FAULT == "another_answers" else value("-a"),
        "tokens": found.get("token_ids"),
        "timings": {
            "prompt_n": len(body["prompt"]),
            "prompt_ms": {"no_time": 0, "huge_time": 1e308}.get(FAULT, 1000000),
            "predicted_ms": 1000000,
            "predicted_n": body["n_predict"],
        },
    }
    if answer["tokens"] is None:
        del answer["tokens"]
    return [answer] if FAULT == "a_list" else answer


def props() -> dict[str, str]:
    return {
        "model_path": "/elsewhere/other.gguf" if FAULT == "other_model" else value("-m"),
        "model_alias": "another" if FAULT == "other_server" else value("-a"),
        "build_info": "b0-unknown" if FAULT == "build_0" else "b8763-b8763",
    }


def serve_one(connection: socket.socket) -> None:
    stream = connection.makefile("rb")
    path = stream.readline().split()[1]
    n_bytes = 0
    while (line := stream.readline().strip()) != b"":
        if line.lower().startswith(b"content-length:"):
            n_bytes = int(line.split(b":")[1])
    if path == b"/health":
        found: Any = {"status": "ok"}
    elif path == b"/props":
        found = props()
    else:
        body = json.loads(stream.read(n_bytes))
        fail_request(connection)
        found = completion(body)
        if body.get("stream"):
            stream_events(connection, found)
            return
    data = as_json(found)
    promised = len(data) * (2 if FAULT == "breaks_off" and path == b"/completion" else 1)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % promised + data)
    if promised > len(data):
        os._exit(1)


def stream_events(connection: socket.socket, found: Any) -> None:
    """Send each id as an event of its own, and the rest of the answer as the last one."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    if FAULT == "breaks_off":
        os._exit(1)
    last = found | {"tokens": []} if isinstance(found, dict) and "tokens" in found else found
    ids = found.get("tokens", []) if isinstance(found, dict) else []
    for event in (*({"tokens": [token], "stop": False} for token in ids), last):
        connection.sendall(b"data: " + as_json(event) + b"\n")


def fail_request(connection: socket.socket) -> None:
    if FAULT == "hangs_later":
        time.sleep(600)
    if FAULT == "dies_later":
        say(b"error: worn out\n")
        os._exit(1)
    if FAULT == "drips":  # a byte now and then, so that no single wait is long
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.1)
    if FAULT == "floods_answer":
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b" " * 65536)


def serve() -> None:
    log_settings()
    fail()
    listener = socket.create_server((value("--host"), int(value("--port"))))
    with (FOLDER / "ports").open("a") as file:
        file.write(f"{value('--port')}\n")
    while True:
        connection, _ = listener.accept()
        with connection:
            serve_one(connection)


if __name__ == "__main__":
    {"llama-worker": worker, "llama-server": serve, "llama-bench": bench}[PROGRAM]()
