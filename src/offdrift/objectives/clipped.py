"""PPO clipping: stop the push on a token once its ratio has moved far enough the way it is pushed.

A token-level trust region. It does not bound the divergence of the policies (Li et al.,
arXiv:2512.23075v5, section 4.1): with a negative advantage and a large ratio the loss is unclipped
unless `dual_clip` caps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import TokenLoss
from offdrift.ratios import RatioName, Unit, log_ratio, per_unit, turns_of
from offdrift.segments import Segments


def ppo_clip(
    log_ratio: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    negatives: Literal["low", "both"] = "low",
) -> TokenLoss:
    """Clipped surrogate, per token, with r = exp(log_ratio):

        L = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high));   where A < 0:  L <- min(L, -A dual_clip)

    Args:
        log_ratio: staleness (full in bypass mode), nats.
        advantages: signed, any scale.
        eps_low: distance below 1 at which a negative push stops.
        eps_high: distance above 1 at which a positive push stops.
        dual_clip: ratio beyond which a negative advantage stops pushing; None for plain PPO.
        negatives: "low" is PPO; "both" clips negative advantages on both sides, as TBPO does.

    Returns: loss, and where a clip strictly changed it.

    Gradient: to `log_ratio`, -A r where unclipped, zero where clipped or |log_ratio| > 20. On the
    bound itself the token is unclipped.

    Example:
        >>> import torch
        >>> ppo_clip(torch.tensor([0.4055]), torch.tensor([1.0])).loss
        tensor([-1.2000])

    Reference: Schulman et al., PPO, arXiv:1707.06347, eq. 7; asymmetric: DAPO, arXiv:2503.14476;
    dual clip: Ye et al., arXiv:1912.09729, eq. 4 (the two-sided clip of INTELLECT-2, `delta`, is
    the same function); both sides: TBPO, arXiv:2604.07853 (unverified: best reading).
    """
    r = ratio(log_ratio)
    plain = -advantages * r
    limited = -advantages * r.clamp(1 - eps_low, 1 + eps_high)
    # Strict comparisons, not max/min: on a tie the gradient goes to the unclipped branch.
    clipped = limited > plain
    if negatives == "both":
        clipped = clipped | ((advantages < 0) & (limited < plain))
    loss = limited.where(clipped, plain)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = ceiling.where(capped, loss), clipped | capped
    return TokenLoss(loss, clipped.detach())


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """`ppo_clip` on the ratio of the given unit.

    With a unit larger than a token, `gradient="unit"` differentiates the unit's ratio, with the mean
    advantage of the unit (GSPO); `gradient="token"` gives every token the unit's ratio as a value
    and its own log-prob as the only path of the gradient (GSPO-token), with its own advantage.

    Args:
        on: `staleness`, or `full` in bypass mode.
        unit: token (PPO), geometric (GSPO), turn (turn-level PPO), ...; see `ratios.per_unit`.

    Example:
        >>> Clipped(unit="geometric", eps_low=3e-4, eps_high=4e-4).formula
        'L = max(-A u, -A clip(u, 1 - 0.0003, 1 + 0.0004)), u = geometric ratio(staleness)'

    Reference: GSPO, arXiv:2507.18071, eqs. 5-7; GSPO-token: section 4.3 there.
    """

    on: RatioName = "staleness"
    unit: Unit = "token"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    negatives: Literal["low", "both"] = "low"
    gradient: Literal["unit", "token"] = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_choice("unit", self.unit, get_args(Unit))
        check_choice("negatives", self.negatives, ("low", "both"))
        check_choice("gradient", self.gradient, ("unit", "token"))
        for name in ("eps_low", "eps_high", "dual_clip"):
            check_number(name, getattr(self, name))
        if not (0 < self.eps_low <= 1 and self.eps_high > 0):
            raise MethodError(
                f"eps_low={self.eps_low} must lie in (0, 1] and eps_high={self.eps_high} above 0; "
                "they are distances from ratio 1"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise MethodError(f"dual_clip={self.dual_clip} must exceed 1")

    @property
    def formula(self) -> str:
        """The loss, in one line."""
        dual = "" if self.dual_clip is None else f", at most -A {self.dual_clip:g} where A < 0"
        both = "; both sides bind where A < 0" if self.negatives == "both" else ""
        through = ", gradient through the token alone" if self.gradient == "token" else ""
        return (
            f"L = max(-A u, -A clip(u, 1 - {self.eps_low:g}, 1 + {self.eps_high:g})){dual}{both}, "
            f"u = {self.unit} ratio({self.on}){through}"
        )

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"], batch_info: BatchInfo = NO_INFO
    ) -> TokenLoss:
        u, a = unit_ratio(logprobs, advantages, self.on, self.unit, self.gradient)
        return ppo_clip(
            u, a, eps_low=self.eps_low, eps_high=self.eps_high, dual_clip=self.dual_clip, negatives=self.negatives
        )


def unit_ratio(
    logprobs: LogProbs, advantages: Float[Tensor, " n"], on: RatioName, unit: Unit, gradient: Literal["unit", "token"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Each token's log-ratio over its unit, and the advantage that goes with it.

    Gradient: to `logp`; of the unit's tokens, or of the token itself alone.
    """
    segments = logprobs.segments
    per_token = log_ratio(logprobs, on=on)
    if unit == "token":
        return per_token, advantages
    if gradient == "unit":
        whole = _whole(segments, unit)
        a = advantages if whole is None else whole.spread(whole.mean(advantages))
        return per_unit(per_token, segments, unit=unit), a
    value = per_unit(per_token.detach(), segments, unit=unit)
    return value + logprobs.current - logprobs.current.detach(), advantages


def _whole(segments: Segments, unit: Unit) -> Segments | None:
    """The segments whose tokens share one ratio; None where every token has its own."""
    if unit.startswith("turn"):
        return turns_of(segments)
    return segments if unit in ("sequence", "geometric", "worst") else None
