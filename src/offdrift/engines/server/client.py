"""JSON over HTTP to an inference server: bounded answers, retries, errors that name the address.

The server is not trusted. Redirects are not followed, and proxies, cookies and other settings of the
environment are ignored, so a key goes only to the address that was configured. The key is read from
`OFFDRIFT_API_KEY` alone and never stored or quoted.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

import httpx

from offdrift.errors import EngineError

BUSY = (429, 502, 503, 504)
"""Statuses worth a retry. 500 is not one: there an engine has died."""
EXCERPT = 300
"""Characters of an answer that an error quotes."""
SMALL = 2**24
"""Bytes of an answer that carries no log-probs."""


class StatusError(EngineError):
    """The server answered with a refusal."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server and the open connections to it; safe to use from several threads.

    Args:
        url: as OpenAI clients take it, `http://HOST:PORT/v1`; the `/v1` may be left out.
        timeout: seconds without a byte from the server; it sends nothing while it draws.
        retries: further tries where the server is busy or the connection breaks. Only for requests
            that may be sent twice: a draw is a function of its seed, so its answer is the same.

    Raises: `EngineError` for an invalid address, or one with a password, which would be recorded.
    """

    def __init__(self, url: str, *, timeout: float | int = 600.0, retries: int = 3) -> None:
        # For error messages: without what stands before its @ or behind its ?.
        shown = url.rpartition("@")[2].partition("?")[0].partition("#")[0]
        not_an_address = f"url = {shown!r} is no address; write http://HOST:PORT/v1"
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:  # which may quote a password
            raise EngineError(not_an_address) from None
        if parts.scheme not in ("http", "https") or not host:
            raise EngineError(not_an_address)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise EngineError(
                f"url = {shown!r} holds more than an address, and it would be recorded; put a key into OFFDRIFT_API_KEY"
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._timeout, self._retries = timeout, retries
        # An idle connection may have been closed by the server meanwhile. Last tries therefore open
        # a new one, through a client that keeps none.
        tls = ssl.create_default_context()
        self._pooled, self._fresh = (
            httpx.Client(
                timeout=timeout,
                verify=tls,
                trust_env=False,
                follow_redirects=False,
                limits=httpx.Limits(max_keepalive_connections=idle, keepalive_expiry=None),
                headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            )
            for idle in (None, 0)
        )

    def get(self, path: str) -> Any:
        """The JSON at a path. Raises as `post` does."""
        return self._request("GET", path, None, SMALL, self._retries)

    def post(self, path: str, body: Any = None, *, limit: int = SMALL, again: bool = True) -> Any:
        """The JSON answer to a request; None for an empty answer.

        Args:
            limit: largest answer, bytes.
            again: whether the request may be sent twice.

        Raises: `StatusError` for a refusal, with address, status and the server's words;
            `EngineError` if there is no server, no answer in time, or none that can be read.
        """
        return self._request("POST", path, body, limit, self._retries if again else 0)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._pooled.close()
        self._fresh.close()

    def __del__(self) -> None:
        if hasattr(self, "_fresh"):
            self.close()

    def _request(self, verb: str, path: str, body: Any, limit: int, retries: int) -> Any:
        sent = None if body is None else json.dumps(body, allow_nan=False).encode()
        where = f"{verb} {self.url}{path}"
        if self._fresh.is_closed:
            raise EngineError(f"{where}: the connections are closed; construct another engine")
        for left in range(retries, -1, -1):
            client = self._pooled if left and left == self._retries else self._fresh
            try:
                status, content = self._send(client, verb, path, sent, limit)
            except httpx.TimeoutException as error:
                # A server that is too slow becomes no faster by the same request once more.
                raise EngineError(
                    f"{where}: no answer within {self._timeout:g} s; raise timeout, or lower concurrency"
                ) from error
            except (httpx.TransportError, httpx.InvalidURL) as error:
                if not left:
                    raise EngineError(
                        f"{where}: {type(error).__name__}: {error}; is the server running at this address?"
                    ) from error
            else:
                if status == 200:
                    return _parsed(content, limit, where)
                if status not in BUSY or not left:
                    message = f"{where} was answered with status {status}: {_excerpt(content)}"
                    raise StatusError(message, status)
            time.sleep(0.1 * 4 ** (retries - left))
        raise AssertionError("unreachable: the last try returns or raises")

    def _send(self, client: httpx.Client, verb: str, path: str, sent: bytes | None, limit: int) -> tuple[int, bytes]:
        """Status and content, of which no more than one piece beyond `limit` bytes is read."""
        key = _key()
        headers = {"Authorization": f"Bearer {key}"} if key else None
        content = bytearray()
        with client.stream(verb, self.url + path, content=sent, headers=headers) as answer:
            for piece in answer.iter_raw():  # undecoded: a compressed answer could be any size
                content += piece
                if len(content) > limit:
                    break
        return answer.status_code, bytes(content)


def _key() -> str:
    key = os.environ.get("OFFDRIFT_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # or httpx would quote it in its error
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
    """The beginning of an answer on one line, without the key, which some servers repeat."""
    text = content[: 4 * EXCERPT].decode(errors="replace")
    if key := _key():
        text = text.replace(key, "***")
    return repr(" ".join(text.split())[:EXCERPT])
