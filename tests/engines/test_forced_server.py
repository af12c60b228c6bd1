"""Forced decoding on servers: which way is taken, what is sent, and what is refused.

vLLM's trace replay needs a GPU; a stand-in plays it here, and vLLM's own class reads what is sent to it. The plugin runs
in a real server in `tests/check/test_paired_vllm.py`.
"""

import base64
import io
from itertools import pairwise

import numpy as np
import pytest
import torch

from offdrift.engines.server.dialects import decoding_request
from offdrift.engines.vllm.forced import forced_tokens, leave_only
from offdrift.engines.vllm.taps import IMPOSED
from offdrift.errors import EngineError, NotOfferedError
from offdrift.records.provenance import Sampling
from tests.engines.models import need_vllm
from tests.engines.test_openai_broken import COMPLETIONS, LOGITS, VOCAB, Played, engine, playing

GENERATE = "/inference/v1/generate"
PROMPTS = [[1, 2], [3]]


class Forcing(Played):
    """A server that decodes given tokens in the ways that it is told it has."""

    def __init__(self, *ways: str, mode: str = "raw", status: int = 403) -> None:
        super().__init__(mode=mode)
        self.ways, self.status, self.draws_on = ways, status, False
        self.fault = self.answered

    def answered(self, verb, path, body):
        if path == GENERATE and "trace replay" not in self.ways:
            return self.status, {"error": {"message": "not enabled"}}
        if path == GENERATE:
            return self.traced(body)
        if path == COMPLETIONS and IMPOSED in (body.get("vllm_xargs") or {}) and "logits processor" in self.ways:
            return self.led(body)
        return None

    def forced(self, tokens: list[int]) -> list[int]:
        return [(t + 1) % VOCAB for t in tokens] if self.draws_on and len(set(tokens)) > 1 else tokens

    def traced(self, body: dict) -> dict:
        tokens = self.forced(body["sampling_params"]["trace_decode_token_ids"])
        logp = LOGITS.log_softmax(-1)
        rows = [{"token_id": t, "logprob": float(logp[t]), "top_logprobs": []} for t in tokens]
        choice = {"token_ids": tokens, "finish_reason": "length", "logprobs": {"content": rows}}
        usage = {"prompt_tokens_details": {"cached_tokens": 7}}
        return {"model": "m", "choices": [choice], "usage": usage}

    def led(self, body: dict) -> dict:
        tokens = self.forced(body["vllm_xargs"][IMPOSED])
        said = self.completion(body)
        choice = said["choices"][0]
        logp = torch.zeros(VOCAB) if self.mode == "processed" else LOGITS.log_softmax(-1)
        choice["token_ids"] = tokens
        choice["logprobs"]["tokens"] = [f"token_id:{t}" for t in tokens]
        choice["logprobs"]["token_logprobs"] = [float(logp[t]) for t in tokens]
        return said


def drawn(server: Played):
    return engine(server).generate(PROMPTS, Sampling(max_tokens=4), seed=0)


@pytest.mark.parametrize(
    ("ways", "taken"),
    [
        (("trace replay",), "trace replay"),
        (("logits processor",), "logits processor"),
        (("trace replay", "logits processor"), "trace replay"),
    ],
)
def test_given_tokens_are_decoded_in_the_way_that_the_server_has(ways, taken):
    with playing(Forcing(*ways)) as server:
        rollouts, asked = drawn(server), engine(server)
        assert asked.decoding(PROMPTS[0]) == taken
        found = asked.decoded(rollouts)
    assert torch.equal(found.tokens, rollouts.tokens)
    assert torch.equal(found.logp_rollout, LOGITS.log_softmax(-1)[rollouts.tokens.long()].float())
    assert found.provenance.sampling.temperature == 1
    assert asked.cached_tokens == (7 * (2 + len(PROMPTS)) if taken == "trace replay" else None)


@pytest.mark.parametrize("status", [400, 403, 404, 422])
def test_a_server_without_a_way_says_how_to_start_one_and_still_draws(status):
    with playing(Forcing(status=status)) as server:
        rollouts = drawn(server)
        with pytest.raises(NotOfferedError, match=r"--logits-processors offdrift.*--enable-trace-replay"):
            engine(server).decoded(rollouts)


def test_processed_log_probs_behind_the_plugin_are_not_the_models_and_are_not_taken():
    with playing(Forcing("logits processor", mode="processed")) as server, pytest.raises(NotOfferedError):
        engine(server).decoding(PROMPTS[0])


def test_other_tokens_than_the_given_ones_are_an_error():
    with playing(Forcing("trace replay")) as server:
        rollouts = drawn(server)
        rollouts = rollouts.with_(tokens=(torch.arange(len(rollouts.tokens)) % VOCAB).to(rollouts.tokens.dtype))
        server.draws_on = True
        with pytest.raises(EngineError, match="drew other ones"):
            engine(server).decoded(rollouts)


def test_a_server_that_breaks_is_not_one_that_lacks_the_way():
    with playing(Forcing(status=500)) as server, pytest.raises(EngineError, match="500") as caught:
        engine(server).decoding(PROMPTS[0])
    assert not isinstance(caught.value, NotOfferedError)


