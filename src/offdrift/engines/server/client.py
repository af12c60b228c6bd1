"""An inference server: JSON over HTTP, and which software, model and kind of log-probs it has.

The server is not trusted. Redirects are not followed, and proxies, cookies and other settings of the
environment are ignored, so a key goes only to the address that was configured. The key is read from
`OFFDRIFT_API_KEY` alone and never stored or quoted.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from threading import Lock
from typing import Any, Literal
from urllib.parse import urlsplit
from weakref import WeakSet

import httpcore
import httpx
import torch

from offdrift.engines.server.settings import settings_of
from offdrift.engines.server.sglang_record import Offers
from offdrift.engines.server.sglang_record import offers as offers_of
from offdrift.errors import EngineError
from offdrift.hosts import on_this_machine
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import Rollouts, TopK

BUSY = (429, 502, 503, 504)
"""Statuses worth a retry. 500 is not one: there an engine has died."""
EXCERPT = 300
"""Characters of an answer that an error quotes."""
SMALL = 2**22
"""Bytes of an answer that carries no log-probs: decoded, JSON takes up to 25 times its bytes."""
DEEPEST = 64
"""Brackets in brackets of such an answer."""
LONGEST = 4096
"""Characters of a name that a server gives and a record keeps."""


class StatusError(EngineError):
    """The server answered with a refusal."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server and the open connections to it; safe to use from several threads.

    Args:
        url: as OpenAI clients take it, `http://HOST:PORT/v1`; the `/v1` may be left out.
        timeout: seconds without a byte from the server, which sends nothing while it draws; and seconds that the rest
            of an answer may take from its first byte on, so that one that trickles ends too.
        retries: further tries where the server is busy or the connection breaks. Only for requests
            that may be sent twice: a draw is a function of its seed, so its answer is the same.
        insecure: whether `http://` may go to another machine, where everyone on the way can read and change
            prompts, answers and the key.

    Raises: `EngineError` for an invalid address, one with a password, which would be recorded, or one on another
        machine without encryption, unless `insecure` says so.
    """

    def __init__(self, url: str, *, timeout: float | int = 600.0, retries: int = 3, insecure: bool = False) -> None:
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
        if parts.scheme == "http" and not insecure and not on_this_machine(host):
            raise EngineError(
                f"url = {shown!r} is on another machine, to which http:// sends prompts and keys in the clear; "
                "use https://, tunnel to 127.0.0.1, or allow it on a network that you trust: rollout.insecure = true "
                "in a recipe, the option insecure=true behind an engine's address"
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._timeout, self._retries = timeout, retries
        # An idle connection may have been closed by the server meanwhile. Last tries therefore open
        # a new one, through a client that keeps none.
        tls = ssl.create_default_context()
        # A name such as `localhost` is what a resolver makes of it: where the address that answers is another
        # machine's after all, nothing is sent.
        only_here = parts.scheme == "http" and not insecure
        self._networks = [_Network(float(timeout), only_here) for _ in range(2)]
        self._pooled, self._fresh = (
            httpx.Client(
                timeout=timeout,
                transport=_Transport(tls, idle, network),
                trust_env=False,
                follow_redirects=False,
                headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            )
            for idle, network in zip((None, 0), self._networks, strict=True)
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
        """Close the connections, also those on which another thread waits for an answer. Idempotent."""
        for network in self._networks:
            network.cut()
        self._pooled.close()
        self._fresh.close()

    def __del__(self) -> None:
        if hasattr(self, "_fresh"):
            self.close()

    def _request(self, verb: str, path: str, body: Any, limit: int, retries: int) -> Any:
        sent = None if body is None else json.dumps(body, allow_nan=False).encode()
        where = f"{verb} {self.url}{path}"
        for left in range(retries, -1, -1):
            if self._fresh.is_closed:
                raise EngineError(f"{where}: the connections are closed; construct another engine")
            client = self._pooled if left and left == self._retries else self._fresh
            try:
                status, content = self._send(client, verb, path, sent, limit)
            except httpx.TimeoutException as error:
                # A server that is too slow becomes no faster by the same request once more.
                raise EngineError(
                    f"{where}: no whole answer within {self._timeout:g} s; raise timeout, or lower concurrency"
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
                    raise StatusError(message + _key_advice(status), status)
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
        if key and (repeated := key.encode()) in content:  # in a name or a version it would be recorded
            content = content.replace(repeated, b"***")
        return answer.status_code, bytes(content)


class _Transport(httpx.HTTPTransport):
    """httpx's own, over a network of ours, of which it lets nobody choose another."""

    def __init__(self, tls: ssl.SSLContext, idle: int | None, network: httpcore.NetworkBackend) -> None:
        super().__init__(verify=tls)
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls, max_keepalive_connections=idle, keepalive_expiry=None, network_backend=network
        )


