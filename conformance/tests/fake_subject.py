"""An engine that is none: gives the ids it was started with, as a command or as a server; or does something wrong.

`python fake_subject.py IDS [FAULT]` answers request lines on standard input.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def main(argv: list[str]) -> None:
    ids, fault = [int(part) for part in argv[0].split(",")], argv[1] if len(argv) > 1 else ""
    print("loading", file=sys.stderr)
    for n_done, line in enumerate(sys.stdin):
        request = json.loads(line)
        if fault == "hang":
            time.sleep(60)
        if fault == "crash":
            sys.exit("no such kernel")
        if fault == "text":
            print("hello", flush=True)
            continue
        found = ids[: request["n_predict"]]
        if fault == "unsteady" and n_done:
            found[-1] += 1
        answer: dict[str, Any] = {"token_ids": found, "prompt_time_ns": 7, "generation_time_ns": 9}
        print(json.dumps([answer] if fault == "list" else answer), flush=True)


class FakeServer(ThreadingHTTPServer):
    """Both APIs; `answers` has what a path answers in place of the right thing, `requests` what was asked."""

    daemon_threads = True

    def __init__(self, ids: list[int], answers: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ids, self.answers = ids, answers
        self.requests: list[tuple[str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        known = {"/props": {"model_path": "/models/x.gguf"}, "/v1/models": {"data": [{"id": "x"}]}}
        self._answer(known.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        ids, n_prompt = self.server.ids, len(body["prompt"])
        timings = {"prompt_n": n_prompt, "prompt_ms": 1.5, "predicted_ms": 2.5}
        known = {
            "/completion": {"tokens": ids, "timings": timings},
            "/v1/completions": {"choices": [{"token_ids": ids}], "usage": {"prompt_tokens": n_prompt}},
        }
        self._answer(known.get(self.path))

    def _answer(self, found: Any) -> None:
        found = self.server.answers.get(self.path, found)
        if found == "trickle":
            self._trickle()
            return
        data = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(500 if found is None else 302 if data == b"moved" else 200)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _trickle(self) -> None:
        """Send a header now and then, so that no single read waits long."""
        try:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            for _ in range(100):
                self.wfile.write(b"X: y\r\n")
                time.sleep(0.1)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def serve(ids: list[int], **answers: Any) -> Iterator[FakeServer]:
    """Run a server while the block runs; answers: by path, with _ for /."""
    with FakeServer(ids, {f"/{path.replace('__', '/')}": answer for path, answer in answers.items()}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
