"""PPO clipping: values and gradients of the methods table, and the four directions of a push."""

import pytest
import torch

from offdrift.errors import MethodError
from offdrift.objectives import Clipped
from offdrift.objectives.clipped import ppo_clip
from tests.oracles.fixtures import double, fx_a

# FX-R: r = .5, 1, 1.5, 5 with A = +1 and A = -1
R = torch.tensor([0.5, 1.0, 1.5, 5.0], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "expected"),
    [
        (1.0, None, [-0.5, -1, -1.2, -1.2]),
        (-1.0, None, [0.8, 1, 1.5, 5]),
        (1.0, 3.0, [-0.5, -1, -1.2, -1.2]),
        (-1.0, 3.0, [0.8, 1, 1.5, 3]),
        (0.0, 3.0, [0, 0, 0, 0]),
    ],
)
def test_token_losses_of_fx_r(advantage, dual_clip, expected):
    got = ppo_clip(R, torch.full_like(R, advantage), dual_clip=dual_clip).loss
    torch.testing.assert_close(got, double(expected), rtol=1e-12, atol=0)


def test_token_mean_loss_and_gradient_on_fx_a():
    lp, advantages, leaf = fx_a()
    got = Clipped()(lp, advantages)
    (got.loss.sum() / 7).backward()
    assert got.loss.mean().item() == pytest.approx(-0.369155, abs=1e-6)
    expected = [[-0.150182, 0, -0.111257, -0.157882], [0.06147914, 0.08724305, 0.07287152, 0]]
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, double(expected), rtol=0, atol=1e-6)
    assert got.clipped is not None
    assert got.clipped.double().mean().item() == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("advantage", "r", "pushes"), [(1.0, 1.5, False), (1.0, 0.5, True), (-1.0, 0.5, False), (-1.0, 1.5, True)]
)
def test_clipping_stops_only_the_outward_push(advantage, r, pushes):
    l = torch.tensor([r], dtype=torch.float64).log().requires_grad_()  # noqa: E741
    ppo_clip(l, torch.tensor([advantage], dtype=torch.float64)).loss.sum().backward()
    assert l.grad is not None
    assert l.grad.item() == pytest.approx(-advantage * r if pushes else 0.0)


@pytest.mark.parametrize(("advantage", "r"), [(1.0, 1.25), (-1.0, 0.75)])
def test_on_the_bound_the_token_still_pushes(advantage, r):
    l = torch.tensor([r], dtype=torch.float64).log().requires_grad_()  # noqa: E741
    got = ppo_clip(l, torch.tensor([advantage], dtype=torch.float64), eps_low=0.25, eps_high=0.25)
    got.loss.sum().backward()
    assert l.grad is not None
    assert l.grad.item() == pytest.approx(-advantage * r)
    assert not got.clipped.any()


def test_a_log_ratio_of_fifty_has_a_finite_loss_and_no_gradient():
    l = torch.tensor([50.0, -50.0], dtype=torch.float64, requires_grad=True)  # noqa: E741
    loss = ppo_clip(l, torch.tensor([-1.0, -1.0], dtype=torch.float64)).loss
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([4.851652e8, 0.8], rel=1e-6)
    assert l.grad is not None
    assert l.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("parts", [{"eps_low": 0.0}, {"eps_high": -1.0}, {"dual_clip": 1.0}])
def test_limits_that_cannot_mean_anything_are_refused(parts):
    with pytest.raises(MethodError):
        Clipped(**parts)
