"""The share of the divergence in its worst tokens: by hand, and against the audit's histogram."""

import math

import pytest
import torch

from offdrift.audit.tally import Tally
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift.stats import DriftStats, summarize
from offdrift.stats.drift import Tails
from tests.audit.logs import log_of


def share(lp: LogProbs, on: str = "full") -> float:
    tails = Tails()
    tails.add(lp)
    return summarize(DriftStats.of(lp).plus(tails.sums(lambda mine: [mine])))[f"{on}/k3_top_share"]


def test_the_worst_percent_by_hand():
    zero = torch.full((300,), -3.0)
    moved = zero.clone()
    moved[:3], moved[3:9] = -2.0, -2.5
    k3 = {x: math.expm1(x) - x for x in (1.0, 0.5)}
    lp = LogProbs.pack(zero, moved, segments=Segments.from_lengths([100, 200]))
    assert share(lp) == pytest.approx(3 * k3[1.0] / (3 * k3[1.0] + 6 * k3[0.5]))


def test_pieces_and_processes_together_are_one_batch():
    g = torch.Generator().manual_seed(1)
    mu = -torch.rand(1000, generator=g) - 2
    pi = (mu + 0.1 * torch.randn(1000, generator=g).pow(3)).clamp(max=-1e-3)

    def of(*cuts: slice) -> Tails:
        tails = Tails()
        for cut in cuts:
            tails.add(LogProbs.pack(mu[cut], pi[cut], segments=Segments.from_lengths([len(mu[cut])])))
        return tails

    whole = of(slice(None)).sums(lambda mine: [mine])
    ranks = [of(slice(0, 30), slice(30, 400)), of(slice(400, 1000))]
    k3 = [torch.cat(r.k3["full"]).double() for r in ranks]
    sent = [(x.topk(10).values, x.sum()) for x in k3]
    for mine in range(2):
        answers = iter([[["full"], ["full"]], [400, 600], [sent[0], sent[1]]])
        found = ranks[mine].sums(lambda _, a=answers: next(a))
        assert {k: v.item() for k, v in found.items()} == pytest.approx(
            {k: v.item() for k, v in whole.items()}, rel=1e-9
        )
    assert len(whole) == 2


def test_both_ratios_and_one_token():
    one = torch.tensor([-1.0])
    lp = LogProbs.pack(one, one - 0.1, one - 0.2, segments=Segments.from_lengths([1]))
    assert share(lp) == share(lp, "mismatch") == 1.0


def test_it_agrees_with_what_an_audit_reads_off_its_histogram():
    g = torch.Generator().manual_seed(0)
    mu = -torch.rand(20_000, generator=g) - 2
    pi = mu + 0.02 * torch.randn(20_000, generator=g)
    pi[::500] += 0.8
    log = log_of([50] * 400, logp_rollout=mu, logp=pi)
    held = Tally.of(log).as_dict()["overall"]["full/k3_top_share"]
    assert 0.5 < held < 1
    assert share(log.logprobs()) == pytest.approx(held, rel=0.02)
