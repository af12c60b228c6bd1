"""The engine against answers that SGLang 0.5.23 gave: real ones, asked for word by word as the engine asks."""

import json

import pytest
import torch

from offdrift.check.rescore import rescored
from offdrift.divergence.head import Head
from offdrift.records.rollouts import FullVocab, HiddenStates, TopK
from tests.engines.models import VOCAB, tiny
from tests.engines.sglang_answers import ANSWERS, session
from tests.engines.test_openai_broken import Played, playing


class Recorded(Played):
    """A server that has the answers of a recorded session, and no others."""

    def __init__(self) -> None:
        super().__init__("sglang")
        exchanges = json.loads(ANSWERS.read_text())
        self.answers = {(asked, json.dumps(body, sort_keys=True)): answer for asked, body, answer in exchanges}
        self.fault = self.replayed

    def replayed(self, verb: str, path: str, body: dict | None) -> object:
        answer = self.answers.get((f"{verb} {path}", json.dumps(body, sort_keys=True)))
        return (404, {"detail": "not recorded"}) if answer is None else answer


@pytest.fixture(scope="module")
def drawn():
    with playing(Recorded()) as played:
        yield session(played.url)


@pytest.mark.parametrize("kind", ["full", "3", "hidden", "read"])
def test_log_probs_of_a_real_server_are_those_of_the_model_that_it_serves(drawn, kind):
    rollouts = drawn[kind]
    assert rollouts.provenance.engine_version == "sglang 0.5.23"
    assert rollouts.provenance.dtype == "float32"
    assert (rollouts.rollout_version == 0).all()
    with torch.no_grad():
        logp = rescored(tiny("dense"), rollouts).logp
    torch.testing.assert_close(rollouts.logp_rollout, logp.float(), atol=1e-5, rtol=1e-5)


def test_evidence_of_a_real_server_is_whole(drawn):
    full, few, hidden = (drawn[kind].evidence for kind in ("full", "3", "hidden"))
    assert isinstance(full, FullVocab)
    assert isinstance(few, TopK)
    assert isinstance(hidden, HiddenStates)
    assert full.logp.shape == (8, VOCAB)
    torch.testing.assert_close(full.logp.logsumexp(-1), torch.zeros(8), atol=1e-5, rtol=0)
    assert few.ids.shape == (8, 3)
    head: Head = hidden.head
    rows = (hidden.states.float() @ head.weight.float().T).log_softmax(-1)
    at = drawn["hidden"].tokens.long()[:, None]
    torch.testing.assert_close(rows.gather(1, at)[:, 0], drawn["hidden"].logp_rollout, atol=1e-5, rtol=1e-5)


def test_a_filtered_draw_of_a_real_server_has_the_mask_it_was_drawn_from(drawn):
    rollouts = drawn["filtered"]
    assert rollouts.provenance.logprobs == "processed"
    assert (rollouts.support.cu_seqlens.diff() == 5).all()
    with torch.no_grad():
        logp = rescored(tiny("dense"), rollouts).logp
    gained = rollouts.logp_rollout - logp.float()
    assert (gained > -1e-5).all(), "what the filter left is renormalized"
    assert (gained < 1.5).all()