def test_requests_have_salts_of_their_own_unless_they_are_given():
    with playing(Forcing("trace replay")) as server:
        rollouts, asked = drawn(server), engine(server)
        asked.decoding(PROMPTS[0])
        server.asked.clear()
        for _ in range(2):
            asked.decoded(rollouts)
        asked.decoded(rollouts, salts=["a", "b"], concurrency=1)
    salts = [body["cache_salt"] for _, path, body, _ in server.asked if path == GENERATE]
    assert len(set(salts[:4])) == 4
    assert salts[4:] == ["a", "b"]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as vLLM imports it
def test_vllm_reads_the_request_as_it_is_meant():
    need_vllm()
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    tokens = [5, 6, 7]
    body = decoding_request("trace replay", "m", [1, 2], tokens, evidence=20, salt="s")
    params = GenerateRequest.model_validate(body).sampling_params
    assert params.trace_decode_token_ids == tokens
    assert (params.max_tokens, params.logprobs, params.ignore_eos, params.temperature) == (3, 21, True, 1.0)
    body = decoding_request("logits processor", "m", [1, 2], tokens, evidence="full")
    params = CompletionRequest.model_validate(body).to_sampling_params(3, {})
    assert forced_tokens(params.extra_args) == tokens
    assert (params.logprobs, params.ignore_eos) == (-1, True)


# -- what a draw records besides --------------------------------------------------------------------


class Recording(Played):
    """vLLM under `--return-sampling-mask --enable-return-routed-experts`."""

    def __init__(self, **changes) -> None:
        super().__init__(mode="processed")
        self.changes, self.fault = changes, self.answered

    def answered(self, verb, path, body):
        if path != GENERATE:
            return None
        tokens, logp, _ = self.rows(body["sampling_params"], body["sampling_params"]["max_tokens"])
        experts = io.BytesIO()
        np.save(experts, np.arange((len(body["token_ids"]) + len(tokens) - 1) * 4, dtype=np.uint8).reshape(-1, 2, 2))
        rows = [{"token_id": t, "logprob": x, "top_logprobs": []} for t, x in zip(tokens, logp, strict=True)]
        choice = {"token_ids": tokens, "finish_reason": "length", "logprobs": {"content": rows}}
        choice["sampling_mask"] = [[7, t] if t != 7 else [7] for t in tokens]
        choice["routed_experts"] = base64.b64encode(experts.getvalue()).decode()
        choice["weight_versions"] = [
            {"version": "default", "start": 0, "end": 1},
            {"version": "default", "start": 1, "end": len(tokens)},
        ]
        return {"model": "m", "choices": [choice | self.changes]}


def recorded(**changes):
    with playing(Recording(**changes)) as server:
        return engine(server, api="generate").generate(PROMPTS, Sampling(max_tokens=3), seed=0)


def test_masks_and_experts_of_the_draw_are_recorded_as_the_server_says_them():
    found = recorded()
    cuts, drawn_tokens = found.support.cu_seqlens.tolist(), found.tokens.tolist()
    masks = [found.support.ids[a:b].tolist() for a, b in pairwise(cuts)]
    assert masks == [sorted({7, t}) for t in drawn_tokens]
    lengths = [len(p) + 3 - 1 for p in PROMPTS]
    expected = [np.arange(n * 4).reshape(-1, 2, 2) for n in lengths]
    assert found.routes.cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
    assert np.array_equal(found.routes.experts.numpy(), np.concatenate(expected))


def test_a_server_that_says_neither_records_neither():
    found = recorded(sampling_mask=None, routed_experts=None)
    assert found.support is None
    assert found.routes is None


@pytest.mark.parametrize(
    ("mask", "words"),
    [([[7]], "1 entries for 3"), ([[99]] * 3, "vocabulary"), ([[]] * 3, "leaves out"), ({"0": [7]}, "no list")],
)
def test_a_mask_that_cannot_be_is_refused(mask, words):
    with pytest.raises(EngineError, match=words):
        recorded(sampling_mask=mask)


def test_experts_of_other_positions_are_refused():
    stream = io.BytesIO()
    np.save(stream, np.zeros((9, 2, 2), dtype=np.uint8))
    with pytest.raises(EngineError, match="9, 2, 2"):
        recorded(routed_experts=base64.b64encode(stream.getvalue()).decode())


# -- the plugin's own functions ------------------------------------------------------------------------


def test_only_the_next_given_token_can_be_drawn():
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0])
    for drawn_already, token in (([], 1), ([1], 3), ([1, 3], 2), ([1, 3, 2], 2)):
        left = leave_only([1, 3, 2], drawn_already, logits)
        assert left.isfinite().nonzero().flatten().tolist() == [token]
        assert left.softmax(-1)[token] == 1
    assert leave_only([4], [], logits) is logits  # beyond the vocabulary: a server must not end by it
    assert logits.tolist() == [3.0, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("tokens", [[], [1.5], [-1], "12", [True], [[1]]])
def test_what_is_no_list_of_token_ids_is_refused(tokens):
    with pytest.raises(ValueError, match=IMPOSED):
        forced_tokens({IMPOSED: tokens})


def test_requests_without_given_tokens_are_left_alone():
    assert forced_tokens(None) is None
    assert forced_tokens({"other": 1}) is None
