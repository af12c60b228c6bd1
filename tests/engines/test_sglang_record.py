"""SGLang's sampling masks, experts and hidden states, in the form of its answers since 0.5.23."""

import base64
import math

import numpy as np
import pytest
import torch

from offdrift.divergence.head import Head
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.engines.server.sglang_record import offers, read_flat_experts, read_states
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import FullVocab, HiddenStates
from tests.engines.test_openai_broken import LOGITS, VOCAB, Played, playing

LAYERS, K = 3, 2
INFO = {
    "version": "0.5.23", "dtype": "float32", "quantization": None, "sampling_mask_max_tokens": 4,
    "enable_return_routed_experts": True, "return_hidden_states_mode": "full",
}  # fmt: skip
HEAD = torch.cat([torch.eye(VOCAB), torch.zeros(VOCAB, 1)], 1)
"""Logits are the first numbers of a state."""


def state(scale: float = 1.0) -> list[float]:
    return [*(scale * LOGITS).tolist(), 7.0]


class Recording(Played):
    """SGLang that was started to record everything."""

    def __init__(self, **info) -> None:
        super().__init__("sglang", mode="tempered")
        self.info = INFO | info
        self.change = lambda meta: {}
        """What a faulty server says in place."""

    def answer(self, path, body):
        return self.info if path == "/get_server_info" else super().answer(path, body)

    def generated(self, body):
        said = super().generated(body)
        meta, tokens, params = said["meta_info"], said["output_ids"], body["sampling_params"]
        places = len(body["input_ids"]) + len(tokens) - 1
        if body.get("return_sampling_mask"):
            t, k = params["temperature"], params["top_k"]
            ids = LOGITS.topk(k).indices.tolist()
            inside = (LOGITS[ids] / t).log_softmax(-1).tolist()
            meta["output_token_sampling_mask"] = [ids] * len(tokens)
            meta["output_token_sampling_logprobs"] = [inside[ids.index(token)] for token in tokens]
        if body.get("return_routed_experts"):
            routes = np.arange(places * LAYERS * K, dtype="<i4") % 8
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        if body.get("return_hidden_states"):
            meta["hidden_states"] = [[state(0.5)] * (len(body["input_ids"]) - 1) + [state()]]
            meta["hidden_states"] += [[state()] for _ in tokens[1:]]
        meta |= self.change(meta)
        return said


@pytest.fixture
def server():
    with playing(Recording()) as played:
        yield played


def engine(played, **options) -> OpenAIEngine:
    known = {"experts_per_token": K, "head": lambda: Head(HEAD)}
    return OpenAIEngine(played.url, vocab_size=VOCAB, timeout=5.0, **known | options)


@pytest.mark.parametrize("evidence", ["sampled", "full"])
def test_filtered_draws_have_their_masks_and_the_log_probs_behind_them(server, evidence):
    """Without a mask SGLang's log-probs are those before the filter, and a draw with one is refused."""
    sampling = Sampling(6, temperature=0.7, top_k=3)
    drawn = engine(server).generate([[1, 2], [3]], sampling, seed=1, evidence=evidence)
    kept = LOGITS.topk(3).indices.sort().values
    assert drawn.provenance.logprobs == "processed"
    assert torch.equal(drawn.support.ids.long(), kept.repeat(len(drawn.tokens)))
    inside = torch.full((VOCAB,), -math.inf)
    inside[kept] = (LOGITS[kept] / 0.7).log_softmax(-1).float()
    torch.testing.assert_close(drawn.logp_rollout, inside[drawn.tokens.long()], atol=1e-5, rtol=0)
    if evidence == "full":
        assert isinstance(drawn.evidence, FullVocab)
        torch.testing.assert_close(drawn.evidence.logp, inside.expand(len(drawn.tokens), -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("info", "sampling"),
    [
        ({"sampling_mask_max_tokens": None}, Sampling(4, top_k=3)),
        ({"speculative_algorithm": "EAGLE"}, Sampling(4, top_k=3)),
        ({}, Sampling(4, top_k=5)),
        ({}, Sampling(4, top_p=0.9)),
    ],
    ids=["not offered", "speculative", "beyond the limit", "no top-k"],
)
def test_draws_whose_mask_is_not_offered_are_refused_as_before(info, sampling):
    with playing(Recording(**info)) as played, pytest.raises(EngineError, match="not those of what is"):
        engine(played).generate([[1, 2]], sampling, seed=0)
    assert not any("return_sampling_mask" in body for body in played.drawn())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda meta: {"output_token_sampling_mask": None}, "gives none"),
        (lambda meta: {"output_token_sampling_logprobs": []}, "about other tokens"),
        (lambda meta: {"output_token_sampling_mask": [[99]] * 4}, "sampling_mask|not a list"),
        (lambda meta: {"routed_experts": "AAAA"}, "no whole layers"),
        (lambda meta: {"routed_experts": "?"}, "cannot be read"),
    ],
    ids=["no mask", "no log-probs", "beyond the vocabulary", "cut", "no base64"],
)
def test_records_that_do_not_add_up_are_refused(server, fault, words):
    server.change = fault
    with pytest.raises(EngineError, match=words):
        engine(server).generate([[1, 2]], Sampling(4, top_k=3), seed=0)


