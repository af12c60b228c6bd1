"""Formulas of metrics from sums: means, deviations, effective sample sizes, quantiles of counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.numerics import LOG_RATIO_LIMIT

Numbers = dict[str, float]
"""The host copy of `DriftStats`: sums and maxima by name."""

Formula = Callable[[Numbers], float]

NO_VARIANCE = 1e-12
"""A variance below this is rounding of the sums it was computed from."""


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    unit: str
    formula: str
    larger_is: Literal["worse", "better", "neither"]
    value: Formula


def mean(name: str, count: str = "n") -> Formula:
    """sum / count; where the sum brought a count of its own (`x/n` beside `x`), that one."""
    return lambda s: s[name] / (s[f"{name}/n"] if f"{name}/n" in s else s[count])


def std(total: str, square: str, count: str, *, ddof: int) -> Formula:
    """Standard deviation from a sum and a sum of squares."""

    def value(s: Numbers) -> float:
        n = s[count]
        center = s[total] / n
        return math.sqrt(max(0.0, s[square] / n - center * center) * n / (n - ddof))

    return value


def ess(total: str, square: str, count: str) -> Formula:
    """(sum w)^2 / (n sum w^2) from the logs of both sums; 0 where every weight is 0."""

    def value(s: Numbers) -> float:
        n = math.log(s[count])
        return math.exp(2 * s[total] - s[square] - n) if s[square] > -math.inf else 0.0

    return value


def chi2(square: str, count: str) -> Formula:
    """E[w^2] - 1 from the log of sum w^2; e^40 - 1 stands for everything larger."""
    return lambda s: math.expm1(min(s[square] - math.log(s[count]), 2 * LOG_RATIO_LIMIT))


def largest_chi2(total: str, square: str, count: str) -> Formula:
    """The largest of three estimates of chi^2 from the logs of sum w and sum w^2.

        E[w^2] - 1,   E[(w - 1)^2],   E[w^2] / E[w]^2 - 1

    They agree where E[w] = 1. Where the sample missed the sequences that carry E[w], the first comes
    out at -1, as if there were no drift; the second is 1 and the third what the sampled ones say of
    each other. It is never negative.
    """

    def value(s: Numbers) -> float:
        n, most = math.log(s[count]), 2 * LOG_RATIO_LIMIT
        raw = math.expm1(min(s[square] - n, most))
        centered = raw - 2 * math.expm1(min(s[total] - n, LOG_RATIO_LIMIT))
        relative = math.expm1(min(s[square] - 2 * s[total] + n, most))
        return max(0.0, raw, centered, relative)

    return value


def correlation(n: float, x: float, xx: float, y: float, yy: float, xy: float) -> float:
    """Pearson correlation from sums over n pairs; NaN where one of the two does not vary."""
    var_x, var_y = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2
    if n < 2 or min(var_x, var_y) <= NO_VARIANCE:
        return math.nan
    cov = xy / n - (x / n) * (y / n)
    return max(-1.0, min(1.0, cov / math.sqrt(var_x * var_y)))


MARGIN_LOW, MARGIN_BINS = -16, 24
"""Margins of routers are counted in bins of a factor of two, the first one up to 2^-15, the last one from 2^7 on."""


def margin_counts(margins: Float[Tensor, " m"]) -> Int[Tensor, " bins"]:
    """Margins per bin; what is not above 0 is in the first."""
    return octave_counts(margins, low=MARGIN_LOW, bins=MARGIN_BINS)


def margin_quantile(share: float) -> Formula:
    """The quantile of margins from their counts by bin."""
    return octave_quantile("router/margin_bin", share, low=MARGIN_LOW, bins=MARGIN_BINS)


def octave_counts(x: Float[Tensor, " m"], *, low: int, bins: int) -> Int[Tensor, " bins"]:
    """Count the numbers in each bin of a factor of two, from 2^low on; smaller and larger ones in the end bins."""
    octave = x.float().clamp(min=2.0**low, max=2.0 ** (low + bins - 1)).log2().floor().long() - low
    return torch.zeros(bins, dtype=torch.int64, device=x.device).index_add(0, octave, torch.ones_like(octave))


def octave_quantile(prefix: str, share: float, *, low: int, bins: int, zero: bool = False) -> Formula:
    """The quantile of numbers from their counts by bin, with a bin's counts spread evenly over its octave.

    Args:
        prefix: of the sums, `PREFIX_0` and so on.
        zero: whether what lies in the first bin counts as 0.
    """

    def value(s: Numbers) -> float:
        counts = [s[f"{prefix}_{i}"] for i in range(bins)]
        left = share * sum(counts)
        for i, count in enumerate(counts):
            if count and left <= count:
                return 0.0 if zero and i == 0 else 2.0 ** (low + i + (left / count if i < bins - 1 else 0))
            left -= count
        return math.nan

    return value
