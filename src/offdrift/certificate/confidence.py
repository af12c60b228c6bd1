"""Confidence intervals for means that hold at any sample size, for variables known to be bounded.

The unit of independence is the *prompt group*: sequences that answer the same prompt share it, so
they are not independent draws. Take `cluster_means` first; every function here counts one entry of
its argument as one independent draw.

All of them assume independent, identically distributed draws inside the stated range, in an order
that does not depend on their values. Nothing else: no normality, no known variance. `asymptotic`
is the exception, a comparison and not a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from jaxtyping import Float, Int

from offdrift.errors import BadValueError, MethodError

SIDES = ("both", "low", "high")

LARGEST_BET = 0.95
"""Share of the capital that one observation may cost: below 1, so that no observation ruins."""

STOPS = tuple(2**k for k in range(4, 16))
"""Sample sizes, 16 to 32,768, for which the bettors of an anytime interval bet: one each."""

BISECTIONS = 44
"""Halvings of the search interval: its width falls below the rounding of what is summed."""


@dataclass(frozen=True)
class Estimate:
    """A sample mean and an interval for the expectation."""

    mean: float
    """Sample mean; NaN without observations."""
    low: float
    high: float
    n: int
    """Independent observations."""
    alpha: float
    """The interval misses the expectation with at most this probability."""
    method: str

    def scaled(self, factor: float) -> Estimate:
        """The same for the variable times a positive number."""
        return replace(self, mean=factor * self.mean, low=factor * self.low, high=factor * self.high)


def cluster_means(x: Float[np.ndarray, " b"], ids: Int[np.ndarray, " b"] | None) -> Float[np.ndarray, " g"]:
    """One mean per group, ordered by group id: the independent observations of a batch.

    A mean over groups of group means estimates E over prompts of E over answers. It equals the mean
    over sequences where all groups have one size.

    Args:
        x: a number per sequence.
        ids: prompt group of each sequence, any integers; None if all prompts differ.

    Example:
        >>> cluster_means(np.array([1.0, 0.0, 1.0]), np.array([7, 7, 2]))
        array([1. , 0.5])
    """
    if ids is None:
        return x
    _, index, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    return np.bincount(index, weights=x, minlength=len(sizes)) / sizes


def betting(
    x: Float[np.ndarray, " n"],
    *,
    low: float = 0.0,
    high: float = 1.0,
    alpha: float = 0.05,
    sides: str = "both",
    anytime: bool = False,
) -> Estimate:
    """Interval for the mean of a bounded variable from the capital of a bettor against each mean m.

        K_t(m) = prod_{i<=t} (1 + min(l_i, c / (m - low)) (x_i - m)),   reject m if max_t K_t >= 1/alpha

    Under the true mean the capital is a martingale that starts at 1, so it ever reaches 1/alpha with
    probability at most alpha (Ville). The bets l_i follow the variance seen *before* x_i: the width
    adapts to the variance, and where that is small it falls like range / n. The lower end needs
    only `low`, the upper one only `high`: give an infinite other end for a variable bounded on one
    side. Two sides spend alpha / 2 each.

    The bets know the number of draws, so that it must not depend on them. With `anytime` it may: the
    capital is the mean of that of twelve bettors, each of whom bets for one of the sizes `STOPS`, whatever
    the sample's. The interval of x[:n] then holds for all n at once, with probability 1 - alpha, so that you
    may look after every draw and stop when you like. It is a fifth wider.

    Args:
        x: independent draws, in an order that does not depend on their values; with `anytime` in their order of
            arrival, which a later look only continues.
        low, high: what the variable cannot leave, known beforehand; one may be infinite.
        alpha: largest probability of missing the mean.
        sides: "both", "low" or "high"; the other end is the range's own.
        anytime: hold at every sample size at once.

    Raises: `BadValueError` for a value outside the range or NaN, and for alpha outside (0, 1).

    Example:
        >>> interval = betting(np.full(100, 0.5))
        >>> round(interval.low, 3), round(interval.high, 3)
        (0.48, 0.52)

    Reference: I. Waudby-Smith, A. Ramdas, arXiv:2010.09686, section 4 (hedged capital
    with predictable plug-in bets); J. Ville, "Etude critique de la notion de collectif", 1939.
    """
    share = _checked(x, low, high, alpha, sides)
    scale = _scale(low, high)
    ends = [low, high]
    stops = STOPS if anytime else (len(x),)
    if len(x) and scale > 0:
        if sides != "high" and math.isfinite(low):
            ends[0] = low + scale * _lower_end((x - low) / scale, share, stops)
        if sides != "low" and math.isfinite(high):
            ends[1] = high - scale * _lower_end((high - x) / scale, share, stops)
    return _estimate(x, ends, alpha, "betting, anytime" if anytime else "betting")


def power(
    x: Float[np.ndarray, " n"],
    size: int,
    *,
    above: float = 0.0,
    low: float = 0.0,
    high: float = 1.0,
    alpha: float = 0.05,
    samples: int = 400,
) -> float:
    """Probability that `betting` puts the lower end of so many new draws above a number: an estimate, no guarantee.

    The draws seen stand for the distribution: samples are taken from them with replacement. What they did not
    show, a rare loss above all, is not in it, and a mean that is large by luck stays large.

    Args:
        x: draws of the variable.
        size: draws of a planned sample, at least 1.
        above: what the lower end should exceed; above `low`.
        low, high: range of the variable; `low` finite.
        alpha: of the one-sided interval.
        samples: samples taken; the standard error is at most 1/2 sqrt(1 / samples).

    Example:
        >>> x = np.array([-0.3, 0.4] * 50)
        >>> few, many = (power(x, n, low=-1.0) for n in (50, 800))
        >>> few < 0.5 < 0.9 < many
        True
    """
    _checked(x, low, high, alpha, "low")
    scale, reached, chunk = _scale(low, high), 0, max(1, 2**21 // size)
    generator, mean = np.random.default_rng(0), (above - low) / scale
    for start in range(0, samples, chunk):
        y = (generator.choice(x, (min(chunk, samples - start), size)) - low) / scale
        bets = np.minimum(_bets(y, alpha, (size,)), LARGEST_BET / mean)
        capital = np.log1p(bets * (y - mean)).cumsum(-1)
        reached += int((capital.max(-1) >= math.log(1 / alpha)).sum())
    return reached / samples


def bernstein(
    x: Float[np.ndarray, " n"], *, low: float = 0.0, high: float = 1.0, alpha: float = 0.05, sides: str = "both"
) -> Estimate:
    """Interval for the mean of a bounded variable from its sample variance V, in closed form.

        mean -+ (sqrt(2 V log(2/a) / n) + 7 (high - low) log(2/a) / (3 (n - 1))),   a = alpha per side

    Wider than `betting`, but symmetric in the draws: any order will do.

    Args, Raises: as in `betting`; both ends finite.

    Example:
        >>> round(bernstein(np.full(100, 0.5)).low, 3)
        0.397

    Reference: A. Maurer, M. Pontil, arXiv:0907.3740, Theorem 4.
    """
    share = _checked(x, low, high, alpha, sides)
    n, ends = len(x), [low, high]
    if n > 1 and math.isfinite(high - low):
        log = math.log(2 / share)
        half = math.sqrt(2 * float(x.var(ddof=1)) * log / n)
        half += 7 * (high - low) * log / (3 * (n - 1))
        if sides != "high":
            ends[0] = max(low, float(x.mean()) - half)
        if sides != "low":
            ends[1] = min(high, float(x.mean()) + half)
    return _estimate(x, ends, alpha, "bernstein")


def asymptotic(x: Float[np.ndarray, " n"], *, alpha: float = 0.05, sides: str = "both") -> Estimate:
    """The normal interval mean -+ z s / sqrt(n): asymptotic, not a guarantee.

    Heavy tails (ratios of long sequences) make it too narrow at any size a batch has. Unbounded
    below two observations.

    Example:
        >>> interval = asymptotic(np.array([0.0, 1.0] * 50))
        >>> round(interval.low, 3), round(interval.high, 3)
        (0.402, 0.598)
    """
    share = _checked(x, -math.inf, math.inf, alpha, sides)
    ends = [-math.inf, math.inf]
    if len(x) > 1:
        half = NormalDist().inv_cdf(1 - share) * float(x.std(ddof=1)) / math.sqrt(len(x))
        ends[0] = float(x.mean()) - half if sides != "high" else -math.inf
        ends[1] = float(x.mean()) + half if sides != "low" else math.inf
    return _estimate(x, ends, alpha, "asymptotic")


def _scale(low: float, high: float) -> float:
    """The unit of the bets: the range, or twice the finite end, as if 0 were the middle."""
    if math.isfinite(high - low):
        return high - low
    finite = low if math.isfinite(low) else high
    return 2 * abs(finite) if math.isfinite(finite) and finite else 1.0


def _lower_end(y: Float[np.ndarray, " n"], alpha: float, stops: Sequence[int]) -> float:
    """The largest mean m that is rejected from below, for draws y >= 0; 0 if none is.

    Args:
        stops: sample sizes for which a bettor each bets; their mean capital counts.
    """
    bets, goal = _bets(y, alpha, stops), math.log(len(stops) / alpha)
    below, above = 0.0, float(y.max())
    # The capital falls with m, since every factor does.
    for _ in range(BISECTIONS + max(0, math.ceil(math.log2(max(above, 1.0))))):
        m = (below + above) / 2
        if m == 0:
            break
        capital = np.log1p(np.minimum(bets, LARGEST_BET / m) * (y - m)).cumsum(1)
        if float(np.logaddexp.reduce(capital).max()) >= goal:
            below = m
        else:
            above = m
    return below


def _bets(y: Float[np.ndarray, "*samples n"], alpha: float, stops: Sequence[int]) -> Float[np.ndarray, "rows n"]:
    """sqrt(2 log(1/alpha) / (stop variance)), the variance from earlier draws, 1/4 before the first.

    With one stop y may be samples, `[samples, n]`, and so are the bets then.
    """
    count = np.arange(1, y.shape[-1] + 1)
    mean = (0.5 + y.cumsum(-1)) / (count + 1)
    variance = (0.25 + ((y - mean) ** 2).cumsum(-1)) / (count + 1)
    before = np.concatenate([np.full_like(y[..., :1], 0.25), variance[..., :-1]], -1)
    return np.sqrt(2 * math.log(1 / alpha) / (np.array(stops)[:, None] * before))


def _estimate(x: Float[np.ndarray, " n"], ends: list[float], alpha: float, method: str) -> Estimate:
    mean = float(x.mean()) if len(x) else math.nan
    return Estimate(mean, ends[0], ends[1], len(x), alpha, method)


def _checked(x: Float[np.ndarray, " n"], low: float, high: float, alpha: float, sides: str) -> float:
    """Alpha of each side; refuses what no such variable can be."""
    check_alpha(alpha)
    if sides not in SIDES:
        raise MethodError(f"sides = {sides!r}; choose one of {SIDES}")
    if not low <= high:
        raise BadValueError(f"low = {low} and high = {high}; give the range of the variable")
    wrong = ~((x >= low) & (x <= high))
    if wrong.any():
        where = int(np.flatnonzero(wrong)[0])
        raise BadValueError(
            f"x[{where}] = {x[where]} lies outside [{low}, {high}], the range that the interval "
            "relies on; give the true range of the variable"
        )
    return alpha / 2 if sides == "both" else alpha


def check_alpha(alpha: float) -> None:
    """Raise `BadValueError` unless alpha is a probability of error, in (0, 1)."""
    if not 0 < alpha < 1:
        raise BadValueError(f"alpha = {alpha}; a probability of error lies in (0, 1)")


# Probabilities of rare or unobserved events: a batch without a violation limits the probability that the
# next draw has one. Draws are independent prompt groups, not the sequences inside them.


def clopper_pearson(events: int, draws: int, *, alpha: float = 0.05, sides: str = "both") -> Estimate:
    """The exact interval for a probability, from the binomial tails.

        high = max{p : P(Bin(n, p) <= k) >= a},   low = min{p : P(Bin(n, p) >= k) >= a}

    Args:
        events: independent draws in which it happened, k.
        draws: independent draws, n; 0 gives [0, 1].
        alpha: largest probability of missing it; halved for two sides.
        sides: "both", "low" or "high".

    Raises: `BadValueError` unless 0 <= events <= draws and alpha lies in (0, 1).

    Example:
        >>> interval = clopper_pearson(2, 10)
        >>> round(interval.low, 4), round(interval.high, 4)
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
    return Estimate(mean, 0.0 if low is None else low, 1.0 if high is None else high, draws, alpha, "Clopper-Pearson")


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
        raise BadValueError(f"singletons = {singletons} of draws = {draws}; they are some of the draws")
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
