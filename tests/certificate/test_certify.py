"""From a batch to a certificate: hand-computed inputs of the bound, and when there is none."""

import numpy as np
import pytest
import torch

from offdrift.certificate.bounds import unified
from offdrift.certificate.certify import certify
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift.stats import DriftStats

KL = torch.tensor([0.01, 0.02, 0.03, 0.04], dtype=torch.float64)
TV = torch.tensor([0.05, 0.06, 0.07, 0.08], dtype=torch.float64)


def stats(kl=KL, tv=TV, make=Divergence.exact) -> DriftStats:
    lp = LogProbs.pack(torch.full((4,), -1.0).double(), segments=Segments.from_lengths([3, 1]))
    return DriftStats.of(lp, divergences={"kl_rollout_current": make("kl_rollout_current", kl), "tv_rollout_current": make("tv_rollout_current", tv)})  # fmt: skip


def test_positions_after_a_sequences_end_count_as_zero_divergence():
    got = certify(stats(), delta=0.05, horizon=5)
    # position 0: both sequences; positions 1, 2: the first alone; 3, 4: none
    mean_tv = np.array([(0.05 + 0.08) / 2, 0.06 / 2, 0.07 / 2, 0.0, 0.0])
    expected = unified(
        horizon=5, delta=0.05, kl_seq=(0.01 + 0.02 + 0.03 + 0.04) / 2, mean_tv=mean_tv
    )
    assert got.bound is not None
    assert got.bound.value == pytest.approx(expected.value, rel=1e-9)
    assert got.precondition == "not falsified"


@pytest.mark.parametrize(("delta", "said"), [(0.04, "not falsified"), (0.0399, "falsified")])
def test_one_token_above_delta_falsifies_the_precondition(delta, said):
    assert certify(stats(), delta=delta, horizon=3).precondition == said


def test_infinite_divergence_falsifies():
    infinite = KL.clone()
    infinite[1] = float("inf")
    assert certify(stats(kl=infinite), delta=0.05, horizon=3).precondition == "falsified"


def test_lower_ends_may_falsify_but_never_bound():
    interval = lambda name, x: Divergence.interval(name, x, x + 1.0)  # noqa: E731
    got = certify(stats(make=interval), delta=0.035, horizon=3)
    assert got.bound is None
    assert got.precondition == "falsified"
    assert got.grade == "interval"


def test_without_distributions_nothing_is_known():
    lp = LogProbs.pack(torch.tensor([-1.0]), segments=Segments.from_lengths([1]))
    got = certify(DriftStats.of(lp), delta=0.05, horizon=3)
    assert (got.bound, got.precondition) == (None, "unknown")
