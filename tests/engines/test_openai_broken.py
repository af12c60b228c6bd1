"""The client engine against servers that are broken on purpose, and against SGLang's contract.

The server here is a stand-in: it plays faults that a real one shows too rarely to test, and the
answers of SGLang, which does not run on this machine (`/generate`, releases 0.5).
"""

import base64
import gzip
import importlib
import inspect
import io
import json
import math
import re
import socket
import threading
import time
import tomllib
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from offdrift.check.bench import Bench, EngineSpec
from offdrift.engines import make_engine
from offdrift.engines.server.client import Server, StatusError, faithful, measured_mode
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.errors import EngineError, RecipeError
from offdrift.records.provenance import Sampling
from offdrift_lab.train.settings.recipe import check_recipe

VOCAB = 8
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.3, -2.0, 1.5]).double()
"""Of every token, whatever stands before."""
PLAIN = Sampling(max_tokens=3)
COMPLETIONS, SERVER_INFO = "/v1/completions", "/server_info?config_format=json"


class Played:
    """A server that answers as it is told; `fault(verb, path, body)` may answer first."""

    def __init__(self, software: str = "vllm", mode: str = "processed") -> None:
        self.software, self.mode, self.label = software, mode, "default"
        self.dev, self.tells = True, True
        self.fault = lambda verb, path, body: None
        self.asked: list[tuple[str, str, dict | None, dict]] = []
        self.active = self.most_active = 0
        self.url = ""

    def answer(self, path: str, body: dict | None) -> object:
        model = {"dtype": "torch.float32", "logprobs_mode": f"{self.mode}_logprobs", "quantization": "fp8"}
        label = {"weight_version": self.label} if self.dev else None
        if path == "/update_weights_from_disk":
            self.label = body["weight_version"]
        answers = {
            "/v1/models": lambda: {
                "data": [{"id": "m", "root": "/models/m", "owned_by": self.software, "max_model_len": 64}]
            },
            "/version": lambda: {"version": "0.32.0"},
            "/get_server_info": lambda: {"version": "0.5.4", "dtype": "bfloat16", "quantization": None},
            SERVER_INFO: lambda: (
                {"vllm_config": {"model_config": model, "cache_config": {"cache_dtype": "fp8"}}}
                if self.dev and self.tells
                else None
            ),
            "/weight_info": lambda: label,
            "/get_model_info": lambda: label,
            COMPLETIONS: lambda: self.completion(body),
            "/generate": lambda: self.generated(body),
            "/update_weights_from_disk": lambda: {"success": True},
        }
        return answers[path]() if path in answers else None

    def rows(self, params: dict, length: int) -> tuple[list[int], list[float], torch.Tensor]:
        """Tokens drawn as asked, their log-probs by this server's mode, and its log-probs of all."""
        t, k = params["temperature"], max(params["top_k"], 0)
        sampled = (LOGITS / t).log_softmax(-1)
        if k:
            sampled = sampled.masked_fill(sampled < sampled.topk(k).values[-1], -math.inf).log_softmax(-1)
        shown = {
            "processed": sampled,
            "tempered": (LOGITS / t).log_softmax(-1),
            "raw": LOGITS.log_softmax(-1),
            "logits": LOGITS,
        }[self.mode]
        seed = params.get("seed", params.get("sampling_seed", 0)) % 2**31
        rng = np.random.default_rng(seed)
        tokens = rng.choice(VOCAB, size=length, p=sampled.exp().numpy()).tolist()
        return tokens, shown[tokens].clamp(min=-9999.0).tolist(), shown.clamp(min=-9999.0)

    def completion(self, body: dict) -> dict:
        tokens, logp, shown = self.rows(body, body["max_tokens"])
        k = VOCAB if body["logprobs"] == -1 else body["logprobs"]
        best = shown.topk(k).indices.tolist()
        return {
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": tokens,
                    "prompt_token_ids": body["prompt"],
                    "logprobs": {
                        "tokens": [f"token_id:{t}" for t in tokens],
                        "token_logprobs": logp,
                        "top_logprobs": [{f"token_id:{i}": float(shown[i]) for i in [t, *best]} for t in tokens],
                    },
                }
            ]
        }

    def generated(self, body: dict) -> dict:
        params = body["sampling_params"]
        tokens, logp, shown = self.rows(params, params["max_new_tokens"])
        k = VOCAB if body["top_logprobs_num"] == -1 else body["top_logprobs_num"]
        best = shown.topk(k).indices.tolist()
        return {
            "text": "",
            "output_ids": tokens,
            "meta_info": {
                "id": "x",
                "finish_reason": {"type": "length", "length": len(tokens)},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(tokens),
                "weight_version": self.label,
                "output_token_logprobs": [[x, t, None] for x, t in zip(logp, tokens)],
                "output_top_logprobs": [[[float(shown[i]), i, None] for i in best] for _ in tokens],
            },
        }

    def drawn(self) -> list[dict]:
        return [body for _, path, body, _ in self.asked if path in (COMPLETIONS, "/generate")]


