"""GMPO: clip every token's log-ratio first, then take the geometric mean of the sequence.

An outlier is limited before it enters the mean, so that it cannot pull the whole sequence out of
the trust region, as it does where the mean is clipped (GSPO).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped, ratio
from offdrift.objectives.base import TokenLoss
from offdrift.ratios import RatioName, log_ratio
from offdrift.segments import Segments


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

    Args:
        on: `staleness`, or `full` in bypass mode.

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
        for name in ("eps_low", "eps_high"):
            value = getattr(self, name)
            check_number(name, value)
            if value is None or not value > 0:
                raise MethodError(f"{name}={value} must be positive: a distance from 0, in nats")

    @property
    def formula(self) -> str:
        """The loss, in one line."""
        return (
            f"L = -A exp(mean_t m_t), m = log ratio({self.on}), <= {self.eps_high:g} where A > 0, "
            f">= {-self.eps_low:g} where A < 0"
        )

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"], batch_info: BatchInfo = NO_INFO
    ) -> TokenLoss:
        l = log_ratio(logprobs, on=self.on)  # noqa: E741
        segments = logprobs.segments
        return geometric_clip(l, advantages, segments, eps_low=self.eps_low, eps_high=self.eps_high)
