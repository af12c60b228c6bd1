"""Scales of a step's learning rate: by the effective sample size, and after a surge of length.

Pure functions of what a step saw and of a small state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import BatchInfo, StepSums
from offdrift.correction.weight import WHOLE_SEQUENCE, Weight
from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import log_sums


@dataclass(frozen=True, kw_only=True)
class EssScale:
    """Learning-rate scale from the effective sample size of a step's sequence weights.

        ess = (sum_i w_i)^2 / (B sum_i w_i^2)        in [1/B, 1]
        scale = min(1, ess / reference)^power

    Args:
        power: 0.5 is the official code, 1 is linear.
        reference: ess from which the scale is 1, in (0, 1]; 0.55 is reported for several turns.
        weight: the sequence weights, with the limits that the loss uses. Their scale cancels. `override` keeps them
            those of the method's own weight. A sequence that a gate rejects has weight 0 and is counted.
        truncated: whether the limits apply. Where every weight is at its cap, truncated ones are all alike and the
            scale is 1, whatever the drift; weights as they are bring it to sqrt(1 / B).

    Example:
        >>> log_w, log_w2 = torch.tensor([6.0, 17.5]).log()
        >>> seen = {"log_weight": log_w, "log_square": log_w2, "count": torch.tensor(4.0)}
        >>> EssScale().scale(seen)
        tensor(0.7171)

    Reference: VCPO, arXiv:2602.17616, and its official code.
    """

    power: float = 0.5
    reference: float = 1.0
    weight: Weight = field(default_factory=lambda: Weight(on="full", unit="sequence", cap=2.0))
    truncated: bool = True

    def __post_init__(self) -> None:
        for name in ("power", "reference"):
            check_number(name, getattr(self, name))
        if self.power <= 0 or not 0 < self.reference <= 1:
            raise MethodError(f"power={self.power} <= 0, or reference={self.reference} not in (0, 1]")
        if self.weight.unit not in WHOLE_SEQUENCE or self.weight.normalize:
            raise MethodError(
                f"weight.unit={self.weight.unit!r}, weight.normalize={self.weight.normalize}: the "
                f"ess counts sequences; choose a unit of {WHOLE_SEQUENCE} and do not normalize"
            )

    @property
    def formula(self) -> str:
        """The scale, in one line."""
        return f"lr x min(1, ess / {self.reference:g})^{self.power:g}, ess of {self._weight.formula}"

    @property
    def _weight(self) -> Weight:
        return self.weight if self.truncated else replace(self.weight, cap=None, floor=None)

    def observe(
        self,
        logprobs: LogProbs,
        advantages: Float[Tensor, " n"] | None,
        batch_info: BatchInfo,
        keep: Bool[Tensor, " n"] | None = None,
    ) -> StepSums:
        """Logs of the sums over sequences of w and w^2, and their number; rejected tokens (not `keep`) have weight 0.

        Gradient: none.
        """
        segments = logprobs.segments
        filled = segments.lengths > 0
        log_w = self._weight.log_weight(logprobs, advantages, batch_info)
        log_w = segments.log_mean_exp(log_w if keep is None else log_w.where(keep, -torch.inf))
        log_weight, log_square = log_sums(log_w.where(filled, -torch.inf))
        count = filled.sum().double()
        return {"log_weight": log_weight, "log_square": log_square, "count": count}

    def scale(self, seen: StepSums) -> Float[Tensor, ""]:
        """The scale for what all pieces of a step saw: 1 for one sequence, 0 if no weight is left."""
        square = seen["log_square"]
        ess = (2 * seen["log_weight"] - square - seen["count"].log()).exp()
        return (ess.where(square > -torch.inf, 0.0) / self.reference).clamp(max=1) ** self.power


class SurgeState(NamedTuple):
    """State of `LengthSurge`. Plain numbers, for the checkpoint."""

    step: int = 0
    """Steps seen; the first is 1."""
    scale: float = 1.0
    """The scale for the update of the last step seen (its responses come first)."""
    surge: int | None = None
    """Step of the last surge that counted; None before the first."""
    fired: bool = False
    """Whether the last step was such a surge."""
    lengths: tuple[float, ...] = ()
    """Mean lengths that the detector still needs, tokens."""


@dataclass(frozen=True, kw_only=True)
class LengthSurge:
    """Learning-rate scale that falls after responses suddenly became longer.

        period   surge s:  mean length > threshold * mean over the first `window` steps; once
                 scale(t) = max(floor, factor^k),  k = ceil((t - s) / P) - 1,  P = int(period * s)
        survey   surge s:  mean length(s) / mean length(s - window) > threshold
                 scale <- max(floor, factor * scale), and nothing for `cooldown` steps

    In survey mode `fired` also says: switch to the uncorrected objective behind a gate on geometric
    ratios. Warm-up and base learning rate are the optimizer's own.

    Unverified: best reading. The rule of `period` is the paper's; numbers and detector are from
    secondary sources, and the cooldown is this library's.

    Args:
        threshold: ratio of lengths; None for 3 (period) or 1.2 (survey).
        window: steps; None for 50 (period) or 100 (survey).
        period: P as a multiple of the step of the surge.
        factor: of the learning rate at each fall, (0, 1).
        floor: smallest scale.
        cooldown: steps after a surge without another.

    Example:
        >>> s = LengthSurge(mode="survey", window=2)
        >>> state = s.after(s.after(s.after(SurgeState(), 100.0), 110.0), 121.0)
        >>> state.fired, state.scale
        (True, 0.5)

    Reference: arXiv:2602.01826.
    """

    mode: Literal["period", "survey"] = "period"
    threshold: float | None = None
    window: int | None = None
    period: float = 1.8
    factor: float = 0.5
    floor: float = 0.1
    cooldown: int = 100

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("period", "survey"))
        for name in ("threshold", "window", "period", "factor", "floor", "cooldown"):
            check_number(name, getattr(self, name))
        for name in ("threshold", "window", "period"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise MethodError(f"{name}={value} must be positive")
        if not (0 < self.factor < 1 and 0 <= self.floor <= 1 and self.cooldown >= 0):
            raise MethodError(
                f"factor={self.factor} must lie in (0, 1), floor={self.floor} in [0, 1], and "
                f"cooldown={self.cooldown} must not be negative"
            )

    def after(self, state: SurgeState, mean_length: float | int) -> SurgeState:
        """The state after one more step, whose responses had this mean length in tokens."""
        step, before, periodic = state.step + 1, state.lengths, self.mode == "period"
        threshold, n = {"period": (3.0, 50), "survey": (1.2, 100)}[self.mode]
        threshold, n = self.threshold or threshold, self.window or n
        base = (sum(before) / n if periodic else before[0]) if len(before) == n else float("inf")
        ready = state.surge is None or (not periodic and step - state.surge > self.cooldown)
        fired = ready and mean_length > threshold * base
        surge = step if fired else state.surge
        if periodic:
            scale = 1.0 if surge is None else self.periodic(step, surge)
            return SurgeState(step, scale, surge, fired, (*before, float(mean_length))[:n])
        scale = max(self.floor, self.factor * state.scale) if fired else state.scale
        return SurgeState(step, scale, surge, fired, (*before, float(mean_length))[-n:])

    def periodic(self, step: int, surge: int) -> float:
        """The scale of `period` mode at a step, given the step of the surge.

        Example:
            >>> [LengthSurge().periodic(step, 110) for step in (110, 308, 309, 507, 903)]
            [1.0, 1.0, 0.5, 0.25, 0.1]
        """
        period = max(1, int(self.period * surge))
        return max(self.floor, self.factor ** max(0, (step - surge - 1) // period))
