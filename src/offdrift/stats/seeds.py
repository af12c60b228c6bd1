"""Comparisons of repeated experiments: Student intervals of means, differences paired by seed, Holm's procedure.

The unit is the seed: one number per seed and setting. What two settings share at a seed (prompts, initial weights,
draws) cancels in their difference. Everything rests on means of few seeds being about normal, and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from offdrift.errors import BadValueError

NO_SPREAD = 1e-12
"""Standard deviation over size below which values are equal but for rounding."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with a Student interval."""

    mean: float
    """NaN without seeds."""
    low: float
    """-inf where the seeds do not tell."""
    high: float
    n: int
    """Seeds."""
    confidence: float
    p: float
    """Of the two-sided test that the expectation is 0; 1 where the seeds do not tell."""

    def within(self, lowest: float, highest: float) -> Mean:
        """Return the mean with its interval's ends inside a range that the expectation cannot leave.

        Ends at infinity, where the seeds tell nothing, and a mean outside of the range stay as they are.

        Example:
            >>> m = over_seeds([0.2, 0.8]).within(0.0, 1.0)
            >>> m.low, m.high
            (0.0, 1.0)
        """
        if not (lowest <= self.mean <= highest and math.isfinite(self.low) and math.isfinite(self.high)):
            return self
        return replace(self, low=max(self.low, lowest), high=min(self.high, highest))


@dataclass(frozen=True)
class Comparison:
    """A setting less its baseline, of the seeds that both have."""

    difference: Mean
    """Its confidence is the level at which Holm's procedure decided about it: the interval excludes 0 exactly where
    there is a verdict."""
    p_adjusted: float
    """Smallest error rate, of all comparisons together, at which Holm's procedure finds a difference."""
    verdict: Literal["better", "worse", "undecided", "no data"]
    """"no data" where no seed has both numbers."""


def student_p(t: float, dof: int) -> float:
    """P(|T| >= |t|) for Student's t of a whole number of degrees of freedom, exact.

        theta = atan(t / sqrt(dof)),   1 - P = sin(theta) (1 + c/2 + 1 3/(2 4) c^2 + ...),   c = cos(theta)^2, even dof
        1 - P = 2/pi (theta + sin(theta) cos(theta) (1 + 2/3 c + 2 4/(3 5) c^2 + ...))                       odd dof

    Reference: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.

    Example:
        >>> [round(student_p(t, dof), 4) for t, dof in ((12.706, 1), (2.776, 4), (2.571, 5), (0.0, 3))]
        [0.05, 0.05, 0.05, 1.0]
    """
    if dof < 1:
        raise BadValueError(f"dof = {dof}: Student's t has at least one degree of freedom; give two seeds or more")
    theta = math.atan(abs(t) / math.sqrt(dof))
    sine, c = math.sin(theta), math.cos(theta) ** 2
    odd = dof % 2
    term, total = 1.0, 1.0 if dof > 1 else 0.0
    for k in range(1, (dof - odd) // 2):
        term *= c * (2 * k - 1 + odd) / (2 * k + odd)
        total += term
    inside = 2 / math.pi * (theta + sine * math.cos(theta) * total) if odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


def student_t(alpha: float, dof: int) -> float:
    """The t that |T| exceeds with probability alpha.

    Example:
        >>> [round(student_t(0.05, dof), 3) for dof in (1, 2, 3, 7, 30)]
        [12.706, 4.303, 3.182, 2.365, 2.042]
    """
    if not 0 < alpha < 1:
        raise BadValueError(f"alpha = {alpha}: a probability of error is above 0 and below 1; take 0.05")
    low, high = 0.0, 1.0
    while student_p(high, dof) > alpha:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, dof) > alpha else (low, middle)
    return high


