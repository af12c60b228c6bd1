"""QUATRO: one KL radius for all prompts, one multiplier per prompt, solved for from its rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import MethodError, check_choice, check_number, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped
from offdrift.objectives.base import PerToken, StepPrompts, TokenLoss, prompt_ids
from offdrift.ratios import RatioName, log_ratio

BISECTIONS = 60
"""Halvings of the bracket of log lambda: enough to end at neighboring float64 numbers."""


def quatro(
    log_ratio: Float[Tensor, " n"],
    logp: Float[Tensor, " n"],
    advantages: Float[Tensor, " n"],
    *,
    multiplier: float | int | Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """Score-function loss with a signed coefficient, r = exp(log_ratio), l = log_ratio:

        L = -stop(r (A - multiplier l)) log pi

    A token that moved far enough the way its advantage points is pushed back.

    Args:
        log_ratio: staleness, nats; clamped to +-20.
        logp: log pi of the same tokens.
        advantages: R - mean of the prompt, in reward units.
        multiplier: price of a nat, in reward units; see `multipliers`.

    Gradient: to `logp` alone, -r (A - multiplier l); the pull remains where A = 0.

    Unverified: best reading of the abstract; the equation could not be found.

    Example:
        >>> import torch
        >>> quatro(torch.tensor([0.2]), torch.tensor([-0.5]), torch.tensor([0.0]), multiplier=1.0)
        tensor([-0.1221])

    Reference: QUATRO, arXiv:2602.04620.
    """
    stopped = clamped(log_ratio.detach())
    return -(stopped.exp() * (advantages - multiplier * stopped)) * logp


def tilt_kl(
    rewards: Float[Tensor, " s"], prompts: StepPrompts, *, log_multiplier: Float[Tensor, " s"]
) -> Float[Tensor, " s"]:
    """KL of each prompt's answers reweighted by exp(R / lambda) from the same answers unweighted.

        KL = sum_j q_j R_j / lambda - log mean_j exp(R_j / lambda),  q_j ~ exp(R_j / lambda)

    Args:
        rewards: one per sequence of the step; only differences within a prompt matter, and the
            largest of each prompt must be 0, so that nothing overflows.
        prompts: which of them answer the same prompt.
        log_multiplier: log lambda of each slot of `prompts`.

    Returns: nats, one per slot; falls as lambda rises. Gradient: not meant to be taken.

    Example:
        >>> import torch
        >>> ids = torch.tensor([5, 5])
        >>> kl = tilt_kl(torch.tensor([0.0, -1.0]), StepPrompts.of(ids, ids), log_multiplier=torch.zeros(2))
        >>> kl[0]
        tensor(0.1109)
    """
    x = rewards / prompts.spread(log_multiplier.exp())
    tilt = x.exp()
    mean = prompts.mean(tilt)
    # Slots without a prompt have mean 0; the smallest mean of a prompt is 1 / s.
    mean = mean.clamp(min=1 / max(len(rewards), 1))
    return prompts.mean(tilt * x) / mean - mean.log()


def multipliers(
    rewards: Float[Tensor, " s"], prompts: StepPrompts, *, radius: float | int, floor: float | int = 1e-3
) -> Float[Tensor, " s"]:
    """The multiplier of each prompt, which minimizes the dual of "stay within `radius`":

        lambda = argmin_{lambda >= floor}  lambda radius + lambda log mean_j exp(R_j / lambda)

    The derivative is radius - `tilt_kl`, so this is where the tilt's KL equals the radius; about
    sqrt(Var(R) / (2 radius)). The floor where even the whole weight on the best answers stays
    within the radius, equal rewards among them. Bisection in log lambda, all prompts at once.

    Args:
        rewards: one per sequence of the step.
        prompts: which of them answer the same prompt.
        radius: nats.
        floor: smallest lambda, in reward units.

    Returns: one per slot of `prompts`, in reward units. Gradient: none.

    Unverified: best reading.

    Example:
        >>> import torch
        >>> ids = torch.tensor([5, 5, 5, 5, 5])
        >>> rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
        >>> multipliers(rewards, StepPrompts.of(ids, ids), radius=0.02)[0]
        tensor(2.4913, dtype=torch.float64)

    Reference: QUATRO, arXiv:2602.04620.
    """
    with torch.no_grad():
        below_best = rewards - prompts.spread(prompts.max(rewards))
        # Hoeffding: the tilt's KL is at most range^2 / (8 lambda^2), so the root lies below this.
        span = prompts.max(-below_best) / math.sqrt(8 * radius)
        low, high = torch.full_like(span, math.log(floor)), span.clamp(min=floor).log()
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            outside = tilt_kl(below_best, prompts, log_multiplier=middle) > radius
            low, high = middle.where(outside, low), high.where(outside, middle)
        return high.exp()


@dataclass(frozen=True, kw_only=True)
class PromptDual:
    """`quatro` with the multiplier of each token's prompt; use advantages R - mean of the prompt.

    Unverified: best reading.

    Args:
        radius: see `multipliers`. None is published; 0.02 is this library's.
        floor: see `multipliers`.
        multiplier: the same for all prompts; then neither rewards nor groups are read. None: found.

    Raises: `EvidenceError` when called on a batch without rewards or group ids, if it needs them.

    Example:
        >>> PromptDual().formula
        'L = -stop(r (A - lambda log r)) log pi, r = ratio(staleness), lambda of the prompt for KL 0.02, at least 0.001'
    """

    on: RatioName = "staleness"
    radius: float = 0.02
    floor: float = 1e-3
    multiplier: float | None = None
    gradient = "score"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        check_positive(self, "radius", "floor")
        check_number("multiplier", self.multiplier)
        if self.multiplier is not None and self.multiplier < 0:
            raise MethodError(f"multiplier={self.multiplier} must not be negative")

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of `BatchInfo` that it reads."""
        return ("rewards",) if self.multiplier is None else ()

    @property
    def whole_prompts(self) -> bool:
        """Whether a step must hold all answers to a prompt: its multiplier is found from them."""
        return self.multiplier is None

    @property
    def formula(self) -> str:
        chosen = f"lambda of the prompt for KL {self.radius:g}, at least {self.floor:g}"
        fixed = f"lambda = {self.multiplier or 0:g}"
        return (
            f"L = -stop(r (A - lambda log r)) log pi, r = ratio({self.on}), "
            f"{chosen if self.multiplier is None else fixed}"
        )

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Prompt id and reward of each sequence; nothing if the multiplier is given."""
        if self.multiplier is not None:
            return {}
        return {"prompt": prompt_ids(logprobs.segments), "reward": batch_info.required("rewards").detach().double()}

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        price = self.multiplier
        if price is None:
            price = logprobs.segments.spread(self.prices(logprobs, batch_info)).to(advantages.dtype)
        log_r = log_ratio(logprobs, on=self.on)
        return TokenLoss(quatro(log_r, logprobs.current, advantages, multiplier=price))

    def prices(self, logprobs: LogProbs, batch_info: BatchInfo) -> Float[Tensor, " b"]:
        """The multiplier of each sequence's prompt, float64. Gradient: none."""
        prompts, observed = StepPrompts.seen(self, logprobs, batch_info)
        return prompts.here(multipliers(observed["reward"], prompts, radius=self.radius, floor=self.floor))
