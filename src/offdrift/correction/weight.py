"""`Weight`: how much does a token count? A number >= 0 without gradient.

An importance weight corrects for having sampled from another policy; its limits trade variance for
bias. A weight never receives a gradient: where the ratio itself should be differentiated, that is
an objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.errors import MethodError, check_choice, check_number
from offdrift.facts import NO_FACTS, Facts, Seen
from offdrift.logprobs import LogProbs
from offdrift.numerics import blocks, clamped
from offdrift.ratios import RatioName, Unit, per_unit, stopped_log_ratio

Sign = Literal["any", "negative", "positive"]
WHOLE_SEQUENCE = ("sequence", "geometric", "worst")


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
        saturation=g:       W <- W / (W + g)
        normalize=True:     W <- W / m, m the mean of W over the whole step

    Args:
        on: which ratio; `mismatch` in decoupled form, `full` in bypass form.
        unit: what the ratio is taken over, see `ratios.per_unit`.
        cap: upper limit, a ratio; None for none.
        floor: lower limit, a ratio; None for none.
        outside: what happens beyond the limits.
        advantage: which tokens are weighted, by the sign of their advantage; the others have
            weight 1.
        growth: the limits of the t-th token (from 1) are `floor^(t^growth)` and `cap^(t^growth)`;
            0.5 for prefix products, whose log spreads like the square root of the length.
        normalize: mean over tokens; for whole-sequence units, mean over sequences.
        saturation: see above; None for none.

    Example:
        >>> token_tis = Weight(on="mismatch", unit="token", cap=2.0)

    Reference: truncated importance sampling: Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training", 2025; sequence form and mask: Liu et al., "When speed kills
    stability", 2025; Ionides, 2008; growth: CTPO, arXiv:2605.07331; saturation: LUFFY,
    arXiv:2504.14945.
    """

    on: RatioName
    unit: Unit = "token"
    cap: float | None = None
    floor: float | None = None
    outside: Literal["truncate", "mask"] = "truncate"
    advantage: Sign = "any"
    growth: float = 0.0
    normalize: bool = False
    saturation: float | None = None

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_choice("unit", self.unit, get_args(Unit))
        check_choice("outside", self.outside, ("truncate", "mask"))
        check_choice("advantage", self.advantage, get_args(Sign))
        for name in ("cap", "floor", "growth", "saturation"):
            check_number(name, getattr(self, name))
        if self.cap is not None and self.cap <= 0:
            raise MethodError(f"cap={self.cap} must be positive")
        if self.floor is not None and not 0 <= self.floor <= (self.cap or float("inf")):
            raise MethodError(f"floor={self.floor} must lie in [0, cap={self.cap}]")
        if self.saturation is not None and self.saturation <= 0:
            raise MethodError(f"saturation={self.saturation} must be positive")
        if self.growth and ((self.cap or 1) < 1 or (self.floor or 1) > 1 or self.floor == 0):
            raise MethodError(
                f"growth={self.growth} widens limits around 1: floor={self.floor} must lie in "
                f"(0, 1] and cap={self.cap} must be at least 1"
            )

    @property
    def observes(self) -> bool:
        """Whether it looks at the whole step."""
        return self.normalize

    @property
    def formula(self) -> str:
        """The weight, in one line."""
        limits = [
            f"{self.outside} {side} {value:g}{'^t^' + format(self.growth, 'g') if self.growth else ''}"
            for side, value in (("below", self.floor), ("above", self.cap))
            if value is not None
        ]
        if self.saturation is not None:
            limits.append(f"W / (W + {self.saturation:g})")
        if self.normalize:
            limits.append("mean 1 over the step")
        if self.advantage != "any":
            limits.append(f"where advantage is {self.advantage}, else 1")
        return ", ".join([f"weight {self.unit} ratio({self.on})", *limits])

    def __call__(
        self,
        logprobs: LogProbs,
        advantages: Float[Tensor, " n"] | None = None,
        facts: Facts = NO_FACTS,
    ) -> Weighted:
        """Weights of the batch and which tokens the limits touched. Gradient: none.

        Raises: `MethodError` if the weight depends on the advantage and none was given.
        """
        with torch.no_grad():
            weight, limited = self._limited(logprobs)
            if self.normalize:
                seen = facts.seen_by(self, logprobs, advantages)
                mean = seen["weight"] / seen["count"].clamp(min=1)
                weight = weight / mean.to(weight.dtype).where(mean > 1e-8, 1.0)
            if self.advantage == "any":
                return Weighted(weight, limited)
            if advantages is None:
                raise MethodError(f'a weight with advantage="{self.advantage}" needs advantages')
            applies = advantages > 0 if self.advantage == "positive" else advantages < 0
            return Weighted(weight.where(applies, 1.0), limited & applies)

    def observe(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, facts: Facts
    ) -> Seen:
        """Sum and number of weights, for their mean over the step. Gradient: none."""
        with torch.no_grad():
            weight, _ = self._limited(logprobs)
            segments = logprobs.segments
            if self.unit in WHOLE_SEQUENCE:
                weight, count = segments.mean(weight), (segments.lengths > 0).sum()
            else:
                count = segments.cu_seqlens[-1]
            return {"weight": weight.double().sum(), "count": count.double()}

    def _limited(self, logprobs: LogProbs) -> tuple[Tensor, Tensor]:
        log_ratio = stopped_log_ratio(logprobs, on=self.on)
        segments = logprobs.segments
        unit = per_unit(log_ratio, segments, unit=self.unit)
        if self.growth:
            steps = (segments.position + 1).to(unit.dtype) ** self.growth
            parts = [self._limit(clamped(x), s) for x, s in blocks(unit, steps)]
        else:
            parts = [self._limit(clamped(x), 1.0) for (x,) in blocks(unit)]
        return torch.cat([w for w, _ in parts]), torch.cat([x for _, x in parts])

    def _limit(
        self, log_ratio: Float[Tensor, " k"], steps: Float[Tensor, " k"] | float
    ) -> tuple[Tensor, Tensor]:
        """Weights inside the limits, and which ones the limits changed.

        Compared in log space, so that a ratio on its limit is inside.
        """
        limited = torch.zeros_like(log_ratio, dtype=torch.bool)
        weight = log_ratio.exp()
        for limit, beyond in ((self.cap, torch.gt), (self.floor, torch.lt)):
            if not limit:  # None, or a floor of 0
                continue
            outside = beyond(log_ratio, math.log(limit) * steps)
            limited |= outside
            edge = 0.0 if self.outside == "mask" else limit**steps
            weight = torch.where(outside, edge, weight)
        if self.saturation is not None:
            weight = weight / (weight + self.saturation)
        return weight, limited
