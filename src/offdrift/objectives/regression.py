"""Objectives that regress instead of pushing: squared log-ratios, no clip, no importance weight.

`Quadratic` (DRO) pushes and pulls every token back in proportion to its log-ratio. `Regression`
(OAPL) fits the log-ratio of the sequence to the advantage that the optimal policy would have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import check_choice, check_positive
from offdrift.logprobs import LogProbs
from offdrift.objectives.base import PerToken, StepPrompts, TokenLoss, prompt_ids
from offdrift.ratios import RatioName, log_ratio


def dro(
    log_ratio: Float[Tensor, " n"], logp: Float[Tensor, " n"], advantages: Float[Tensor, " n"], *, beta: float | int
) -> Float[Tensor, " n"]:
    """Push and quadratic pull, L = -(A log pi - (beta / 2) log_ratio^2), per token.

    Args:
        log_ratio: staleness, nats; not clamped.
        logp: log pi of the same tokens.
        advantages: signed, any scale.
        beta: pull per nat of log-ratio, in units of the advantage.

    Gradient: to `logp`, -A, and to `log_ratio`, beta log_ratio; the pull remains where A = 0.

    Example:
        >>> import torch
        >>> dro(torch.tensor([0.2]), torch.tensor([-0.5]), torch.tensor([1.0]), beta=0.1)
        tensor([0.5020])

    Reference: Richemond et al., DRO, arXiv:2405.19107; this token form: verl's `dro`.
    """
    return -(advantages * logp - beta / 2 * log_ratio.square())


def oapl(log_ratio: Float[Tensor, " b"], advantages: Float[Tensor, " b"], *, beta: float | int) -> Float[Tensor, " b"]:
    """Squared residual of each sequence, L_i = (beta s_i - A_i)^2 with s_i its log-ratio.

    Args:
        log_ratio: full, summed over the sequence, nats; not clamped.
        advantages: R - V*, with `soft_value`.
        beta: reward per nat of the sequence's log-ratio.

    Gradient: to `log_ratio`, 2 beta (beta s - A).

    Example:
        >>> import torch
        >>> oapl(torch.tensor([2.0]), torch.tensor([0.5]), beta=1.0)
        tensor([2.2500])

    Reference: OAPL, arXiv:2602.19362.
    """
    return (beta * log_ratio - advantages).square()


def soft_value(rewards: Float[Tensor, " s"], prompts: StepPrompts, *, beta: float | int) -> Float[Tensor, " s"]:
    """Optimal value of each prompt, V* = beta log mean_j exp(R_j / beta), by log-sum-exp.

    Between the mean reward (beta large) and the best (beta small).

    Args:
        rewards: one per sequence of the step.
        prompts: which of them answer the same prompt.
        beta: in reward units.

    Returns: one value per slot of `prompts`. Gradient: to `rewards`.

    Example:
        >>> import torch
        >>> ids = torch.tensor([5, 5, 5, 5])
        >>> soft_value(torch.tensor([1.0, 0.0, 0.0, 1.0]), StepPrompts.of(ids, ids), beta=1.0)[0]
        tensor(0.6201)

    Reference: OAPL, arXiv:2602.19362.
    """
    best = prompts.max(rewards)
    mean = prompts.mean(((rewards - prompts.spread(best)) / beta).exp())
    # A prompt's own best contributes 1, so that only slots without a prompt are below 1 / s.
    return best + beta * mean.clamp(min=1 / max(len(rewards), 1)).log()


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """`dro` on the given ratio of each token.

    Gates and weights act on push and pull alike, as in verl: together they are one square.

    Args:
        beta: see `dro`. No value is published; 0.1 is this library's.

    Example:
        >>> Quadratic(beta=0.05).formula
        'L = -(A log pi - 0.05 / 2 (log ratio(staleness))^2)'
    """

    on: RatioName = "staleness"
    beta: float = 0.1
    gradient = "score"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        check_positive(self, "beta", hint="; without a pull use Reinforce()")

    @property
    def formula(self) -> str:
        return f"L = -(A log pi - {self.beta:g} / 2 (log ratio({self.on}))^2)"

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        log_r = log_ratio(logprobs, on=self.on)
        return TokenLoss(dro(log_r, logprobs.current, advantages, beta=self.beta))


@dataclass(frozen=True, kw_only=True)
class Regression:
    """`oapl`: every token gets its sequence's squared residual; use seq_mean_token_mean.

        L_i = (beta s_i - (R_i - V*))^2,   s_i = sum_t log w_t

    Reads rewards and prompt groups, and no advantages. A prompt with one answer has V* = R: its
    log-ratio is pulled to 0.

    Args:
        beta_value: see `soft_value`.
        beta: see `oapl`; 1e-3 in the authors' documentation, 1 in a recipe for agents.
        unit: `geometric` takes the mean over tokens for s_i, as one implementation does.

    Raises: `EvidenceError` when called on a batch without rewards or group ids.

    Reference: OAPL, arXiv:2602.19362.
    """

    beta_value: float = 1.0
    beta: float = 1e-3
    unit: Literal["sequence", "geometric"] = "sequence"
    gradient = "unit"
    needs = ("rewards",)
    whole_prompts = True

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, ("sequence", "geometric"))
        check_positive(self, "beta_value", "beta")

    @property
    def on(self) -> RatioName:
        """The ratio it contains."""
        return "full"

    @property
    def formula(self) -> str:
        total, b = "sum" if self.unit == "sequence" else "mean", self.beta_value
        return (
            f"L = ({self.beta:g} {total} log ratio(full) - (R - V))^2, "
            f"V = {b:g} log mean exp(R / {b:g}) over the prompt"
        )

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Prompt id and reward of each sequence. Gradient: none."""
        return {"prompt": prompt_ids(logprobs.segments), "reward": batch_info.required("rewards").detach().double()}

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        segments = logprobs.segments
        log_w = log_ratio(logprobs, on="full")
        total = segments.sum(log_w) if self.unit == "sequence" else segments.mean(log_w)
        target = self.targets(logprobs, batch_info).to(total.dtype)
        return TokenLoss(segments.spread(oapl(total, target, beta=self.beta)))

    def targets(self, logprobs: LogProbs, batch_info: BatchInfo) -> Float[Tensor, " b"]:
        """R - V* of each sequence, float64. Gradient: none."""
        with torch.no_grad():
            prompts, observed = StepPrompts.seen(self, logprobs, batch_info)
            values = prompts.here(soft_value(observed["reward"], prompts, beta=self.beta_value))
            return batch_info.required("rewards").double() - values
