"""SAPO: numbers of the methods table, the closed form, and the shape of the push."""

import pytest
import torch

from offdrift.logprobs import LogProbs
from offdrift.objectives.soft import Soft, sapo
from tests.objectives.checks import (
    check_golden,
    loss_and_grad,
)
from tests.oracles.fixtures import double, fx_a

R = double([0.5, 1.0, 1.5, 5.0]).log()  # FX-R


def test_token_losses_and_gradient_on_fx_a():
    lp, advantages, _ = fx_a()  # loss.sapo
    check_golden(
        Soft(),
        (lp, advantages),
        tokens=[[-2.05126, -2.346333, -1.779698, -2.105074], [0.882859, 1.062586, 0.962481, 0]],
        loss=-0.550641,
        grad=[[-0.131323, -0.163673, -0.09616893, -0.137765], [0.07134346, 0.100421, 0.08500722, 0]],
        how="seq_mean_token_mean",
    )


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (1.0, [-1.510163, -2, -2.489837, -3.928055]),
        (-1.0, [1.415938, 1.904762, 2.393585, 3.753242]),
        (0.0, [0, 0, 0, 0]),
    ],
)
def test_token_losses_of_fx_r(advantage, expected):
    got = sapo(R, torch.full_like(R, advantage))
    torch.testing.assert_close(got, double(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 0.7), (-2.0, 3.0)])
def test_the_push_is_the_ratio_times_the_slope_of_the_sigmoid(advantage, tau):
    log_r = R.clone().requires_grad_()
    sapo(log_r, torch.full_like(R, advantage), tau_positive=0.7, tau_negative=3.0).sum().backward()
    r = R.exp()
    sigma = 1 / (1 + (-tau * (r - 1)).exp())
    assert log_r.grad is not None
    expected = -advantage * r * 4 * sigma * (1 - sigma)
    torch.testing.assert_close(log_r.grad, expected, rtol=1e-9, atol=0)


def test_on_the_full_ratio_it_needs_no_old_policy():
    whole, advantages, _ = fx_a()
    lp = LogProbs.pack(whole.logp_rollout, whole.logp, segments=whole.segments)
    _, grad = loss_and_grad(Soft(on="full", tau_positive=2.0, tau_negative=2.0), lp, advantages)
    w = (lp.current.detach() - lp.logp_rollout).exp()
    sigma = (2 * (w - 1)).sigmoid()
    torch.testing.assert_close(grad, -advantages * w * 4 * sigma * (1 - sigma) / 7, rtol=1e-9, atol=0)