@contextmanager
def playing(played: Played):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet per answer

        def log_message(self, *words):
            pass

        def _do(self):
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            played.asked.append((self.command, self.path, body, dict(self.headers)))
            played.active += 1
            played.most_active = max(played.most_active, played.active)
            try:
                said = played.fault(self.command, self.path, body)
                if callable(said):
                    said(self)
                    return
                status, said = said if isinstance(said, tuple) else (200, said)
                if said is None:
                    said = played.answer(self.path, body)
                if said is None:
                    status, said = 404, {"detail": "Not Found"}
                content = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            finally:
                played.active -= 1

        do_GET = do_POST = _do

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    played.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield played
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def played(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OFFDRIFT_API_KEY", raising=False)
    with playing(Played()) as server:
        yield server


@pytest.fixture
def sglang(monkeypatch):
    with playing(Played("sglang", mode="tempered")) as server:
        yield server


def engine(played: Played, **options) -> OpenAIEngine:
    return OpenAIEngine(played.url, **{"vocab_size": VOCAB, "timeout": 5.0, "retries": 2, **options})


def changed(**changes):
    """A fault: the right completion with some fields of its choice replaced."""

    def fault(verb, path, body):
        if path != COMPLETIONS:
            return None
        said = Played().completion(body)
        choice = said["choices"][0]
        for name, value in changes.items():
            holder, key = (choice["logprobs"], name) if name in choice["logprobs"] else (choice, name)
            holder[key] = value
        return said

    return fault


def spoiled(sglang: Played, change) -> None:
    """A fault: what `change` makes of SGLang's right answer."""
    sglang.fault = lambda verb, path, body: change(sglang.generated(body)) if path == "/generate" else None


def at(path: str, answer):
    """A fault: this answer at one path, the right ones elsewhere."""
    return lambda verb, where, body: answer if where == path else None


def slow(seconds: float):
    """A fault: responses that take their time."""
    return lambda verb, path, body: time.sleep(seconds) if path == COMPLETIONS else None


def refused(played: Played, words: str, error=EngineError, sampling=PLAIN, evidence="sampled", **options):
    """One response is asked for and refused; the error."""
    with pytest.raises(error, match=words) as caught:
        engine(played, **options).generate([[1, 2]], sampling, seed=0, evidence=evidence)
    return str(caught.value)


# -- addresses and connections ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "is no address"), ("file:///etc/passwd", "is no address"), ("", "is no address"),
        ("http://user:secret@host/v1", "OFFDRIFT_API_KEY"), ("http://host/v1?key=secret", "OFFDRIFT_API_KEY"),
        ("http://host:port/v1", "is no address"), ("http://host:99999/v1", "is no address"),
        ("http://[::1", "is no address"),
        ("http://user:secret/b@host/v1", "is no address"), ("http://10.0.0.7:8000/v1", "rollout.insecure = true"),
        ("http://127.0.0.1.example/v1", "in the clear"), ("http://localhost.example/v1", "in the clear"),
    ],
)  # fmt: skip
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url, words):
    with pytest.raises(EngineError, match=words) as caught:
        Server(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("https://host/v1", {}), ("http://localhost:1/v1", {}), ("http://127.8.0.1/v1", {}), ("http://[::1]:1/v1", {}),
        ("http://10.0.0.7/v1", {"insecure": True}),
    ],
)  # fmt: skip
def test_this_machine_and_encrypted_or_trusted_ones_are_spoken_to(url, options):
    Server(url, **options).close()


def test_a_server_that_is_not_there_is_named_with_its_address():
    with pytest.raises(
        EngineError, match=r"GET http://127\.0\.0\.1:9/v1/models: ConnectError: .*is the server running"
    ):
        OpenAIEngine("http://127.0.0.1:9/v1", vocab_size=VOCAB, retries=0)


def test_busy_and_broken_connections_are_tried_again_and_give_the_same_draw(played):
    calm = engine(played).generate([[1, 2]] * 4, PLAIN, seed=5)
    failures = iter([(503, {"detail": "busy"}), _hung_up, (429, b"slow down")])
    lock = threading.Lock()

    def fault(verb, path, body):
        with lock:
            return next(failures, None) if path == COMPLETIONS else None

    played.fault = fault
    again = engine(played, retries=3).generate([[1, 2]] * 4, PLAIN, seed=5)
    assert torch.equal(calm.tokens, again.tokens)
    assert torch.equal(calm.logp_rollout, again.logp_rollout)
    seeds = [body["seed"] for body in played.drawn()]
    assert len(seeds) == 4 + 4 + 3
    assert len(set(seeds)) == 4


def _idle_sockets(server: Server) -> list[socket.socket]:
    pools = [client._transport._pool for client in (server._pooled, server._fresh)]
    streams = [c._connection._network_stream for pool in pools for c in pool.connections]
    return [stream.get_extra_info("socket") for stream in streams]


def test_connections_that_were_closed_meanwhile_cost_one_try_together(played):
    made = engine(played, concurrency=4, retries=1)
    played.fault = lambda verb, path, body: time.sleep(0.02)
    made.generate([[1]] * 8, PLAIN, seed=0)
    idle = _idle_sockets(made._server)
    assert len(idle) >= 3
    for connection in idle:
        connection.shutdown(socket.SHUT_RDWR)
    assert made.generate([[1]] * 8, PLAIN, seed=0).num_sequences == 8


def test_without_retries_no_connection_is_used_that_may_be_closed(played):
    made = engine(played, retries=0)
    assert _idle_sockets(made._server) == []
    assert made.generate([[1]], PLAIN, seed=0).num_sequences == 1


@pytest.mark.parametrize(("retries", "again"), [(0, True), (2, False)])
def test_connections_do_not_pile_up(played, retries, again):
    made = Server(played.url, retries=retries)
    for _ in range(5):
        made.post("/update_weights_from_disk", {"weight_version": "x"}, again=again)
    assert len(_idle_sockets(made)) <= 1
    made.close()
    made.close()
    with pytest.raises(EngineError, match="closed"):
        made.get("/v1/models")


