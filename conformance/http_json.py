"""JSON over HTTP to one server, each request under one deadline as a whole, without proxies and redirects."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from conformance.errors import SubjectError, SubjectTimeoutError, SubjectUnreachableError

_MAX_N_BYTES = 64 << 20
_N_SHOWN = 200


def parse_base_url(url: str) -> SplitResult:
    """Return the parts of the address of a server; raises ValueError for one that is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address of a server, expected http://HOST:PORT")
    if parts.username is not None or parts.port == 0:
        raise ValueError(f"{url!r}: expected no user and a port above 0")
    return parts


def is_loopback(url: str) -> bool:
    """Say whether an address stays on this machine; raises ValueError for one that is none."""
    host = parse_base_url(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class HttpJson:
    """A server at `url`, the path of which is put before that of each request; deadline_s is for each of them."""

    url: str
    deadline_s: float

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Get, or post `body`, and return the object that is answered.

        Raises SubjectUnreachableError if nobody listens, SubjectTimeoutError when the deadline has passed, SubjectError
        for an answer that is no object or no success.
        """
        parts = parse_base_url(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=self.deadline_s)
        end = time.monotonic() + self.deadline_s
        watchdog = threading.Timer(self.deadline_s, _hang_up, [connection])
        watchdog.daemon = True
        try:
            _connect(connection)
            watchdog.start()
            return _exchange(connection, parts.path.rstrip("/") + path, body)
        except (OSError, http.client.HTTPException, SubjectError) as error:
            if time.monotonic() >= end:
                raise SubjectTimeoutError(f"{path}: no answer after {self.deadline_s:g} s") from None
            if isinstance(error, SubjectError):
                raise
            raise SubjectError(f"{path}: {type(error).__name__}: {error}") from None
        finally:
            watchdog.cancel()
            connection.close()


def _connect(connection: http.client.HTTPConnection) -> None:
    try:
        connection.connect()
    except TimeoutError:
        raise
    except OSError as error:
        raise SubjectUnreachableError(f"no server at port {connection.port}: {error.strerror or error}") from None


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """End a request at its deadline; a server that sends a byte now and then would outlast any timeout of a read."""
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _exchange(connection: http.client.HTTPConnection, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read(_MAX_N_BYTES + 1)
    if len(text) > _MAX_N_BYTES:
        raise SubjectError(f"{path}: answered more than {_MAX_N_BYTES} bytes")
    if response.status != http.client.OK:
        raise SubjectError(f"{path}: HTTP {response.status}: {text[:_N_SHOWN].decode(errors='replace')}")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise SubjectError(f"{path}: answered {text[:_N_SHOWN]!r}, expected JSON") from None
    if not isinstance(answer, dict):
        raise SubjectError(f"{path}: answered {text[:_N_SHOWN]!r}, expected an object")
    return answer
