"""BAPO: a clip whose bounds open until answers that gain carry their share of the loss.

Off policy, tokens of negative advantage dominate the step: they are more, and their clip stops them later. The bounds
of every step are searched on the whole step, over all pieces and ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import MethodError, check_choice, check_number, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import PerToken, TokenLoss, capped, larger
from offdrift.ratios import RatioName, log_ratio, stopped_log_ratio


class RatioBounds(NamedTuple):
    """Lower and upper limit of the ratio in one step."""

    low: Float[Tensor, ""]
    high: Float[Tensor, ""]


@dataclass(frozen=True, kw_only=True)
class BalancedClipped:
    """PPO's clip on [low, high], the bounds raised step by step until positives carry `share` of the surrogate.

        P(high) = sum over A >= 0 of A min(r, high),   N(low) = sum over A < 0 of |A| max(r, low)
        low rises from `low` to `low_max` until P >= share (P + N); then high from `high` to `high_max`
        L = max(-A r, -A clip(r, low, high));   where A < 0:  L <- min(L, -A dual_clip)

    Bounds that still miss the share at their maxima stay there. The search starts anew in every step. A higher `low`
    stops more negatives and yet raises N, which counts stopped tokens at the bound: a step that misses the share at
    first goes through to `low_max`, in the official code as here.

    Args:
        low, low_max: first and last lower bound, ratios.
        high, high_max: first and last upper bound, ratios.
        increment: distance between two bounds that are tried.
        share: of positives in the surrogate, in (0, 1).
        dual_clip: ratio beyond which a negative advantage stops pushing; None for plain PPO.

    Gradient: to `logp`, -A r where unclipped; the bounds carry none.

    Example:
        >>> BalancedClipped().candidates(0.6, 0.9)
        [0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9]

    Reference: BAPO, arXiv:2510.18927, and its official code, `recipe/bapo` (dual clip, order of the search).
    """

    on: RatioName = "staleness"
    low: float = 0.6
    low_max: float = 0.9
    high: float = 1.2
    high_max: float = 3.0
    increment: float = 0.05
    share: float = 0.5
    dual_clip: float | None = 3.0
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_positive(self, "high", "increment", "share")
        for name in ("low", "low_max", "high_max", "dual_clip"):
            check_number(name, getattr(self, name))
        if not (0 <= self.low <= self.low_max <= 1 <= self.high <= self.high_max):
            raise MethodError(
                f"low={self.low}, low_max={self.low_max}, high={self.high} and high_max={self.high_max} are ratios: "
                "low <= low_max <= 1 <= high <= high_max"
            )
        if self.share >= 1:
            raise MethodError(f"share={self.share} must be below 1: negatives would have to vanish")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise MethodError(f"dual_clip={self.dual_clip} must exceed 1")

    @property
    def formula(self) -> str:
        dual = "" if self.dual_clip is None else f", at most -A {self.dual_clip:g} where A < 0"
        return (
            f"L = max(-A u, -A clip(u, low, high)){dual}, u = ratio({self.on}), low in "
            f"[{self.low:g}, {self.low_max:g}] and high in [{self.high:g}, {self.high_max:g}] until positives carry "
            f"{self.share:g} of it"
        )

    def candidates(self, first: float, last: float) -> list[float]:
        """Bounds that are tried, in their order; the last one is reached exactly."""
        count = math.ceil((last - first) / self.increment - 1e-9)
        return [round(min(first + k * self.increment, last), 12) for k in range(count + 1)]

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        u = ratio(log_ratio(logprobs, on=self.on))
        low, high = (b.to(u) for b in self.bounds(batch_info.seen_by(self, logprobs, advantages)))
        token_losses = larger(-advantages * u, -advantages * u.clamp(low, high))
        return (
            token_losses if self.dual_clip is None else capped(token_losses, advantages, -advantages * self.dual_clip)
        )

    def bounds(self, seen: StepSums) -> RatioBounds:
        """The bounds of a step from what was observed of it. Gradient: none."""
        lows, highs = self.candidates(self.low, self.low_max), self.candidates(self.high, self.high_max)
        negative = torch.stack([seen[f"negative_{i}"] for i in range(len(lows))])
        positive = torch.stack([seen[f"positive_{i}"] for i in range(len(highs))])
        odds = self.share / (1 - self.share)
        low = _first(positive[0] >= odds * negative)
        high = _first(positive >= odds * negative.gather(0, low))
        return RatioBounds(negative.new_tensor(lows).gather(0, low)[0], positive.new_tensor(highs).gather(0, high)[0])

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """N at every lower bound and P at every upper one, float64. Gradient: none."""
        if advantages is None:
            raise MethodError("which tokens gain depends on the advantages; give them")
        with torch.no_grad():
            r = ratio(stopped_log_ratio(logprobs, on=self.on)).double()
            up, down = advantages.double().clamp(min=0), (-advantages.double()).clamp(min=0)
            lows, highs = self.candidates(self.low, self.low_max), self.candidates(self.high, self.high_max)
            negative = {f"negative_{i}": (down * r.clamp(min=b)).sum() for i, b in enumerate(lows)}
            return negative | {f"positive_{i}": (up * r.clamp(max=b)).sum() for i, b in enumerate(highs)}


def _first(holds: Tensor) -> Tensor:
    """Index of the first True, of the last entry if there is none, as one number to gather by: no host waits for it."""
    at = torch.arange(len(holds), device=holds.device)
    return at.where(holds, len(holds) - 1).amin(0, keepdim=True)