def test_a_refusal_is_not_tried_again_and_is_quoted(played):
    played.fault = at(COMPLETIONS, (400, {"error": "max_logprobs is 20 " + "x" * 999}))
    words = r"POST http://127.*/v1/completions.*status 400.*max_logprobs is 20"
    assert len(refused(played, words, StatusError)) < 500
    assert len(played.drawn()) == 1


def test_an_answer_that_does_not_come_is_given_up_once(played):
    played.fault = slow(0.6)
    refused(played, r"no whole answer within 0\.2 s.*timeout.*concurrency", timeout=0.2)
    assert len(played.drawn()) == 1


def _hung_up(handler):
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def _truncated(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (_truncated, "RemoteProtocolError.*13 bytes, expected 100"),
        (b"<html>gateway</html>", "not answered with JSON.*gateway"),
        (b"[" * 100_000, "not answered with JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not answered with JSON"),
        (b" " * 2**21, "more than .* bytes"),
        ([1, 2], "list where an object belongs"),
    ],
    ids=["truncated", "html", "nested", "digits", "endless", "list"],
)
def test_an_answer_that_cannot_be_read_is_refused(played, said, words):
    played.fault = at(COMPLETIONS, said)
    refused(played, words)


def test_requests_under_way_are_bounded(played):
    played.fault = slow(0.02)
    assert engine(played, concurrency=3).generate([[1]] * 24, PLAIN, seed=0).num_sequences == 24
    assert 2 <= played.most_active <= 3


def test_the_first_failure_stops_what_has_not_begun(played):
    played.fault = at(COMPLETIONS, (500, b"dead"))
    with pytest.raises(StatusError, match="status 500"):
        engine(played, concurrency=2).generate([[1]] * 200, PLAIN, seed=0)
    assert len(played.drawn()) < 100


