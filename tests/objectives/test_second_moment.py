"""M2PO: the threshold by brute force, the numbers of the methods table, and AReaL's mask.

R2VPO in both readings: numbers of the methods table, the moving price, any split of a step.
"""

import math

import pytest
import torch

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.second_moment import (
    GroupClipped,
    SecondMomentClipped,
    VariancePenalized,
    largest_kept,
    second_moment_bounds,
    second_moment_threshold,
)
from offdrift.ratios import log_ratio
from offdrift.segments import Segments
from tests.oracles.fixtures import ADVANTAGES, LOGP_ROLLOUT, MASK, MISMATCH, PAD, double, fx_a

FX_A2 = [[0.6, 0.3, -0.25, 0.10], [-0.9, 0.2, 0.02, PAD]]
EVERY = [
    SecondMomentClipped(),
    SecondMomentClipped(level="exact", budget=0.03, floor_low=0.05, floor_high=0.05),
    SecondMomentClipped(budget=0.03, floor_low=0.0, floor_high=0.0),
    SecondMomentClipped(scope="all_drop_largest", budget=0.05),
]


def fx_a2():
    """FX-A': larger staleness; all log-probs lower by 1, as one of FX-A's would be positive."""
    logp_rollout = double(LOGP_ROLLOUT) - 1
    logp_old = logp_rollout + double(MISMATCH)
    leaf = (logp_old + double(FX_A2)).requires_grad_()
    lp = LogProbs.pack(logp_rollout, leaf, logp_old, mask=MASK)
    return lp, lp.like_caller(double(ADVANTAGES))


def harmful_squares(lp, advantages):
    return SecondMomentClipped().observe(lp, advantages, NO_INFO)["squares"]


def test_within_the_budget_nothing_is_clipped():
    lp, advantages, _ = fx_a()
    squares = harmful_squares(lp, advantages)  # m2po.harm, m2po.M2
    assert (squares > 0).double().tolist() == [1, 1, 0, 1, 1, 0, 0]
    assert (squares.sum() / 4).item() == pytest.approx(0.03125)
    assert second_moment_threshold(squares, budget=0.04).item() == float("inf")
    got = SecondMomentClipped()(lp, advantages)
    assert not got.clipped.any()
    torch.testing.assert_close(got.loss, -advantages * log_ratio(lp, on="staleness").exp())


@pytest.mark.parametrize(
    ("level", "tau", "raw"),
    # m2po.big: tau and raw distances; exact: 0.01 + 3 tau^2 = 0.16
    [
        ("discrete", 0.1, (0.09516258, 0.105171)),
        ("exact", 0.223607, (1 - math.exp(-(0.05**0.5)), math.exp(0.05**0.5) - 1)),
    ],
)
def test_threshold_and_bounds_on_fx_a2(level, tau, raw):
    squares = harmful_squares(*fx_a2())
    assert (squares.sum() / (squares > 0).sum()).item() == pytest.approx(0.3175)
    got = second_moment_threshold(squares, budget=0.04, level=level)
    assert got.item() == pytest.approx(tau, abs=1e-6)
    low, high = second_moment_bounds(got, floor_low=0.0, floor_high=0.0)
    assert (1 - low.item(), high.item() - 1) == pytest.approx(raw, abs=1e-6)
    low, high = second_moment_bounds(got)
    assert (low.item(), high.item()) == pytest.approx((0.7, 1.5))


@pytest.mark.parametrize(("level", "reach"), [("discrete", 0.1), ("exact", 0.05**0.5)])
def test_without_floors_the_threshold_itself_clips_what_is_harmful(level, reach):
    lp, advantages = fx_a2()
    got = SecondMomentClipped(level=level, floor_low=0.0, floor_high=0.0)(lp, advantages)
    x = log_ratio(lp, on="staleness").detach()
    reached = x.where(advantages < 0, x.clamp(max=reach)).where(advantages > 0, x.clamp(min=-reach))
    torch.testing.assert_close(got.loss, -advantages * reached.exp(), rtol=1e-9, atol=0)
    # not token 2, A = 1 and log u = -0.25, nor token 5, A = -.5 and log u = 0.2; token 3 is on tau
    assert got.clipped[[0, 1, 4, 2, 5, 6]].tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("seed", range(20))
