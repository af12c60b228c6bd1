"""Every check of the server client, each by an answer that it alone refuses: the limit itself passes, one more does not."""

from __future__ import annotations

import copy
import gzip
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offdrift.engines.server.client import Server, StatusError, identify
from offdrift.engines.server.dialects import read, size_limit
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from tests.engines.test_openai_broken import SERVER_INFO, VOCAB, Played, at, playing
from tests.fuzz.test_server import OK, PROMPT, RIGHT, answering, body, forever, sent

SMALL, DEEPEST, LONGEST, EXCERPT = 4_194_304, 64, 4096, 300
"""Written out again: a limit that is changed is a change that a test should tell."""


def asked(content: bytes, **options: Any) -> Any:
    """What `Server.get` makes of an answer."""
    with answering(lambda connection: connection.sendall(body(content))) as url:
        return Server(url, **{"timeout": 5.0, "retries": 0, **options}).get("/x")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.delenv("OFFDRIFT_API_KEY", raising=False)
    with playing(Played()) as server:
        yield server


# -- time ------------------------------------------------------------------------------------------


def pieces(pauses: list[float]) -> Callable[[socket.socket], object]:
    """An answer, a byte after each pause."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(OK + f"Content-Length: {len(pauses)}\r\n\r\n".encode())
        for i, pause in enumerate(pauses):
            time.sleep(pause)
            connection.sendall(b"1" if i == 0 else b" ")

    return answer


@pytest.mark.parametrize(
    "pauses", [[0.05] * 18, [0.35, 0.35]], ids=["many bytes", "each within the time, not together"]
)
def test_an_answer_that_takes_longer_than_the_timeout_as_a_whole_is_refused(pauses: list[float]) -> None:
    with answering(pieces(pauses)) as url, pytest.raises(EngineError, match=r"no whole answer within 0\.5 s"):
        Server(url, timeout=0.5, retries=0).get("/x")


@pytest.mark.parametrize(
    "answer",
    [lambda connection: connection.recv(1), forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
    ids=["nothing comes", "there is always more to read"],
)
def test_who_says_nothing_and_who_never_ends_are_given_up(answer: Callable[[socket.socket], object]) -> None:
    with answering(answer) as url, pytest.raises(EngineError, match=r"no whole answer within 0\.5 s"):
        Server(url, timeout=0.5, retries=0).get("/x")


def test_the_time_of_an_answer_begins_anew_with_every_request(played: Played) -> None:
    server = Server(played.url, timeout=0.5, retries=1)
    for _ in range(3):
        assert server.get("/v1/models")["data"][0]["id"] == "m"
        time.sleep(0.3)
    time.sleep(0.4)
    assert server.get("/v1/models")["data"][0]["id"] == "m"


def test_an_encrypted_answer_that_trickles_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
            "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(made, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(pauses: list[float]) -> None:
        try:
            with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
                connection.recv(65536)
                pieces(pauses)(connection)
        except OSError:  # the client has gone, as it should
            pass

    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    with listener:
        for pauses, slow in (([0.0] * 3, False), ([0.05] * 30, True)):
            thread = threading.Thread(target=serve, args=(pauses,))
            thread.start()
            server = Server(url, timeout=1.0, retries=0)
            if slow:
                with pytest.raises(EngineError, match="no whole answer within 1 s"):
                    server.get("/x")
            else:
                assert server.get("/x") == 1
            thread.join()


# -- size ------------------------------------------------------------------------------------------


def test_an_answer_of_the_largest_size_is_read_and_one_byte_more_is_not() -> None:
    assert asked(b"7" + b" " * (SMALL - 1)) == 7
    with pytest.raises(EngineError, match=r"more than 4,194,304 bytes"):
        asked(b"7" + b" " * SMALL)
    with answering(lambda connection: connection.sendall(body(b"7" + b" " * 1000))) as url:
        server = Server(url, retries=0)
        assert server.post("/x", limit=1001) == 7
        with pytest.raises(EngineError, match="more than 1,000 bytes"):
            server.post("/x", limit=1000)


def test_of_an_answer_that_is_too_large_no_more_is_waited_for() -> None:
    """It stops right behind the limit and says nothing any more: who reads on finds no answer in time."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(OK + b"Content-Length: 99999999\r\n\r\n" + b" " * (SMALL + 1))
        connection.recv(1)

    with answering(answer) as url, pytest.raises(EngineError, match=r"more than 4,194,304 bytes"):
        Server(url, timeout=1.0, retries=0).get("/x")


