"""ASPO: numbers of the methods table, both soft dual clips, and the range by entropy."""

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.flipped import Flipped, above_quantile, aspo
from offdrift.segments import Segments
from tests.objectives.checks import loss_and_grad
from tests.oracles.fixtures import double, fx_a


def pushed(r: float, advantage: float, logp: float = -0.7, **options):
    """Loss, gradient to the log-ratio, gradient to logp, and whether clipped, of one token."""
    log_r = double([r]).log().requires_grad_()
    leaf = double([logp]).requires_grad_()
    got = aspo(log_r, leaf, double([advantage]), **options)
    through_r, direct = torch.autograd.grad(got.loss.sum(), [log_r, leaf], allow_unused=True)
    direct = 0.0 if direct is None else direct.item()
    return got.loss.item(), through_r.item(), direct, got.clipped.item()


# advantage, r -> loss, gradient to log r, gradient to logp, clipped; with logp = -0.7 and c = 3
CASES = [
    (2.0, 0.25, 2 * 3 * 0.7, 0.0, -2 * 3, True),  # 1/r = 4 > 3
    (2.0, 0.4, -2 / 0.4, -2 / 0.4, 0.0, False),
    (2.0, 1.15, -2 / 1.15, -2 / 1.15, 0.0, False),
    (2.0, 1.5, -2 / 1.2, 0.0, 0.0, True),
    (-2.0, 0.5, 2 * 0.8, 0.0, 0.0, True),
    (-2.0, 0.85, 2 * 0.85, 2 * 0.85, 0.0, False),
    (-2.0, 2.9, 2 * 2.9, 2 * 2.9, 0.0, False),
    (-2.0, 5.0, -2 * 3 * 0.7, 0.0, 2 * 3, True),
    (0.0, 5.0, 0.0, 0.0, 0.0, False),
    (0.0, 0.1, 0.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("advantage", "r", "loss", "through_r", "direct", "clipped"), CASES)
def test_every_branch_has_its_value_and_its_path(advantage, r, loss, through_r, direct, clipped):
    got = pushed(r, advantage)
    assert got[:3] == pytest.approx((loss, through_r, direct), rel=1e-12, abs=1e-12)
    assert got[3] is clipped


@pytest.mark.parametrize(("advantage", "r"), [(1.0, 1.25), (-1.0, 0.75), (1.0, 0.5), (-1.0, 2.0)])
def test_on_a_bound_the_token_still_pushes(advantage, r):
    _, through_r, direct, clipped = pushed(r, advantage, eps_low=0.25, eps_high=0.25, dual_clip=2)
    assert through_r == pytest.approx(-advantage / r if advantage > 0 else -advantage * r, rel=1e-12)
    assert direct == 0
    assert not clipped


def test_far_away_the_soft_dual_clip_keeps_a_push_of_its_size():
    lp = LogProbs.pack(
        double([-999.0, -1.0]),
        double([-1.0, -1e4]).requires_grad_(),
        double([-1e4, -1.0]),
        segments=Segments.from_lengths([2]),
    )
    _, grad = loss_and_grad(Flipped(), lp, double([-0.5, 2.0]), normalizer=1.0)
    assert grad.tolist() == [1.5, -6.0]


# -- the range by entropy --------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_above_quantile_agrees_with_torch_per_sequence(quantile):
    g = torch.Generator().manual_seed(3)
    lengths = [4, 0, 1, 7, 2, 11, 0]
    x = torch.rand(25, generator=g, dtype=torch.float64)
    got = above_quantile(x, Segments.from_lengths(lengths), quantile=quantile)
    expected = [part > part.quantile(quantile) if len(part) else part.bool() for part in x.split(lengths)]
    assert got.tolist() == torch.cat(expected).tolist()
    assert len(got) == 25


def test_tokens_of_high_entropy_get_the_other_range():
    # one sequence, A = +1, every r = 1.3: clipped at 1.2, free under 0.4
    log_r = torch.full((5,), 1.3, dtype=torch.float64).log()
    logp_old = torch.full_like(log_r, -2.0)
    lp = LogProbs.pack(logp_old, (logp_old + log_r).requires_grad_(), logp_old, segments=Segments.from_lengths([5]))
    entropy = double([0.1, 0.9, 0.2, 0.3, 0.8])  # the 0.6 quantile lies between 0.3 and 0.8
    objective = Flipped(eps_high_entropy=(0.4, 0.4), entropy_quantile=0.6)
    got = objective(lp, torch.ones_like(log_r), BatchInfo(entropy=entropy))
    assert got.clipped.tolist() == [True, False, True, True, False]
    expected = [-1 / 1.2, -1 / 1.3, -1 / 1.2, -1 / 1.2, -1 / 1.3]
    assert got.loss.tolist() == pytest.approx(expected, rel=1e-12)


def test_low_and_high_of_the_entropy_range_are_not_swapped():
    lp, _, _ = fx_a()
    entropy = torch.arange(7.0, dtype=torch.float64)
    objective = Flipped(eps_high_entropy=(0.01, 0.02), entropy_quantile=0.0, dual_clip=None)
    up = objective(lp, torch.ones(7, dtype=torch.float64), BatchInfo(entropy=entropy)).loss
    down = objective(lp, -torch.ones(7, dtype=torch.float64), BatchInfo(entropy=entropy)).loss
    # token 1 (r = 1.349859) and token 4 (r = 0.860708, the first of sequence 2: not above its 0-quantile)
    assert up[1].item() == pytest.approx(-1 / 1.02, rel=1e-12)
    assert down[2].item() == pytest.approx(0.99, rel=1e-12)
    assert down[4].item() == pytest.approx(torch.tensor(-0.15).double().exp().item(), rel=1e-6)