class _Network(httpcore.NetworkBackend):
    """Connections whose answers end in time, and to this machine alone where nothing is encrypted."""

    def __init__(self, timeout: float, only_here: bool) -> None:
        self._network, self._timeout, self._only_here = httpcore.SyncBackend(), timeout, only_here
        self._open: WeakSet[_Stream] = WeakSet()
        self._lock, self._ended = Lock(), False

    def cut(self) -> None:
        """End every connection for good. A thread that waits for bytes is woken, which closing alone does not do."""
        with self._lock:
            self._ended = True
            open_now = [*self._open]
        for stream in open_now:
            stream.cut()

    def connect_tcp(self, host: str, *args: Any, **options: Any) -> httpcore.NetworkStream:
        """A connection. Raises: `EngineError` where it leads to another machine and may not."""
        stream = self._network.connect_tcp(host, *args, **options)
        address = str(stream.get_extra_info("server_addr")[0])
        if self._only_here and not on_this_machine(address.partition("%")[0]):
            stream.close()
            raise EngineError(
                f"{host} is {address}, another machine, to which http:// sends prompts and keys in the clear; use "
                "https://, or the address 127.0.0.1 or [::1]"
            )
        return self._kept(stream)

    def _kept(self, stream: httpcore.NetworkStream) -> _Stream:
        kept = _Stream(stream, self._timeout, self._kept)
        with self._lock:
            self._open.add(kept)
            ended = self._ended
        if ended:
            kept.close()
            raise httpcore.ConnectError("the connections were closed")
        return kept

    def sleep(self, seconds: float) -> None:
        """See `httpcore.NetworkBackend`."""
        self._network.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    """A connection on which an answer, from its first byte on, takes at most so long, headers included."""

    def __init__(
        self, stream: httpcore.NetworkStream, timeout: float, kept: Callable[[httpcore.NetworkStream], _Stream]
    ) -> None:
        self._stream, self._timeout, self._kept = stream, timeout, kept
        self._socket = stream.get_extra_info("socket")
        self._begun: float | None = None

    def cut(self) -> None:
        """End the connection under whoever reads from it."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Bytes of an answer. Raises: `httpcore.ReadTimeout` where it has taken too long as a whole."""
        if self._begun is None:
            content = self._stream.read(max_bytes, timeout)
            self._begun = time.monotonic()
            return content
        left = self._begun + self._timeout - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the answer trickles")
        return self._stream.read(max_bytes, left if timeout is None else min(timeout, left))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Bytes of a request; what comes next is another answer."""
        self._begun = None
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        """See `httpcore.NetworkStream`."""
        self._stream.close()

    def start_tls(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        """See `httpcore.NetworkStream`."""
        return self._kept(self._stream.start_tls(*args, **options))

    def get_extra_info(self, info: str) -> Any:
        """See `httpcore.NetworkStream`."""
        return self._stream.get_extra_info(info)


def _key() -> str:
    key = os.environ.get("OFFDRIFT_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # or httpx would quote it in its error
        raise EngineError("OFFDRIFT_API_KEY holds characters that no header can carry; set it anew")
    return key


def _key_advice(status: int) -> str:
    """Advice where a server wants a key, or another one; "" for other refusals."""
    if status not in (401, 403):
        return ""
    if _key():
        return "; the key in OFFDRIFT_API_KEY is not the server's"
    return "; it wants a key: put it into the environment variable OFFDRIFT_API_KEY"


def _parsed(content: bytes, limit: int, where: str) -> Any:
    if len(content) > limit:
        raise EngineError(
            f"{where} was answered with more than {limit:,} bytes, which no answer to it needs; "
            "is another service behind this address?"
        )
    try:
        answer = json.loads(content) if content.strip() else None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{where} was not answered with JSON: {_excerpt(content)}") from error
    if limit == SMALL and _deeper(answer, DEEPEST):
        raise EngineError(f"{where} was answered with brackets in brackets, {DEEPEST} deep: {_excerpt(content)}")
    return answer


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than this: further on they are compared and printed."""
    layer = [value]
    for _ in range(levels):
        layer = [x for holder in layer if isinstance(holder, list | dict) for x in _inside(holder)]
        if not layer:
            return False
    return any(isinstance(x, list | dict) for x in layer)


