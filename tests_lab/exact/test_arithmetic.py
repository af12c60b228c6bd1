"""Arithmetic of claims against sums over every token and draws."""

import math

import pytest
import torch

from offdrift.divergence.evidence import k3
from offdrift_lab.exact.arithmetic import (
    acceptance,
    clipped_weight,
    crossover,
    geometric_ratio,
    k3_expectation,
    kl,
    longest_within,
    masked_world,
    sequence_ratio,
    table,
)


def test_the_share_within_a_band_is_that_of_draws():
    torch.manual_seed(0)
    total = (-(0.05**2) / 2 + 0.05 * torch.randn(20_000, 100, dtype=torch.float64)).sum(1)
    assert total.exp().mean().item() == pytest.approx(1.0, abs=0.02)
    assert (total.abs() <= math.log(2)).double().mean().item() == pytest.approx(acceptance(0.05, 100, 2.0), abs=0.01)


def test_a_mean_forgets_the_length_and_a_product_does_not():
    assert geometric_ratio(1e-3, 7) == pytest.approx(geometric_ratio(1e-3, 5_000), rel=1e-12)
    longest = longest_within(1e-3, 2.0)
    assert sequence_ratio(1e-3, longest) <= 2.0 < sequence_ratio(1e-3, longest + 1)


def test_the_bounds_cross_where_it_is_said():
    n = crossover(2e-3, 0.005)
    for tokens, kl_is_smaller in ((0.9 * n, False), (1.1 * n, True)):
        assert (math.sqrt(2e-3 * tokens / 2) < 0.005 * tokens) == kl_is_smaller


@pytest.mark.parametrize("mu", [(0.3, 0.3, 0.4), (0.5, 0.5, 0.0)])
def test_k3_lacks_what_has_no_support(mu):
    pi = (0.2, 0.5, 0.3)
    lacking = sum(p for m, p in zip(mu, pi, strict=True) if m == 0)
    assert k3_expectation(mu, pi) == pytest.approx(kl(mu, pi) - lacking, abs=1e-12)
    drawn = [(m, p) for m, p in zip(mu, pi, strict=True) if m > 0]
    of_library = k3(torch.tensor([math.log(p / m) for m, p in drawn], dtype=torch.float64))
    by_hand = sum(m * x for (m, _), x in zip(drawn, of_library.tolist(), strict=True))
    assert by_hand == pytest.approx(k3_expectation(mu, pi), abs=1e-12)


def test_the_numbers_of_the_page_are_these():
    numbers = table()
    assert numbers["longest response with a product of at most 2"] == 693
    assert numbers["crossover at delta 1e-3, eps .01"] == pytest.approx(5.0)
    shares = numbers["acceptance of Cmax = 2 at a scatter of .05"]
    assert [round(x, 3) for x in shares.values()] == [0.821, 0.253, 0.133, 0.005]


def test_a_masked_world_is_what_enumeration_says():
    accepted, flip, (of_a, of_x) = 0.7, 0.9, (0.4, 0.8)
    world = masked_world(accepted, flip, (of_a, of_x))
    # Sequences a, bx, by: probabilities under both policies, rewards, and whether the mask keeps them.
    mu = [accepted, (1 - accepted) * flip, (1 - accepted) * (1 - flip)]
    pi = [accepted, (1 - accepted) * (1 - flip), (1 - accepted) * flip]
    rewards, kept = [of_a, of_x, 0.0], [1, 0, 0]
    j_mu, j_pi = (sum(p * r for p, r in zip(law, rewards, strict=True)) for law in (mu, pi))
    assert world.error == pytest.approx(j_pi - j_mu)
    assert world.tv == pytest.approx(sum(abs(p - q) for p, q in zip(mu, pi, strict=True)) / 2)
    score = [1 - accepted, -accepted, -accepted]  # d log pi / d logit of a
    gradient = sum(p * r * s for p, r, s in zip(pi, rewards, score, strict=True))
    assert world.gradient == pytest.approx(gradient)
    terms = zip(mu, pi, rewards, score, kept, strict=True)
    masked = sum(m * k * (p / m) * (r - j_pi) * s for m, p, r, s, k in terms)
    assert world.masked == pytest.approx(masked)
    assert world.conditional == pytest.approx(masked / accepted)
    assert abs(world.conditional) < abs(world.gradient) / 2


@pytest.mark.parametrize(("ratio", "advantage"), [(900.0, -1.0), (900.0, 1.0), (0.5, -1.0), (0.5, 1.0), (1.1, 2.0)])
def test_the_weight_under_a_clip_is_the_derivative_of_its_objective(ratio, advantage):
    def objective(log_ratio: float) -> float:
        r = math.exp(log_ratio)
        return min(r * advantage, min(max(r, 0.8), 1.2) * advantage)

    x, h = math.log(ratio), 1e-6
    slope = (objective(x + h) - objective(x - h)) / (2 * h)
    assert clipped_weight(ratio, advantage) == pytest.approx(slope, rel=1e-5)
