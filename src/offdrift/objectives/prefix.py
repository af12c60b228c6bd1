"""CTPO and MinPRO: clipping on the ratios of a prefix, their product or their minimum.

The log of a prefix product spreads like the square root of the position, and CTPO's trust region widens with it;
MinPRO takes the token's own ratio and shrinks it by the worst one before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import MethodError, check_choice, check_number, check_positive, check_range
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped, ratio
from offdrift.objectives.base import PerToken, TokenLoss, capped, larger
from offdrift.objectives.clipped import ppo_clip
from offdrift.ratios import RatioName, least_before, log_ratio, stopped_log_ratio

PREFIX_LIMIT = 10.0
"""Upper limit of a prefix log-ratio, nats (official code of CTPO)."""


def prefix_clip(
    log_prefix: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    widths: Float[Tensor, " n"],
    *,
    eps_low: float = 0.025,
    eps_high: float = 0.05,
    dual_clip: float | None = 0.05,
) -> TokenLoss:
    """Clipped surrogate on prefix products, with limits that widen with the position:

        v = exp(min(c, 10))
        L = max(-A v, -A clip(v, exp(-eps_low s), exp(eps_high s)))
        where A < 0:  L <- min(L, -A exp(dual_clip s))

    Args:
        log_prefix: c, sum of the log-ratios up to and including the token, nats.
        widths: s, the token's position (from 1) to the power `growth`.
        dual_clip: None for none.

    Gradient: to `log_prefix`, -A v where unclipped; zero where clipped, above 10 and below -20.

    Example:
        >>> import torch
        >>> c, s = torch.tensor([0.04, 0.08]), torch.tensor([1.0, 2.0]).sqrt()
        >>> prefix_clip(c, torch.ones(2), s).loss  # the second is clipped at exp(0.05 sqrt(2))
        tensor([-1.0408, -1.0733])

    Reference: CTPO, arXiv:2605.07331, and its official code (limit at 10, dual clip).
    """
    c = log_prefix.clamp(max=PREFIX_LIMIT)
    plain = -advantages * ratio(c)
    limited = -advantages * ratio(c.clamp(-eps_low * widths, eps_high * widths))
    token_losses = larger(plain, limited)
    return (
        token_losses if dual_clip is None else capped(token_losses, advantages, -advantages * ratio(dual_clip * widths))
    )


@dataclass(frozen=True, kw_only=True)
class PrefixClipped:
    """CTPO: `prefix_clip` on the ratio of each token's prefix.

    `gradient="token"` with a dual clip is the official code, averaged over tokens ("token_mean");
    `gradient="unit"` with `dual_clip=None` is the paper, averaged over sequences
    ("seq_mean_token_mean"): there every token of a prefix receives its gradient.

    Args:
        on: `staleness` (official code), or `full`.
        eps_low: nats below 0 at which a negative push stops, at the first token.
        eps_high: nats above 0 at which a positive push stops, at the first token.
        dual_clip: nats above 0 at which a negative advantage stops pushing, at the first token.
        growth: limits widen like position^growth.

    Example:
        >>> PrefixClipped(dual_clip=None, gradient="unit").formula
        'L = max(-A v, -A clip(v, e^(-0.025 t^0.5), e^(0.05 t^0.5))), v = prefix ratio(staleness)'

    Reference: CTPO, arXiv:2605.07331; on staleness or full: sources differ.
    """

    on: RatioName = "staleness"
    eps_low: float = 0.025
    eps_high: float = 0.05
    dual_clip: float | None = 0.05
    growth: float = 0.5
    gradient: Literal["token", "unit"] = "token"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_choice("gradient", self.gradient, ("token", "unit"))
        check_positive(self, "eps_low", "eps_high", *([] if self.dual_clip is None else ["dual_clip"]))
        check_number("growth", self.growth)
        if self.growth is None or self.growth < 0:
            raise MethodError(f"growth={self.growth} must be 0 (constant limits) or positive")

    @property
    def formula(self) -> str:
        s = f"t^{self.growth:g}"
        dual = "" if self.dual_clip is None else f", at most -A e^({self.dual_clip:g} {s}) where A < 0"
        through = ", gradient through the token alone" if self.gradient == "token" else ""
        return (
            f"L = max(-A v, -A clip(v, e^(-{self.eps_low:g} {s}), e^({self.eps_high:g} {s}))){dual}, "
            f"v = prefix ratio({self.on}){through}"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        segments = logprobs.segments
        if self.gradient == "unit":
            prefix = segments.prefix_sum(clamped(log_ratio(logprobs, on=self.on)))
        else:
            value = segments.prefix_sum(clamped(stopped_log_ratio(logprobs, on=self.on)))
            prefix = value + (logprobs.current - logprobs.current.detach())
        return prefix_clip(
            prefix,
            advantages,
            (segments.position + 1).to(prefix.dtype) ** self.growth,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, kw_only=True)
class PrefixMinClipped:
    """MinPRO's clipped form: PPO on the token's ratio, times the least ratio before it.

        L_t = m_t max(-A r_t, -A clip(r_t, 1 - eps_low, 1 + eps_high)),   m_t = min_{s<t} r_s, m_1 = 1

    m never rises along a sequence: one outlier early in a response suppresses all the rest.

    Args:
        on: `full`, or `staleness` where one engine does both.

    Gradient: to `logp`, through r_t alone, where unclipped; m is a constant.

    Reference: MinPRO, arXiv:2601.22718. Unverified: best reading of where the clip acts and where
    the gradient goes; the weight m r is stated there. Average it over tokens ("token_mean").
    """

    on: RatioName = "full"
    eps_low: float = 0.2
    eps_high: float = 0.2
    gradient = "token"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_range(self)

    @property
    def formula(self) -> str:
        return (
            f"L = m max(-A r, -A clip(r, 1 - {self.eps_low:g}, 1 + {self.eps_high:g})), "
            f"m = least ratio before, r = token ratio({self.on})"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        segments = logprobs.segments
        before = least_before(stopped_log_ratio(logprobs, on=self.on), segments)
        l = log_ratio(logprobs, on=self.on)  # noqa: E741
        loss, clipped, _ = ppo_clip(l, advantages, eps_low=self.eps_low, eps_high=self.eps_high)
        return TokenLoss(ratio(before) * loss, clipped)
