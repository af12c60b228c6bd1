"""Confidence intervals for means that hold at any sample size, for variables known to be bounded; `Looks` shares alpha.

The unit of independence is the *prompt group*: sequences that answer the same prompt share it. Take
`cluster_means` first; every function here counts one entry of its argument as one independent draw.

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
        """Estimate of the variable times a positive number."""
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


def betting_any(
    variables: Sequence[tuple[Float[np.ndarray, " n"], float]], *, alpha: float = 0.05, anytime: bool = False
) -> Estimate:
    """Lower end for a mean that several variables share, by one bettor for each.

        K_t(m) = 1/k sum_j K_t^j(m),   reject m if max_t K_t >= 1/alpha

    Each bettor's capital is a martingale under the true mean, and so is their mean: valid whichever of them wins,
    without a choice. Beside the best variable alone it costs log k. The variables may depend on each other.

    Args:
        variables: (x, low) each: draws in the same order, and what the variable cannot fall below. Equal means.
        alpha, anytime: as in `betting`.

    Raises: `BadValueError` as `betting`.

    Example:
        >>> noisy, quiet = np.array([-0.9, 1.1] * 50), np.full(100, 0.1)
        >>> alone, both = betting_any([(noisy, -1.0)]), betting_any([(noisy, -1.0), (quiet, -1.0)])
        >>> alone.low < both.low
        True
    """
    for x, low in variables:
        _checked(x, low, math.inf, alpha, "low")
    first = variables[0][0]
    stops = STOPS if anytime else (len(first),)
    name = "betting, anytime" if anytime else "betting"
    ends = [max(low for _, low in variables), math.inf]
    if len(first):
        prepared = []
        for x, low in variables:
            scale = _scale(low, math.inf)
            y = (x - low) / scale
            prepared.append((y, _bets(y, alpha, stops), low, scale))
        ends[0] = _shared_lower_end(prepared, ends[0], math.log(len(stops) * len(variables) / alpha))
    return _estimate(first, ends, alpha, name)


def _shared_lower_end(
    prepared: Sequence[tuple[Float[np.ndarray, " n"], Float[np.ndarray, "rows n"], float, float]],
    lowest: float,
    goal: float,
) -> float:
    """The largest mean that the capitals together reject; `lowest` if they reject none above it."""
    below, above = lowest, max(low + scale * float(y.max()) for y, _, low, scale in prepared)
    for _ in range(BISECTIONS):
        middle = (below + above) / 2
        capitals = []
        for y, bets, low, scale in prepared:
            m = (middle - low) / scale
            capitals.append(np.log1p(np.minimum(bets, LARGEST_BET / m) * (y - m)).cumsum(1))
        if float(np.logaddexp.reduce(np.concatenate(capitals)).max()) >= goal:
            below = middle
        else:
            above = middle
    return below


def power_any(
    variables: Sequence[tuple[Float[np.ndarray, " n"], float]],
    size: int,
    *,
    alpha: float = 0.05,
    samples: int = 400,
) -> float:
    """Probability that `betting_any` puts the lower end of so many new draws above 0: an estimate, as `power`.

    Example:
        >>> x = np.array([-0.3, 0.4] * 50)
        >>> power_any([(x, -1.0)], 50) < 0.5 < 0.9 < power_any([(x, -1.0)], 800)
        True
    """
    reached, chunk, generator = 0, max(1, 2**20 // size), np.random.default_rng(0)
    for start in range(0, samples, chunk):
        rows = generator.integers(0, len(variables[0][0]), (min(chunk, samples - start), size))
        capitals = []
        for x, low in variables:
            scale = _scale(low, math.inf)
            y, m = (x[rows] - low) / scale, -low / scale
            capitals.append(np.log1p(np.minimum(_bets(y, alpha, (size,)), LARGEST_BET / m) * (y - m)).cumsum(-1))
        capital = np.logaddexp.reduce(np.stack(capitals))
        reached += int((capital.max(-1) >= math.log(len(variables) / alpha)).sum())
    return reached / samples


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
    return Estimate(mean, ends[0], ends[1], n=len(x), alpha=alpha, method=method)


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
    return Estimate(
        mean, 0.0 if low is None else low, 1.0 if high is None else high, n=draws, alpha=alpha, method="Clopper-Pearson"
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


# Several certificates.


@dataclass(frozen=True)
class Looks:
    """Certificates that share one probability of error and hold together; proofs: docs/certificates.md.

        a series     alpha_t = 6 alpha / (pi^2 t^2)    looks 1, 2, ... at new rollouts, of however many policies
        best of K    alpha / K                         K policies judged by the same rollouts, any of them then shown
        anytime      `betting(anytime=True)`           one policy, looked at as often as rollouts arrive

    The first two are union bounds, and multiply. The third spends nothing on looks: its bets are fair at every moment.

    Raises: `BadValueError` for a look or a number of policies below 1; `MethodError` for a look of a series that
        is anytime valid: such a series is one look.

    Example:
        >>> round(Looks(at=2, of=10).share(0.05), 6)  # 6 / (4 pi^2) of 0.05 / 10
        0.00076
        >>> sum(Looks(at=t).share(0.05) for t in range(1, 10_000)) < 0.05
        True
    """

    at: int | None = None
    """Number of this look in its series, from 1; None: there is no series."""
    of: int = 1
    """Policies that the same rollouts judge."""
    anytime: bool = False
    """Whether intervals hold at every moment of one growing sample."""
    series: str = "this series"
    """What the looks are looks of."""

    def __post_init__(self) -> None:
        for name, number in (("look", self.at), ("of", self.of)):
            if number is not None and number < 1:
                raise BadValueError(f"{name} = {number}; looks and policies are counted from 1")
        if self.anytime and self.at is not None:
            raise MethodError(
                f"look = {self.at} of intervals that hold at every moment: however often you look is one look; give "
                "either a look or anytime"
            )

    def share(self, alpha: float) -> float:
        """Share of a probability of error that this certificate may spend: 6 alpha / (pi^2 at^2 of)."""
        spent = alpha if self.at is None else 6 * alpha / (math.pi * self.at) ** 2
        return spent / self.of

    @property
    def covers(self) -> str:
        """Subject of a confidence, in words to be shown beside it."""
        one_of = f"one of {self.of} policies"
        if self.at is not None:
            at = f" at {one_of}" if self.of > 1 else ""
            return f"all certificates of {self.series} together, this is look {self.at}{at}"
        if self.anytime:
            which = one_of if self.of > 1 else "one policy"
            return f"{which}, however often you look as rollouts arrive"
        return "one policy, one look" if self.of == 1 else f"whichever of {self.of} policies is shown, one look"

    @property
    def provided(self) -> str:
        """Condition that `covers` takes for granted, in words."""
        if self.at is not None:
            what = "one policy each" if self.of == 1 else f"at most {self.of} policies each"
            return f"looks are numbered 1, 2, ... without leaving one out, at rollouts of their own, and judge {what}"
        what = "one policy" if self.of == 1 else f"at most {self.of} policies, fixed before they were looked at"
        if self.anytime:
            return (
                f"they judge {what}, and count in order of arrival: a later look begins with the same files in the "
                "same order"
            )
        if self.of > 1:
            return f"they judge {what}, once (of several looks as rollouts arrive, each spends alpha)"
        return (
            "they judge one policy, once: of k certificates (of updates, checkpoints, regions, or of one policy as "
            "rollouts arrive) one is false with probability up to k alpha"
        )