def test_the_size_of_an_answer_with_log_probs() -> None:
    # 1 MiB, 16 bytes for each token of the prompt and 160 for each entry, two of which every token has.
    assert size_limit([1] * 100, Sampling(10), 20) == 1_048_576 + 1600 + 10 * 22 * 160


def test_brackets_in_brackets_of_the_largest_depth_are_read_and_one_more_is_not() -> None:
    for left, right in ((b"[", b"]"), (b'{"a":', b"}")):
        inside = b"1" if right == b"}" else b""
        asked(left * DEEPEST + inside + right * DEEPEST)
        with pytest.raises(EngineError, match="brackets in brackets, 64 deep"):
            asked(left * (DEEPEST + 1) + inside + right * (DEEPEST + 1))


def test_an_error_quotes_so_many_characters() -> None:
    with pytest.raises(EngineError, match="not answered with JSON") as caught:
        asked(b"x" * 5000)
    assert re.findall("x+'$", str(caught.value)) == ["x" * EXCERPT + "'"]


# -- what is not done ------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "tries"), [(500, 1), (404, 1), (429, 3), (502, 3), (503, 3), (504, 3)])
def test_only_a_busy_server_is_asked_again(played: Played, status: int, tries: int) -> None:
    played.fault = at("/x", (status, b"no"))
    server = Server(played.url, retries=2)
    with pytest.raises(StatusError, match=f"status {status}"):
        server.get("/x")
    assert len(played.asked) == tries
    with pytest.raises(StatusError):
        server.post("/x", {}, again=False)
    assert len(played.asked) == tries + 1


def test_a_redirect_is_a_refusal_and_nobody_else_is_asked(played: Played) -> None:
    def redirect(handler: Any) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    played.fault = at("/x", redirect)
    with pytest.raises(StatusError, match="status 302"):
        Server(played.url, retries=0).get("/x")
    assert [path for _, path, _, _ in played.asked] == ["/x"]