def test_an_interrupt_stops_what_has_not_begun(played, monkeypatch):
    made = engine(played, concurrency=2)
    played.fault = slow(0.02)

    def interrupted(*_, **__):
        time.sleep(0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr("offdrift.engines.server.engine.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.generate([[1]] * 200, PLAIN, seed=0)
    assert 2 <= len(played.drawn()) < 100


def test_closing_wakes_a_thread_that_waits_for_an_answer(played):
    """Else a process that was interrupted lives until its requests time out, ten minutes later."""
    arrived, answer = threading.Event(), threading.Event()

    def stalls(verb, path, body):
        if path == COMPLETIONS:
            arrived.set()
            answer.wait(60)

    made = engine(played, timeout=300.0)
    played.fault = stalls
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(made.generate, [[1]], PLAIN, seed=0)
        assert arrived.wait(60)
        made.close()
        failed = next(futures.as_completed([asked], timeout=30)).exception()
        answer.set()
    assert isinstance(failed, EngineError)


@pytest.mark.parametrize(("key", "advice"), [("", "it wants a key"), ("sk-first", "is not the server's")])
def test_a_server_that_wants_a_key_is_told_from_one_that_wants_another(played, monkeypatch, key, advice):
    monkeypatch.setenv("OFFDRIFT_API_KEY", key)
    played.fault = at("/v1/models", (401, b'{"error": "Unauthorized"}'))
    with pytest.raises(StatusError, match=rf"OFFDRIFT_API_KEY.*{advice}|{advice}.*OFFDRIFT_API_KEY"):
        engine(played)


CARDS = {
    "data": [
        {"id": "base", "root": "/models/base", "owned_by": "vllm", "parent": None, "max_model_len": 64},
        {"id": "tuned", "root": "/adapters/tuned", "owned_by": "vllm", "parent": "base", "max_model_len": None},
    ]
}
"""What vLLM 0.32 lists that was started with --lora-modules tuned=/adapters/tuned."""


def test_a_server_with_adapters_is_asked_by_name_and_scores_prompts_one_by_one(played):
    played.fault = at("/v1/models", (200, json.dumps(CARDS).encode()))
    with pytest.raises(EngineError, match=r"'tuned': LoRA adapter.*model=NAME"):
        engine(played)
    tuned, base = engine(played, model="tuned"), engine(played, model="base")
    assert (tuned.served.parent, base.served.parent) == ("base", None)
    drawn = base.generate([[1]] * 8, PLAIN, seed=0)

    def reads(verb, path, body):
        if path != COMPLETIONS:
            return None
        time.sleep(0.02)  # long enough that others would come meanwhile
        rows = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
        return {"choices": [{"prompt_token_ids": body["prompt"], "prompt_logprobs": rows}]}

    played.fault, played.most_active = reads, 0
    assert base.forced(drawn).logp_rollout.tolist() == [-1.0] * 24
    assert played.most_active == 1


@pytest.mark.parametrize("key", ["sk-first\r\nX: y", "sk-first\u2603", "sk-\x00first"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(played, monkeypatch, key):
    if "\x00" in key:  # which no environment can hold, but a library's own may
        monkeypatch.setattr("os.environ", {"OFFDRIFT_API_KEY": key})
    else:
        monkeypatch.setenv("OFFDRIFT_API_KEY", key)
    with pytest.raises(EngineError, match="no header can carry") as caught:
        engine(played)
    assert "sk-" not in str(caught.value)
    assert played.asked == []


def test_a_key_is_sent_and_stands_nowhere_else(played, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another")  # of another service
    monkeypatch.setenv("OFFDRIFT_API_KEY", "sk-first\r\n")  # as it was read from a file
    made = engine(played)
    drawn = made.generate([[1]], PLAIN, seed=0)
    assert {h.get("Authorization") for *_, h in played.asked} == {"Bearer sk-first"}
    assert "sk-" not in repr(drawn.provenance) + repr(vars(made)) + repr(vars(made._server))
    played.fault = at(COMPLETIONS, (401, b"bad key sk-first"))
    with pytest.raises(StatusError, match=r"bad key \*\*\*"):
        made.generate([[1]], PLAIN, seed=0)


def test_redirects_proxies_and_cookies_lead_nowhere_else(played, monkeypatch):
    monkeypatch.setenv("OFFDRIFT_API_KEY", "sk-first")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with playing(Played()) as other:

        def redirect(handler):
            handler.send_response(307)
            for header in (("Location", other.url), ("Set-Cookie", "session=1; Path=/"), ("Content-Length", "0")):
                handler.send_header(*header)
            handler.end_headers()

        made = engine(played)
        played.fault = at(COMPLETIONS, redirect)
        for _ in range(2):
            with pytest.raises(StatusError, match="status 307"):
                made.generate([[1]], PLAIN, seed=0)
        assert other.asked == []
    assert not any("Cookie" in headers for *_, headers in played.asked)


def test_a_compressed_answer_is_not_unpacked(played):
    bomb = gzip.compress(b" " * 2**26)

    def compressed(handler):
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(bomb)))
        handler.end_headers()
        handler.wfile.write(bomb)

    played.fault = at(COMPLETIONS, compressed)
    refused(played, "not answered with JSON")


# -- answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": None}, "text and no token_ids"),
        ({"token_ids": [1, 2, 8]}, "logprobs.tokens are not those"),
        ({"token_ids": [1, 2, 8], "tokens": ["token_id:1", "token_id:2", "token_id:8"]},
         "token 2 is 8; the vocabulary has 8"),
        ({"token_ids": [1, 2, True], "tokens": ["token_id:1", "token_id:2", "token_id:True"]}, "token 2 is True"),
        ({"prompt_token_ids": [1, 3]}, "it was tokenized again"),
        ({"token_logprobs": [-1.0, -1.0]}, "3 tokens have 2 log-probs"),
        ({"token_logprobs": [-1.0, -1.0, None]}, "a log-prob is None"),
        ({"token_logprobs": [-1.0, -1.0, math.nan]}, "a log-prob is nan"),
        ({"token_logprobs": [-1.0, -1.0, "-1"]}, "a log-prob is '-1'"),
        ({"token_logprobs": [-1.0, -1.0, 3.5]}, "are these logits"),
        ({"token_logprobs": [-1.0, -1.0, -9999.0]}, "log-prob -inf"),
        ({"token_logprobs": [-1.0, -1.0, 10**400]}, "are these logits"),
        ({"token_logprobs": [-1.0, -1.0, -(10**400)]}, "log-prob -inf"),
        ({"token_ids": [1, 2, ["x" * 999]], "tokens": ["token_id:1", "token_id:2", f"token_id:{['x' * 999]}"]},
         "token 2 is .{80}; the vocabulary"),
        ({"finish_reason": "abort"}, "finish_reason = 'abort'"),
        ({"finish_reason": None}, "finish_reason = None"),
        ({"token_ids": [1, 2], "tokens": ["token_id:1", "token_id:2"], "token_logprobs": [-1.0, -1.0],
          "finish_reason": "stop", "stop_reason": 2}, "2 of 3 tokens at token 2 .*generation-config"),
        ({"token_ids": [], "tokens": [], "token_logprobs": []}, "0 tokens, 1 to 3"),
        ({"logprobs": None}, "logprobs is NoneType, not dict"),
    ],
)  # fmt: skip
def test_an_answer_that_does_not_add_up_is_refused(played, changes, words):
    played.fault = changed(**changes)
    refused(played, words)


def test_a_response_that_goes_on_behind_a_stop_token_is_refused(played):
    names = {"token_ids": [1, 2, 3], "tokens": ["token_id:1", "token_id:2", "token_id:3"]}
    played.fault = changed(**names)
    assert engine(played).generate([[1]], PLAIN, seed=0).tokens.tolist() == [1, 2, 3]
    refused(played, "goes on behind a stop token", sampling=Sampling(3, stop_token_ids=(2,)))


@pytest.mark.parametrize(
    "row", [{}, {"token_id:1": -1.0}, {"a": -1.0, "token_id:1": -1.0}, {"token_id:99": -1.0, "token_id:1": -1.0}]
)
def test_too_few_likeliest_tokens_are_refused(played, row):
    played.fault = changed(top_logprobs=[row] * 3)
    refused(played, r"[01] tokens of the vocabulary are listed where 2", evidence=2)


def shifted(by: float):
    """A change of SGLang's answer: every log-prob is so much larger or smaller, that of the drawn token too."""

    def change(said):
        meta = said["meta_info"]
        meta["output_token_logprobs"] = [[x + by, t, text] for x, t, text in meta["output_token_logprobs"]]
        meta["output_top_logprobs"] = [[[x + by, t, text] for x, t, text in row] for row in meta["output_top_logprobs"]]
        return said

    return change


@pytest.mark.parametrize("total", [2.2, 1.001, 0.999, 0.04])
def test_a_whole_vocabulary_that_does_not_sum_to_one_is_refused(sglang, total):
    """Whatever is made of it later is normalized, and would be exact."""
    assert float(LOGITS.softmax(-1).max()) * total < 1  # a log-prob above 0 is refused for that alone
    spoiled(sglang, shifted(math.log(total)))
    told = refused(sglang, "not to 1", evidence="full")
    assert re.search(rf"request 0 of 1 to .* token 0: its 8 probabilities sum to {total:.6g}, not to 1", told), told
    assert 'evidence = "sampled"' in told


def test_a_whole_vocabulary_within_the_rounding_of_its_dtype_is_read(sglang):
    def as_float32(said, dtype=np.float32):
        meta = said["meta_info"]
        to = lambda x: float(torch.tensor(x).to(dtype)) if isinstance(dtype, torch.dtype) else float(dtype(x))  # noqa: E731
        meta["output_token_logprobs"] = [[to(x), t, text] for x, t, text in meta["output_token_logprobs"]]
        meta["output_top_logprobs"] = [[[to(x), t, text] for x, t, text in row] for row in meta["output_top_logprobs"]]
        return said

    for dtype in (np.float32, torch.bfloat16, torch.float16):
        spoiled(sglang, lambda said, dtype=dtype: as_float32(said, dtype))
        drawn = engine(sglang).generate([[1, 2]], PLAIN, seed=0, evidence="full")
        assert drawn.evidence.logp.shape == (3, VOCAB)


def test_likeliest_tokens_that_sum_to_more_than_one_are_refused(sglang):
    def change(said):
        meta = said["meta_info"]
        meta["output_top_logprobs"][1] = [[-1e-9, t, text] for _, t, text in meta["output_top_logprobs"][1]]
        return said

    spoiled(sglang, change)
    refused(sglang, "token 1: its 3 probabilities sum to [23].*, above 1", evidence=3)


def test_likeliest_tokens_out_of_order_are_refused(sglang):
    def change(said):
        said["meta_info"]["output_top_logprobs"][2].reverse()
        return said

    spoiled(sglang, change)
    refused(sglang, "response token 2: its likeliest tokens are not in order", evidence=4)


def test_a_drawn_token_with_two_log_probs_is_refused(sglang, played):
    def change(said):
        row = said["meta_info"]["output_token_logprobs"][0]
        row[0] -= 0.01
        return said

    spoiled(sglang, change)
    refused(sglang, "response token 0: the drawn token . has two log-probs", evidence="full")
    played.fault = changed(token_logprobs=[-9.0] * 3)
    refused(played, "response token 0: the drawn token . has two log-probs", evidence=VOCAB - 1)


def test_a_drawn_token_that_the_likeliest_leave_out_is_refused(sglang):
    def change(said):
        meta = said["meta_info"]
        (x, t, _), row = meta["output_token_logprobs"][0], meta["output_top_logprobs"][0]
        meta["output_token_logprobs"][0] = [max(x, row[-1][0] + 0.01), t, None]
        meta["output_top_logprobs"][0] = [e for e in row if e[1] != t][:2]
        return said

    spoiled(sglang, lambda said: change(said))
    refused(sglang, "is likelier than the last of the 2|its 2 probabilities sum|listed where 2", evidence=2)


def test_a_token_that_is_listed_twice_is_refused(sglang):
    def change(said):
        row, drawn = said["meta_info"]["output_top_logprobs"][1], said["meta_info"]["output_token_logprobs"][1][1]
        other = next(i for i, e in enumerate(row) if e[1] != drawn)
        row.insert(other, list(row[other]))
        return said

    spoiled(sglang, change)
    refused(sglang, "response token 1: token . is listed twice", evidence=3)


def test_a_token_that_is_listed_with_two_log_probs_is_refused(sglang):
    def change(said):
        row = said["meta_info"]["output_top_logprobs"][1]
        row.append([row[0][0] - 1.0, row[0][1], None])
        return said

    spoiled(sglang, change)
    refused(sglang, "token 0 is listed with two log-probs", evidence=3)


def test_what_was_cut_off_has_no_probability(played):
    drawn = engine(played).generate([[1]] * 4, Sampling(6, top_k=3), seed=0, evidence="full")
    assert drawn.evidence.logp.shape == (24, VOCAB)
    assert (drawn.evidence.logp == -torch.inf).sum(-1).tolist() == [5] * 24
    torch.testing.assert_close(drawn.evidence.logp.exp().sum(-1), torch.ones(24))


def test_the_likeliest_tokens_come_in_order_whether_or_not_one_was_drawn(played):
    drawn = engine(played).generate([[1]] * 8, PLAIN, seed=0, evidence=3)
    assert drawn.evidence.ids.tolist() == [[0, 7, 1]] * 24
    assert not torch.isin(drawn.tokens, torch.tensor([0, 7, 1])).all()
    expected = LOGITS.log_softmax(-1)[[0, 7, 1]].float().expand(24, -1)
    torch.testing.assert_close(drawn.evidence.logp, expected, atol=1e-6, rtol=0)


# -- which log-probs --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["processed", "tempered", "raw"])
@pytest.mark.parametrize("tells", [True, False])
def test_log_probs_that_are_not_those_of_what_is_sampled_are_refused(played, mode, tells):
    played.mode, played.tells = mode, tells and mode != "tempered"
    made = engine(played)
    assert made.logprobs_mode([1]) == mode
    samplings = {"plain": PLAIN, "cold": Sampling(3, temperature=0.5), "top_k": Sampling(3, top_k=2)}
    right = {"processed": {"plain", "cold", "top_k"}, "tempered": {"plain", "cold"}, "raw": {"plain"}}[mode]
    for name, sampling in samplings.items():
        assert faithful(mode, sampling) == (name in right)
        if name in right:
            assert made.generate([[1]], sampling, seed=0).provenance.logprobs == "processed"
            continue
        with pytest.raises(EngineError, match=f"are {mode}: not those of what is.*--logprobs-mode"):
            made.generate([[1]], sampling, seed=0)
        recorded = engine(played, on_raw="record").generate([[1]], sampling, seed=0)
        assert recorded.provenance.logprobs == "raw"


def test_logits_are_refused(played):
    played.mode = "logits"
    refused(played, "are these logits")
    played.fault = at(SERVER_INFO, {"vllm_config": {"model_config": {"logprobs_mode": "raw_logits"}}})
    with pytest.raises(EngineError, match="reports raw_logits"):
        engine(played)


def test_a_flat_distribution_says_nothing_about_the_mode(played, monkeypatch):
    monkeypatch.setattr("tests.engines.test_openai_broken.LOGITS", torch.zeros(VOCAB).double())
    played.tells = False
    made = engine(played)
    assert measured_mode(lambda s: made._drawn([[1]], s, 0, 4, "raw")) is None
    with pytest.raises(EngineError, match="raw, it seems"):
        made.generate([[1]], Sampling(3, temperature=0.5), seed=0)


# -- what the server is -----------------------------------------------------------------------------


def test_the_record_says_what_the_server_says(played):
    said = engine(played).generate([[1]], PLAIN, seed=0).provenance
    assert (said.engine, said.engine_version, said.model) == ("openai", "vllm 0.32.0", "/models/m")
    assert (said.dtype, said.quantization) == ("float32", "fp8+kv_fp8")
    assert engine(played).states_dtype


def test_a_server_that_says_little_is_used_as_it_is(played):
    played.dev = False
    made = engine(played)
    assert (made.dtype, made.served.mode, made._weights.label) == ("bfloat16", None, None)
    assert not made.states_dtype
    assert engine(played, dtype="float16").states_dtype
    assert made.generate([[1]] * 2, PLAIN, seed=0).num_sequences == 2
    with pytest.raises(EngineError, match="no /collective_rpc; start vLLM with VLLM_SERVER_DEV_MODE=1"):
        engine(played, sync=True).load_weights([("w", torch.ones(2))], version=1)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([], "say which one: openai:URL,model=NAME"),
        ([{"id": "a"}, {"id": "b"}], "say which one"),
        (5, "serves no model"),
    ],
)
def test_which_model_must_be_clear(played, models, words):
    played.fault = at("/v1/models", {"data": models})
    with pytest.raises(EngineError, match=words):
        engine(played)


