"""KL and TV written from their definitions, one token at a time, in float64 with exact summation."""

import math
from collections.abc import Sequence


def probabilities(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Softmax of one row; NaN everywhere if the row is no distribution."""
    top = max(scores)
    if any(math.isnan(s) for s in scores) or math.isinf(top):
        return [math.nan] * len(scores)
    powers = [math.exp((s - top) / temperature) for s in scores]
    return [w / math.fsum(powers) for w in powers]


def log_probabilities(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    top = max(scores)
    if any(math.isnan(s) for s in scores) or math.isinf(top):
        return [math.nan] * len(scores)
    log_sum = math.log(math.fsum(math.exp((s - top) / temperature) for s in scores))
    return [(s - top) / temperature - log_sum for s in scores]


def kl(mu: Sequence[float], pi: Sequence[float], temperature: float = 1.0) -> float:
    """KL(mu || pi) of two rows of scores; +inf where mu can draw what pi cannot."""
    log_mu, log_pi = log_probabilities(mu), log_probabilities(pi, temperature)
    if math.isnan(log_mu[0]) or math.isnan(log_pi[0]):
        return math.nan
    drawn = [a for a, value in enumerate(log_mu) if value > -math.inf]
    if any(log_pi[a] == -math.inf for a in drawn):
        return math.inf
    return math.fsum(math.exp(log_mu[a]) * (log_mu[a] - log_pi[a]) for a in drawn)


def tv(mu: Sequence[float], pi: Sequence[float], temperature: float = 1.0) -> float:
    """Half the L1 distance of two rows of scores."""
    p, q = probabilities(mu), probabilities(pi, temperature)
    return math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
