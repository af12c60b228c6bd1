"""`Weight`: how much does a token count? A number >= 0 without gradient.

An importance weight corrects for having sampled from another policy; its limits trade variance for
bias. A weight never receives a gradient: where the ratio itself should be differentiated, that is
an objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import blocks, ratio
from offdrift.ratios import RatioName, per_unit, stopped_log_ratio

WeightUnit = Literal["token", "sequence", "geometric"]


class Weighted(NamedTuple):
    """What a weight decided: the weights, and which tokens its limits changed."""

    weight: Float[Tensor, " n"]
    limited: Bool[Tensor, " n"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Importance weight of each token's unit, limited to `[floor, cap]`.

        W = exp(l)   with l the log-ratio of the unit (summed first, then clamped to +-20)
        outside="truncate": W <- min(max(W, floor), cap)
        outside="mask":     W <- 0 where W is outside

    Args:
        on: which ratio; `mismatch` in decoupled form, `full` in bypass form.
        unit: token, sequence (product) or geometric (mean in log space).
        cap: upper limit, a ratio; None for none.
        floor: lower limit, a ratio; None for none.
        outside: what happens beyond the limits.

    Example:
        >>> token_tis = Weight(on="mismatch", unit="token", cap=2.0)

    Reference: truncated importance sampling: Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training", 2025; sequence form and mask: Liu et al., "When speed kills
    stability", 2025; Ionides, 2008.
    """

    on: RatioName
    unit: WeightUnit = "token"
    cap: float | None = None
    floor: float | None = None
    outside: Literal["truncate", "mask"] = "truncate"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_choice("unit", self.unit, get_args(WeightUnit))
        check_choice("outside", self.outside, ("truncate", "mask"))
        check_number("cap", self.cap)
        check_number("floor", self.floor)
        if self.cap is not None and self.cap <= 0:
            raise MethodError(f"cap={self.cap} must be positive")
        if self.floor is not None and not 0 <= self.floor <= (self.cap or float("inf")):
            raise MethodError(f"floor={self.floor} must lie in [0, cap={self.cap}]")

    def __call__(self, logprobs: LogProbs) -> Weighted:
        """Weights of the batch and which tokens the limits touched. Gradient: none."""
        with torch.no_grad():
            unit = per_unit(
                stopped_log_ratio(logprobs, on=self.on), logprobs.segments, unit=self.unit
            )
            parts = [self._limit(ratio(block)) for (block,) in blocks(unit)]
            return Weighted(*map(torch.cat, zip(*parts, strict=True)))

    def _limit(self, raw: Float[Tensor, " k"]) -> tuple[Tensor, Tensor]:
        """Weights inside the limits, and which ones the limits changed."""
        limited = torch.zeros_like(raw, dtype=torch.bool)
        if self.cap is not None:
            limited |= raw > self.cap
        if self.floor is not None:
            limited |= raw < self.floor
        if self.outside == "mask":
            return raw.where(~limited, 0.0), limited
        return raw.clamp(self.floor or 0.0, self.cap), limited