def over_seeds(values: Sequence[float], *, confidence: float = 0.95) -> Mean:
    """Mean of one number per seed with its Student interval, mean -+ t s / sqrt(n).

    One seed has no interval. Of n equal numbers, whose spread is 0, the test is that of signs, 2^(1 - n).

    Args:
        values: finite numbers.

    Raises: `BadValueError` for a number that is not finite.

    Example:
        >>> m = over_seeds([0.1, 0.2, 0.3])
        >>> round(m.mean, 3), round(m.low, 3), round(m.high, 3), round(m.p, 3)
        (0.2, -0.048, 0.448, 0.074)
    """
    x = np.asarray(values, dtype=np.float64)
    if not np.isfinite(x).all():
        raise BadValueError(f"values = {list(values)} over seeds are not all finite; leave out runs without a number")
    n, mean = len(x), float(x.mean()) if len(x) else math.nan
    if n < 2:
        return Mean(mean, -math.inf, math.inf, n=n, confidence=confidence, p=1.0)
    spread = float(x.std(ddof=1))
    if spread <= NO_SPREAD * abs(mean) or spread == 0:
        p = 2.0 ** (1 - n)
        low, high = (mean, mean) if p <= 1 - confidence else (-math.inf, math.inf)
        return Mean(mean, low, high, n=n, confidence=confidence, p=p if mean else 1.0)
    error = spread / math.sqrt(n)
    half = student_t(1 - confidence, n - 1) * error
    return Mean(mean, mean - half, mean + half, n=n, confidence=confidence, p=student_p(mean / error, n - 1))


def paired(values: Mapping[int, float], baseline: Mapping[int, float], *, confidence: float = 0.95) -> Mean:
    """Mean difference to a baseline over the seeds that both have; arguments map seeds to numbers.

    Example:
        >>> d = paired({0: 0.5, 1: 0.9, 2: 0.7}, {0: 0.4, 1: 0.8, 3: 0.1})
        >>> round(d.mean, 3), d.n
        (0.1, 2)
    """
    common = sorted(values.keys() & baseline.keys())
    return over_seeds([values[seed] - baseline[seed] for seed in common], confidence=confidence)


def compare_all(
    pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]], *, larger: str, alpha: float = 0.05
) -> list[Comparison]:
    """Every (setting, baseline), decided together so that any false verdict has probability at most alpha.

    Holm's procedure goes through the m p-values from the smallest: the k-th, k = 0, 1, ..., is a difference while
    p <= alpha / (m - k); the first that is not, and all after it, are undecided. A difference's interval has the level
    1 - alpha / (m - k) of its step (of the step that stopped, for the undecided): each alone covers its difference
    with at least 1 - alpha, and excludes 0 exactly where there is a verdict.

    Args:
        pairs: numbers by seed.
        larger: "better" or "worse".

    Reference: S. Holm, Scandinavian Journal of Statistics 6 (1979), 65-70.

    Example:
        >>> a, b = {0: 0.50, 1: 0.41, 2: 0.62, 3: 0.55}, {0: 0.30, 1: 0.22, 2: 0.40, 3: 0.37}
        >>> [c.verdict for c in compare_all([(a, b), (a, a)], larger="better")]
        ['better', 'undecided']
    """
    if larger not in ("better", "worse"):
        raise BadValueError(f'larger = {larger!r}: a larger number is "better" or "worse"')
    tests = [paired(*pair).p for pair in pairs]
    order = sorted(range(len(tests)), key=tests.__getitem__)
    decided: dict[int, Comparison] = {}
    level, adjusted, stopped = alpha, 0.0, False
    for k, i in enumerate(order):
        adjusted = max(adjusted, min(1.0, (len(tests) - k) * tests[i]))
        if not stopped:
            level = alpha / (len(tests) - k)
            stopped = tests[i] > level
        difference = paired(*pairs[i], confidence=1 - level)
        better = (difference.mean > 0) == (larger == "better")
        verdict = "undecided" if stopped else "better" if better else "worse"
        verdict = verdict if difference.n else "no data"
        decided[i] = Comparison(difference, adjusted, verdict)
    return [decided[i] for i in range(len(pairs))]
