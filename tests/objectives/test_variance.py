"""R2VPO in both readings: numbers of the methods table, the moving price, any split of a step."""

import pytest
import torch

from offdrift.batch_info import BatchInfo, Observed
from offdrift.logprobs import LogProbs
from offdrift.objectives.clipped import Clipped
from offdrift.objectives.variance import GroupClipped, VariancePenalized
from offdrift.segments import Segments
from tests.objectives.checks import (
    batch,
    loss_and_grad,
    piece,
)
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


@pytest.mark.parametrize("cut", [[[0, 2, 4], [1, 3, 5]], [[3], [0], [5], [1, 2, 4]]])
def test_the_next_penalty_does_not_depend_on_the_split(cut):
    lp, advantages, _ = batch(2)
    objective = VariancePenalized()
    merged = None
    for sequences in cut:
        p, rows = piece(lp, sequences)
        seen = Observed({objective: objective.observe(p, advantages[rows], BatchInfo())})
        merged = seen if merged is None else merged.merge(seen)
    whole = objective.next(objective.observe(lp, advantages, BatchInfo()))
    split = objective.next(merged.parts[objective])
    assert split.penalty == pytest.approx(whole.penalty, rel=1e-12)
    assert whole.penalty != 0.04


@pytest.mark.parametrize("on", ["staleness", "full"])
def test_push_and_pull_have_their_closed_forms_and_their_places(on):
    lp, advantages, _ = batch(1)
    r = (lp.current - (lp.old if on == "staleness" else lp.logp_rollout)).detach().exp()
    got = VariancePenalized(on=on, penalty=0.7)(lp, advantages)
    (push,) = torch.autograd.grad(got.loss.sum(), lp.current)
    (pull,) = torch.autograd.grad(got.regularizer.sum(), lp.current)
    torch.testing.assert_close(push, -advantages * r, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pull, 2 * 0.7 * (r - 1) * r, rtol=1e-9, atol=1e-12)
    assert got.clipped is None
    assert len(r) > 6


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


def test_each_prompt_is_clipped_at_its_own_range():
    lp = two_prompts([0.7, 1.3, 0.95, 1.15, 0.7, 1.3, 0.95, 1.15])
    objective = GroupClipped(eps=0.1, reference=0.04)
    for sign in (1.0, -1.0):
        a = torch.full((8,), sign, dtype=torch.float64)
        got = objective(lp, a)
        # ranges 0.0667 and 0.2: in prompt 9 the outward token is clipped, in prompt 4 none is
        outward = [False, True] if sign > 0 else [True, False]
        assert got.clipped.tolist() == [*outward, False, False] * 2
        bound = 1 + 0.2 / 3 if sign > 0 else 1 - 0.2 / 3
        assert got.loss[got.clipped].tolist() == pytest.approx([-sign * bound] * 2, rel=1e-9)
        _, grad = loss_and_grad(objective, lp, a, normalizer=1.0)
        r = (lp.current - lp.old).detach().exp()
        expected = (-a * r).where(~got.clipped, 0.0)
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_with_a_pinned_range_it_is_ppo(seed):
    lp, advantages, _ = batch(seed)
    got = GroupClipped(eps=0.1, reference=1e9)(lp, advantages)
    ppo = Clipped(eps_low=0.2, eps_high=0.2)(lp, advantages)
    torch.testing.assert_close(got.loss, ppo.loss, rtol=1e-12, atol=0)
    assert got.clipped.tolist() == ppo.clipped.tolist()
    assert got.clipped.any()
