"""Tests of whether the level of a series of autocorrelated steps changed by more than its own scatter.

With the lag-1 autocorrelation phi, n steps say as much of a mean as n / f independent ones,

    f = (1 + phi) / (1 - phi)        the long-run variance over the variance, for an AR(1) series

A level has `moved` if a shift, a line or a walk says so. docs/diagnosis.md describes these tests, what they rest on
and how often they are wrong (`benchmarks/trend_alarms.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

ROUNDING = 1e-12
"""Scatter over size below which a series is exact: the rounding of a perfect line is not noise."""
Series = Float[np.ndarray, " steps"]


class Scatter(NamedTuple):
    """The scatter of one step, and how many steps say as much as one independent draw."""

    deviation: float
    """Standard deviation of a step; inf for too few steps."""
    per_draw: float
    """f, from 1 to n."""
    dof: float
    """Degrees of freedom of the deviation: independent draws, n / f, less the fitted parameters."""

    @staticmethod
    def of(residuals: Sequence[float] | Series, fitted: int) -> Scatter:
        """Estimate the scatter from residuals of a fit with `fitted` parameters (1: a mean, 2: a line).

            phi = (n r + fitted) / (n - fitted - 2)        r = sum e_t e_{t-1} / sum e_t^2
            phi <- phi + sqrt((1 - phi^2) / n), within [0, 1)

        A fit makes residuals look less correlated than the errors are, hence the first line; too small a phi raises
        false alarms, hence the second. A series too short for its correlation counts as a single draw: f = n.

        Reference: M. Kendall, Biometrika 41 (1954), 403-404, for the bias (1 + 3 phi) / n of r about a
        mean; about a line it is (2 + 4 phi) / n.

        Example:
            >>> deviation, per_draw, dof = Scatter.of([1.0, -1.0] * 50, fitted=1)
            >>> round(deviation, 3), round(per_draw, 3), round(dof, 1)
            (1.006, 1.222, 80.8)
        """
        e = np.asarray(residuals, dtype=np.float64)
        n, rss = len(e), float(e @ e)
        if n <= fitted + 2 or rss == 0:
            return Scatter(math.inf if rss else 0.0, 1.0, float(max(n - fitted, 0)))
        r = float(e[1:] @ e[:-1]) / rss
        phi = min(max((n * r + fitted) / (n - fitted - 2), 0.0), 1.0)
        phi = min(phi + math.sqrt((1 - phi * phi) / n), 1 - 1e-9)
        per_draw = min((1 + phi) / (1 - phi), n)
        deviation = math.sqrt(rss / max(n - fitted * per_draw, 1.0))
        return Scatter(deviation, per_draw, max(n / per_draw - fitted, 0.0))

    def of_mean(self, n: int) -> float:
        """Standard error of the mean of so many consecutive steps."""
        return self.deviation * min(1.0, math.sqrt(self.per_draw / n))


def normal_score(t: float | int, dof: float | int) -> float:
    """The z that a normal variable exceeds as rarely as Student's t of so many degrees of freedom does.

        z = sign(t) (8 dof + 1) / (8 dof + 3) sqrt(dof log(1 + t^2 / dof))

    Never larger than it should be: at 3 by 10 % too small for one degree of freedom, by 4 % for two. 0
    for none; fractions are fine.

    Reference: D. Wallace, Annals of Mathematical Statistics 30 (1959), 1121-1130.

    Example:
        >>> [round(normal_score(12.706, dof), 2) for dof in (1, 4, 1e6)]  # 12.706: 2.5 % at 1
        [1.85, 3.64, 12.71]
    """
    if not dof or math.isinf(t):
        return t if math.isinf(t) else 0.0
    size = math.sqrt(dof * math.log1p(t * t / dof))
    return math.copysign(size * (8 * dof + 1) / (8 * dof + 3), t)


class Break(NamedTuple):
    """A step at which the level of a series changes."""

    at: int
    """Values before it."""
    before: float
    after: float
    """Means on both sides."""
    score: float
    """Their difference over its error, as a normal score."""


def break_of(values: Sequence[float], width: int) -> Break | None:
    """The one change of level that explains a series best, by least squares; None for fewer than two `width` values.

    Errors are those of residuals about both levels, autocorrelated (`Scatter`). The place is chosen by the data: of
    series without a break (AR(1), phi up to .8, 20 to 100 steps) .7 % at most score above 4, .1 % above 5.

    Example:
        >>> [round(x, 2) for x in break_of([0.6, 0.7, 0.6, 0.7, 0.6, 0.1, 0.2, 0.1, 0.2, 0.1], width=3)[:3]]
        [5, 0.64, 0.14]
    """
    y = np.asarray(values, dtype=np.float64)
    n = len(y)
    if n < 2 * width:
        return None
    places = np.arange(width, n - width + 1)
    sums = np.cumsum(y)[places - 1]
    explained = sums**2 / places + (y.sum() - sums) ** 2 / (n - places)
    at = int(places[explained.argmax()])
    before, after = float(y[:at].mean()), float(y[at:].mean())
    scatter = Scatter.of(y - np.where(np.arange(n) < at, before, after), fitted=2)
    error = math.hypot(scatter.of_mean(at), scatter.of_mean(n - at))
    exact = error <= ROUNDING * max(abs(before), abs(after))
    t = math.copysign(math.inf, after - before) if exact and after != before else (after - before) / (error or 1.0)
    return Break(at, before, after, normal_score(t, scatter.dof))


def slope_over(values: Sequence[float]) -> float:
    """Relative change along the least-squares line: slope (n - 1) / |mean|.

    0 for fewer than 5 values, or a mean of 0.

    Example:
        >>> slope_over([1.0, 2.0, 3.0, 4.0, 5.0])
        1.3333333333333333
    """
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 5 or (mean := float(y.mean())) == 0:
        return 0.0
    return _slope(y) * (len(y) - 1) / abs(mean)


def about_line(values: Sequence[float] | Series) -> Series:
    """Residuals of at least two equidistant values about their least-squares line."""
    y = np.asarray(values, dtype=np.float64)
    return y - y.mean() - _slope(y) * (np.arange(len(y)) - (len(y) - 1) / 2)


def _slope(y: Series) -> float:
    return float((np.arange(len(y)) - (len(y) - 1) / 2) @ y) / _sxx(len(y))


def _sxx(n: int) -> float:
    """Sum of squares of n consecutive whole numbers about their mean."""
    return n * (n * n - 1) / 12


def line_of(values: Sequence[float] | Series, width: int) -> float:
    """Significance of a rising or falling trend (slope of the least-squares line), as a normal score.

    The smaller of two in size, of the steps and of means of `width`; of the steps alone where there are
    fewer than 8 such means. A perfect line has +-inf, fewer than 5 values 0.

    Example:
        >>> line_of([1.0, 2.0, 3.0, 4.0, 5.0], width=5), line_of([1.0, 2.0] * 20, width=5) < 1
        (inf, True)
    """
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 5:
        return 0.0
    means = _means(y, width)
    return min((_line_score(x) for x in (y, means) if len(x)), key=abs)


def _means(y: Series, width: int) -> Float[np.ndarray, " blocks"]:
    """Means of consecutive `width` values, the last ones included; none if they are fewer than 8."""
    blocks = len(y) // width
    return y[len(y) - blocks * width :].reshape(blocks, width).mean(1) if blocks >= 8 else y[:0]


def error_of_mean(residuals: Series, fitted: int, n: int, width: int) -> tuple[float, float]:
    """Standard error of the mean of n consecutive steps, and its degrees of freedom.

    The larger of two, by the scatter of the steps and by that of means of `width`, where there are 8.

    Args:
        residuals: what a fit of so many parameters leaves of at least as many steps.
    """
    steps, means = Scatter.of(residuals, fitted), Scatter.of(_means(residuals, width), fitted)
    errors = [(steps.of_mean(n), steps.dof)]
    if len(residuals) // width >= 8:
        errors.append((means.of_mean(max(n // width, 1)), means.dof))
    return max(errors)


def _line_score(y: Series) -> float:
    slope, residuals = _slope(y), about_line(y)
    rise = slope * math.sqrt(_sxx(len(y)))
    rounding = ROUNDING * float(np.linalg.norm(y))
    if float(np.linalg.norm(residuals)) <= rounding:
        return math.copysign(math.inf, rise) if abs(rise) > rounding else 0.0
    scatter = Scatter.of(residuals, fitted=2)
    return normal_score(rise / (scatter.deviation * math.sqrt(scatter.per_draw)), scatter.dof)


def shift_of(values: Sequence[float] | Series, width: int, gap: int | None = None) -> float:
    """Significance of a recent shift, as a normal score: median of the last `width` values against the mean before.

    The error is that of a single step about the line of those before, which a median of a few
    correlated ones may have, and that of the mean before. A shift from values that
    do not scatter is +-inf.

    Args:
        gap: values at the end that the mean before leaves out, at least `width`, which is the
            default. A slow change is seen only if what it left behind is not compared with itself.

    Example:
        >>> shift_of([1.0, 2.0] * 20 + [4.5] * 5, width=5) > 4
        True
    """
    y = np.asarray(values, dtype=np.float64)
    past = y[: len(y) - (gap or width)]
    if len(past) < width:
        return 0.0
    mean = float(past.mean())
    apart = median(y[-width:].tolist()) - mean
    scatter = Scatter.of(about_line(past), fitted=2)
    if scatter.deviation <= ROUNDING * abs(mean):
        return 0.0 if abs(apart) <= ROUNDING * abs(mean) else math.copysign(math.inf, apart)
    error = math.hypot(scatter.deviation, scatter.of_mean(len(past)))
    return normal_score(apart / error, scatter.dof)


def walk_of(values: Sequence[float] | Series, width: int, over: int) -> float:
    """The distance of two means of `width` steps, `over` steps apart, in errors of a random walk.

        (mean of the last - mean of those before) / (s sqrt(over))        s^2 = mean (x_t - x_{t-1})^2

    A stationary series with phi >= 0 moves less than the walk of the same steps, so this never claims
    too much. Too few values: 0.

    Example:
        >>> walk_of([0.0] * 20 + [1.0] * 20, width=5, over=20), walk_of([float(x) for x in range(40)], 5, 20)
        (1.396424004376894, 4.47213595499958)
    """
    y = np.asarray(values, dtype=np.float64)
    if len(y) < over + width:
        return 0.0
    steps = np.diff(y)
    size = math.sqrt(float(steps @ steps) / len(steps))
    apart = float(y[-width:].mean() - y[-width - over :][:width].mean())
    return apart / (size * math.sqrt(over)) if size > 0 else 0.0


def drift_of(values: Sequence[float] | Series) -> float:
    """The mean step over its own error, as a normal score: for a random walk, and a smooth rise.

    Fewer than 5 values: 0. Equal steps have +-inf.

    Example:
        >>> drift_of([float(x * x) for x in range(15)]) > 4, drift_of([1.0, 2.0] * 20) < 1
        (True, True)
    """
    steps = np.diff(np.asarray(values, dtype=np.float64))
    if len(steps) < 4:
        return 0.0
    mean, spread = float(steps.mean()), float(steps.std(ddof=1))
    if spread <= ROUNDING * abs(mean):
        return math.copysign(math.inf, mean) if mean else 0.0
    return normal_score(mean * math.sqrt(len(steps)) / spread, len(steps) - 1)


def moved(
    values: Sequence[float] | Series,
    width: int,
    sign: int = 1,
    *,
    t: float | int,
    walk: float | int,
    drift: float | int,
) -> bool:
    """Whether a level rose (sign 1) or fell (-1), suddenly or slowly, further than it does by itself.

    Positive values are compared on the log scale, on which large ones scatter no more than small
    ones. The last `width` are held against all before and against the older half; walks go over 4 and
    8 widths.

    Args:
        t: normal score that a shift or a line must exceed.
        walk: errors of a random walk that a distance must exceed.
        drift: normal score that the mean step must exceed.

    Example:
        >>> moved([100.0] * 40 + [121.0] * 5, width=5, t=4.0, walk=3.0, drift=2.5)
        True
        >>> moved([1.0, 2.0] * 20, width=5, t=4.0, walk=3.0, drift=2.5)
        False
    """
    y = np.asarray(values, dtype=np.float64)
    if len(y) <= width:
        return False
    y = sign * (np.log(y) if y.min() > 0 else y)
    shifts = (shift_of(y, width, gap) for gap in (width, max(width, len(y) // 2)))
    walks = (walk_of(y, width, n * width) for n in (4, 8))
    return line_of(y, width) > t or drift_of(y) > drift or any(x > t for x in shifts) or any(x > walk for x in walks)
