"""A server that is hostile: whatever it answers, the client reads it or refuses it by name, soon and in little memory."""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import resource
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from offdrift.engines.server.client import SMALL, Server, identify
from offdrift.engines.server.dialects import PATHS, read
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.engines.server.recorded import read_experts
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from tests.fuzz.spoil import _value
from tests.fuzz.test_readers import EXAMPLES

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server on loopback that reads a request's head and then does this; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def one(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            try:
                head = b""
                while b"\r\n\r\n" not in head and (more := connection.recv(65536)):
                    head += more
                if head:
                    answer(connection)
            except OSError:  # the client has gone, as it should
                pass

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        stop.set()
        listener.close()


def body(content: bytes, *headers: str) -> bytes:
    """A whole answer."""
    lines = "".join(f"{line}\r\n" for line in (*headers, f"Content-Length: {len(content)}"))
    return OK + lines.encode() + b"\r\n" + content


def sent(content: bytes) -> Callable[[socket.socket], object]:
    return lambda connection: connection.sendall(content)


def forever(first: bytes, piece: bytes, pause: float = 0.0) -> Callable[[socket.socket], object]:
    """An answer that never ends."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(first)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            connection.sendall(piece)
            time.sleep(pause)

    return answer


NASTY: dict[str, Callable[[socket.socket], object]] = {
    "nothing": lambda connection: connection.shutdown(socket.SHUT_WR),
    "no http": sent(b"SSH-2.0-OpenSSH_9\r\n"),
    "binary": sent(bytes(range(256)) * 4),
    "cut off": sent(OK + b"Content-Length: 100\r\n\r\n{"),
    "negative length": sent(OK + b"Content-Length: -5\r\n\r\n{}"),
    "huge length": sent(OK + b"Content-Length: " + b"9" * 4000 + b"\r\n\r\n{}"),
    "two lengths": sent(OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} "),
    "length and chunks": sent(OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
    "huge chunk": sent(OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}"),
    "broken chunk": sent(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "endless chunks": forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "endless body": forever(OK + b"Content-Length: 99999999999\r\n\r\n", b" " * 65536),
    "endless header": forever(OK + b"X: ", b"y" * 65536),
    "endless headers": forever(OK, b"X-More: y\r\n"),
    "endless preludes": forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "trickling head": forever(b"HTTP/1.1 200", b" ", pause=0.1),
    "trickling header": forever(OK, b"X: y\r\n", pause=0.1),
    "trickling body": forever(OK + b"Content-Length: 1000\r\n\r\n", b" ", pause=0.1),
    "split header": sent(OK + b"X: a\r\n b\r\nY\x00: c\r\nContent-Length: 2\r\n\r\n{}"),
    "header that ends the terminal's line": sent(
        b"HTTP/1.1 500 \x1b[2J\x1b]0;x\x07\r\nContent-Length: 4\r\n\r\n\x1b[2J"
    ),
    "switching protocols": sent(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n"),
    "redirect": sent(b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"),
    "redirect to a file": sent(b"HTTP/1.1 301 M\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"),
    "asks for a password": sent(b"HTTP/1.1 401 U\r\nWWW-Authenticate: Basic realm=x\r\nContent-Length: 0\r\n\r\n"),
    "gzip bomb": sent(body(gzip.compress(b" " * 2**26), "Content-Encoding: gzip")),
    "said to be gzip": sent(body(b"{}", "Content-Encoding: gzip, br, zstd")),
    "deep lists": sent(body(b"[" * 500_000)),
    "deep lists that close": sent(body(b"[" * 900 + b"]" * 900)),
    "deep objects": sent(body(b'{"data":' * 300 + b"1" + b"}" * 300)),
    "many digits": sent(body(b'{"data": ' + b"9" * 100_000 + b"}")),
    "many small lists": sent(body(b"[" + b"[]," * (SMALL // 3 - 9) + b"1]")),
    "half a surrogate": sent(body(b'{"data": [{"id": "\\ud800"}]}')),
    "no utf-8": sent(body(b'{"data": "\xff\xfe"}')),
    "utf-16": sent(body('{"data": []}'.encode("utf-16"))),
    "infinite": sent(body(b'{"data": [{"id": "m", "max_model_len": Infinity}]}')),
    "long name": sent(body(json.dumps({"data": [{"id": "m" * 2**20}]}).encode())),
    "not a list": sent(body(b'{"data": {"id": "m"}}')),
    "null": sent(body(b"null")),
}


@pytest.mark.parametrize("name", NASTY)
def test_a_hostile_server_is_refused_soon_and_in_little_memory(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with answering(NASTY[name]) as url:
        server = Server(url, timeout=1.0, retries=0)
        begin, work = time.monotonic(), time.process_time()
        try:
            served = identify(server, None)
            assert len(served.model) <= 4096
        except EngineError as error:
            said = str(error)
            assert "GET http://127.0.0.1" in said or url.removesuffix("/v1") in said
            assert len(said) < 3000
            assert said.isprintable() or "\n" in said
            assert "\x1b" not in said
        finally:
            server.close()
        assert time.process_time() - work < 15
        assert time.monotonic() - begin < 90, "it waits for what never comes"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 700


def test_a_slow_answer_that_moves_on_in_time_is_read() -> None:
    def answer(connection: socket.socket) -> None:
        content = b'{"data": [{"id": "m"}]}'
        connection.sendall(OK + f"Content-Length: {len(content)}\r\n\r\n".encode())
        for i in range(len(content)):
            connection.sendall(content[i : i + 1])
            time.sleep(0.01)

    with answering(answer) as url:
        assert identify(Server(url, timeout=5.0, retries=0), None).model == "m"


@pytest.mark.parametrize("host", ["localhost", "engine.localhost", "10-0-0-1.localhost"])
def test_a_name_of_this_machine_that_leads_elsewhere_gets_nothing(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """What a resolver answers decides where a name leads: the connection is looked at, and nothing is sent."""
    received: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        received.append(b"!")
        connection.sendall(body(b'{"data": [{"id": "m"}]}'))

    with answering(answer) as url:
        port = url.split(":")[2].removesuffix("/v1")
        real = socket.create_connection
        monkeypatch.setattr(
            socket, "create_connection", lambda address, *a, **k: real(("127.0.0.1", int(port)), *a, **k)
        )
        peer = ["127.0.0.1"]
        monkeypatch.setattr(socket.socket, "getpeername", lambda self: (peer[0], int(port)))
        assert identify(Server(f"http://{host}:{port}", retries=0), None).model == "m"
        for elsewhere in ("10.1.2.3", "fe80::1%eth0", "::ffff:10.0.0.1", "2001:db8::1"):
            received.clear()
            peer[0] = elsewhere
            with pytest.raises(EngineError, match="another machine, to which http:// sends prompts and keys"):
                identify(Server(f"http://{host}:{port}", retries=0), None)
            time.sleep(0.05)
            assert received == [], "a request was sent"
        assert identify(Server(f"http://{host}:{port}", retries=0, insecure=True), None).model == "m"


LOOKALIKES = (
    "http://localhost.evil.example/v1", "http://127.0.0.1.nip.io", "http://0.0.0.0:8000", "http://[::]:8000",
    "http://[::ffff:10.0.0.1]", "http://0x7f000001", "http://2130706433", "http://127.1", "http://017700000001",
    "http://localhost%2eevil.example", "http://ⓛocalhost", "http://evil.example/localhost", "http://xn--localhost-x.example",
    "http://127.0.0.1\\.evil.example", "http://localhost\t.evil.example", "http://[fe80::1]", "http://169.254.169.254",
    "http://127.0.0.1;evil.example", "http://localhost,evil.example",
)  # fmt: skip


@pytest.mark.parametrize("url", LOOKALIKES)
def test_lookalikes_of_this_machine_are_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(EngineError, match=r"in the clear|is no address|more than an address"):
        Server(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1\r\nX-Injected: 1", "http://127.0.0.1:1/a b\nc"])
def test_an_address_puts_nothing_into_the_head_of_a_request(url: str) -> None:
    made = Server(url, retries=0)
    assert "\r" not in made.url
    assert "\n" not in made.url


# -- answers: a right one with something wrong in it ---------------------------------------------------

PROMPT, VOCAB = [1, 2], 8
TOP = {f"token_id:{i}": -1.0 - i for i in range(4)}
RIGHT = {
    "completions": {
        "model": "m",
        "choices": [
            {
                "token_ids": [3, 1],
                "prompt_token_ids": PROMPT,
                "finish_reason": "length",
                "stop_reason": None,
                "logprobs": {
                    "tokens": ["token_id:3", "token_id:1"],
                    "token_logprobs": [-4.0, -2.0],
                    "top_logprobs": [TOP, TOP],
                },
            }
        ],
    },
    "generate": {
        "choices": [
            {
                "token_ids": [3, 1],
                "finish_reason": "length",
                "weight_versions": [{"version": "a", "start": 0, "end": 2}],
                "logprobs": {
                    "content": [
                        {
                            "token_id": t,
                            "logprob": -2.0,
                            "top_logprobs": [{"token_id": i, "logprob": -2.0} for i in range(4)],
                        }
                        for t in (3, 1)
                    ]
                },
            }
        ]
    },
    "sglang": {
        "output_ids": [3, 1],
        "meta_info": {
            "prompt_tokens": 2,
            "finish_reason": {"type": "length"},
            "weight_version": "b",
            "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}],
            "output_token_logprobs": [[-2.0, 3, None], [-2.0, 1, None]],
            "output_top_logprobs": [[[-2.0, i, None] for i in range(4)]] * 2,
        },
    },
}


@pytest.mark.parametrize("evidence", ["sampled", 3])
@pytest.mark.parametrize("api", PATHS)
def test_a_spoiled_answer_is_read_or_refused(api: str, evidence: str | int) -> None:
    sampling = Sampling(2)
    assert read(api, RIGHT[api], PROMPT, sampling, evidence, VOCAB).draws.tokens.tolist() == [3, 1]

    @settings(max_examples=20 * EXAMPLES, deadline=None, database=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(seed=st.integers(0, 2**32))
    def one(seed: int) -> None:
        draw = random.Random(seed)
        text = _value(json.dumps(RIGHT[api]), draw)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):  # which `Server` refuses
            return
        try:
            draws = read(api, answer, PROMPT, sampling, evidence, VOCAB).draws
        except EngineError:
            return
        assert (draws.logp <= 0).all()
        assert ((draws.tokens >= 0) & (draws.tokens < VOCAB)).all()

    one()


def _npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def _npz() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\x00" * 2**24)
    return held.getvalue()


HEADER = b"{'descr': '<i8', 'fortran_order': False, 'shape': (%s), }"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x93NUMPY", b"\x93NUMPY\x03\x00", b"\x93NUMPY\x09\x00\x00\x00", b"PK\x03\x04", _npz(), b"PK\x05\x06" + b"\x00" * 18,
        b"\x80\x04K\x01.", _npy(HEADER % b"4, 1000000, 1000000"), _npy(HEADER % b"4, 2, -2"), _npy(HEADER % (b"9" * 40 + b", 2, 2")),
        _npy(b"(" * 300 + b")" * 300), _npy(b"__import__('os').system('x')"), _npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (4, 2, 2), }", b"\x00" * 128),
        _npy(b"{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (4, 2, 2), }", b"\x00" * 128),
        _npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (4, 2, 2), }", b"\x00" * 128),
        _npy(HEADER % b"4, 2, 2", b"\x00" * 8), _npy(HEADER % b"True, 2, 2", b"\x00" * 64), _npy(HEADER % b"4,0,2"),
    ],
)  # fmt: skip
def test_routes_that_are_no_array_of_numbers_are_refused(content: bytes) -> None:
    with pytest.raises(EngineError, match="routed_experts"):
        read_experts(base64.b64encode(content).decode(), 4)


def test_routes_that_are_one_are_read() -> None:
    held = io.BytesIO()
    np.save(held, np.arange(16, dtype=np.uint8).reshape(4, 2, 2))
    assert read_experts(base64.b64encode(held.getvalue()).decode(), 4).shape == (4, 2, 2)


def test_an_engine_whose_server_trickles_gives_up() -> None:
    with answering(forever(OK + b"Content-Length: 1000\r\n\r\n", b" ", pause=0.05)) as url:
        begin = time.monotonic()
        with pytest.raises(EngineError, match="no whole answer within 1 s"):
            OpenAIEngine(url, vocab_size=VOCAB, timeout=1.0, retries=3)
        assert time.monotonic() - begin < 10, "a slow server is not asked again"
