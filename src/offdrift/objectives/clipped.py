"""PPO clipping and close relatives: GMPO and ESPO clip a mean, QuRL widens the clip, SAPO fades it out.

A clip stops the push on a token once its ratio has moved far enough the way it is pushed. It does not bound the
divergence of the policies (Li et al., arXiv:2512.23075v5, section 4.1): with a negative advantage and a large ratio
the loss is unclipped unless `dual_clip` caps it.

ESPO takes one geometric ratio for the uncertain tokens of a sequence, another for the rest, each with a clip as wide as
its entropy: averaged with hundreds of confident tokens, the drift of the few that decide would disappear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import EvidenceError, MethodError, check_choice, check_number, check_positive, check_range
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped, ratio
from offdrift.objectives.base import PerToken, TokenLoss, capped, larger
from offdrift.ratios import RatioName, Unit, log_ratio, per_unit, stopped_log_ratio, turns_of
from offdrift.segments import Segments


def ppo_clip(
    log_ratio: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    *,
    eps_low: float | Float[Tensor, " n"] = 0.2,
    eps_high: float | Float[Tensor, " n"] = 0.2,
    dual_clip: float | None = None,
    negatives: Literal["low", "both"] = "low",
) -> TokenLoss:
    """Clipped surrogate, per token, with r = exp(log_ratio):

        L = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high));   where A < 0:  L <- min(L, -A dual_clip)

    Args:
        log_ratio: staleness (full in bypass mode), nats.
        advantages: signed, any scale.
        eps_low: distance below 1 at which a negative push stops, for all tokens or for each.
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
    push = -advantages
    plain = push * r
    limited = push * r.clamp(1 - eps_low, 1 + eps_high)  # type: ignore[arg-type]
    # Strict comparisons, not max/min: on a tie the gradient goes to the unclipped branch.
    clipped = limited > plain
    if negatives == "both":
        clipped = clipped | ((advantages < 0) & (limited < plain))
    token_losses = TokenLoss(limited.where(clipped, plain), clipped.detach())
    return token_losses if dual_clip is None else capped(token_losses, advantages, -advantages * dual_clip)


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """`ppo_clip` on the ratio of the given unit.

    With a unit larger than a token, `gradient="unit"` differentiates the unit's ratio, with the mean
    advantage of the unit (GSPO); `gradient="token"` gives every token the unit's ratio as a value
    and its own log-prob as the only path of the gradient (GSPO-token), with its own advantage.

    Args:
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
        check_range(self)
        check_number("dual_clip", self.dual_clip)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise MethodError(f"dual_clip={self.dual_clip} must exceed 1")

    @property
    def formula(self) -> str:
        dual = "" if self.dual_clip is None else f", at most -A {self.dual_clip:g} where A < 0"
        both = "; both sides bind where A < 0" if self.negatives == "both" else ""
        through = ", gradient through the token alone" if self.gradient == "token" else ""
        return (
            f"L = max(-A u, -A clip(u, 1 - {self.eps_low:g}, 1 + {self.eps_high:g})){dual}{both}, "
            f"u = {self.unit} ratio({self.on}){through}"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        u, a = unit_ratio(logprobs, advantages, self.on, self.unit, self.gradient)
        limits = {"eps_low": self.eps_low, "eps_high": self.eps_high, "dual_clip": self.dual_clip}
        return ppo_clip(u, a, **limits, negatives=self.negatives)


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
    if gradient == "token":
        value = per_unit(per_token.detach(), segments, unit=unit)
        return value + logprobs.current - logprobs.current.detach(), advantages
    if unit.startswith("turn") or unit in ("sequence", "geometric", "worst"):
        shared = turns_of(segments) if unit.startswith("turn") else segments
        advantages = shared.spread(shared.mean(advantages))
    return per_unit(per_token, segments, unit=unit), advantages


# GMPO: clip every token's log-ratio first, then take the geometric mean of the sequence.
#
# An outlier is limited before it enters the mean, so that it cannot pull the whole sequence out of
# the trust region, as it does where the mean is clipped (GSPO).


def geometric_clip(
    log_ratio: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    segments: Segments,
    *,
    eps_low: float = 0.4,
    eps_high: float = 0.4,
) -> TokenLoss:
    """The loss of its sequence for every token:

        m_t = min(l_t, eps_high) where A_t > 0,  max(l_t, -eps_low) where A_t < 0,  0 where A_t = 0
        L_t = -a exp(mean of m over the sequence),    a = mean advantage of the sequence

    Average it over sequences ("seq_mean_token_mean").

    Args:
        log_ratio: l, staleness (full in bypass mode), nats; limited to +-20 before all else.
        advantages: meant to be one number per sequence. Where they vary, the sign is the token's
            own, as in verl.
        eps_low: nats below 0 at which a negative push stops.
        eps_high: nats above 0 at which a positive push stops.

    Returns: loss, and the tokens whose log-ratio was clipped.

    Gradient: to `log_ratio`; summed over the sequence -a g where unclipped, g the geometric mean;
    zero where clipped or |l_t| > 20.

    Example:
        >>> import torch
        >>> s, l = Segments.from_lengths([2]), torch.tensor([0.1, 0.9])
        >>> geometric_clip(l, torch.tensor([1.0, 1.0]), s).loss  # -exp((0.1 + 0.4) / 2)
        tensor([-1.2840, -1.2840])

    Reference: GMPO, arXiv:2507.20673; verl's `geo_mean`, which does not limit log-ratios to +-20
    and divides by T + 1e-8.
    """
    up, down = advantages > 0, advantages < 0
    l = clamped(log_ratio)  # noqa: E741
    too_high, too_low = up & (l > eps_high), down & (l < -eps_low)
    m = l.where(up | down, 0.0).where(~too_high, eps_high).where(~too_low, -eps_low)
    g = ratio(segments.mean(m))
    loss = segments.spread(-segments.mean(advantages) * g)
    return TokenLoss(loss, too_high | too_low)


@dataclass(frozen=True, kw_only=True)
class GeometricClipped:
    """`geometric_clip` as an objective.

    Example:
        >>> GeometricClipped().formula
        'L = -A exp(mean_t m_t), m = log ratio(staleness), <= 0.4 where A > 0, >= -0.4 where A < 0'
    """

    on: RatioName = "staleness"
    eps_low: float = 0.4
    eps_high: float = 0.4
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_positive(self, "eps_low", "eps_high", hint=": a distance from 0, in nats")

    @property
    def formula(self) -> str:
        return (
            f"L = -A exp(mean_t m_t), m = log ratio({self.on}), <= {self.eps_high:g} where A > 0, "
            f">= {-self.eps_low:g} where A < 0"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        l = log_ratio(logprobs, on=self.on)  # noqa: E741
        segments = logprobs.segments
        return geometric_clip(l, advantages, segments, eps_low=self.eps_low, eps_high=self.eps_high)


# QuRL: rollouts from a quantized actor, with the clip widened where the weight was truncated.
#
# A truncated mismatch weight undercounts its token, and an ordinary clip on top stops the token as if
# it had not been undercounted. The clip's upper limit grows by the factor that truncation took away.


def quantized_clip(
    staleness: Float[Tensor, " n"],
    mismatch: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    cap: float = 2.0,
) -> TokenLoss:
    """Clipped surrogate under a truncated weight, the clip widened by what truncation took away:

        W = min(rho, cap),   kappa = W / rho
        L = W max(-A r, -A clip(r, 1 - eps_low, (1 + eps_high) / kappa))

    Args:
        staleness: log r, nats.
        mismatch: log rho between the training engine and the quantized actor, nats.
        cap: upper limit of W, a ratio.

    Gradient: to `staleness`, -A W r where unclipped; none to `mismatch`.

    Example:
        >>> import torch
        >>> l = torch.tensor([1.0, 1.0]).log1p()  # r = rho = 2
        >>> quantized_clip(l, l, torch.ones(2), cap=1.25).loss  # -1.25 min(2, 1.2 * 2 / 1.25)
        tensor([-2.4000, -2.4000])

    Reference: QuRL, arXiv:2602.13953. Unverified: best reading of the formula and its defaults.
    """
    r, rho = ratio(staleness), ratio(mismatch.detach())
    w = rho.clamp(max=cap)
    plain = -advantages * r
    limited = -advantages * r.clamp(min=1 - eps_low).minimum((1 + eps_high) * rho / w)
    loss, clipped, _ = larger(plain, limited)
    return TokenLoss(w * loss, clipped)


@dataclass(frozen=True, kw_only=True)
class QuantizedClipped:
    """`quantized_clip` as an objective. It contains the mismatch weight: add no other.

    Average it over tokens ("token_mean").

    Example:
        >>> QuantizedClipped().formula
        'L = W max(-A r, -A clip(r, 1 - 0.2, (1 + 0.2) rho / W)), W = min(rho, 2)'
    """

    on: RatioName = field(default="full", init=False)
    needs_old = True
    gradient = "unit"

    eps_low: float = 0.2
    eps_high: float = 0.2
    cap: float = 2.0

    def __post_init__(self) -> None:
        check_range(self)
        check_positive(self, "cap")

    @property
    def formula(self) -> str:
        return (
            f"L = W max(-A r, -A clip(r, 1 - {self.eps_low:g}, (1 + {self.eps_high:g}) rho / W)), "
            f"W = min(rho, {self.cap:g})"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        return quantized_clip(
            log_ratio(logprobs, on="staleness"),
            stopped_log_ratio(logprobs, on="mismatch"),
            advantages,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            cap=self.cap,
        )


# SAPO: a sigmoid in place of the clip; the push fades smoothly as a token's ratio leaves 1.


def sapo(
    log_ratio: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    *,
    tau_positive: float | int = 1.0,
    tau_negative: float | int = 1.05,
) -> Float[Tensor, " n"]:
    """Soft surrogate, per token, with r = exp(log_ratio):

        L = -A g(r),   g(r) = (4 / tau) sigmoid(tau (r - 1))

    tau is tau_positive where A > 0, else tau_negative. g'(1) = 1, so that on policy the push is that
    of the plain ratio; g(1) = 2 / tau, so that the value is not.

    Args:
        log_ratio: staleness (full in bypass mode), nats.
        advantages: signed, any scale.
        tau_positive: how fast a positive push fades, per unit of ratio.
        tau_negative: the same for a negative push.

    Gradient: to `log_ratio`, -A r g'(r) with g' = 4 sigmoid (1 - sigmoid) of the same argument; zero
    where |log_ratio| > 20. Nothing is ever cut, so nothing counts as clipped.

    Example:
        >>> import torch
        >>> sapo(torch.tensor([0.0, 0.0]), torch.tensor([1.0, -1.0]))
        tensor([-2.0000,  1.9048])

    Reference: SAPO, arXiv:2511.20347; verl's `sapo`.
    """
    tau = advantages.new_full((), tau_positive).where(advantages > 0, tau_negative)
    return -advantages * (4 / tau) * (tau * (ratio(log_ratio) - 1)).sigmoid()


@dataclass(frozen=True, kw_only=True)
class Soft:
    """`sapo` on the given ratio of each token; published with seq_mean_token_mean.

    Args:
        tau_negative: see `sapo`; larger than tau_positive, because a negative push raises the
            probability of every other token.

    Example:
        >>> Soft().formula
        'L = -A (4 / tau) sigmoid(tau (r - 1)), r = ratio(staleness), tau = 1 where A > 0 else 1.05'
    """

    on: RatioName = "staleness"
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        check_positive(self, "tau_positive", "tau_negative", hint="; larger is harder")

    @property
    def formula(self) -> str:
        return (
            f"L = -A (4 / tau) sigmoid(tau (r - 1)), r = ratio({self.on}), "
            f"tau = {self.tau_positive:g} where A > 0 else {self.tau_negative:g}"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        taus = {"tau_positive": self.tau_positive, "tau_negative": self.tau_negative}
        return TokenLoss(sapo(log_ratio(logprobs, on=self.on), advantages, **taus))


FLOAT32_BITS = 32


def most_uncertain(entropy: Float[Tensor, " n"], segments: Segments, *, fraction: float) -> Bool[Tensor, " n"]:
    """The ceil(fraction T) tokens of highest entropy of each sequence of T; earlier ones on ties.

    Entropies are compared as float32. Gradient: none.

    Example:
        >>> s = Segments.from_lengths([4, 1])
        >>> most_uncertain(torch.tensor([0.2, 2.5, 0.4, 3.0, 0.0]), s, fraction=0.5)
        tensor([False,  True, False,  True,  True])
    """
    # One exact, stable sort: the bits of a non-negative float sort like the number itself.
    bits = entropy.detach().abs().float().view(torch.int32)
    order = ((segments.seq_ids << FLOAT32_BITS) - bits).sort(stable=True).indices
    rank = torch.empty_like(order).scatter_(0, order, segments.position)
    # 0.07 * 100 is 7.000000000000001 in binary, and should not round up to 8.
    number = (fraction * segments.lengths.double() - 1e-9).ceil()
    return rank < segments.spread(number)


def entropy_groups(
    log_ratio: Float[Tensor, " n"], entropy: Float[Tensor, " n"], top: Bool[Tensor, " n"], segments: Segments
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    """For each token, over its group (the top or the rest of its sequence): mean log-ratio, mean
    entropy, and the token's share of the sequence, T_i / (groups of the sequence * group size).

    With that share as a factor, a mean over the tokens of a sequence is a mean over the tokens of a
    group, then over the groups. An empty group does not count. Gradient: none.

    Example:
        >>> s, top = Segments.from_lengths([3]), torch.tensor([True, False, False])
        >>> l, h = torch.tensor([0.3, 0.1, 0.2]), torch.tensor([2.0, 1.0, 0.0])
        >>> entropy_groups(l, h, top, s)[2]  # 3 / (2 groups * 1), 3 / (2 groups * 2)
        tensor([1.5000, 0.7500, 0.7500])
    """
    with torch.no_grad():
        size = _group_sums(torch.ones_like(log_ratio), top, segments)
        lengths = segments.spread(segments.lengths.to(log_ratio.dtype))
        groups = 1 + (size < lengths).to(log_ratio.dtype)
        mean_ratio = _group_sums(log_ratio, top, segments) / size
        mean_entropy = _group_sums(entropy.to(log_ratio.dtype), top, segments) / size
        return mean_ratio, mean_entropy, lengths / (groups * size)


def _group_sums(x: Float[Tensor, " n"], top: Bool[Tensor, " n"], segments: Segments) -> Float[Tensor, " n"]:
    above = segments.spread(segments.sum(x.where(top, 0.0)))
    below = segments.spread(segments.sum(x.where(~top, 0.0)))
    return above.where(top, below)


@dataclass(frozen=True, kw_only=True)
class EntropyGrouped:
    """PPO clipping on the geometric ratio of entropy groups, each with its own width:

        s_t = exp(mean of l over the group of t)        value; its gradient is that of token t alone
        eps = alpha (mean entropy of the group) / ln(vocabulary)
        L_t = max(-A s, -A clip(s, 1 - eps, 1 + eps)) T_i / (groups_i |group|)

    Average it over sequences ("seq_mean_token_mean"): tokens of a group, then groups, then
    sequences. A group of entropy 0 has a width of 0: any drift outwards is clipped.

    Args:
        alpha: width of a clip at the highest possible entropy, as a distance from ratio 1.
        top_frac: share of a sequence's tokens in the group of high entropy, rounded up.

    Gradient: to `logp`, -A s times the factor where unclipped.

    Reference: ESPO, arXiv:2512.00499. Its eq. 9 prints the old policy under the token's ratio; the
    form of GSPO-token is meant. The share of the top group is from a secondary source.
    """

    on: RatioName = "staleness"
    alpha: float = 0.02
    top_frac: float = 0.2
    needs = ("entropy", "vocab")
    gradient = "token"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        for name in ("alpha", "top_frac"):
            value = getattr(self, name)
            check_number(name, value)
            if value is None or not 0 < value <= 1:
                raise MethodError(f"{name}={value} must lie in (0, 1]")

    @property
    def formula(self) -> str:
        return (
            f"L = max(-A s, -A clip(s, 1 -+ {self.alpha:g} H / ln V)), s = geometric "
            f"ratio({self.on}) of top {100 * self.top_frac:g}% and rest by entropy, "
            "gradient through the token alone"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        """Raises: `EvidenceError` without the entropy of each token, or the vocabulary's size."""
        entropy, vocab, segments = batch_info.required("entropy"), batch_info.vocab, logprobs.segments
        if vocab is None or vocab < 2:
            raise EvidenceError(f"vocab={vocab}: this method needs the number of tokens, at least 2")
        top = most_uncertain(entropy, segments, fraction=self.top_frac)
        per_token = stopped_log_ratio(logprobs, on=self.on)
        value, mean_entropy, share = entropy_groups(per_token, entropy, top, segments)
        eps = self.alpha / math.log(vocab) * mean_entropy
        s = ratio(value + (logprobs.current - logprobs.current.detach()))
        plain = -advantages * s
        limited = -advantages * s.minimum(1 + eps).maximum(1 - eps)
        loss, clipped, _ = larger(plain, limited)
        return TokenLoss(share * loss, clipped)
