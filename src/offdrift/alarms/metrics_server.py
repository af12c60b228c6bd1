"""A small HTTP server for Prometheus: `GET /metrics`, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from typing import Any

from offdrift.alarms.exposition import CONTENT_TYPE
from offdrift.errors import BadValueError

LOOPBACK = "127.0.0.1"
PATH = "/metrics"
SLOWEST_S = 10.0
"""Seconds that a client may be silent."""


def listening_address(words: str) -> tuple[str, int]:
    """Return host and port of `PORT`, `HOST:PORT` or `[HOST]:PORT`; a port alone is on loopback.

    Raises: `BadValueError` for anything else.

    Example:
        >>> listening_address("9464"), listening_address("0.0.0.0:9464"), listening_address("[::1]:0")
        (('127.0.0.1', 9464), ('0.0.0.0', 9464), ('::1', 0))
    """
    host, _, port = words.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not (port.isascii() and port.isdecimal() and int(port) < 2**16) or (":" in bare and not bracketed):
        raise BadValueError(
            f"--prometheus {words!r}: write PORT or HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:9464; "
            "an IPv6 address stands in brackets"
        )
    return bare or LOOPBACK, int(port)


class MetricsServer:
    """Serves a text at /metrics from threads of its own, until `close`.

    Args:
        address: host and port; port 0 is any that is free.
        text: called for each request.

    Raises: `BadValueError` if nothing can listen there.
    """

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        class Handler(_Handler):
            metrics = staticmethod(text)

        kind = _Server6 if ":" in address[0] else _Server
        try:
            self._server = kind(address, Handler)
        except OSError as e:
            where = f"[{address[0]}]" if ":" in address[0] else address[0]
            raise BadValueError(
                f"--prometheus: nothing can listen on {where}:{address[1]} ({e.strerror or e}); choose another port, "
                "or 0 for any that is free"
            ) from e
        host, port = self._server.server_address[:2]
        self.url = f"http://{f'[{host}]' if ':' in str(host) else host}:{port}{PATH}"
        """Where the metrics are."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that goes away is no fault of the watch."""


class _Server6(_Server):
    address_family = AF_INET6


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "offdrift", ""
    timeout = SLOWEST_S
    metrics: Callable[[], str]

    def do_GET(self) -> None:
        """Answer /metrics; to HEAD without its text."""
        right = self.path.partition("?")[0] == PATH
        content = (self.metrics() if right else f"offdrift watch serves {PATH} and nothing else\n").encode()
        self.send_response(200 if right else 404)
        self.send_header("Content-Type", CONTENT_TYPE if right else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Print nothing: stdout and stderr are the watch's."""

    def log_error(self, format: str, *args: Any) -> None:
        """Print nothing."""