def test_requests_bring_no_cookie_ask_for_no_compression_and_go_through_no_proxy(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cookie(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Set-Cookie", "id=1; Path=/")
        handler.send_header("Content-Length", "2")
        handler.end_headers()
        handler.wfile.write(b"{}")

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    played.fault = at("/x", cookie)
    server = Server(played.url, retries=0)
    for _ in range(2):
        assert server.get("/x") == {}
    sent = [{name.lower(): value for name, value in head.items()} for *_, head in played.asked]
    assert [head["accept-encoding"] for head in sent] == ["identity"] * 2
    assert not any("cookie" in head or "authorization" in head for head in sent)


def test_an_answer_that_says_it_is_compressed_is_taken_as_it_is() -> None:
    packed = gzip.compress(b'{"data": []}')
    answer = body(packed, "Content-Encoding: gzip")
    with answering(sent(answer)) as url, pytest.raises(EngineError, match="not answered with JSON"):
        Server(url, retries=0).get("/x")


def test_a_key_that_an_answer_repeats_is_struck_out(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFDRIFT_API_KEY", "open-sesame")
    played.fault = at("/x", {"data": "open-sesame"})
    assert Server(played.url, retries=0).get("/x") == {"data": "***"}
    for answer in ((400, b"no: open-sesame"), b"no JSON: open-sesame"):
        played.fault = at("/x", answer)
        with pytest.raises(EngineError, match=r"\*\*\*") as caught:
            Server(played.url, retries=0).get("/x")
        assert "sesame" not in str(caught.value)
    assert [head["Authorization"] for *_, head in played.asked] == ["Bearer open-sesame"] * 3


def test_a_connection_that_leads_elsewhere_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        listener.settimeout(5)
        monkeypatch.setattr(socket.socket, "getpeername", lambda self: ("10.1.2.3", 80))
        with pytest.raises(EngineError, match="another machine") as caught:
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}", retries=0).get("/x")
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(1)
            assert connection.recv(1) == b""
    assert caught.value.args


@pytest.mark.parametrize("rest", ["user@127.0.0.1:1", ":word@127.0.0.1:1", "127.0.0.1:1/v1?a=word", "127.0.0.1:1/v1#word"])  # fmt: skip
def test_an_address_with_more_than_an_address_is_refused_and_not_repeated(rest: str) -> None:
    with pytest.raises(EngineError, match="holds more than an address") as caught:
        Server(f"http://{rest}")
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/v1", "http:///v1", "127.0.0.1:1?a=word", "127.0.0.1:1#word"])
def test_what_is_no_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(EngineError, match="is no address") as caught:
        Server(url)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("key", ["kéy", "a\x07b"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(
    played: Played, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OFFDRIFT_API_KEY", key)
    with pytest.raises(EngineError, match="characters that no header can carry") as caught:
        Server(played.url, retries=0).get("/x")
    assert key not in str(caught.value)


def test_a_path_that_is_none_is_refused_by_name(played: Played) -> None:
    with pytest.raises(EngineError, match="InvalidURL"):
        Server(played.url, retries=0).get("/\x01")


# -- who it is -------------------------------------------------------------------------------------


def cards(played: Played, *listed: Any, software: str = "x") -> None:
    listed = tuple({"owned_by": software, **c} if isinstance(c, dict) else c for c in listed)
    played.fault = at("/v1/models", {"data": list(listed)})


def test_models_with_no_name_or_a_long_one_are_not_there(played: Played) -> None:
    cards(played, 5, None, {"id": 5}, {"id": "n" * (LONGEST + 1)}, {"root": "x"}, {"id": "m"})
    assert identify(Server(played.url, retries=0), None).model == "m"
    cards(played, {"id": "n" * LONGEST})
    assert identify(Server(played.url, retries=0), None).model == "n" * LONGEST
    for odd in (5, "m", {"id": "m"}, None):
        played.fault = at("/v1/models", {"data": odd})
        with pytest.raises(EngineError, match="serves no model; say which"):
            identify(Server(played.url, retries=0), None)


def test_what_a_record_keeps_of_a_server_is_short(played: Played) -> None:
    cards(played, {"id": "m", "root": "r" * 5000})
    assert identify(Server(played.url, retries=0), None).root == "r" * LONGEST
    cards(played, *({"id": f"{i:02}" + "n" * 500} for i in range(12)))
    with pytest.raises(EngineError, match="say which one") as caught:
        identify(Server(played.url, retries=0), None)
    assert str(caught.value).count("n" * 118) == 8
    assert "n" * 119 not in str(caught.value)


@pytest.mark.parametrize("length", [-5, 0, "64", 1.5, None])
def test_a_length_that_is_none_is_unknown(played: Played, length: Any) -> None:
    cards(played, {"id": "m", "max_model_len": length})
    assert identify(Server(played.url, retries=0), None).max_model_len is None


def served(played: Played, software: str, answers: dict[str, Any]) -> Any:
    models = {"data": [{"id": "m", "owned_by": software}]}
    played.fault = lambda verb, path, body: {"/v1/models": models, **answers}.get(path)
    return identify(Server(played.url, retries=0), None)


def test_what_a_server_says_of_itself_is_cut_and_checked(played: Played) -> None:
    long = "v" * 500
    one = served(played, "sglang", {"/get_server_info": {"version": long, "dtype": "int8", "quantization": long}})
    assert (one.version, one.dtype, one.quantization) == ("v" * 40, None, "v" * 80)
    two = served(played, "vllm", {"/version": {"version": long}, SERVER_INFO: {"vllm_config": {"model_config": {
        "dtype": "torch.float16", "quantization": long, "logprobs_mode": 5}, "cache_config": 5}}})  # fmt: skip
    assert (two.version, two.dtype, two.quantization, two.mode) == ("v" * 40, "float16", "v" * 80, None)
    three = served(played, "vllm", {"/version": [5], SERVER_INFO: {"vllm_config": [5]}})
    assert (three.version, three.dtype, three.quantization) == ("unknown", None, None)
    logits = {SERVER_INFO: {"vllm_config": {"model_config": {"logprobs_mode": "raw_logits"}}}}
    with pytest.raises(EngineError, match="reports raw_logits as log-probs"):
        served(played, "vllm", logits)


@pytest.mark.parametrize(("status", "there"), [(401, False), (403, False), (404, False), (405, False), (501, False), (500, True), (400, True)])  # fmt: skip
def test_only_a_question_that_is_not_offered_may_stay_open(played: Played, status: int, there: bool) -> None:
    answers = {"/version": (status, b"no"), SERVER_INFO: {}}
    if there:
        with pytest.raises(StatusError, match=f"status {status}"):
            served(played, "vllm", answers)
    else:
        assert served(played, "vllm", answers).version == "unknown"


def test_another_model_is_refused_in_few_words(played: Played) -> None:
    def other(verb: str, path: str, body: Any) -> Any:
        return {**Played().completion(body), "model": "o" * 500} if path == "/v1/completions" else None

    played.fault = other
    made = OpenAIEngine(played.url, vocab_size=VOCAB, retries=0)
    with pytest.raises(EngineError, match="answered in place of 'm'") as caught:
        made.generate([[1, 2]], Sampling(3), seed=0)
    assert "o" * 120 in str(caught.value)
    assert "o" * 121 not in str(caught.value)


# -- answers with tokens ---------------------------------------------------------------------------

CHOICE, META = ("choices", 0), ("meta_info",)
LOGPROBS = (*CHOICE, "logprobs")
THREE = {f"token_id:{i}": -1.0 - i for i in range(3)}
ODD: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("sglang", ("output_ids",), [3, 2], "not those of output_ids"),
    ("sglang", (*META, "prompt_tokens"), 3, "prompt_tokens is 3"),
    ("sglang", (*META, "output_token_logprobs"), [[-1.0, True, None], [-1.0, 1, None]], "not those of output_ids|token 0"),
    ("sglang", (*META, "output_token_logprobs", 0), [-1.0], "a log-prob is list"),
    ("sglang", (*META, "output_token_logprobs", 0), "xy", "a log-prob is str"),
    ("sglang", (*META, "output_top_logprobs"), 5, "int where a list"),
    ("sglang", (*META, "output_top_logprobs"), [], "2 tokens have 0 lists"),
    ("sglang", (*META, "finish_reason"), "length", "finish_reason is str"),
    ("sglang", (), 5, "int where an object"),
    ("generate", (*LOGPROBS, "content", 0, "token_id"), 2, "not about the tokens"),
    ("generate", (*LOGPROBS, "content", 0), 5, "int where an object"),
    ("generate", (*CHOICE, "weight_versions"), 5, "int where a list"),
    ("generate", (*LOGPROBS, "content", 0, "top_logprobs", 0, "token_id"), -1, "3 tokens of the vocabulary|listed where 4"),
    ("generate", (*LOGPROBS, "content", 0, "top_logprobs", 0, "token_id"), VOCAB, "listed where 4"),
    ("generate", (*LOGPROBS, "content", 0, "top_logprobs", 0, "token_id"), False, "listed where 4"),
    ("generate", (*LOGPROBS, "content", 0, "top_logprobs", 0, "token_id"), 1.5, "listed where 4"),
    ("generate", (*LOGPROBS, "content", 0, "top_logprobs", 0, "token_id"), "x", "listed where 4"),
    ("generate", (*LOGPROBS, "content", 0, "top_logprobs"),
     [{"token_id": 0, "logprob": -1.0}, {"token_id": 0, "logprob": -2.0}], "listed with two log-probs"),
    ("completions", ("choices",), [], "0 choices"),
    ("completions", ("choices",), [{}, {}], "2 choices"),
    ("completions", (*CHOICE, "prompt_token_ids"), [1], "tokenized again"),
    ("completions", (*CHOICE, "token_ids"), "31", "text and no token_ids"),
    ("completions", (*CHOICE, "token_ids"), {"0": 3}, "text and no token_ids"),
    ("completions", (*LOGPROBS, "tokens"), ["token_id:3", "token_id:2"], "not those of token_ids"),
    ("completions", (*LOGPROBS, "token_logprobs"), [-1.0], "2 tokens have 1 log-probs"),
    ("completions", (*LOGPROBS, "token_logprobs", 0), True, "a log-prob is True"),
    ("completions", (*LOGPROBS, "token_logprobs", 0), "-1", "a log-prob is '-1'"),
    ("completions", (*LOGPROBS, "token_logprobs", 0), None, "a log-prob is None"),
    ("completions", (*LOGPROBS, "token_logprobs", 0), float("nan"), "a log-prob is nan"),
    ("completions", (*LOGPROBS, "token_logprobs", 0), 0.0015, "reports 0.0015 as a log-prob"),
    ("completions", (*LOGPROBS, "top_logprobs", 0), THREE, "3 tokens of the vocabulary"),
    ("completions", (*LOGPROBS, "top_logprobs", 0), {**THREE, "3": -9.0}, "3 tokens of the vocabulary"),
    ("completions", (*LOGPROBS, "top_logprobs", 0), {**THREE, "token_id:x": -9.0}, "3 tokens of the vocabulary"),
    ("completions", (*LOGPROBS, "top_logprobs", 0), {**THREE, "token_id:" + "0" * 9 + "3": -9.0}, "3 tokens of"),
    ("completions", (*LOGPROBS, "top_logprobs", 0), {**THREE, "token_id:" + "9" * 5000: -9.0}, "3 tokens of"),
    ("completions", (*LOGPROBS, "top_logprobs", 0), 5, "int where an object"),
    ("completions", (*LOGPROBS, "top_logprobs"), 5, "top_logprobs is int"),
    ("completions", LOGPROBS, None, "logprobs is NoneType"),
    ("completions", (*CHOICE, "finish_reason"), "abort", "finish_reason = 'abort'"),
]  # fmt: skip


def changed(api: str, path: tuple[Any, ...], value: Any) -> Any:
    """A right answer with one thing else in it."""
    answer: Any = copy.deepcopy(RIGHT[api])
    if not path:
        return value
    holder = answer
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return answer


@pytest.mark.parametrize(("api", "path", "value", "words"), ODD)
def test_an_answer_with_one_thing_wrong_is_refused_for_it(
    api: str, path: tuple[Any, ...], value: Any, words: str
) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        read(api, changed(api, path, value), PROMPT, Sampling(2), 4, VOCAB)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 400


def completion(tokens: list[Any], finish: str = "length") -> Any:
    """A right answer of other tokens."""
    top = [{f"token_id:{i}": -1.0 - i for i in range(4)}] * len(tokens)
    logprobs = {
        "tokens": [f"token_id:{t}" for t in tokens],
        "token_logprobs": [-1.0] * len(tokens),
        "top_logprobs": top,
    }
    choice = {"token_ids": tokens, "prompt_token_ids": PROMPT, "finish_reason": finish, "logprobs": logprobs}
    return {"choices": [choice]}


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "has 0 tokens"), ([1, 2, 3, 4], "has 4 tokens"), ([1, VOCAB, 2], "token 1 is 8"), ([1, -1, 2], "token 1 is -1"),
        ([1, True, 2], "token 1 is True"), ([1, 2.0, 2], "token 1 is 2.0"), ([1, "2", 2], "token 1 is '2'"),
        ([1, 10**4000, 2], "token 1 is 1"), ([1, "y" * 5000, 2], "token 1 is 'y"), ([7, 1, 2], "goes on behind a stop token"),
        ([1, 2], "no stop token of this run"),
    ],
)  # fmt: skip
def test_tokens_that_were_not_asked_for_are_refused(tokens: list[Any], words: str) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        read("completions", completion(tokens), PROMPT, Sampling(3, stop_token_ids=(7,)), "sampled", VOCAB)
    quoted = re.findall(r"token 1 is (.*); the", str(caught.value))
    assert all(len(words) <= 80 for words in quoted)


def test_what_is_long_is_quoted_to_its_80th_character() -> None:
    with pytest.raises(EngineError) as caught:
        read("completions", completion([1, "y" * 500]), PROMPT, Sampling(2), "sampled", VOCAB)
    assert re.findall(r"token 1 is (.*); the", str(caught.value)) == ["'" + "y" * 79]


def test_brackets_that_are_compared_and_too_deep_are_refused() -> None:
    def deep() -> Any:
        value: Any = []
        for _ in range(20_000):
            value = [value]
        return value

    answer = changed("generate", (*CHOICE, "token_ids", 0), deep())
    answer["choices"][0]["logprobs"]["content"][0]["token_id"] = deep()
    with pytest.raises(EngineError, match="nested too deeply"):
        read("generate", answer, PROMPT, Sampling(2), 4, VOCAB)


def test_log_probs_at_the_edges_are_read() -> None:
    def logp(x: float) -> float:
        answer = changed("completions", (*LOGPROBS, "token_logprobs", 0), x)
        return float(read("completions", answer, PROMPT, Sampling(2), "sampled", VOCAB).draws.logp[0])

    assert logp(0.0009) == 0.0
    assert logp(-9998.0) == -9998.0
    assert logp(-9999.0) == -float("inf")
    assert logp(-(10**400)) == -float("inf")


def test_a_good_answer_of_every_api_is_read_with_its_evidence() -> None:
    for api in RIGHT:
        answer = read(api, RIGHT[api], PROMPT, Sampling(2), 4, VOCAB)  # type: ignore[arg-type]
        assert answer.draws.tokens.tolist() == [3, 1]
        labels = {"completions": [], "generate": ["a"], "sglang": ["a", "b"]}
        assert [span.label for span in answer.spans] == labels[api]
    ended = read("completions", completion([1, 7], "stop"), PROMPT, Sampling(3, stop_token_ids=(7,)), "sampled", VOCAB)
    assert json.dumps(ended.draws.tokens.tolist()) == "[1, 7]"