def test_an_answer_of_another_model_is_refused_and_one_under_an_alias_is_not(played):
    cards = [{"id": n, "root": root, "owned_by": "vllm"} for n, root in [("first", "/m"), ("m", "/m"), ("lora", "/l")]]
    answers = {"name": "first"}

    def fault(verb, path, body):
        if path == "/v1/models":
            return {"data": cards}
        return Played().completion(body) | {"model": answers["name"]} if path == COMPLETIONS else None

    played.fault = fault
    made = engine(played, model="m")  # vLLM answers under the first name of the weights
    assert made.generate([[1]], PLAIN, seed=0).num_sequences == 1
    for name in ("lora", "gpt", ["m"]):
        answers["name"] = name
        with pytest.raises(EngineError, match=r"answered in place of 'm'"):
            made.generate([[1]], PLAIN, seed=0)


def test_a_restart_that_loses_weights_is_noticed(played):
    made = engine(played)
    made._weights.label = played.label = "offdrift-1"
    made.generate([[1]], PLAIN, seed=0)
    played.label = "default"
    with pytest.raises(EngineError, match=r"holds weights 'default', expected 'offdrift-1'.*restarted"):
        made.generate([[1]], PLAIN, seed=0)
    played.dev = False
    with pytest.raises(EngineError, match="holds weights 'None'"):
        made.generate([[1]], PLAIN, seed=0)


