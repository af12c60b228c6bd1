"""How far a series moves by itself, and what goes beyond it: trends and shifts of autocorrelated steps.

Steps of a run are no independent draws: what happened at one step is still there at the next. With
the lag-1 autocorrelation phi, n steps say as much of a mean, or of a line, as n / f independent ones,

    f = (1 + phi) / (1 - phi)        the long-run variance over the variance, for an AR(1) series

A fit makes residuals look less correlated than the errors are, so phi is corrected for that, and taken
one standard error higher: too small a phi is the error that raises false alarms. The variance counts
independent steps, too: RSS / (n - fitted f). A series that is too short for its correlation, as smooth
ones are, counts as a single draw: RSS itself, with f = n. Only what dwarfs it stands out.

What this costs and saves is measured in docs/diagnosis.md, by `benchmarks/trend_alarms.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

ROUNDING = 1e-12
"""Scatter over size below which a series is exact: the rounding of a perfect line is not noise."""


class Scatter(NamedTuple):
    """The scatter of one step, and how many steps say as much as one independent draw."""

    deviation: float
    """Standard deviation of a step; inf for too few steps."""
    per_draw: float
    """f, from 1 to n."""

    @staticmethod
    def of(residuals: Sequence[float], fitted: int) -> Scatter:
        """Of what a fit of so many parameters (1: a mean, 2: a line) leaves of a series.

            phi = (n r + fitted) / (n - fitted - 2)        r = sum e_t e_{t-1} / sum e_t^2
            phi <- phi + sqrt((1 - phi^2) / n), within [0, 1)

        Reference: M. Kendall, Biometrika 41 (1954), 403-404, for the bias (1 + 3 phi) / n of r about a
        mean; about a line it is (2 + 4 phi) / n.

        Example:
            >>> deviation, per_draw = Scatter.of([1.0, -1.0] * 50, fitted=1)
            >>> round(deviation, 3), round(per_draw, 3)
            (1.006, 1.222)
        """
        n, rss = len(residuals), math.fsum(e * e for e in residuals)
        if n <= fitted + 2 or rss == 0:
            return Scatter(math.inf if rss else 0.0, 1.0)
        r = math.fsum(a * b for a, b in pairwise(residuals)) / rss
        phi = min(max((n * r + fitted) / (n - fitted - 2), 0.0), 1.0)
        phi = min(phi + math.sqrt((1 - phi * phi) / n), 1 - 1e-9)
        per_draw = min((1 + phi) / (1 - phi), n)
        return Scatter(math.sqrt(rss / max(n - fitted * per_draw, 1.0)), per_draw)

    def of_mean(self, n: int) -> float:
        """Standard error of the mean of so many consecutive steps."""
        return self.deviation * min(1.0, math.sqrt(self.per_draw / n))


def slope_over(values: Sequence[float]) -> tuple[float, float]:
    """Relative change along the least-squares line, and the slope over its standard error.

        change = slope (n - 1) / |mean|        t = slope / (deviation sqrt(f / Sxx)), or mean step / (its deviation / sqrt(n - 1))

    Fewer than 5 values, or a mean of 0: (0, 0). A perfect line has t = +-inf.

    Example:
        >>> slope_over([1.0, 2.0, 3.0, 4.0, 5.0])
        (1.3333333333333333, inf)
    """
    n, mean = len(values), fmean(values) if values else 0.0
    if n < 5 or mean == 0:
        return 0.0, 0.0
    found = line(values)
    return found.slope * (n - 1) / abs(mean), found.t


class Line(NamedTuple):
    """The least-squares line through equidistant values."""

    slope: float
    t: float
    """The slope over its standard error; +-inf where the line is exact. Where the mean step, over its
    own error, is the larger of the two, that: the test that holds even for a random walk, and that
    sees a smooth rise which is no straight line."""
    residuals: list[float]


def line(values: Sequence[float]) -> Line:
    """The line through at least two values."""
    n, mean = len(values), fmean(values)
    center, sxx = (n - 1) / 2, n * (n * n - 1) / 12
    slope = math.fsum((i - center) * (y - mean) for i, y in enumerate(values)) / sxx
    residuals = [y - mean - slope * (i - center) for i, y in enumerate(values)]
    rounding = ROUNDING * math.hypot(*values)
    if math.hypot(*residuals) <= rounding:
        exact = abs(slope) * math.sqrt(sxx) > rounding
        return Line(slope, math.copysign(math.inf, slope) if exact else 0.0, residuals)
    found = Scatter.of(residuals, fitted=2)
    stationary = slope / (found.deviation * math.sqrt(found.per_draw / sxx))
    steps = [b - a for a, b in pairwise(values)]
    step = fmean(steps)
    spread = math.hypot(*(x - step for x in steps)) / math.sqrt(max(n - 2, 1))
    walk = step * math.sqrt(n - 1) / spread if spread > 0 else 0.0
    return Line(slope, max(stationary, walk, key=abs), residuals)


def shift_of(values: Sequence[float], width: int) -> float:
    """How far the median of the last `width` values is from the mean before, over one step's deviation.

    The error is that of a single step, which a median of a few correlated ones may have. A shift from
    values that did not vary is +-inf.

    Example:
        >>> shift_of([1.0, 2.0] * 20 + [4.5] * 5, width=5) > 5
        True
    """
    past = values[:-width]
    if len(past) < width:
        return 0.0
    mean = fmean(past)
    apart = median(values[-width:]) - mean
    deviation = Scatter.of([x - mean for x in past], fitted=1).deviation
    if deviation <= ROUNDING * abs(mean):
        return 0.0 if abs(apart) <= ROUNDING * abs(mean) else math.copysign(math.inf, apart)
    return apart / deviation


def moved(values: Sequence[float], width: int, sign: int = 1) -> float:
    """How surely positive values rose (sign 1) or fell (-1), in errors: on their line, or at their end.

    The end is compared on the log scale, on which large values scatter no more than small ones.

    Example:
        >>> moved([100.0] * 40 + [121.0] * 5, width=5), moved([1.0, 2.0] * 20, width=5) < 2
        (inf, True)
    """
    positive = [x for x in values if x > 0]
    if len(positive) <= width:
        return 0.0
    return max(sign * line(positive).t, sign * shift_of([math.log(x) for x in positive], width))
