"""The policy gradient in its two plain forms: score function (`Reinforce`, corrected by a `Weight`), and the surrogate
of the Trust Region Masking paper (`ImportanceSampled`), which differentiates the ratio to the rollout policy itself.
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
from offdrift.objectives.base import PerToken, TokenLoss
from offdrift.ratios import RatioName, log_ratio


def reinforce(logp: Float[Tensor, " n"], advantages: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Score-function loss, L_t = -A_t log pi(y_t). Gradient: to `logp`, -A_t.

    Example:
        >>> import torch
        >>> reinforce(torch.tensor([-0.5]), torch.tensor([2.0]))
        tensor([1.])

    Reference: Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    return -advantages * logp


def importance_sampled(log_ratio: Float[Tensor, " n"], advantages: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Importance-sampled surrogate, L_t = -A_t w_t with w_t = exp(log_ratio_t).

    Gradient: to `log_ratio`, -A_t w_t; zero where |log_ratio| > 20.

    Example:
        >>> import torch
        >>> importance_sampled(torch.tensor([0.0]), torch.tensor([2.0]))
        tensor([-2.])

    Reference: Li et al., Trust Region Masking, arXiv:2512.23075v5, eq. 2 and Algorithm 1, line 6.
    """
    return -advantages * ratio(log_ratio)


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """`reinforce` as an objective; contains no ratio."""

    on = None
    gradient = "score"

    @property
    def formula(self) -> str:
        return "L = -A log pi"

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        return TokenLoss(reinforce(logprobs.current, advantages))


@dataclass(frozen=True, kw_only=True)
class ImportanceSampled:
    """`importance_sampled` as an objective on the given ratio.

    Args:
        cap: L = -A min(w, cap), the one-sided cap of Logit Fusion; a capped token has no gradient.
        saturation: L = -A w / (w + saturation), the shaped ratio of LUFFY: its slope, saturation / (w + saturation)^2,
            favors tokens that the policy deems unlikely. Excludes a cap.
        pull: adds pull * (log w)^2, which neither gates nor weights touch (prime-rl's kl_tau).
    """

    on: RatioName = "full"
    cap: float | None = None
    saturation: float | None = None
    pull: float = 0.0
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_number("cap", self.cap)
        check_number("saturation", self.saturation)
        check_number("pull", self.pull)
        for name in ("cap", "saturation"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise MethodError(f"{name}={value} must be positive")
        if self.cap is not None and self.saturation is not None:
            raise MethodError(
                f"cap={self.cap} and saturation={self.saturation}: a shaped ratio stays below 1; leave out one"
            )

    @property
    def formula(self) -> str:
        w = f"ratio({self.on})"
        shape = w if self.cap is None else f"min({w}, {self.cap:g})"
        if self.saturation is not None:
            shape = f"u / (u + {self.saturation:g}), u = {w}"
        pull = f" + {self.pull:g} log({w})^2" if self.pull else ""
        return f"L = -A {shape}{pull}"

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        log_w = log_ratio(logprobs, on=self.on)
        pull = self.pull * clamped(log_w).square() if self.pull else None
        if self.saturation is not None:
            w = ratio(log_w)
            return TokenLoss(-advantages * w / (w + self.saturation), None, pull)
        if self.cap is None:
            return TokenLoss(importance_sampled(log_w, advantages), None, pull)
        w = ratio(log_w)
        capped = w > self.cap
        changed = (capped & (advantages != 0)).detach()
        return TokenLoss(-advantages * w.where(~capped, self.cap), changed, pull)