def test_a_change_while_responses_are_drawn_is_noticed(played):
    made = engine(played)

    played.fault = lambda verb, path, body: setattr(played, "label", "other") if path == COMPLETIONS else None
    with pytest.raises(EngineError, match="holds weights 'other'"):
        made.generate([[1]], PLAIN, seed=0)


def test_wrong_options_are_named(played):
    for options, words in [
        ({"concurrency": 0}, "concurrency = 0"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"api": "chat"}, "there are completions"),
        ({"on_raw": "ignore"}, "on_raw"),
        ({"quantization": "fp8"}, "keeps its own"),
    ]:
        with pytest.raises(EngineError, match=words):
            engine(played, **options)
    made = engine(played)
    made.close()
    made.close()
    with pytest.raises(EngineError, match="is closed"):
        made.generate([[1]], PLAIN, seed=0)


# -- routed experts ---------------------------------------------------------------------------------


def _encoded(array) -> str:
    held = io.BytesIO()
    np.save(held, array, allow_pickle=True)
    return base64.b64encode(held.getvalue()).decode()


def test_routed_experts_are_read_per_position(played):
    drawn = engine(played).generate([[1, 2], [3]], PLAIN, seed=0)
    sent = {}

    def fault(verb, path, body):
        if path == COMPLETIONS and "cache_salt" in body:
            n = len(body["prompt"])
            sent[n] = np.arange(n * 2 * 2).reshape(n, 2, 2).astype(np.uint8)
            said = Played().completion(body)
            said["choices"][0]["routed_experts"] = _encoded(sent[n])
            return said

    played.fault = fault
    found = engine(played).routes(drawn).experts
    # Prompts of 2 and 1 and responses of 3, whose last token is not computed: 4 and 3 positions.
    assert found.shape == (7, 2, 2)
    assert torch.equal(found, torch.from_numpy(np.concatenate([sent[4], sent[3]]).astype(np.int64)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "--enable-return-routed-experts"),
        ("!!", "cannot be read"),
        (_encoded(np.zeros((4, 2))), "shape"),
        (_encoded(np.zeros((9, 2, 2), np.uint8)), "shape"),
        (_encoded(np.array([{}], dtype=object)), "cannot be read"),
    ],
)
def test_routed_experts_that_make_no_sense_are_refused(played, value, words):
    drawn = engine(played).generate([[1, 2]], PLAIN, seed=0)
    played.fault = changed(routed_experts=value)
    made = engine(played)
    with pytest.raises(EngineError, match=words):
        made.routes(drawn)


