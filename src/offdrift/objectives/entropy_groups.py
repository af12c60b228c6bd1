"""ESPO: one geometric ratio for the uncertain tokens of a sequence, another for the rest, each with a clip as wide as
its entropy: averaged with hundreds of confident tokens, the drift of the few that decide would disappear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import EvidenceError, MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import PerToken, TokenLoss, larger
from offdrift.ratios import RatioName, stopped_log_ratio
from offdrift.segments import Segments

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
