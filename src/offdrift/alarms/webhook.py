"""`Webhook`: an address that gets each finding as JSON.

The address is often a secret by itself (Slack's are), so messages name its host alone. Redirects are not followed: a
finding goes to the address that was given and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from offdrift.alarms.alarm import Alarm
from offdrift.alarms.place import Delivery
from offdrift.errors import BadValueError
from offdrift.hosts import on_this_machine
from offdrift.show.json_access import visible

WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds before each further try."""
LONGEST_WAIT = 60.0
"""Seconds that a server's Retry-After may ask for."""
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""
ANSWER = 4096
"""Bytes of an answer that are read."""
QUOTED = 200


class Webhook:
    """Posts each alarm as JSON.

    Args:
        url: https, or http on this machine.
        level: the least severe finding that is posted.
        timeout: seconds that one try may take in all, name lookup and a slow answer included.
        waits: seconds before each further try.
        insecure: whether http may go to another machine, readable by everybody on the way.

    Raises: `BadValueError` for what is no address of that kind; the message does not hold the path.
    """

    def __init__(
        self,
        url: str,
        *,
        level: str = "watch",
        timeout: float | int = 10.0,
        waits: Sequence[float | int] = WAITS,
        insecure: bool = False,
    ) -> None:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            parts, host = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable():
            raise BadValueError("--webhook: the address is none; write https://HOST/PATH, as the service gives it")
        if parts.username or parts.password:
            raise BadValueError(f"--webhook: the address on {host} holds a user or password; use one without")
        self._here = on_this_machine(host)
        if parts.scheme == "http" and not self._here and not insecure:
            raise BadValueError(
                f"--webhook: http:// to {host} would send findings in the clear to another machine; use https://, "
                "a tunnel to 127.0.0.1, or --insecure on a network that you trust"
            )
        self.level, self.timeout, self.waits = level, timeout, tuple(waits)
        self.name, self.key = f"--webhook {parts.scheme}://{visible(host)}", f"webhook {url}"
        self._url, self._secret = url, parts.path + (f"?{parts.query}" if parts.query else "")

    def send(self, alarm: Alarm, stop: threading.Event) -> Delivery:
        """Post one alarm, several times if need be."""
        body = json.dumps(alarm.as_dict()).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "offdrift",
            "Idempotency-Key": alarm.id,  # of two posts after a timeout, a receiver may drop one
        }
        problem = ""
        for wait in (*self.waits, None):
            problem, retry = self._try(urllib.request.Request(self._url, body, headers, method="POST"))
            if not problem or retry is None or wait is None or stop.wait(max(wait, retry)):
                break
        return Delivery(problem)

    def _try(self, request: urllib.request.Request) -> tuple[str, float | None]:
        """Problem, and the least seconds to wait before another try; None if another is of no use."""
        answers: list[tuple[str, float | None]] = []
        # In a thread of its own: a name lookup has no timeout, and one byte a second keeps a socket's at bay.
        thread = threading.Thread(target=lambda: answers.append(self._post(request)), daemon=True)
        thread.start()
        thread.join(self.timeout)
        return answers[0] if answers else (f"no answer within {self.timeout:g} s", 0.0)

    def _post(self, request: urllib.request.Request) -> tuple[str, float | None]:
        proxies = [urllib.request.ProxyHandler({})] if self._here else []
        try:
            with urllib.request.build_opener(_NoRedirect, *proxies).open(request, timeout=self.timeout) as answer:
                answer.read(ANSWER)
            return "", None
        except urllib.error.HTTPError as e:
            with e:
                words = f"it answered {e.code}"
                if 300 <= e.code < 400:
                    return f"{words}, a redirect, which is not followed; give the address that it leads to", None
                quoted = ""
                with contextlib.suppress(OSError, HTTPException):
                    quoted = e.read(QUOTED).decode("utf-8", "replace").strip()
                return self._safe(f"{words}: {quoted}" if quoted else words), retry_after(e)
        except Exception as e:  # whatever a library raises, it did not arrive
            reason = getattr(e, "reason", e)
            return self._safe(f"it cannot be reached: {reason or type(e).__name__}"), 0.0

    def _safe(self, words: str) -> str:
        """Words for the terminal, without the part of the address that is a secret."""
        hidden = words.replace(self._secret, "/...") if len(self._secret) > 1 else words
        return visible(hidden.replace("\n", " "))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **options: Any) -> None:
        """Follow none: the answer stays an error."""


def retry_after(answer: urllib.error.HTTPError) -> float | None:
    """Return the least seconds before another try; None if it would be refused again.

    They are those of Retry-After, `LONGEST_WAIT` at most; a date or nonsense is 0.
    """
    if answer.code not in AGAIN:
        return None
    words = str(answer.headers.get("Retry-After") or "").strip()
    return min(float(words), LONGEST_WAIT) if words.isascii() and words.isdigit() else 0.0
