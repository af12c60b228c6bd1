"""A Hugging Face hub on loopback: one data set, `me/log`, as far as the hub's own client asks for it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

API, FILES = "/api/datasets/me/log", "/datasets/me/log/resolve/main/"


class Hub(ThreadingHTTPServer):
    """Files by their path in the data set; what is asked is in `asked`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.status: dict[str, int] = {}
        """Another status than 200 for requests whose path begins so."""
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def _say(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._say(json.dumps(value).encode(), Content_Type="application/json")

    def _file(self, name: str) -> None:
        if name not in self.server.files:
            return self._say(b"", 404, X_Error_Code="EntryNotFound")
        data, wanted = self.server.files[name], self.headers.get("Range")
        if wanted is None:
            return self._say(data, ETag='"1"')
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(data)) + 1, len(data))
        return self._say(data[start:stop], 206, ETag='"1"', Content_Range=f"bytes {start}-{stop - 1}/{len(data)}")

    def _tree(self, folder: str) -> None:
        """Entries of one folder."""
        below = {n.removeprefix(folder): d for n, d in self.server.files.items() if n.startswith(folder)}
        if not below:
            return self._say(b"{}", 404, X_Error_Code="EntryNotFound")
        inner = {n.partition("/")[0] for n in below if "/" in n}
        listed = [{"type": "directory", "path": folder + n, "oid": "0"} for n in sorted(inner)]
        listed += [
            {"type": "file", "path": folder + n, "size": len(d), "oid": "1"} for n, d in below.items() if "/" not in n
        ]
        return self._json(listed)

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path.partition("?")[0])
        self.server.asked.append(path)
        status = next((s for start, s in self.server.status.items() if path.startswith(start)), 200)
        if status != 200:
            self._say(b"{}", status)
        elif path.startswith(FILES):
            self._file(path.removeprefix(FILES))
        elif path.startswith(f"{API}/tree/main"):
            self._tree(f"{path.removeprefix(f'{API}/tree/main').strip('/')}/".lstrip("/"))
        elif path == API:
            self._json({"id": "me/log", "sha": "a" * 40, "siblings": []})
        else:
            self._say(b"{}", 404, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = _answer


@contextmanager
def serving() -> Iterator[Hub]:
    """The hub, until the end of the block."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
