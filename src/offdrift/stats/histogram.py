"""`Histogram`: mergeable counts on fixed edges, from which quantiles are read.

A grid is symmetric around 0, with four bins to each factor of two, so that a bin is found from the bits of a float32
without a search, and one bin around 0 for everything smaller. A bin also holds the sum and the sum of squares of its
values, and is read as a uniform distribution of that mean and width: values on one point give that very point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.numerics import LOG_RATIO_LIMIT, asked, blocks

PER_OCTAVE = 4
QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Grid:
    """Bins between +-2^low and +-2^high; what lies beyond is counted in the outermost bin."""

    low: int
    high: int

    @property
    def side(self) -> int:
        """Bins on either side of the one around 0."""
        return PER_OCTAVE * (self.high - self.low)

    @property
    def bins(self) -> int:
        return 2 * self.side + 1

    @cached_property
    def edges(self) -> Float[np.ndarray, " edges"]:
        """One more than there are bins, ascending."""
        steps = np.arange(self.side + 1)
        positive = 2.0 ** (self.low + steps // PER_OCTAVE) * (1 + steps % PER_OCTAVE / PER_OCTAVE)
        return np.concatenate([-positive[::-1], positive])

    def index(self, x: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The bin of each value, from exponent and leading mantissa bits; edges belong outwards.

        Example:
            >>> Grid(-1, 1).index(torch.tensor([-9.0, -0.1, 0.0, 0.5, 1.0]))
            tensor([ 0,  8,  8,  9, 13], dtype=torch.int32)
        """
        bits = x.float().view(torch.int32)
        first = (self.low + 127) * PER_OCTAVE
        outwards = (bits & 0x7FFFFFFF).bitwise_right_shift_(21).sub_(first - 1).clamp_(0, self.side)
        sign = bits >> 31  # 0 or -1
        return outwards.bitwise_xor_(sign).sub_(sign).add_(self.side)


LOG_RATIO = Grid(-20, 7)
"""From 1e-6 to 128 nats, 13 bins a decade."""
REWARD = Grid(-10, 20)
LENGTH = Grid(0, 24)


def _counted(x: Float[Tensor, " n"], grid: Grid) -> tuple[Int[Tensor, " bins"], Float[Tensor, "2 bins"]]:
    """Counts, and sums and sums of squares, by bin."""
    if asked():
        from offdrift.compiled.passes import histogram

        if (found := histogram(x, low=grid.low, side=grid.side)) is not None:
            return found
    counts = torch.zeros(grid.bins, dtype=torch.int64)
    moments = torch.zeros(2, grid.bins, dtype=torch.float64)
    for (block,) in blocks(x) if len(x) else ():
        index, value = grid.index(block), block.double()
        counts += torch.bincount(index, minlength=grid.bins)
        place, of_block = index.long(), torch.zeros_like(moments)  # a third less than weighted counts take
        of_block[0].scatter_add_(0, place, value)
        of_block[1].scatter_add_(0, place, value * value)
        moments += of_block
    return counts, moments


@dataclass(frozen=True)
class Histogram:
    """Counts, sums and sums of squares by bin, and the exact extremes."""

    grid: Grid
    counts: Int[np.ndarray, " bins"]
    moments: Float[np.ndarray, "2 bins"]
    low: float = math.inf
    high: float = -math.inf

    @staticmethod
    def of(x: Float[Tensor, " n"], grid: Grid) -> Histogram:
        """Count finite values.

        Example:
            >>> h = Histogram.of(torch.tensor([0.0, 1.0, 1.0, 1.0]), REWARD)
            >>> h.quantile(0.5), h.quantile(0.0)
            (1.0, 0.0)
        """
        counts, moments = _counted(x, grid)
        low, high = (float(e) for e in x.aminmax()) if len(x) else (math.inf, -math.inf)
        return Histogram(grid, counts.numpy(), moments.numpy(), low, high)

    def merge(self, other: Histogram) -> Histogram:
        """The counts of both."""
        return Histogram(
            self.grid,
            self.counts + other.counts,
            self.moments + other.moments,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def uniform(self) -> tuple[Float[np.ndarray, " bins"], Float[np.ndarray, " bins"]]:
        """Mean and standard deviation of each bin's values; NaN where there is none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean, square = self.moments / self.counts
            return mean, np.sqrt(np.maximum(square - mean * mean, 0.0))

    def quantile(self, q: float) -> float:
        """The value that the share `q` lies below, from within the bin of the exact one; NaN if empty.

        The exact one is the order statistic at rank floor(q (n - 1)). A bin is 25% wide or less.
        """
        if not self.n:
            return math.nan
        rank = math.floor(q * (self.n - 1))
        upto = self.counts.cumsum()
        i = int(np.searchsorted(upto, rank, side="right"))
        inside = (rank - (upto[i] - self.counts[i]) + 0.5) / self.counts[i]
        mean, std = self.uniform
        value = mean[i] + math.sqrt(3.0) * std[i] * (2 * inside - 1)
        low = max(self.low, self.grid.edges[i]) if i else self.low
        high = min(self.high, self.grid.edges[i + 1]) if i < len(self.counts) - 1 else self.high
        return float(min(max(value, low), high))

    def quantiles(self) -> dict[str, float]:
        """The quantiles that a band is drawn with."""
        return {name: self.quantile(q) for name, q in QUANTILES.items()}

    def k3_top(self, share: float = 0.01) -> tuple[float, float]:
        """The sum of k3 = e^l - 1 - l over the given share of values with the largest, and over all.

        At least one value. A bin's mean k3 is that of its uniform distribution; the last bin that
        belongs to the top in part counts in that proportion.
        """
        mean, std = (x[self.counts > 0] for x in self.uniform)
        counts = self.counts[self.counts > 0]
        center = mean.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        half = np.where(center == mean, math.sqrt(3.0) * std, 0.0)  # at the limit all are one value
        # E[e^l] = e^center sinh(half) / half; where half is small the rest of the series is nothing.
        spread = np.where(half < 0.01, half**2 / 6, np.sinh(half) / half.clip(0.01) - 1)
        k3 = np.expm1(center) - center + np.exp(center) * spread
        order = np.argsort(-k3, kind="stable")
        counts, k3 = counts[order].astype(np.float64), k3[order]
        top = max(1.0, share * self.n)
        taken = np.clip(top - (counts.cumsum() - counts), 0.0, counts)
        return float(taken @ k3), float(counts @ k3)

    def as_dict(self) -> dict[str, Sequence[float] | Sequence[int]]:
        """Edges and counts, as plain numbers."""
        return {"edges": self.grid.edges.tolist(), "counts": self.counts.tolist()}
