"""QuRL: rollouts from a quantized actor, with the clip widened where the weight was truncated.

A truncated mismatch weight undercounts its token, and an ordinary clip on top stops the token as if
it had not been undercounted. The clip's upper limit grows by the factor that truncation took away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import MethodError, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import TokenLoss
from offdrift.ratios import RatioName, log_ratio, stopped_log_ratio


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
    clipped = limited > plain
    return TokenLoss(w * limited.where(clipped, plain), clipped.detach())


@dataclass(frozen=True, kw_only=True)
class QuantizedClipped:
    """`quantized_clip` as an objective. It contains the mismatch weight: add no other.

    Average it over tokens ("token_mean").

    Example:
        >>> QuantizedClipped().formula
        'L = W max(-A r, -A clip(r, 1 - 0.2, (1 + 0.2) rho / W)), W = min(rho, 2)'

    Reference: QuRL, arXiv:2602.13953. Unverified: best reading.
    """

    on: RatioName = field(default="full", init=False)
    needs_old = True
    gradient = "unit"

    eps_low: float = 0.2
    eps_high: float = 0.2
    cap: float = 2.0

    def __post_init__(self) -> None:
        for name in ("eps_low", "eps_high", "cap"):
            value = getattr(self, name)
            check_number(name, value)
            if value is None or not value > 0:
                raise MethodError(f"{name}={value} must be positive")
        if self.eps_low > 1:
            raise MethodError(f"eps_low={self.eps_low} must lie in (0, 1]: a distance below ratio 1")

    @property
    def formula(self) -> str:
        """The loss, in one line."""
        return (
            f"L = W max(-A r, -A clip(r, 1 - {self.eps_low:g}, (1 + {self.eps_high:g}) rho / W)), "
            f"W = min(rho, {self.cap:g})"
        )

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"], batch_info: BatchInfo = NO_INFO
    ) -> TokenLoss:
        return quantized_clip(
            log_ratio(logprobs, on="staleness"),
            stopped_log_ratio(logprobs, on="mismatch"),
            advantages,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            cap=self.cap,
        )