def _inside(holder: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return holder.values() if isinstance(holder, dict) else holder


def _excerpt(content: bytes) -> str:
    """The beginning of an answer on one line; `_send` has struck the key out, which some servers repeat."""
    text = content[: 4 * EXCERPT].decode(errors="replace")
    return repr(" ".join(text.split())[:EXCERPT])


# What a server says of itself, or is measured to do. vLLM reports raw log-probs by default; SGLang's are after
# the temperature, but not after top-k and top-p. Either is right for plain sampling and wrong for any other.

Mode = Literal["processed", "tempered", "raw"]
"""Log-probs after temperature and filters, after temperature alone, or after neither."""

TOLERANCE = 0.05
"""Nats per nat by which half precision may move the ratio of two differences of log-probs."""


@dataclass(frozen=True)
class Served:
    """A server and the model that it serves. None: it does not say."""

    software: Literal["vllm", "sglang", "unknown"]
    model: str
    """Name in requests."""
    root: str
    """Where its weights came from."""
    max_model_len: int | None = None
    version: str = "unknown"
    dtype: str | None = None
    quantization: str | None = None
    mode: Mode | None = None
    aliases: tuple[str, ...] = ()
    """Names under which it serves these weights; answers bear one of them."""
    offers: Offers = field(default_factory=Offers)
    """What SGLang was started to record."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that no request changes, by name, as far as it says them."""
    parent: str | None = None
    """The model that this one is an adapter of (LoRA); None: it is none."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that it serves."""


def identify(server: Server, model: str | None) -> Served:
    """Ask a server what it is; `model` may be absent where only one is served.

    Raises: `EngineError` if there is no server, it serves no such model, or it reports logits.
    """
    cards = server.get("/v1/models")
    cards = cards.get("data") if isinstance(cards, dict) else None
    cards = cards if isinstance(cards, list) else []
    cards = [c for c in cards if isinstance(c, dict) and isinstance(c.get("id"), str) and len(c["id"]) <= LONGEST]
    names, parents = [c["id"] for c in cards], [_parent(c) for c in cards]
    adapters = tuple(name for name, parent in zip(names, parents, strict=True) if parent is not None)
    card = cards[_chosen(server, names, adapters, model)]
    length = card.get("max_model_len")
    length = length if isinstance(length, int) and length > 0 else None
    roots = [str(c.get("root") or c["id"])[:LONGEST] for c in cards]
    root = roots[cards.index(card)]
    served = Served(
        "unknown",
        card["id"],
        root,
        length,
        aliases=tuple(n for n, r in zip(names, roots, strict=True) if r == root),
        parent=parents[cards.index(card)],
        adapters=adapters,
    )
    software = str(card.get("owned_by"))
    ask = {"vllm": _vllm, "sglang": _sglang}.get(software)
    return served if ask is None else replace(served, software=software, **ask(server))


def _parent(card: dict[str, Any]) -> str | None:
    """The model that a card's is an adapter of; None if it is none."""
    parent = card.get("parent")
    return parent[:LONGEST] if isinstance(parent, str) and parent not in ("", card["id"]) else None


def _chosen(server: Server, names: list[str], adapters: tuple[str, ...], model: str | None) -> int:
    """The place of the model that is meant. Raises: `EngineError` if it is not said, or not there."""
    if model is None and len(names) != 1:
        which = f" ({_listed([*adapters])}: LoRA adapter)" if adapters else ""
        raise EngineError(
            f"{server.url} serves {_listed(names)}{which}; say which one: openai:URL,model=NAME, or "
            "rollout.served_model in a recipe"
        )
    if model is not None and model not in names:
        raise EngineError(f"{server.url} serves {_listed(names)} and no model {model!r}")
    return 0 if model is None else names.index(model)


def faithful(mode: Mode, sampling: Sampling) -> bool:
    """Whether log-probs of this mode are those of the distribution that is sampled."""
    plain = not sampling.filtered and sampling.temperature == 1
    return mode == "processed" or plain or (mode == "tempered" and not sampling.filtered)


def measured_mode(draw: Callable[[Sampling], Rollouts]) -> Mode | None:
    """Measure which log-probs a server reports (raw or processed) from three tokens drawn after one prompt; None if the
    distribution is too flat to tell.

    At half the temperature, differences of tempered log-probs are twice as large and raw ones are as they
    were. With top_k = 1 the token has probability one, unless filters are ignored. `draw` gives one token
    after one fixed prompt, with top-k evidence.

    Raises: `EngineError` if neither is the case.
    """

    def row(temperature: float) -> dict[int, float]:
        drawn = draw(Sampling(1, temperature=temperature))
        assert isinstance(drawn.evidence, TopK)
        entries = zip(drawn.evidence.ids[0].tolist(), drawn.evidence.logp[0].tolist(), strict=True)
        return {token: x for token, x in entries if x > -torch.inf}

    plain, cold = row(1.0), row(0.5)
    shared = sorted(plain.keys() & cold.keys())
    a, b = (torch.tensor([row[t] for t in shared]).double() for row in (plain, cold))
    a, b = a - a.max(), b - b.max()
    if len(shared) < 2 or float(a.abs().max()) < 0.01:
        return None
    ratio = float((a * b).sum() / a.square().sum())
    if abs(ratio - 1) < TOLERANCE:
        return "raw"
    if abs(ratio - 2) > 2 * TOLERANCE:
        raise EngineError(
            f"halving the temperature multiplies differences of log-probs by {ratio:.3g}; those of "
            "what is sampled double, raw ones stay: the server reports something else"
        )
    lone = draw(Sampling(1, top_k=1))
    return "processed" if float(lone.logp_rollout[0]) > -1e-3 else "tempered"


def _vllm(server: Server) -> dict[str, Any]:
    answer = optional(lambda: server.get("/version"))
    info = optional(lambda: server.get("/server_info?config_format=json"))
    config = _at(info, "vllm_config", "model_config")
    cache = _at(info, "vllm_config", "cache_config").get("cache_dtype")
    mode = config.get("logprobs_mode")
    if isinstance(mode, str) and mode.endswith("_logits"):
        raise EngineError(
            f"{server.url} reports {mode} as log-probs; start vLLM with --logprobs-mode processed_logprobs"
        )
    parts = [config.get("quantization"), f"kv_{cache}" if cache not in (None, "auto") else None]
    return {
        "version": str(answer.get("version"))[:40] if isinstance(answer, dict) else "unknown",
        "dtype": _dtype(config.get("dtype")),
        "quantization": "+".join(str(p) for p in parts if p)[:80] or None,
        "mode": {"processed_logprobs": "processed", "raw_logprobs": "raw"}.get(str(mode)),
        "settings": settings_of("vllm", _at(info, "vllm_config")),
    }


def _sglang(server: Server) -> dict[str, Any]:
    info = _at(optional(lambda: server.get("/get_server_info")))
    quantization = info.get("quantization")
    return {
        "version": str(info.get("version", "unknown"))[:40],
        "dtype": _dtype(info.get("dtype")),
        "quantization": None if quantization is None else str(quantization)[:80],
        "offers": offers_of(info),
        "settings": settings_of("sglang", info),
    }


def check_model(answer: Any, served: Served) -> None:
    """Raise `EngineError` if an answer says that another model gave it, as behind a gateway."""
    named = answer.get("model") if isinstance(answer, dict) else None
    if named is not None and named not in served.aliases:
        raise EngineError(
            f"{str(named)[:120]!r} answered in place of {served.model!r}; is this a gateway that "
            "chooses models? give the address of the server itself"
        )


def optional(ask: Callable[[], Any], besides: Iterable[int] = ()) -> Any:
    """The answer, or None from a server that does not offer the question: by usual statuses, and by those `besides`."""
    try:
        return ask()
    except StatusError as error:
        if error.status in (401, 403, 404, 405, 501, *besides):
            return None
        raise


def _at(info: Any, *names: str) -> dict[str, Any]:
    for name in names:
        info = info.get(name) if isinstance(info, dict) else None
    return info if isinstance(info, dict) else {}


def _dtype(reported: Any) -> str | None:
    name = str(reported).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else None


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name[:120]) for name in names[:8]) or "no model"
