"""Receivers on loopback: what a webhook posts to, behaving as told."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FINDING = {
    "rule": "stale_engine",
    "cause": "stale_engine",
    "severity": "act",
    "confidence": "high",
    "symptom": "The engine is behind.",
    "explanation": "It draws with older weights.",
    "fix": "Synchronize more often.",
    "decides": "Compare checksums.",
    "step": 40,
    "steps": 1,
    "evidence": [{"metric": "full/k3", "value": 0.25, "relation": ">", "threshold": 0.05, "unit": "nat"}],
}
"""A finding as `Finding.as_dict` makes it."""
HOSTILE = "$(touch pwned) `touch pwned`; touch pwned & <!channel> </script> \u202e\x00\x1b[31m' \" \ud800\nnext"
"""A text of a log that tries to be a command, a mention, markup and a terminal's commands."""

Answer = Callable[[BaseHTTPRequestHandler, int], None]


def answer(status: int, body: bytes = b"ok", **headers: str) -> Answer:
    """Answer every request alike."""

    def give(request: BaseHTTPRequestHandler, number: int) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return give


def in_turn(*answers: Answer) -> Answer:
    """Answer the first request by the first, and so on; the last goes on."""
    return lambda request, number: answers[min(number, len(answers) - 1)](request, number)


def trickle(request: BaseHTTPRequestHandler, number: int) -> None:
    """A byte of a header every tenth of a second, without end."""
    request.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
    for _ in range(600):
        time.sleep(0.1)
        request.wfile.write(b"x")
        request.wfile.flush()


class Received:
    """What a receiver got."""

    def __init__(self) -> None:
        self.url = ""
        self.posts: list[tuple[float, str, dict[str, str], Any]] = []
        """When, path, headers and JSON of each."""

    @property
    def bodies(self) -> list[Any]:
        return [body for *_, body in self.posts]


@contextmanager
def receiver(give: Answer) -> Iterator[Received]:
    """A server on loopback, for as long as the block runs."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.posts.append((time.monotonic(), self.path, dict(self.headers), json.loads(body)))
            with suppress(OSError):  # the client may go away
                give(self, len(received.posts) - 1)

        def do_GET(self) -> None:
            received.posts.append((time.monotonic(), self.path, dict(self.headers), None))

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
