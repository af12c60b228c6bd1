"""`DriftStats`: any split into pieces gives what one pass gives."""

import itertools

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from offdrift.segments import Segments
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


def split(lp: LogProbs, sizes: list[int]) -> list[LogProbs]:
    """The batch as pieces of so many sequences."""
    cuts = lp.segments.cu_seqlens.tolist()
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    assert ends[-1] == len(lp.segments)
    out = []
    for a, b in itertools.pairwise(ends):
        s = slice(cuts[a], cuts[b])
        out.append(LogProbs.pack(lp.logp_rollout[s], lp.current[s], lp.old[s], segments=Segments.from_lengths(lp.segments.lengths[a:b])))  # fmt: skip
    return out


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 7], [3, 1, 8], [11, 1]], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_merge_over_any_split_equals_one_pass(sizes, seed):
    lp = ragged(seed, sequences=12)
    whole, merged = stats_of(lp), DriftStats.merge_all(map(stats_of, split(lp, sizes)))
    expected, got = summarize(whole), summarize(merged)
    assert got.keys() == expected.keys()
    assert len(got) > 60
    for name in expected:
        assert got[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12, nan_ok=True), name
    for name in whole.by_position:
        torch.testing.assert_close(merged.by_position[name], whole.by_position[name])


def test_merge_is_commutative():
    a, b = (stats_of(ragged(s, longest=4 + s)) for s in (0, 5))
    left, right = a.merge(b), b.merge(a)
    assert left.to_host() == pytest.approx(right.to_host())


def test_pieces_that_know_different_policies_merge_to_what_each_knows():
    lp = ragged(0)
    some = LogProbs.pack(lp.logp_rollout, lp.current, segments=lp.segments)
    merged = summarize(DriftStats.of(lp).merge(DriftStats.of(some)))
    assert merged["full/k3"] == pytest.approx(summarize(DriftStats.of(lp))["full/k3"])
    assert merged["mismatch/k3"] == pytest.approx(summarize(DriftStats.of(lp))["mismatch/k3"])


def test_the_weakest_grade_wins():
    lp = ragged(0)
    assert stats_of(lp).merge(DriftStats.of(lp)).grade == "sampled"


def test_statistics_carry_no_gradient_and_come_to_the_host_at_once():
    s = stats_of(ragged(0))
    assert not s.sums.requires_grad
    assert len(s.to_host()) == len(s.sums) + len(s.maxima) + len(s.logs)