# -- SGLang's contract ------------------------------------------------------------------------------


def test_sglang_is_asked_in_its_own_words(sglang):
    drawn = engine(sglang).generate([[1, 2], [3]], Sampling(4, temperature=0.5), seed=3, evidence=2)
    assert drawn.provenance.engine_version == "sglang 0.5.4"
    assert (drawn.provenance.dtype, drawn.provenance.logprobs) == ("bfloat16", "processed")
    bodies = [b for b in sglang.drawn() if b["top_logprobs_num"] == 2]
    assert sorted(b["input_ids"] for b in bodies) == [[1, 2], [3]]
    assert all(b["return_logprob"] and b["logprob_start_len"] == -1 for b in bodies)
    params = bodies[0]["sampling_params"]
    assert (params["max_new_tokens"], params["temperature"], params["top_k"]) == (4, 0.5, -1)
    expected = (LOGITS / 0.5).log_softmax(-1)
    assert drawn.evidence.ids.tolist() == [[0, 7]] * 8
    torch.testing.assert_close(drawn.logp_rollout.double(), expected[drawn.tokens], atol=1e-6, rtol=0)


def test_sglang_takes_weights_through_a_folder(sglang, tmp_path):
    from safetensors.torch import load_file

    seen = {}

    def fault(verb, path, body):
        if path == "/update_weights_from_disk":
            seen.update(load_file(f"{body['model_path']}/model.safetensors"))

    sglang.fault = fault
    made = engine(sglang, sync=True, sync_folder=str(tmp_path))
    shared = torch.arange(6.0).view(2, 3)
    made.load_weights([("a", shared), ("b", shared)], version=7)
    assert torch.equal(seen["a"], shared)
    assert torch.equal(seen["b"], shared)
    assert made.generate([[1]], PLAIN, seed=0).rollout_version.tolist() == [7] * 3
    assert list(tmp_path.iterdir()) == []
    sglang.fault = lambda verb, path, body: {"success": False, "message": "no"} if "update" in path else None
    with pytest.raises(EngineError, match="did not succeed"):
        made.load_weights([("a", shared)], version=8)
    with pytest.raises(EngineError, match="holds weights"):
        made.generate([[1]], PLAIN, seed=0)
    with pytest.raises(EngineError, match="no weights were given"):
        made.load_weights([], version=9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output_ids": [1]}, "not those of output_ids"), ({"meta": {"prompt_tokens": 9}}, "prompt_tokens is 9"),
        ({"meta": {"finish_reason": {"type": "abort"}}}, "finish_reason = 'abort'"),
        ({"meta": {"weight_version": "x"}}, "holds weights 'x'"),
        ({"meta": {"output_token_logprobs": [[-1.0]]}}, "not \\[log-prob, token, text\\]"),
        ({"meta": {"output_top_logprobs": 5}}, "int where a list belongs"),
        ({"meta": {"output_top_logprobs": [5] * 3}}, "int where a list belongs"),
    ],
)  # fmt: skip
def test_answers_of_sglang_that_do_not_add_up_are_refused(sglang, change, words):
    top, meta = {k: v for k, v in change.items() if k != "meta"}, change.get("meta", {})
    spoiled(sglang, lambda said: said | top | {"meta_info": said["meta_info"] | meta})
    refused(sglang, words)


def saying(server: Played, spans) -> None:
    """A fault: right answers that say `spans(labels)`, which weights drew which tokens, in each server's words."""

    def fault(verb, path, body):
        said = {"weight_versions": spans}
        if path == "/generate":
            right = server.generated(body)
            return right | {"meta_info": right["meta_info"] | said}
        if path == "/inference/v1/generate":
            tokens, logp, _ = server.rows(body["sampling_params"], 3)
            rows = [{"token_id": t, "logprob": x, "top_logprobs": []} for t, x in zip(tokens, logp)]
            choice = {"token_ids": tokens, "finish_reason": "length", "logprobs": {"content": rows}}
            return {"choices": [choice | said]}
        return None

    server.fault = fault


def span(label, start, end):
    return {"version": label, "start": start, "end": end}


