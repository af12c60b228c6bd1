"""How often something happens that was seen rarely or never: exact intervals, and the unseen.

A batch without a violation does not prove that there is none. What it proves is a limit on the
probability that the next draw has one. The draws are independent: prompt groups, not the sequences
inside them.
"""

from __future__ import annotations

import math

import numpy as np

from offdrift.certificate.confidence import BISECTIONS, Estimate, check_alpha
from offdrift.errors import BadValueError


def clopper_pearson(
    events: int, draws: int, *, alpha: float = 0.05, sides: str = "both"
) -> Estimate:
    """The exact interval for a probability, from the binomial tails.

        high = max{p : P(Bin(n, p) <= k) >= a},   low = min{p : P(Bin(n, p) >= k) >= a}

    Args:
        events: independent draws in which it happened, k.
        draws: independent draws, n; 0 gives [0, 1].
        alpha: largest probability of missing it; halved for two sides.
        sides: "both", "low" or "high".

    Raises: `BadValueError` unless 0 <= events <= draws and alpha lies in (0, 1).

    Example:
        >>> found = clopper_pearson(2, 10)
        >>> round(found.low, 4), round(found.high, 4)
        (0.0252, 0.5561)

    Reference: C. Clopper, E. Pearson, Biometrika 26 (1934), 404-413.
    """
    check_alpha(alpha)
    if not 0 <= events <= draws:
        raise BadValueError(f"events = {events} of draws = {draws}; events are some of the draws")
    share = alpha / 2 if sides == "both" else alpha
    low = high = None
    if sides != "low" and events < draws:
        high = _upper_end(events, draws, share)
    if sides != "high" and events > 0:
        low = 1 - _upper_end(draws - events, draws, share)
    mean = events / draws if draws else math.nan
    return Estimate(
        mean,
        0.0 if low is None else low,
        1.0 if high is None else high,
        draws,
        alpha,
        "Clopper-Pearson",
    )


def rule_of_three(draws: int, *, alpha: float = 0.05) -> float:
    """The largest probability of an event that `draws` independent draws never showed.

        q = 1 - alpha^(1/n)  ~  3 / n at alpha = 0.05

    Example:
        >>> round(rule_of_three(300), 5)
        0.00994
    """
    check_alpha(alpha)
    if draws < 0:
        raise BadValueError(f"draws = {draws}; a number of draws is not negative")
    return -math.expm1(math.log(alpha) / draws) if draws else 1.0


def missing_mass(singletons: int, draws: int, *, alpha: float = 0.05) -> Estimate:
    """Upper end of the probability that the next draw is something never drawn so far (Good-Turing).

        M <= N_1 / n + (1 + sqrt 2) sqrt(log(2 / alpha) / n)

    N_1 things were drawn exactly once. The interval joins two tails of alpha / 2 each:
    P(M > E M + t) <= exp(-n t^2), and, because one draw changes N_1 by at most 2,
    P(N_1/n < E N_1/n - t) <= exp(-n t^2 / 2); E M <= E N_1/n. Of things that are never drawn twice
    (long responses) it says 1, which is the truth.

    Args:
        singletons: different things drawn exactly once.
        draws: independent draws; 0 gives 1.
        alpha: largest probability that the mass is above `high`.

    Raises: `BadValueError` unless 0 <= singletons <= draws.

    Example:
        >>> round(missing_mass(3, 1000).high, 4)
        0.1496

    Reference: I. Good, Biometrika 40 (1953); D. McAllester, L. Ortiz, JMLR 4 (2003), and D. Berend,
    A. Kontorovich, ECP 18 (2013), for the first tail; McDiarmid's inequality for the second.
    """
    check_alpha(alpha)
    if not 0 <= singletons <= draws:
        raise BadValueError(
            f"singletons = {singletons} of draws = {draws}; they are some of the draws"
        )
    if draws == 0:
        return Estimate(math.nan, 0.0, 1.0, 0, alpha, "Good-Turing")
    seen_once = singletons / draws
    slack = (1 + math.sqrt(2)) * math.sqrt(math.log(2 / alpha) / draws)
    return Estimate(seen_once, 0.0, min(1.0, seen_once + slack), draws, alpha, "Good-Turing")


def _upper_end(events: int, draws: int, alpha: float) -> float:
    """The largest p with P(Bin(draws, p) <= events) >= alpha, for events < draws."""
    if events == 0:
        return rule_of_three(draws, alpha=alpha)
    k = np.arange(events + 1)
    ways = np.concatenate([[0.0], np.log((draws - k[:-1]) / (k[:-1] + 1.0)).cumsum()])
    goal = math.log(alpha)
    inside, outside = events / draws, 1.0
    for _ in range(BISECTIONS):
        p = (inside + outside) / 2
        tail = np.logaddexp.reduce(ways + k * math.log(p) + (draws - k) * math.log1p(-p))
        if tail >= goal:
            inside = p
        else:
            outside = p
    return outside
