"""PPO clipping: stop the push on a token once its ratio has moved far enough the way it is pushed.

A token-level trust region. It does not bound the divergence of the policies (Li et al.,
arXiv:2512.23075v5, section 4.1): with a negative advantage and a large ratio the loss is unclipped
unless `dual_clip` caps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from jaxtyping import Float
from torch import Tensor

from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import TokenLoss
from offdrift.ratios import RatioName, log_ratio


def ppo_clip(
    log_ratio: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate, per token, with r = exp(log_ratio):

        L = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high));   where A < 0:  L <- min(L, -A dual_clip)

    Args:
        log_ratio: staleness (full in bypass mode), nats.
        advantages: signed, any scale.
        eps_low: distance below 1 at which a negative push stops.
        eps_high: distance above 1 at which a positive push stops.
        dual_clip: ratio beyond which a negative advantage stops pushing; None for plain PPO.

    Returns: loss, and where a clip strictly changed it.

    Gradient: to `log_ratio`, -A r where unclipped, zero where clipped or |log_ratio| > 20. On the
    bound itself the token is unclipped.

    Example:
        >>> import torch
        >>> ppo_clip(torch.tensor([0.4055]), torch.tensor([1.0])).loss
        tensor([-1.2000])

    Reference: Schulman et al., PPO, arXiv:1707.06347, eq. 7; asymmetric: DAPO, arXiv:2503.14476;
    dual clip: Ye et al., arXiv:1912.09729, eq. 4.
    """
    r = ratio(log_ratio)
    plain = -advantages * r
    limited = -advantages * r.clamp(1 - eps_low, 1 + eps_high)
    # Strict comparisons, not max/min: on a tie the gradient goes to the unclipped branch.
    clipped = limited > plain
    loss = limited.where(clipped, plain)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        capped = (advantages < 0) & (loss > ceiling)
        loss, clipped = ceiling.where(capped, loss), clipped | capped
    return TokenLoss(loss, clipped.detach())


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """`ppo_clip` as an objective on the given ratio (`staleness`, or `full` in bypass mode)."""

    on: RatioName = "staleness"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        for name in ("eps_low", "eps_high", "dual_clip"):
            check_number(name, getattr(self, name))
        if not (0 < self.eps_low <= 1 and self.eps_high > 0):
            raise MethodError(
                f"eps_low={self.eps_low} must lie in (0, 1] and eps_high={self.eps_high} above 0; "
                "they are distances from ratio 1"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise MethodError(f"dual_clip={self.dual_clip} must exceed 1")

    def __call__(self, logprobs: LogProbs, advantages: Float[Tensor, " n"]) -> TokenLoss:
        return ppo_clip(
            log_ratio(logprobs, on=self.on),
            advantages,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            dual_clip=self.dual_clip,
        )
