"""SAPO: a sigmoid in place of the clip; the push fades smoothly as a token's ratio leaves 1."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.errors import MethodError, check_choice, check_number
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio
from offdrift.objectives.base import TokenLoss
from offdrift.ratios import RatioName, log_ratio


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
        on: `staleness`, or `full` in bypass mode.
        tau_positive: see `sapo`.
        tau_negative: see `sapo`; larger than tau_positive, because a negative push raises the
            probability of every other token.

    Example:
        >>> Soft().formula
        'L = -A (4 / tau) sigmoid(tau (r - 1)), r = ratio(staleness), tau = 1 where A > 0 else 1.05'

    Reference: SAPO, arXiv:2511.20347.
    """

    on: RatioName = "staleness"
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        for name in ("tau_positive", "tau_negative"):
            check_number(name, getattr(self, name))
            if not getattr(self, name) > 0:
                raise MethodError(f"{name}={getattr(self, name)} must be positive; larger is harder")

    @property
    def formula(self) -> str:
        """The loss, in one line."""
        return (
            f"L = -A (4 / tau) sigmoid(tau (r - 1)), r = ratio({self.on}), "
            f"tau = {self.tau_positive:g} where A > 0 else {self.tau_negative:g}"
        )

    def __call__(
        self, logprobs: LogProbs, advantages: Float[Tensor, " n"], batch_info: BatchInfo = NO_INFO
    ) -> TokenLoss:
        taus = {"tau_positive": self.tau_positive, "tau_negative": self.tau_negative}
        return TokenLoss(sapo(log_ratio(logprobs, on=self.on), advantages, **taus))
