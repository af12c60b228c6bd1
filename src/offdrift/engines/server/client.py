"""JSON over HTTP to an inference server that nobody vouches for: bounded, retried, named in errors.

The standard library does all of it: a rollout is a few hundred requests that take seconds each, and
a client library would add a dependency and save nothing. Redirects are not followed and proxies are
not asked, so a key goes to the address that was written down and nowhere else. A key is read from
`OFFDRIFT_API_KEY` alone, because keys of other services may be around; it stands in no record, no
message and no attribute.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from offdrift.errors import EngineError

BUSY = (429, 502, 503, 504)
"""Statuses that a later try may not meet again. 500 is none: there an engine has died."""
EXCERPT = 300
"""Characters of an answer that an error quotes."""
SMALL = 2**24
"""Bytes of an answer that carries no log-probs."""


class StatusError(EngineError):
    """The server answered, and the answer is a refusal."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server and the open connections to it; safe to use from several threads.

    Args:
        url: as OpenAI clients take it, `http://HOST:PORT/v1`; the `/v1` may be left out.
        timeout: seconds for which the server may say nothing; it says nothing while it draws.
        retries: further tries where the server is busy or the connection breaks. Only for requests
            that may be sent twice: a draw is a function of its seed, so its answer is the same.

    Raises: `EngineError` for an address that is none, or one with a password, which would be recorded.
    """

    def __init__(self, url: str, *, timeout: float | int = 600.0, retries: int = 3) -> None:
        try:
            parts = urlsplit(url)
            host, self._port = parts.hostname, parts.port
        except ValueError:  # which may quote a password
            raise EngineError(
                f"url = {_harmless(url)!r} is no address; write http://HOST:PORT/v1"
            ) from None
        if parts.scheme not in ("http", "https") or not host:
            raise EngineError(f"url = {_harmless(url)!r} is no address; write http://HOST:PORT/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise EngineError(
                f"url = {_harmless(url)!r} holds more than an address, and it would be recorded; "
                "put a key into OFFDRIFT_API_KEY"
            )
        self._kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._host, self._path = host, parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._timeout, self._retries = timeout, retries
        self._idle: deque[http.client.HTTPConnection] = deque()

    def get(self, path: str) -> Any:
        """The JSON at a path. Raises as `post` does."""
        return self._asked("GET", path, None, SMALL, self._retries)

    def post(self, path: str, body: Any = None, *, limit: int = SMALL, again: bool = True) -> Any:
        """The JSON that a request is answered with; None for an empty answer.

        Args:
            limit: bytes that the answer may have.
            again: whether the request may be sent twice.

        Raises: `StatusError` for a refusal, with address, status and what the server said;
            `EngineError` if there is no server, no answer in time, or none that can be read.
        """
        return self._asked("POST", path, body, limit, self._retries if again else 0)

    def close(self) -> None:
        """End the open connections. Idempotent; the next request opens others."""
        while connection := self._waiting():
            connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self.close()

    def _asked(self, verb: str, path: str, body: Any, limit: int, retries: int) -> Any:
        sent = None if body is None else json.dumps(body, allow_nan=False).encode()
        where = f"{verb} {self.url}{path}"
        for left in range(retries, -1, -1):
            try:
                # An idle connection may have been closed by the server meanwhile; a new one was not.
                fresh = left < self._retries or not left
                status, content = self._once(verb, path, sent, limit, fresh=fresh)
            except (OSError, http.client.HTTPException) as error:
                # A server that is too slow becomes no faster by the same request once more.
                if not left or isinstance(error, TimeoutError):
                    raise _unreachable(where, error, self._timeout) from error
            else:
                if status == 200:
                    return _parsed(content, limit, where)
                if status not in BUSY or not left:
                    said = _excerpt(content)
                    raise StatusError(f"{where} was answered with status {status}: {said}", status)
            time.sleep(0.1 * 4 ** (retries - left))
        raise AssertionError("unreachable: the last try returns or raises")

    def _once(
        self, verb: str, path: str, sent: bytes | None, limit: int, *, fresh: bool
    ) -> tuple[int, bytes]:
        connection = self._waiting()
        if fresh and connection is not None:
            connection.close()  # its place is taken, so that there are never more than requests
            connection = None
        connection = connection or self._kind(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(verb, self._path + path, sent, _headers())
            answer = connection.getresponse()
            content = answer.read(limit + 1)
        except BaseException:
            connection.close()
            raise
        # What was not read to its end would be taken for the next answer.
        if answer.will_close or not answer.isclosed():
            connection.close()
        else:
            self._idle.append(connection)
        if len(content) <= limit and answer.length:
            raise http.client.IncompleteRead(content, answer.length)
        return answer.status, content

    def _waiting(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None


def _headers() -> dict[str, str]:
    key = _key()
    return {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )


def _key() -> str:
    key = os.environ.get("OFFDRIFT_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # or the library would quote it in its error
        raise EngineError("OFFDRIFT_API_KEY holds characters that no header can carry; set it anew")
    return key


def _parsed(content: bytes, limit: int, where: str) -> Any:
    if len(content) > limit:
        raise EngineError(
            f"{where} was answered with more than {limit:,} bytes, which no answer to it needs; "
            "is another service behind this address?"
        )
    try:
        return json.loads(content) if content.strip() else None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{where} was not answered with JSON: {_excerpt(content)}") from error


def _excerpt(content: bytes) -> str:
    said = content[: 4 * EXCERPT].decode(errors="replace")
    if key := _key():
        said = said.replace(key, "***")  # some servers repeat what they were sent
    return repr(" ".join(said.split())[:EXCERPT])


def _harmless(url: str) -> str:
    """An address without what stands before its @ or behind its ?."""
    return url.rpartition("@")[2].partition("?")[0].partition("#")[0]


def _unreachable(where: str, error: Exception, timeout: float | int) -> EngineError:
    if isinstance(error, TimeoutError):
        return EngineError(
            f"{where}: no answer within {timeout:g} s; raise timeout, or lower concurrency"
        )
    return EngineError(
        f"{where}: {type(error).__name__}: {error}; is the server running at this address?"
    )
