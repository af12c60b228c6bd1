"""ASPO: positive advantages are weighted by 1/r, so that what already rose is pushed less and what lags catches up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import MethodError, check_choice, check_number, check_range
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import PerToken, TokenLoss
from offdrift.ratios import RatioName, log_ratio
from offdrift.segments import Segments


def aspo(
    log_ratio: Float[Tensor, " n"],
    logp: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    *,
    eps_low: float | Float[Tensor, " n"] = 0.2,
    eps_high: float | Float[Tensor, " n"] = 0.2,
    dual_clip: float | int | None = 3.0,
) -> TokenLoss:
    """Flipped surrogate, per token, with r = exp(log_ratio) and c = dual_clip:

        A < 0:   u = max(r, 1 - eps_low)     L = -A u                 (value u)
        A > 0:   p = min(r, 1 + eps_high)    L = -A p / stop(p)^2     (value u = 1 / p)
        u > c:   L = -A c log pi             (soft dual clip, both signs)

    Args:
        log_ratio: staleness, nats.
        logp: log pi of the same tokens; read only where the soft dual clip acts.
        advantages: signed, any scale.
        eps_low: distance below 1 at which a negative push stops.
        eps_high: distance above 1 at which a positive push stops.
        dual_clip: weight at which a push stops growing; None for no limit.

    Returns: loss, and where a clip changed it.

    Gradient: to `log_ratio`: -A / r where A > 0 and r <= 1 + eps_high, -A r where A < 0 and
    r >= 1 - eps_low, else zero. Where the soft dual clip acts, -A c to `logp` instead: bounded,
    never cut off.

    Example:
        >>> import torch
        >>> r = torch.tensor([0.5, 2.0, 0.5, 2.0])
        >>> aspo(r.log(), torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0])).loss
        tensor([-2.0000, -0.8333,  0.8000,  2.0000])

    Reference: ASPO, arXiv:2510.06062, and its official code.
    """
    r, up = ratio(log_ratio), advantages > 0
    p = r.clamp(max=1 + eps_high)
    u = (p / p.detach().square()).where(up, r.clamp(min=1 - eps_low))
    clipped = torch.where(up, r > 1 + eps_high, (r < 1 - eps_low) & (advantages < 0))
    loss = -advantages * u
    if dual_clip is not None:
        capped = (u > dual_clip) & (advantages != 0)
        loss, clipped = (-advantages * dual_clip * logp).where(capped, loss), clipped | capped
    return TokenLoss(loss, clipped.detach())


def above_quantile(x: Float[Tensor, " n"], segments: Segments, *, quantile: float) -> Bool[Tensor, " n"]:
    """Mark tokens that lie strictly above the given quantile of their own sequence. Gradient: none.

    The quantile interpolates linearly between the two nearest values of the sequence, as
    `torch.quantile` does.

    Example:
        >>> import torch
        >>> above_quantile(torch.arange(5.0), Segments.from_lengths([4, 1]), quantile=0.5)
        tensor([False, False,  True,  True, False])
    """
    x = x.detach()
    by_value = x.argsort()
    order = by_value[segments.seq_ids[by_value].argsort(stable=True)]
    place = (segments.lengths - 1).clamp(min=0).double() * quantile
    # An empty sequence has no token to be given its quantile; its index only must stay inside.
    first = segments.cu_seqlens[:-1].clamp(max=len(x) - 1)
    low = x[order[first + place.floor().long()]]
    high = x[order[first + place.ceil().long()]]
    return x > segments.spread(low.lerp(high, place.frac().to(x.dtype)))


@dataclass(frozen=True, kw_only=True)
class Flipped:
    """`aspo` on the given ratio of each token; published with token_mean.

    Args:
        eps_high_entropy: (low, high) in place of the above where the old policy's entropy lies above
            the `entropy_quantile` of its sequence; (0.4, 0.4) in the official code. None: one range
            for all. The code names its mask "high entropy" where it holds the low-entropy tokens and
            gives it the range named "low entropy": two slips that cancel, so this is what it does,
            except that it takes the entropy of the current policy.
        entropy_quantile: see above.

    Raises: `EvidenceError` when called, if it needs entropy and the batch has none.
    """

    on: RatioName = "staleness"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = 3.0
    eps_high_entropy: tuple[float, float] | None = None
    entropy_quantile: float = 0.8
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        check_range(self)
        for name in ("dual_clip", "entropy_quantile"):
            check_number(name, getattr(self, name))
        if self.eps_high_entropy is not None:
            low, high = self.eps_high_entropy
            check_number("eps_high_entropy", low)
            check_number("eps_high_entropy", high)
            if not (0 < low <= 1 and high > 0):
                raise MethodError(
                    f"eps_high_entropy={self.eps_high_entropy}: the first must lie in (0, 1], the second above 0; "
                    "they are distances from ratio 1"
                )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise MethodError(f"dual_clip={self.dual_clip} must exceed 1")
        if not 0 <= self.entropy_quantile <= 1:
            raise MethodError(f"entropy_quantile={self.entropy_quantile} must lie in [0, 1]")

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of `BatchInfo` that it reads."""
        return () if self.eps_high_entropy is None else ("entropy",)

    @property
    def formula(self) -> str:
        c = self.dual_clip
        dual = "" if c is None else f", -A {c:g} log pi where the factor exceeds {c:g}"
        wide = ""
        if self.eps_high_entropy is not None:
            low, high = self.eps_high_entropy
            q = self.entropy_quantile
            wide = f" ({low:g} and {high:g} where entropy is above its sequence's {q:g} quantile)"
        return (
            f"L = -A max(r, 1 - {self.eps_low:g}) where A < 0, "
            f"-A / min(r, 1 + {self.eps_high:g}) where A > 0{wide}{dual}, r = ratio({self.on})"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        low, high = self.eps_low, self.eps_high
        log_r = log_ratio(logprobs, on=self.on)
        if self.eps_high_entropy is not None:
            entropy = batch_info.required("entropy")
            wide = above_quantile(entropy, logprobs.segments, quantile=self.entropy_quantile)
            low, high = (
                log_r.new_full((), there).where(wide, here)
                for here, there in zip((low, high), self.eps_high_entropy, strict=True)
            )
        limits = {"eps_low": low, "eps_high": high, "dual_clip": self.dual_clip}
        return aspo(log_r, logprobs.current, advantages, **limits)