@pytest.mark.parametrize("software", ["sglang", "vllm"])
def test_tokens_keep_the_version_of_the_weights_that_drew_them(software, tmp_path):
    """A response that was under way while weights were loaded, as SGLang 0.5.23 and vLLM 0.32 say it."""
    with playing(Played(software, "tempered" if software == "sglang" else "processed")) as server:
        made = engine(
            server, sync=True, sync_folder=str(tmp_path), version=6, api=None if software == "sglang" else "generate"
        )
        labels = [made._weights.label]
        for version in (7, 8):
            made._weights._load_from = lambda folder, label: setattr(server, "label", label)
            made.load_weights([("a", torch.ones(2))], version=version)
            labels.append(server.label)
        assert made.logprobs_mode([1]) is not None  # measured before answers say what they are asked to
        for pieces, expected in [
            ([(1, 0, 2), (2, 2, 3)], [7, 7, 8]),
            ([(0, 0, 1), (1, 1, 2), (2, 2, 3)], [6, 7, 8]),
            ([(2, 0, 3)], [8, 8, 8]),
        ]:
            saying(server, [span(labels[i], start, end) for i, start, end in pieces])
            assert made.generate([[1, 2]], PLAIN, seed=0).rollout_version.tolist() == expected
        saying(server, [span(labels[1], 0, 2), span("theirs", 2, 3)] if software == "vllm" else
               [span("theirs", 0, 2), span(labels[2], 2, 3)])  # fmt: skip
        with pytest.raises(EngineError, match="holds weights 'theirs'"):
            made.generate([[1, 2]], PLAIN, seed=0)


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (5, "int where a list belongs"),
        ([5], "int where an object belongs"),
        ([span("default", 0, 2)], "about 2 of 3 tokens"),
        ([span("default", 1, 3)], r"weight_versions\[0\] is about tokens 1 to 3; after 0"),
        ([span("default", 0, 4)], r"weight_versions\[0\] is about tokens 0 to 4"),
        ([span("default", 0, 2), span("default", 1, 3)], r"weight_versions\[1\] is about tokens 1 to 3; after 2"),
        ([span("default", 0, 0), span("default", 0, 3)], r"weight_versions\[0\] is about tokens 0 to 0"),
        ([span("default", False, 3)], r"weight_versions\[0\] is about tokens False"),
        ([span(None, 0, 3)], r"weight_versions\[0\]\.version is None"),
        ([{"version": "default"}], r"weight_versions\[0\] is about tokens None"),
    ],
)
@pytest.mark.parametrize("software", ["sglang", "vllm"])
def test_versions_per_token_that_do_not_add_up_are_refused(software, spans, words):
    with playing(Played(software)) as server:
        saying(server, spans)
        refused(server, words, api="generate" if software == "vllm" else None)


def test_spans_and_the_last_label_of_sglang_must_agree(sglang):
    saying(sglang, [span("default", 0, 2), span("x", 2, 3)])
    refused(sglang, "weight_version is 'default', and weight_versions end with 'x'")


def test_weights_that_change_under_a_server_that_does_not_say_what_it_holds_are_refused(sglang):
    sglang.dev = False
    saying(sglang, [span("x", 0, 2), span("default", 2, 3)])
    refused(sglang, "drew responses with weights default, x and does not say")
    saying(sglang, [span("default", 0, 3)])
    assert engine(sglang, version=4).generate([[1, 2]], PLAIN, seed=0).rollout_version.tolist() == [4] * 3


# -- how it is named --------------------------------------------------------------------------------


def test_a_server_is_named_in_one_line_and_back(played):
    text = f"openai:{played.url},model=m,concurrency=2"
    spec = EngineSpec.parse(text)
    assert (spec.kind, spec.dtype) == ("openai", "auto")
    assert isinstance(make_engine("openai", played.url, vocab_size=VOCAB), OpenAIEngine)
    assert spec.options == {"url": played.url, "model": "m", "concurrency": 2}
    assert EngineSpec.parse(str(spec)) == spec
    assert EngineSpec.parse(text + ",dtype=bf16").dtype == "bfloat16"
    with pytest.raises(EngineError, match="no dtype 'auto'"):
        EngineSpec.parse("vllm:auto")
    with pytest.raises(EngineError, match="openai:URL"):
        EngineSpec.parse("other:x")


def test_a_bench_records_what_is_raw_and_takes_what_evidence_it_gets(played):
    class Config:
        def get_text_config(self):
            return type("C", (), {"vocab_size": VOCAB})()

    class Model(torch.nn.Module):
        config = Config()

    played.mode = "raw"

    def fault(verb, path, body):
        if path == COMPLETIONS and body["logprobs"] == -1:
            return 400, b"max_logprobs"

    played.fault = fault
    spec = EngineSpec.parse(f"openai:{played.url}")
    with Bench(Model(), None, [[1, 2]], sampling=Sampling(3, temperature=0.5)) as bench:
        drawn = bench.rollouts(spec)
        assert drawn.provenance.logprobs == "raw"
        assert drawn.evidence.ids.shape == (3, VOCAB)
        with pytest.raises(EngineError, match="not told that it may change"):
            bench.engine(spec).load_weights([], version=1)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"engine": "openai"}, "rollout.url = None"),
        ({"engine": "vllm", "url": "http://x/v1"}, "and no other"),
        ({"engine": "openai", "url": "http://x/v1", "evidence": "hidden"}, "a server gives none"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(rollout, words):
    content = {"name": "r", "model": "tiny-qwen3", "batches": 1, "method": "none", "rollout": rollout}
    with pytest.raises(RecipeError, match=words):
        check_recipe(content, source="test")


# -- the page about servers -------------------------------------------------------------------------


def test_the_configurations_of_the_page_are_read():
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "servers.md").read_text()
    (recipe,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    read = check_recipe(tomllib.loads(recipe), source="page")
    assert (read.rollout.engine, read.rollout.url) == ("openai", "http://127.0.0.1:8000/v1")
    specs = re.findall(r"openai:https?://[^\s`]+", page)
    assert [EngineSpec.parse(s).options["url"] for s in specs] == ["http://127.0.0.1:8000/v1", "https://host:8000/v1"]
    module, name = re.search(r"--worker-extension-cls (\S+)\.(\w+)", page).groups()
    assert callable(getattr(importlib.import_module(module), name).offdrift_load)
    options = set(inspect.signature(OpenAIEngine).parameters)
    named = re.findall(
        r"`(\w+)`", "".join(re.findall(r"^\| (`[a-z_`, ]+`) \|", page.partition("## Which log-probs")[0], re.M))
    )
    assert len(named) == 8
    assert set(named) <= options