def test_experts_of_the_decoding_are_recorded(server):
    drawn = engine(server).generate([[1, 2], [3]], Sampling(4), seed=0)
    places = [2 + 4 - 1, 1 + 4 - 1]
    assert drawn.routes.experts.shape == (sum(places), LAYERS, K)
    first = torch.arange(places[0] * LAYERS * K).reshape(-1, LAYERS, K) % 8
    assert torch.equal(drawn.routes.experts[: places[0]].long(), first)


def test_experts_of_a_prefill_are_asked_for(server):
    made = engine(server)
    drawn = made.generate([[1, 2]], Sampling(4), seed=0)
    assert torch.equal(made.routes(drawn).experts.long(), drawn.routes.experts.long())


def test_experts_are_not_asked_for_where_their_number_is_not_known(server):
    drawn = engine(server, experts_per_token=None).generate([[1, 2]], Sampling(4), seed=0)
    assert drawn.routes is None
    assert not any("return_routed_experts" in body for body in server.drawn())


def test_hidden_states_stand_for_the_whole_vocabulary(server):
    """The states of the prompt's other places, half as long, are not taken."""
    drawn = engine(server).generate([[1, 2, 3], [3]], Sampling(4), seed=0, evidence="hidden")
    assert isinstance(drawn.evidence, HiddenStates)
    logp = drawn.evidence.head.scores(drawn.evidence.states, slice(0, VOCAB)).log_softmax(-1)
    own = logp.gather(1, drawn.tokens[:, None].long())[:, 0]
    torch.testing.assert_close(own, drawn.logp_rollout, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"head": None}, {}], ids=["no head", "not offered"])
def test_states_that_cannot_be_had_are_refused(options):
    info = {} if options else {"return_hidden_states_mode": "last"}
    with playing(Recording(**info)) as played, pytest.raises(EngineError, match="gives no hidden states"):
        engine(played, **options).generate([[1, 2]], Sampling(4), seed=0, evidence="hidden")


@pytest.mark.parametrize("listed", [None, [[1.0] * 3], [[1.0] * 3, [1.0] * 2], [[1.0] * 3, [None] * 3]], ids=str)
def test_states_of_another_number_or_width_are_refused(listed):
    with pytest.raises(EngineError, match="hidden_states"):
        read_states(listed, 2, 3, torch.float32)


def test_negative_experts_are_refused():
    encoded = base64.b64encode(np.full(4, -1, dtype="<i4").tobytes())
    with pytest.raises(EngineError, match="negative"):
        read_flat_experts(encoded, 2, 2)


@pytest.mark.parametrize(
    "info",
    [{}, {"sampling_mask_max_tokens": "64"}, {"enable_return_routed_experts": "yes"}, {"sampling_mask_max_tokens": -1}],
    ids=str,
)
def test_what_a_server_says_in_another_form_is_not_offered(info):
    assert offers(info) == offers({})
