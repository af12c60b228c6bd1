"""PPO-EWMA: the trust region is centered on an exponential average of the weights.

The rollout policy corrects the distribution, the proximal one (scored with averaged weights, given as `logp_old`)
centers the clip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import MethodError, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import PerToken, TokenLoss
from offdrift.ratios import RatioName


def ppo_ewma(
    logprobs: LogProbs, advantages: Float[Tensor, " n"], *, eps: float = 0.2, limit: float | int = 100.0
) -> TokenLoss:
    """Decoupled clip, per token, with prox = logp_old:

        base = max(logp_rollout, stop(logp) - ln limit)
        L = max(-A exp(logp - base), -A exp(clamp(logp - prox, ln(1 - eps), ln(1 + eps)) + prox - base))

    Args:
        logprobs: `logp_old` holds the proximal policy, nats.
        advantages: signed, any scale.
        eps: distance from ratio 1 to the proximal policy at which an outward push stops.
        limit: largest ratio to the rollout policy; a token beyond it pushes with this weight.

    Returns: loss, and where the clip changed it.

    Gradient: to `logp`: -A min(pi / mu, limit) where unclipped, zero where clipped. None to `base`.

    Example:
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -0.5]), torch.tensor([-0.6, -0.9]),
        ...                    torch.tensor([-0.9, -0.6]), segments=Segments.from_lengths([2]))
        >>> ppo_ewma(lp, torch.tensor([1.0, -1.0])).loss
        tensor([-1.3262,  0.7239])

    Reference: Hilton et al., PPO-EWMA, arXiv:2110.00641, and its official code.
    """
    logp, prox = logprobs.current, logprobs.old
    base = torch.maximum(logprobs.logp_rollout, logp.detach() - math.log(limit))
    low, high = math.log1p(-eps), math.log1p(eps)
    moved = logp - prox
    plain = -advantages * ratio(logp - base)
    limited = -advantages * ratio(moved.clamp(low, high) + prox - base)
    # Inside the limits both branches are one number up to rounding, which must not count as a clip.
    clipped = ((moved < low) | (moved > high)) & (limited > plain)
    return TokenLoss(limited.where(clipped, plain), clipped.detach())


@dataclass(frozen=True, kw_only=True)
class ProximalEwma:
    """`ppo_ewma` as an objective; published with token_mean.

    Contains the full ratio, and reads the proximal policy as `logp_old`: score the rollouts with
    averaged weights (`ewma_update`) instead of those that sampled. The trainer keeps them
    (`[old_policy] from = "ewma"`). Row `ppo_ewma_decoupled` uses the same weights in decoupled PPO.

    Example:
        >>> ProximalEwma().formula
        'L = max(-A w, -A w clip(r, 1 - 0.2, 1 + 0.2) / r), w = min(ratio(full), 100), r = ratio(staleness)'
    """

    eps: float = 0.2
    limit: float = 100.0
    gradient = "unit"
    needs_old = True

    def __post_init__(self) -> None:
        check_number("eps", self.eps)
        check_number("limit", self.limit)
        if not (0 < self.eps < 1 and self.limit > 1):
            raise MethodError(
                f"eps={self.eps} must lie in (0, 1), a distance from ratio 1, and limit={self.limit} must exceed 1"
            )

    @property
    def on(self) -> RatioName:
        """The ratio it contains."""
        return "full"

    @property
    def formula(self) -> str:
        return (
            f"L = max(-A w, -A w clip(r, 1 - {self.eps:g}, 1 + {self.eps:g}) / r), "
            f"w = min(ratio(full), {self.limit:g}), r = ratio(staleness)"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        return ppo_ewma(logprobs, advantages, eps=self.eps, limit=self.limit)


def ewma_update(
    mean: Float[Tensor, "*s"], new: Float[Tensor, "*s"], *, weight: float | int, decay: float | int
) -> tuple[Float[Tensor, "*s"], float]:
    """One step of a bias-corrected exponential average; call it after every policy update.

        weight' = decay weight + 1
        mean'   = (decay weight / weight') mean + new / weight'

    Args:
        mean: the average so far; at first the initial weights, with weight 1.
        new: the current weights, same shape.
        weight: the second thing that the last call returned; 1 at first.
        decay: in [0, 1); 1 - 1 / (m + 1) averages over a mean age of m updates, 0 forgets everything but `new`.

    Returns: mean' and weight'.

    Raises: `MethodError` if decay lies outside [0, 1).

    Gradient: none.

    Example:
        >>> ewma_update(torch.tensor(0.0), torch.tensor(1.0), weight=1.0, decay=0.9)
        (tensor(0.5263), 1.9)

    Reference: Hilton et al., arXiv:2110.00641, and its official code.
    """
    if not 0 <= decay < 1:
        raise MethodError(f"decay={decay} must lie in [0, 1): 1 - 1 / (m + 1) for a mean age of m updates")
    total = decay * weight + 1
    return mean.detach() * (decay * weight / total) + new.detach() / total, float(total)
