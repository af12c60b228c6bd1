"""R2VPO in both readings: numbers of the methods table, the moving price, any split of a step."""

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.variance import GroupClipped, VariancePenalized
from offdrift.segments import Segments
from tests.oracles.fixtures import double, fx_a

# -- the penalty -----------------------------------------------------------------------------------


def test_next_penalty_of_the_methods_table():
    lp, advantages, _ = fx_a()
    objective = VariancePenalized()
    seen = objective.observe(lp, advantages, BatchInfo())
    r = (lp.current - lp.old).detach().exp()
    assert (seen["variance"] / seen["count"]).item() == pytest.approx(0.03626421, abs=1e-8)  # r2vpo.var
    assert seen["variance"].item() == pytest.approx((r - 1).square().sum().item(), rel=1e-12)
    following = objective.next(seen)
    assert following.penalty == pytest.approx(0.04262642, abs=1e-8)  # r2vpo.lam.next
    assert (objective.penalty, following.step, following.target) == (0.04, 0.1, 0.01)


def test_the_penalty_falls_inside_the_target_and_never_below_zero():
    seen = {"variance": double(0.0), "count": double(7.0)}
    assert VariancePenalized(penalty=0.04).next(seen).penalty == pytest.approx(0.039, rel=1e-12)
    assert VariancePenalized(penalty=0.0005).next(seen).penalty == 0.0
    assert VariancePenalized(penalty=0.04, step=0.0).next(seen).penalty == 0.04


# -- the adaptive clip -----------------------------------------------------------------------------


def two_prompts(ratios: list[float]) -> LogProbs:
    """Two prompts of two answers each, two tokens per answer, with the given ratios."""
    log_r = double(ratios).log()
    logp_old = torch.full_like(log_r, -5.0)
    segments = Segments.from_lengths([2, 2, 2, 2], group_ids=torch.tensor([9, 4, 9, 4]))
    leaf = (logp_old + log_r).requires_grad_()
    return LogProbs.pack(logp_old, leaf, logp_old, segments=segments)


def test_ranges_by_hand():
    # prompt 9: 0.7, 1.3, 0.7, 1.3, mean 1, variance 0.09; prompt 4: 0.95, 1.15 twice, mean 1.05, variance 0.01
    lp = two_prompts([0.7, 1.3, 0.95, 1.15, 0.7, 1.3, 0.95, 1.15])
    got = GroupClipped(eps=0.1, reference=0.04).ranges(lp, BatchInfo())
    wide, tight = 0.1 * 2.0, 0.1 * 0.2 / 0.3  # sqrt(.04/.01) = 2, sqrt(.04/.09) = 2/3
    assert got.tolist() == pytest.approx([tight, wide, tight, wide], rel=1e-9)


@pytest.mark.parametrize(("reference", "share"), [(1e-9, 0.5), (1e9, 2.0)])
def test_ranges_lie_between_half_and_twice(reference, share):
    lp = two_prompts([0.7, 1.3, 0.95, 1.15, 0.7, 1.3, 0.95, 1.15])
    got = GroupClipped(eps=0.1, reference=reference).ranges(lp, BatchInfo())
    assert got.tolist() == [0.1 * share] * 4


def test_the_variance_of_the_methods_table():
    lp, _, _ = fx_a()
    segments = Segments(lp.segments.cu_seqlens, group_ids=torch.tensor([2, 2]))
    grouped = LogProbs.pack(lp.logp_rollout, lp.logp, lp.old, segments=segments)
    got = GroupClipped(eps=0.2, reference=0.03320116).ranges(grouped, BatchInfo())  # r2vpo.varc
    assert got.tolist() == pytest.approx([0.2, 0.2], rel=1e-6)


def test_equal_ratios_get_the_widest_range_whatever_rounding_says():
    objective, below = GroupClipped(eps=0.1), 0
    segments = Segments.from_lengths([3, 4], group_ids=torch.tensor([2, 2]))
    for change in torch.linspace(-0.5, 0.5, 40, dtype=torch.float64):
        logp_old = torch.full((7,), -5.0, dtype=torch.float64)
        lp = LogProbs.pack(logp_old, logp_old + change, logp_old, segments=segments)
        seen = {k: x.sum() for k, x in objective.observe(lp, None, BatchInfo()).items()}
        mean = seen["change"] / seen["count"]
        below += int(seen["square"] / seen["count"] < mean.square())
        assert objective.ranges(lp, BatchInfo()).tolist() == [0.2] * 2
    assert below > 0
