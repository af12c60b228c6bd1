"""The record is tested: log-probs of another policy than the one that drew are refuted, right ones hardly ever."""

import math

import numpy as np
import pytest
import torch

from offdrift.certificate import Looks, TrustRegion
from offdrift.certificate.batch import BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.certificate.guarantees import Certificate
from offdrift.certificate.samples import SHARES
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift_lab.exact import random_policies
from offdrift_lab.exact.policy import TabularPolicy

PROMPTS, HORIZON, VOCAB = 30, 4, 3


def tempered(policy: TabularPolicy, temperature: float) -> TabularPolicy:
    return TabularPolicy(tuple((level.log() / temperature).softmax(-1) for level in policy.levels))


class Drawn:
    """Rollouts at temperature .7, and a policy that lies between them and temperature 1."""

    def __init__(self, label: float, between: float = 0.85) -> None:
        """Args:
        label: temperature that the record says.
        between: temperature of the judged policy.
        """
        g = torch.Generator().manual_seed(0)
        base = random_policies(PROMPTS, vocab=VOCAB, horizon=HORIZON, generator=g)
        self.drew, labelled, judged = (tempered(base, t).law() for t in (0.7, label, between))
        self.rewards = 0.2 * (torch.rand(PROMPTS, VOCAB**HORIZON, generator=g) < 0.3).double()
        self.rewards += 0.8 * (self.drew > base.law())
        self.gain = float(((judged - self.drew) * self.rewards).sum(1).mean())
        self.logp, self.log_w = labelled.log(), judged.log() - labelled.log()

    def certificate(self, prompts: int, g: torch.Generator, **settings) -> Certificate:
        who = torch.randint(PROMPTS, (prompts,), generator=g)
        drawn = torch.multinomial(self.drew[who], 1, generator=g).squeeze(1)
        logp = self.logp[who, drawn]  # of whole sequences: one token each
        lp = LogProbs.pack(logp, logp + self.log_w[who, drawn], segments=Segments.from_lengths([1] * prompts))
        batch = BatchEvidence.of(lp, self.rewards[who, drawn], region=TrustRegion(horizon=1, delta=0.5))
        return certify(batch, **settings)


def test_rollouts_that_were_drawn_colder_than_they_are_labelled_are_refuted():
    world, g = Drawn(label=1.0), torch.Generator().manual_seed(1)
    assert world.gain < -0.05
    for looks in (Looks(), Looks(anytime=True)):
        proofs = [world.certificate(400, g, looks=looks) for _ in range(20)]
        assert [p.record_refuted for p in proofs] == [True] * 20
        assert [p.estimates["gain"].low > 0 for p in proofs] == [True] * 20, "what it would have certified"
        assert {p.gain_low for p in proofs} == {-math.inf}
        assert not any(p.certified for p in proofs)
    proof = proofs[0]
    assert "record is refuted" in proof.verdict
    assert "temperature" in proof.verdict
    assert proof.as_dict()["record_refuted"] is True
    assert proof.as_metrics()["certificate/record_refuted"] == 1
    assert proof.as_metrics()["certificate/mean_ratio"] > 1
    assert "<th>guarantee" not in proof._repr_html_()


def test_a_policy_that_learned_from_the_rollouts_says_nothing_about_their_record():
    proof = Drawn(label=1.0).certificate(400, torch.Generator().manual_seed(1), fresh=False)
    assert proof.estimates["mean_ratio"].low > 1
    assert not proof.record_refuted
    assert "very prompts" in proof.verdict


@pytest.mark.parametrize("between", [0.85, 0.3])
def test_a_right_record_is_refuted_with_its_share_at_most(between, monkeypatch):
    """Made large, so that it shows: a fifth of alpha = .5. The mean ratio is exactly 1, and above 1 in many a batch."""
    monkeypatch.setitem(SHARES, "mean_ratio", 0.2)
    world, g, runs = Drawn(label=0.7, between=between), torch.Generator().manual_seed(2), 300
    law = world.drew * world.log_w.exp()
    assert law.sum(1).numpy() == pytest.approx(np.ones(PROMPTS))
    proofs = [world.certificate(100, g, alpha=0.5) for _ in range(runs)]
    assert {p.estimates["mean_ratio"].alpha for p in proofs} == {0.1}
    refuted, above = sum(p.record_refuted for p in proofs), sum(p.estimates["mean_ratio"].mean > 1 for p in proofs)
    assert refuted <= 0.1 * runs + 3 * math.sqrt(0.09 * runs)
    assert above > 0.3 * runs, "a mean is no interval"
    assert refuted > 0, "the share is spent"


def test_the_share_is_as_documented():
    assert SHARES["mean_ratio"] == SHARES["shift"] == 1 / 144
