"""Claims that need only arithmetic: what a ratio's mean over a response says at a length, and what k3 needs.

`drift` is a constant log-ratio per token, nats: every token of a response is more probable under the policy by a factor
exp(drift). `scatter` is the standard deviation of independent log-ratios of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


def geometric_ratio(drift: float, length: int) -> float:
    """Geometric mean of the ratios of a response, (prod_t rho_t)^(1/T) = exp(drift): the length drops out.

    Example:
        >>> [round(geometric_ratio(1e-3, t), 6) for t in (1, 100, 10_000)]
        [1.001001, 1.001001, 1.001001]

    Reference: Trust Region Masking, arXiv:2512.23075, Table 2 (LN-TRM).
    """
    return math.exp(math.fsum([drift] * length) / length)


def sequence_ratio(drift: float, length: int) -> float:
    """Product of the ratios of a response, exp(drift T).

    Example:
        >>> [round(sequence_ratio(1e-3, t), 3) for t in (100, 700, 1000, 10_000)]
        [1.105, 2.014, 2.718, 22026.466]
    """
    return math.exp(drift * length)


def longest_within(drift: float, cap: float) -> int:
    """Longest response whose product of ratios is at most a cap: floor(log(cap) / drift).

    Example:
        >>> longest_within(1e-3, 2.0)
        693
    """
    return math.floor(math.log(cap) / drift)


def acceptance(scatter: float, length: int, cap: float) -> float:
    """Share of responses whose product of ratios lies in [1 / cap, cap], for normal log-ratios with E[ratio] = 1.

        P(|S| <= log cap),   S ~ N(-T scatter^2 / 2, T scatter^2)

    Example:
        >>> [round(acceptance(0.05, t, 2.0), 3) for t in (100, 1_000, 10_000)]
        [0.821, 0.253, 0.005]
    """
    mean, deviation, edge = -length * scatter**2 / 2, scatter * math.sqrt(length), math.log(cap)
    return _normal((edge - mean) / deviation) - _normal((-edge - mean) / deviation)


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def crossover(delta: float, eps: float) -> float:
    """Tokens left, T - t, from which on the KL bound of the rest is below the one by total variation.

        sqrt(delta (T - t) / 2) <= eps (T - t)   from   T - t = delta / (2 eps^2)

    Args:
        delta: KL per token, nats.
        eps: total variation per token.

    Example:
        >>> n = crossover(1e-3, 0.01)
        >>> round(n, 6), math.isclose(math.sqrt(1e-3 * n / 2), 0.01 * n)
        (5.0, True)
    """
    return delta / (2 * eps**2)


def k3_expectation(rollout: Sequence[float], policy: Sequence[float]) -> float:
    """Exact E_mu[w - 1 - log w] over a finite vocabulary, w = pi / mu, of the tokens that mu can draw.

        E_mu[k3] = KL(mu || pi) - pi(mu = 0)

    Unbiased where mu draws every token that pi can; else low by the probability that pi has where mu has none.

    Example:
        >>> mu, pi = (0.5, 0.5, 0.0), (0.4, 0.5, 0.1)
        >>> round(k3_expectation(mu, pi), 6), round(kl(mu, pi), 6)
        (0.011572, 0.111572)
    """
    possible = [(m, p / m) for m, p in zip(rollout, policy, strict=True) if m > 0]
    return math.fsum(m * (w - 1 - math.log(w)) for m, w in possible)


def kl(rollout: Sequence[float], policy: Sequence[float]) -> float:
    """Exact KL(mu || pi), nats."""
    return math.fsum(m * math.log(m / p) for m, p in zip(rollout, policy, strict=True) if m > 0)


class MaskedWorld(NamedTuple):
    """A pair of policies that differ after one first token, under a mask on sequences."""

    acceptance: float
    """Share of rollouts that the mask accepts."""
    accepted_kl: float
    """Largest token KL of an accepted sequence, nats."""
    tv: float
    """Total variation of whole sequences, which the mask does not change."""
    error: float
    """J(pi) - J(mu) - L'_masked; a bound made of the accepted sequences' KL would be 0."""
    gradient: float
    """dJ(pi) / d logit of the accepted first token."""
    masked: float
    """The same by E_mu[M w (R - J(pi)) grad log pi], rejected sequences counting 0."""
    conditional: float
    """The same over accepted sequences alone, masked / acceptance."""


def masked_world(accepted: float = 0.8, flip: float = 0.95, rewards: tuple[float, float] = (0.5, 1.0)) -> MaskedWorld:
    """Enumerate a world of two tokens under a mask on the largest token KL.

    Both policies draw a with probability `accepted`, else b. After a all is equal; the reward is rewards[0]. After b
    mu draws x with probability `flip` and pi with 1 - flip, else y; x has rewards[1], y has 0. The mask rejects b.

    Example:
        >>> w = masked_world()
        >>> [round(x, 4) for x in (w.acceptance, w.tv, w.error, w.gradient, w.masked, w.conditional)]
        [0.8, 0.18, -0.18, 0.072, 0.0144, 0.018]
    """
    of_a, of_x = rewards
    rejected = 1 - accepted
    mu_b, pi_b = flip * of_x, (1 - flip) * of_x
    j_pi = accepted * of_a + rejected * pi_b
    gradient = accepted * rejected * (of_a - pi_b)
    masked = accepted * (of_a - j_pi) * rejected
    error = rejected * (pi_b - mu_b)  # ratios of accepted tokens are 1, so that L'_masked is 0
    tv = rejected * abs(2 * flip - 1)
    return MaskedWorld(accepted, 0.0, tv, error, gradient, masked=masked, conditional=masked / accepted)


def clipped_weight(ratio: float, advantage: float, clip: float = 0.2) -> float:
    """Weight of grad log pi in PPO's clipped objective: d min(r A, clip(r, 1 - c, 1 + c) A) / d log pi.

    Example:
        >>> [round(clipped_weight(r, a), 4) for r, a in ((900.0, -1.0), (900.0, 1.0), (1 / 900, -1.0))]
        [-900.0, 0.0, 0.0]

    Reference: Trust Region Masking, arXiv:2512.23075, section 4.1; PPO, arXiv:1707.06347, eq. 7.
    """
    unclipped = ratio * advantage
    limited = min(max(ratio, 1 - clip), 1 + clip) * advantage
    return unclipped if unclipped <= limited else 0.0


def table() -> Mapping[str, Any]:
    """All numbers that docs/evidence.md has of these claims."""
    lengths = (100, 1_000, 2_000, 10_000)
    mu, pi = (0.5, 0.5, 0.0), (0.4, 0.5, 0.1)
    return {
        "geometric ratio at a drift of 1e-3": {t: geometric_ratio(1e-3, t) for t in lengths},
        "product of ratios at a drift of 1e-3": {t: sequence_ratio(1e-3, t) for t in lengths},
        "longest response with a product of at most 2": longest_within(1e-3, 2.0),
        "acceptance of Cmax = 2 at a scatter of .05": {t: acceptance(0.05, t, 2.0) for t in lengths},
        "acceptance of Cmax = 2 at a scatter of .03": {t: acceptance(0.03, t, 2.0) for t in lengths},
        "crossover at delta 1e-3, eps .01": crossover(1e-3, 0.01),
        "crossover of Table 1, delta 1e-4, eps 5e-3": crossover(1e-4, 5e-3),
        "k3 and KL where a tenth has no support": (k3_expectation(mu, pi), kl(mu, pi)),
        "a mask that accepts 80 %": masked_world()._asdict(),
        "weight of a token of ratio 900 and advantage -1 under PPO's clip": clipped_weight(900.0, -1.0),
        "its weight at the ratio of the printed policies, .001 / .9": clipped_weight(0.001 / 0.9, -1.0),
    }
