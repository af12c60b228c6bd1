"""Schedules over steps: scales of learning rates and losses, the projection of a gradient, a mixture of policies.

Pure functions of what a step saw and of a small state. A scale of a step multiplies its learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import BatchInfo, StepSums
from offdrift.correction.weight import WHOLE_SEQUENCE, Weight
from offdrift.errors import EngineError, MethodError, ShapeError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import at_least_float32, log_sums


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


class Projected(NamedTuple):
    """A gradient without its excess of agreement with the last one, and how far they agreed."""

    grad: Float[Tensor, " p"]
    cosine: Float[Tensor, ""]


def gac_projection(
    grad: Float[Tensor, " p"], previous: Float[Tensor, " q"] | None, threshold: float = 0.3, strength: float = 1.0
) -> Projected:
    """Remove from a gradient what it repeats of the last one, if they agree too well.

        c = <g, p> / (|g| |p|);   where c > threshold:  g <- g - strength (<g, p> / |p|^2) p

    Opposed and zero gradients stay as they are. Call it before the norm is clipped. For a gradient in
    parts (layers, shards), add up the three products and use `gac_coefficient`.

    Unverified: best reading. Threshold and strength are this library's, and no step is skipped.

    Args:
        previous: the last step's gradient; None at the first step.
        threshold: cosine above which to project. On-policy, cosines are near 0.
        strength: share of the parallel part that is removed.

    Raises: `ShapeError` if the gradients have different sizes.

    Example:
        >>> gac_projection(torch.tensor([0.8, 0.6, 0.0]), torch.tensor([1.0, 0.0, 0.0]))
        Projected(grad=tensor([0.0000, 0.6000, 0.0000]), cosine=tensor(0.8000))

    Reference: GAC, arXiv:2603.01501.
    """
    if previous is None:
        return Projected(grad, grad.new_zeros(()))
    if previous.shape != grad.shape:
        raise ShapeError(f"grad has {len(grad)} entries, previous {len(previous)}")
    products = (grad @ previous, grad @ grad, previous @ previous)
    coefficient, cosine = gac_coefficient(*products, threshold=threshold, strength=strength)
    return Projected(grad - coefficient * previous, cosine)


def gac_coefficient(
    dot: Float[Tensor, ""],
    square: Float[Tensor, ""],
    previous_square: Float[Tensor, ""],
    *,
    threshold: float = 0.3,
    strength: float = 1.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Coefficient of the last gradient that `gac_projection` subtracts, and the cosine, from <g,p>, |g|^2, |p|^2.

    Example:
        >>> gac_coefficient(torch.tensor(0.8), torch.tensor(1.0), torch.tensor(1.0))
        (tensor(0.8000), tensor(0.8000))
    """
    present = (square > 0) & (previous_square > 0)
    norms = square.sqrt() * previous_square.sqrt()
    cosine = (dot / norms.where(present, 1.0)).where(present, 0.0)
    share = dot / previous_square.where(present, 1.0)
    return (strength * share).where(cosine > threshold, 0.0), cosine


def alpha_decay(
    initial: float, step: int, steps: int, difficulty: float | Float[Tensor, "*prompts"] = 1.0
) -> float | Float[Tensor, "*prompts"]:
    """The teacher's share in a mixture of logits, which falls linearly and is larger where it is hard.

        alpha(x, k) = initial * max(0, 1 - k / K) * difficulty(x)

    Args:
        initial: share at step 0 for the hardest prompts, [0, 1].
        step: k, from 0.
        steps: K, after which the student is alone.
        difficulty: score of each prompt, [0, 1].

    Raises: `MethodError` if `initial` or `steps` is out of range.

    Example:
        >>> [alpha_decay(0.5, k, 100, 0.8) for k in (0, 50, 100, 120)]
        [0.4, 0.2, 0.0, 0.0]

    Reference: Zhang et al., "Logit Fusion", 2026.
    """
    if not (0 <= initial <= 1 and steps > 0):
        raise MethodError(f"initial={initial} must lie in [0, 1], steps={steps} be above 0")
    return initial * max(0.0, 1 - step / steps) * difficulty


def fused_logits(
    teacher: Float[Tensor, "*s v"], student: Float[Tensor, "*s w"], alpha: float | Float[Tensor, "*s"]
) -> Float[Tensor, "*s v"]:
    """Log-probs of the mixture of a teacher and a student from which tokens are drawn.

        pi_mix = softmax(alpha l_T + (1 - alpha) l_S), proportional to pi_T^alpha pi_S^(1 - alpha)

    Record log mu under the mixture, not under the student. Logits may be -inf, as long as some token
    is possible under both.

    Args:
        teacher, student: logits or log-probs over the same vocabulary.
        alpha: the teacher's share, [0, 1]; see `alpha_decay`.

    Gradient: to both logits. Raises: `ShapeError` if the vocabularies differ in size.

    Example:
        >>> fused_logits(torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 1.0, 0.0]), 0.3).exp()
        tensor([0.3981, 0.4400, 0.1619])

    Reference: Zhang et al., "Logit Fusion", 2026.
    """
    if teacher.shape != student.shape:
        raise ShapeError(
            f"teacher has shape {tuple(teacher.shape)}, student {tuple(student.shape)}; they must "
            "score the same positions over the same vocabulary"
        )
    student = at_least_float32(student)
    a = torch.as_tensor(alpha, dtype=student.dtype, device=student.device).unsqueeze(-1)
    # A share of 0 must not turn -inf into NaN.
    t = (a * at_least_float32(teacher)).where(a > 0, 0.0)
    s = ((1 - a) * student).where(a < 1, 0.0)
    return (t + s).log_softmax(-1)


@dataclass(frozen=True)
class LossScale:
    """Factor of a float16 loss before its gradient is taken, so that small gradients are not lost.

        s <- s / 2   where the gradient overflowed: its step is skipped
        s <- 2 s     after `interval` steps without an overflow

    Gradients are divided by s before they are clipped; a power of two changes none of their digits. It is a function of
    which steps were skipped, so that a resumed run rebuilds it from its metrics.

    Example:
        >>> scale = LossScale(interval=2)
        >>> [scale := scale.after(skipped=x) for x in (True, False, False)][-1].value == scale.value == 65536.0
        True

    Reference: Micikevicius et al., arXiv:1710.03740, section 3.2; the constants are those of `torch.amp.GradScaler`.
    """

    value: float = 65536.0
    steps: int = 0
    """Without an overflow, since the scale last changed."""
    interval: int = 2000

    def after(self, *, skipped: bool) -> LossScale:
        """The scale of the next step.

        Raises: `EngineError` where even an unscaled loss would overflow.
        """
        if skipped and self.value <= 1:
            raise EngineError(
                "the gradient overflows in float16 even with a loss scale of 1, so no step can be taken; set "
                'optim.dtype = "bfloat16", or look at the last batch\'s log-ratios (metric full/abs_log_ratio_max)'
            )
        if skipped:
            return replace(self, value=self.value / 2, steps=0)
        if self.steps + 1 == self.interval:
            return replace(self, value=2 * self.value, steps=0)
        return replace(self, steps=self.steps + 1)
