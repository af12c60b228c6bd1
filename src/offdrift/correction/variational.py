"""VESPO's weight: a smooth kernel of the sequence ratio, whose tails vanish on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_FACTS, Facts
from offdrift.correction.weight import Weighted
from offdrift.errors import MethodError, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import LOG_RATIO_LIMIT, clamped
from offdrift.ratios import RatioName, stopped_log_ratio

LOG_FLOOR = math.log(1e-8)
VANISHED = 1e-3
"""A kernel below this counts as limited: the sequence is dropped in all but name."""


@dataclass(frozen=True, kw_only=True)
class VariationalWeight:
    """phi(l) = exp(lam + k l - lam e^l), phi(0) = 1, largest at e^l = k / lam.

        l = clamp(sum_t clamp(log r_t, +-20) + sum_t log clamp(rho_t, 1e-8, cap), log 1e-8, 20)

    with (k, lam) by the sign of the advantage; zero counts as positive. A NaN kernel is 0.

    Args:
        cap: truncation of the mismatch ratio per token.
        k_positive, lam_positive: the kernel where the advantage is not negative.
        k_negative, lam_negative: the kernel where it is.
        anchor: "old" as above; "rollout" takes l = sum_t log w_t and needs no old policy.

    Gradient: none.

    Example:
        >>> VariationalWeight().kernel(torch.tensor(0.5), torch.tensor(1.0))
        tensor(0.3882)

    Reference: VESPO, arXiv:2602.10693, and its official code.
    """

    cap: float = 2.0
    k_positive: float = 2.0
    lam_positive: float = 3.0
    k_negative: float = 3.0
    lam_negative: float = 2.0
    anchor: Literal["old", "rollout"] = "old"

    unit = "sequence"
    advantage: str = "any"

    def __post_init__(self) -> None:
        for name in ("cap", "k_positive", "lam_positive", "k_negative", "lam_negative"):
            check_number(name, getattr(self, name))
            if not getattr(self, name) > 0:
                raise MethodError(f"{name}={getattr(self, name)} must be positive")

    @property
    def on(self) -> RatioName:
        """The ratio it corrects for."""
        return "full"

    @property
    def needs_old(self) -> bool:
        """Whether it reads the old policy."""
        return self.anchor == "old"

    @property
    def formula(self) -> str:
        """The weight, in one line."""
        up, down = (self.k_positive, self.lam_positive), (self.k_negative, self.lam_negative)
        return (
            "weight exp(lam + k l - lam e^l), l = log sequence ratio(full), "
            f"(k, lam) = {up} where A >= 0 and {down} where A < 0"
        )

    def kernel(
        self, log_ratio: Float[Tensor, "*s"], advantages: Float[Tensor, "*s"]
    ) -> Float[Tensor, "*s"]:
        """phi of a sequence's log-ratio under the sign of its advantage."""
        up = advantages >= 0
        k = torch.full_like(log_ratio, self.k_positive).where(up, self.k_negative)
        lam = torch.full_like(log_ratio, self.lam_positive).where(up, self.lam_negative)
        return torch.nan_to_num((lam + k * log_ratio - lam * log_ratio.exp()).exp(), nan=0.0)

    def __call__(
        self,
        logprobs: LogProbs,
        advantages: Float[Tensor, " n"] | None = None,
        facts: Facts = NO_FACTS,
    ) -> Weighted:
        """The kernel of every sequence, given to its tokens; limited where it nearly vanishes."""
        if advantages is None:
            raise MethodError(
                "VariationalWeight depends on the sign of the advantage; give advantages"
            )
        with torch.no_grad():
            weight = self.kernel(logprobs.segments.spread(self._total(logprobs)), advantages)
            return Weighted(weight, weight < VANISHED)

    def _total(self, logprobs: LogProbs) -> Float[Tensor, " b"]:
        segments = logprobs.segments
        if self.anchor == "rollout":
            total = segments.sum(clamped(stopped_log_ratio(logprobs, on="full")))
        else:
            staleness = segments.sum(clamped(stopped_log_ratio(logprobs, on="staleness")))
            mismatch = stopped_log_ratio(logprobs, on="mismatch")
            total = staleness + segments.sum(mismatch.clamp(LOG_FLOOR, math.log(self.cap)))
        return total.clamp(LOG_FLOOR, LOG_RATIO_LIMIT)
