"""QUATRO: numbers of the methods table, the multiplier's defining property, any split of a step."""

import math

import pytest
import torch

from offdrift.objectives.base import StepPrompts
from offdrift.objectives.prompt_dual import PromptDual, multipliers, tilt_kl
from tests.objectives.checks import batch, loss_and_grad
from tests.oracles.fixtures import double

REWARDS = double([1.0, 0.0, 0.0, 1.0, 0.0])


def one_prompt(rewards: torch.Tensor) -> StepPrompts:
    ids = torch.full((len(rewards),), 4)
    return StepPrompts.of(ids, ids)


def lambda_of(rewards: torch.Tensor, **options) -> float:
    return multipliers(rewards, one_prompt(rewards), **options)[0].item()


def kl_of(rewards: torch.Tensor, multiplier: float) -> float:
    """KL of the tilted answers from the uniform ones, by its definition."""
    q = (rewards / multiplier).softmax(0)
    return (q * (q * len(q)).log()).sum().item()


def dual_of(rewards: torch.Tensor, multiplier: float, radius: float) -> float:
    tilt = (rewards / multiplier).logsumexp(0).item() - math.log(len(rewards))
    return multiplier * radius + multiplier * tilt


def test_multiplier_of_the_methods_table():
    found = lambda_of(REWARDS, radius=0.02)
    assert found == pytest.approx(2.491342, abs=1e-6)  # quatro.lam
    assert dual_of(REWARDS, found, 0.02) == pytest.approx(0.498981, abs=1e-6)  # quatro.dual
    tilt = (REWARDS / found).softmax(0) * 5
    expected = [1.247453, 0.835031, 0.835031, 1.247453, 0.835031]  # quatro.tilt
    assert tilt.tolist() == pytest.approx(expected, abs=1e-6)
    assert kl_of(REWARDS, found) == pytest.approx(0.02, rel=1e-9)  # quatro.kl
    approximation = math.sqrt(REWARDS.var(correction=0).item() / 0.04)
    assert approximation == pytest.approx(2.44949, abs=1e-5)  # quatro.lam.var
    assert found == pytest.approx(approximation, rel=0.03)


@pytest.mark.parametrize("radius", [1e-4, 0.02, 0.3])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 300.0])
def test_every_prompt_reaches_the_radius_and_minimizes_its_dual(radius, scale):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 4, (24,), generator=g)
    rewards = scale * torch.randn(24, generator=g, dtype=torch.float64) + 50
    prompts = StepPrompts.of(ids, ids)
    found = prompts.here(multipliers(rewards, prompts, radius=radius, floor=1e-9))
    for i in range(4):
        mine, lam = rewards[ids == i], found[ids == i][0].item()
        assert len(mine) > 2
        assert kl_of(mine, lam) == pytest.approx(radius, rel=1e-8)
        least = dual_of(mine, lam, radius)
        assert least < dual_of(mine, lam * 1.1, radius)
        assert least < dual_of(mine, lam / 1.1, radius)


def test_tilt_kl_is_its_definition_and_falls_with_the_multiplier():
    below_best, prompts = REWARDS - 1, one_prompt(REWARDS)
    seen = []
    for lam in (0.05, 0.5, 2.0, 30.0):
        log_lam = torch.full((5,), math.log(lam), dtype=torch.float64)
        seen.append(tilt_kl(below_best, prompts, log_multiplier=log_lam)[0].item())
        assert seen[-1] == pytest.approx(kl_of(REWARDS, lam), rel=1e-9)
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize(
    "rewards",
    [
        [0.5, 0.5, 0.5],  # nothing to tilt
        [0.3],  # nobody to compare with
        [1.0, 1.0, 1.0, 0.0],  # even all weight on the best is only log(4/3) = 0.288 away
    ],
)
def test_the_floor_where_the_radius_cannot_be_reached(rewards):
    assert lambda_of(double(rewards), radius=0.29, floor=0.003) == pytest.approx(0.003, rel=1e-9)


def test_the_floor_where_the_root_lies_below_it():
    assert lambda_of(1e-3 * REWARDS, radius=0.02, floor=0.5) == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("on", ["staleness", "full"])
def test_the_coefficient_is_signed_and_the_gradient_is_the_score_alone(on):
    lp, advantages, _ = batch(2, drift=1.5)
    moved = (lp.current - (lp.old if on == "staleness" else lp.logp_rollout)).detach()
    _, grad = loss_and_grad(PromptDual(on=on, multiplier=0.4), lp, advantages, normalizer=1.0)
    expected = -moved.exp() * (advantages - 0.4 * moved)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
    assert ((grad > 0) & (advantages > 0)).any()  # pushed back although rewarded
