"""How much a masked surrogate can overstate, exactly, for the regions that certificates are about.

A guarantee without preconditions says J(pi) - J(mu) >= L'_masked - B_A - price. With F(y) the weight
of a sequence's reward in the error, and d(y) = pi(y) - mu(y), the left side falls below L'_masked by

    sum_y R(y) (M (d - F) - d) = sum_{accepted} R (-F) + sum_{rejected} R (-d),

worst for the reward 1 where a term is positive. If the price is the rejected reward itself, the
second sum is paid for by it.

Reference: Li et al., arXiv:2512.23075v5, Proposition G.1, Remark G.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.lab.enumerate import token_kl, weights_by_sequence
from offdrift.lab.policy import TabularPolicy


@dataclass(frozen=True)
class Masked:
    """Two accepted regions of `p` pairs, and what is exactly true about them."""

    tau: Float[Tensor, " p"]
    """Ratio region: |log w_t| <= tau at every token, tau the median over sequences; nan if none."""
    rejected: Float[Tensor, " p"]
    """Its rejected share, r."""
    overstated: Float[Tensor, " p"]
    """Its largest sum_{accepted} R (-F): what B_A must bound."""
    lost: Float[Tensor, " p"]
    """Its largest sum_{rejected} R (mu - pi)."""
    prefix_kl: Float[Tensor, " p"]
    """Trust region, KL <= delta_max / 2 at every context: E_mu[sum_t 1(contexts 1 .. t in it) KL]."""
    overstated_kl: Float[Tensor, " p"]
    """Its largest sum_{accepted} R (-F)."""


def masked(rollout: TabularPolicy, current: TabularPolicy) -> Masked:
    """Both regions, by enumeration."""
    shift, error = weights_by_sequence(rollout, current)
    law = rollout.law()
    drawn = law > 0
    over = (-error).clamp(min=0)
    worst = _worst_log_ratio(rollout, current)
    tau = torch.where(drawn, worst, torch.inf).median(dim=1).values
    accepted = (worst <= tau[:, None]) & drawn
    region, prefix_kl = _inside(rollout, current)
    return Masked(
        tau=torch.where(tau < torch.inf, tau, torch.nan),
        rejected=(law * ~accepted).sum(1).clamp(max=1),
        overstated=(over * accepted).sum(1),
        lost=((-shift).clamp(min=0) * (drawn & ~accepted)).sum(1),
        prefix_kl=prefix_kl,
        overstated_kl=(over * (region & drawn)).sum(1),
    )


def _worst_log_ratio(rollout: TabularPolicy, current: TabularPolicy) -> Float[Tensor, "p y"]:
    """max_t |log w_t| of every sequence; infinite where either policy cannot draw it."""
    worst = rollout.levels[0].new_zeros(rollout.pairs, 1)
    for mu, pi in zip(rollout.levels, current.levels, strict=True):
        size = torch.where((mu > 0) & (pi > 0), (pi.log() - mu.log()).abs(), torch.inf)
        worst = torch.maximum(worst[..., None], size).flatten(1)
    return worst


def _inside(
    rollout: TabularPolicy, current: TabularPolicy
) -> tuple[Bool[Tensor, "p y"], Float[Tensor, " p"]]:
    """Sequences whose contexts all have at most half the largest KL, and their prefix KL."""
    kl = [token_kl(mu, pi) for mu, pi in zip(rollout.levels, current.levels, strict=True)]
    limit = torch.stack([x.amax(1) for x in kl]).amax(0)[:, None] / 2
    inside = torch.ones(rollout.pairs, 1, dtype=torch.bool)
    total = limit.new_zeros(rollout.pairs)
    for law, x in zip(rollout.context_laws(), kl):
        inside = inside & (x <= limit)
        total = total + (law * x.where(inside & (law > 0), 0.0)).sum(1)
        inside = inside.repeat_interleave(rollout.vocab, dim=1)
    return inside, total
