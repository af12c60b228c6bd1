"""LN-TRM: reject by the mean ratio error, weighted by how much each position can still matter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_FACTS, Facts
from offdrift.correction.statistics import ratio_error
from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.ratios import RatioName, stopped_log_ratio
from offdrift.segments import Segments


@dataclass(frozen=True, kw_only=True)
class LengthNeutralGate:
    """Keep a sequence iff S <= high, with S a weighted mean of |w_t - 1|:

        omega_t = min(1, (T - t) eps, sqrt((T - t) delta / 2))
        S = sum_t omega_t |w_t - 1| / Z(T),   Z(T) = sum_t omega_t

    The last token has weight 0: combine it with a gate on the worst token. A sequence of one token
    is kept (Z = 0: its surrogate is exact). Positions count trainable tokens.

    Args:
        high: largest S, 1. No value is published; 0.05 is this library's.
        eps: assumed largest TV of a token.
        delta: assumed largest KL of a token, nats.

    Example:
        >>> LengthNeutralGate(high=0.2, eps=0.05, delta=0.01).formula
        'keep if length-neutral ratio_error(full) <= 0.2'

    Reference: Li et al., arXiv:2512.23075v5, Appendix F.2, eqs. 98-99.
    """

    on: RatioName = "full"
    high: float = 0.05
    eps: float = 5e-3
    delta: float = 1e-4

    exact = False

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        for name in ("high", "eps", "delta"):
            check_number(name, getattr(self, name))
        if not (0 < self.eps <= 1 and self.delta > 0 and self.high >= 0):
            raise MethodError(
                f"eps={self.eps} must lie in (0, 1], delta={self.delta} above 0 and "
                f"high={self.high} not below 0"
            )

    @property
    def formula(self) -> str:
        """What is kept, in one line."""
        return f"keep if length-neutral ratio_error({self.on}) <= {self.high:g}"

    def score(self, logprobs: LogProbs) -> Float[Tensor, " b"]:
        """S of every sequence; 0 where Z is 0. Gradient: none."""
        segments = logprobs.segments
        error = ratio_error(stopped_log_ratio(logprobs, on=self.on))
        omega = self.position_weights(segments).to(error.dtype)
        total = segments.sum(omega)
        return (segments.sum(omega * error) / total.clamp(min=1e-300)).where(total > 0, 0.0)

    def position_weights(self, segments: Segments) -> Float[Tensor, " n"]:
        """omega of every token, float64."""
        left = (segments.spread(segments.lengths) - 1 - segments.position).double()
        return torch.minimum(left * self.eps, left.sqrt() * math.sqrt(self.delta / 2)).clamp(max=1)

    def keep(
        self,
        logprobs: LogProbs,
        advantages: Float[Tensor, " n"] | None = None,
        facts: Facts = NO_FACTS,
    ) -> Bool[Tensor, " n"]:
        """Which tokens take part. Gradient: none."""
        with torch.no_grad():
            return logprobs.segments.spread(self.score(logprobs) <= self.high)
