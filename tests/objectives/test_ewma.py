"""PPO-EWMA: numbers of the methods table, the limit on the ratio, and the average itself."""

import math

import pytest
import torch

from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs
from offdrift.objectives.ewma import ProximalEwma, ewma_update
from offdrift.segments import Segments
from tests.objectives.checks import loss_and_grad
from tests.oracles.fixtures import double


def tokens(logp_rollout: list, prox: list, logp: list) -> LogProbs:
    leaf = double(logp).requires_grad_()
    segments = Segments.from_lengths([len(logp)])
    return LogProbs.pack(double(logp_rollout), leaf, double(prox), segments=segments)


def test_token_losses_of_the_methods_table():
    lp = tokens([-1.0, -0.5], [-0.9, -0.6], [-0.6, -0.9])  # ewma.loss
    got = ProximalEwma()(lp, double([1.0, -1.0]))
    torch.testing.assert_close(got.loss, double([-1.326205, 0.72387]), rtol=0, atol=1e-6)
    # by hand: exp(ln 1.2 + 0.1) and exp(ln 0.8 - 0.1)
    by_hand = double([-1.2 * math.exp(0.1), 0.8 * math.exp(-0.1)])
    torch.testing.assert_close(got.loss.detach(), by_hand, rtol=1e-12, atol=0)
    assert got.clipped.all()
    got.loss.sum().backward()
    _, grad = loss_and_grad(ProximalEwma(), lp, double([1.0, -1.0]))
    assert grad.tolist() == [0.0, 0.0]


def test_rounding_does_not_count_as_a_clip():
    # float32, inside the limits, and log-probs so near 0 that (logp - prox) + prox is not logp
    g = torch.Generator().manual_seed(0)
    logp_rollout, prox, logp = -0.15 * torch.rand(3, 1000, generator=g) ** 2
    assert ((logp - prox) + prox != logp).any()
    lp = LogProbs.pack(logp_rollout, logp.requires_grad_(), prox, segments=Segments.from_lengths([1000]))
    clipped = ProximalEwma()(lp, torch.randn(1000, generator=g)).clipped
    assert (~clipped).sum() == 1000


@pytest.mark.parametrize(("gap", "weight"), [(math.log(99.0), 99.0), (math.log(400.0), 100.0)])
def test_the_ratio_to_the_rollout_policy_is_limited_and_still_pushes(gap, weight):
    lp = tokens([-8.0], [-8.0 + gap], [-8.0 + gap])
    loss, grad = loss_and_grad(ProximalEwma(), lp, double([2.0]))
    assert loss.item() == pytest.approx(-2 * weight, rel=1e-12)
    assert grad.item() == pytest.approx(-2 * weight, rel=1e-12)


# -- the average -----------------------------------------------------------------------------------


def test_the_average_of_the_methods_table():
    mean, weight, seen = double(0.0), 1.0, []
    for new in (1.0, 2.0, 3.0):
        mean, weight = ewma_update(mean, double(new), weight=weight, decay=0.9)
        seen.append(mean.item())
    assert seen == pytest.approx([0.526316, 1.070111, 1.631288], abs=1e-6)  # ewma.seq
    # in closed form: all weights so far, the initial one included, discounted by age
    closed = (0 * 0.9**3 + 1 * 0.9**2 + 2 * 0.9 + 3) / (0.9**3 + 0.9**2 + 0.9 + 1)
    assert seen[-1] == pytest.approx(closed, rel=1e-12)


def test_no_decay_keeps_the_newest_and_a_constant_stays():
    x = double([[1.0, 2.0], [3.0, 4.0]])
    mean, weight = ewma_update(x + 5, x, weight=7.0, decay=0)
    assert torch.equal(mean, x)
    assert weight == 1.0
    mean, _ = ewma_update(x, x, weight=3.3, decay=0.95)
    torch.testing.assert_close(mean, x, rtol=1e-12, atol=0)


def test_the_average_carries_no_gradient():
    x = double([1.0]).requires_grad_()
    assert not ewma_update(x, x, weight=1, decay=0.5)[0].requires_grad


def test_decays_that_mean_nothing_are_refused():
    with pytest.raises(MethodError):
        ewma_update(double(0.0), double(1.0), weight=1.0, decay=1.0)
