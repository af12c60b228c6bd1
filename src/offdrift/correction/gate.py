"""`Gate`: does a token take part? A 0/1 decision without gradient.

A gate names its statistic, the two policies it compares (`on`), the unit it is taken over and its
bounds. Bounds are inclusive on the keep side. What a gate rejects stays in the normalizer: it
contributes zero gradient, not a larger step for the rest. Gates look at the original tokens, never
at what another gate left, so the order in which they are composed cannot matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.correction.statistics import EXACT, SAMPLED, StatisticName, divergence_name, statistic
from offdrift.divergence.evidence import Divergence
from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.ratios import RatioName

GateUnit = Literal["token", "seq_sum", "seq_mean", "seq_max"]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Keep a unit iff `low <= statistic <= high`; NaN and +inf are never inside.

        token     each token by itself
        seq_sum   the sum over the sequence (for `ratio`: the product of ratios)
        seq_mean  the mean over the sequence (for `ratio`: the geometric mean)
        seq_max   the worst token: every token of the sequence must be inside

    Args:
        statistic: what is looked at, see `correction.statistics`.
        on: which two policies are compared; nothing is guessed.
        unit: over what the statistic is reduced before it meets the bounds.
        low: lower bound, inclusive; for `ratio` a ratio, else in the statistic's unit (nats; tv: 1).
        high: upper bound, inclusive.
        advantage: which tokens the gate may reject: "any", or only those of "negative" advantage.

    Example:
        >>> trm_max = Gate(statistic="kl", on="full", unit="seq_max", high=0.05)

    Reference: Li et al., arXiv:2512.23075v5, Algorithm 1 and section 4.3; unit names as in verl's
    rollout correction. Ratio bounds are bounds on the ratio (verl applies them to its inverse).
    """

    statistic: StatisticName
    on: RatioName
    unit: GateUnit
    low: float | None = None
    high: float | None = None
    advantage: Literal["any", "negative"] = "any"

    def __post_init__(self) -> None:
        if self.statistic not in (*SAMPLED, *EXACT):
            raise MethodError(f"statistic={self.statistic!r} is not one of {[*SAMPLED, *EXACT]}")
        check_choice("unit", self.unit, get_args(GateUnit))
        check_choice("on", self.on, get_args(RatioName))
        check_choice("advantage", self.advantage, ("any", "negative"))
        check_number("low", self.low)
        check_number("high", self.high)
        if self.low is None and self.high is None:
            raise MethodError(f"a gate on {self.statistic} needs low=, high= or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise MethodError(f"low={self.low} is above high={self.high}; nothing could pass")
        if self.statistic == "ratio" and any(
            x is not None and x <= 0 for x in (self.low, self.high)
        ):
            raise MethodError(f"ratio bounds must be positive, got {self.low} and {self.high}")
        if self.exact:
            divergence_name(self.statistic, self.on)

    @property
    def exact(self) -> bool:
        """Whether this gate reads divergences of whole distributions."""
        return self.statistic in EXACT

    def keep(
        self,
        logprobs: LogProbs,
        divergences: Mapping[str, Divergence] | None = None,
        advantages: Float[Tensor, " n"] | None = None,
    ) -> Bool[Tensor, " n"]:
        """Which tokens take part. Gradient: none.

        Raises: `EvidenceError` if the batch lacks what the gate looks at; `MethodError` if the gate
        is one-sided in the advantage and no advantages were given.
        """
        with torch.no_grad():
            x = statistic(self.statistic, logprobs, divergences, on=self.on)
            inside = self._inside(x, logprobs)
            if self.advantage == "any":
                return inside
            if advantages is None:
                raise MethodError('a gate with advantage="negative" needs advantages')
            return inside | (advantages >= 0)

    def _inside(self, x: Float[Tensor, " n"], logprobs: LogProbs) -> Bool[Tensor, " n"]:
        segments = logprobs.segments
        low, high = self._bound(self.low), self._bound(self.high)
        if self.unit == "token":
            smallest = largest = x
        elif self.unit == "seq_max":
            smallest, largest = segments.min(x, empty=high), segments.max(x, empty=low)
        else:
            reduce = segments.sum if self.unit == "seq_sum" else segments.mean
            smallest = largest = reduce(x)
        kept = torch.ones_like(smallest, dtype=torch.bool)
        if self.low is not None:
            kept &= smallest >= low
        if self.high is not None:
            kept &= largest <= high
        return kept if self.unit == "token" else segments.spread(kept)

    def _bound(self, value: float | None) -> float:
        """The bound on the scale the statistic has: log for ratios."""
        if value is None:
            return 0.0
        return math.log(value) if self.statistic == "ratio" else value