def test_threshold_is_the_loosest_that_meets_the_budget(seed):
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 30, (1,), generator=g))
    d = torch.rand(n, generator=g, dtype=torch.float64) + 1e-3
    d = d.round(decimals=1).clamp(min=0.05) if seed % 2 else d  # ties
    budget = 0.9 * d.mean().item() * (seed + 1) / 20
    moment = lambda square: d.clamp(max=square).mean().item()  # noqa: E731
    fits = [x for x in d.tolist() if moment(x) < budget - 1e-9]
    squares = torch.cat([d, torch.zeros(7, dtype=torch.float64)])[torch.randperm(n + 7, generator=g)]
    discrete = second_moment_threshold(squares, budget=budget).item() ** 2
    assert discrete == pytest.approx(max(fits, default=0.0), abs=1e-12)
    exact = second_moment_threshold(squares, budget=budget, level="exact").item() ** 2
    assert moment(exact) == pytest.approx(budget, rel=1e-12)
    assert exact >= discrete


def test_without_a_harmful_token_nothing_is_clipped():
    for level in ("discrete", "exact"):
        tau = second_moment_threshold(torch.zeros(5), budget=0.04, level=level)
        assert tau.item() == float("inf")
    assert [x.item() for x in second_moment_bounds(tau)] == [0.0, float("inf")]


def test_a_budget_below_every_token_clips_all_of_them():
    tau = second_moment_threshold(double([1.0, 2.0]), budget=0.5)
    assert tau.item() == 0
    assert [x.item() for x in second_moment_bounds(tau, floor_low=0.0, floor_high=0.0)] == [1, 1]


def test_areal_drops_three_tokens_on_fx_a2():
    lp, advantages = fx_a2()
    areal = SecondMomentClipped(scope="all_drop_largest")
    squares = areal.observe(lp, advantages, NO_INFO)["squares"]
    assert squares.mean().item() == pytest.approx(0.196129, abs=1e-6)  # m2po.areal
    got = areal(lp, advantages)
    assert got.clipped.tolist() == [True, True, False, False, True, False, False]
    assert squares[~got.clipped].mean().item() == pytest.approx(0.028225, abs=1e-9)
    plain = -advantages * log_ratio(lp, on="staleness").exp()
    torch.testing.assert_close(got.loss, plain * ~got.clipped)
    (grad,) = torch.autograd.grad(got.loss.sum(), lp.current)
    torch.testing.assert_close(grad, lp.like_caller(lp.unpack(plain * ~got.clipped)).detach())


@pytest.mark.parametrize(
    ("squares", "budget", "kept"),
    [
        ([0.5, 0.6, 0.7], 0.04, [0.5]),  # one always stays
        ([0.04, 0.04], 0.04, [0.04, 0.04]),  # strictly below: all should go, equal ones all stay
        ([0.0, 0.08], 0.04, [0.0]),  # the mean is the budget, not below it
        ([0.0, 0.07], 0.04, [0.0, 0.07]),
        ([0.0, 0.0, 0.07, 0.07], 0.03, [0.0, 0.0]),  # three would do; equal ones go together
    ],
)
def test_what_is_kept(squares, budget, kept):
    x = double(squares)
    limit = largest_kept(x.flip(0), budget=budget)
    assert x[x <= limit].tolist() == kept


def test_formulas_name_the_numbers():
    for objective, words in zip(EVERY, ("0.04", "exactly 0.03", "0.03", "0.05"), strict=True):
        assert words in objective.formula
    assert "ratio(full)" in SecondMomentClipped(on="full").formula


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
