"""`DriftStats`: any split into pieces gives what one pass gives."""

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from offdrift.stats import DriftStats, summarize
from tests.oracles.fixtures import ragged


def divergences_of(lp: LogProbs) -> dict[str, Divergence]:
    """KL and TV that depend on the token alone, so that pieces of a batch agree with the whole."""
    kl = 0.02 * (lp.current.detach() - lp.logp_rollout).square()
    tv = (kl / 2).sqrt().clamp(max=1)
    return {
        "kl_rollout_current": Divergence.exact("kl_rollout_current", kl),
        "tv_rollout_current": Divergence.exact("tv_rollout_current", tv),
    }


def stats_of(lp: LogProbs) -> DriftStats:
    a = torch.ones_like(lp.logp_rollout)
    return policy_loss(lp, METHODS["trm_max"], a, BatchInfo(divergences=divergences_of(lp))).stats


def test_pieces_that_know_different_policies_merge_to_what_each_knows():
    lp = ragged(0)
    some = LogProbs.pack(lp.logp_rollout, lp.current, segments=lp.segments)
    merged = summarize(DriftStats.of(lp).merge(DriftStats.of(some)))
    assert merged["full/k3"] == pytest.approx(summarize(DriftStats.of(lp))["full/k3"])
    assert merged["mismatch/k3"] == pytest.approx(summarize(DriftStats.of(lp))["mismatch/k3"])


def test_the_weakest_grade_wins():
    lp = ragged(0)
    assert stats_of(lp).merge(DriftStats.of(lp)).grade == "sampled"
