"""REAL: the answers to a prompt as a classification, right against wrong, by how much likelier they have become.

Each class has a logistic loss over all its answers together, so that an answer's push is bounded and falls off once it
is on its side, where a ratio's grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import MethodError, check_choice, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped
from offdrift.objectives.base import PerToken, StepPrompts, TokenLoss, prompt_ids
from offdrift.ratios import RatioName, log_ratio


@dataclass(frozen=True, kw_only=True)
class Classified:
    """A logistic loss of the answers to a prompt, in two classes; use seq_mean_token_mean.

        S_i = mean_t log r_t
        L = log(1 + sum over A <= 0 of e^(S / tau)) + log(1 + sum over A > 0 of e^(-S / tau))

    Every answer to a prompt carries the prompt's loss, and the gradient of its own S times the number of answers, so
    that the mean over sequences is the mean over prompts where all have as many answers. A prompt all of whose answers
    are in one class has no loss. The advantage says on which side an answer is, and no more. The other answers are
    those of the whole step, in whatever piece they lie.

    Args:
        on: the ratio r.
        tau: nats per unit of the logit; a smaller one separates harder.

    Gradient: to `logp`; each S of the negatives has n / tau e^(S / tau) / (1 + sum), each of the positives
        -n / tau e^(-S / tau) / (1 + sum).

    Raises: `EvidenceError` when called on a batch without group ids.

    Example:
        >>> Classified(tau=1.0).formula.partition(" + log")[0]
        'L = log(1 + sum_neg e^(S / 1))'

    Reference: REAL, arXiv:2602.05630, as in ms-swift 4.6 (`loss_type="real"`), which leaves prompts of one class out of
        the sum and in the count.
    """

    on: RatioName = "staleness"
    tau: float = 0.5
    gradient = "unit"
    unit = "geometric"
    whole_prompts = True
    raises = "E[n / (1 + n_same)] for right answers less that for wrong ones, n_same the answers of its class"

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(RatioName))
        check_positive(self, "tau")

    @property
    def formula(self) -> str:
        return (
            f"L = log(1 + sum_neg e^(S / {self.tau:g})) + log(1 + sum_pos e^(-S / {self.tau:g})) over the prompt, "
            f"S = mean log ratio({self.on})"
        )

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Prompt id, S and class of each sequence, and whether it has a token. Gradient: none."""
        if advantages is None:
            raise MethodError("which answers are right depends on the advantages; give them")
        segments = logprobs.segments
        return {
            "prompt": prompt_ids(segments),
            "score": self._score(logprobs).detach(),
            "positive": segments.mean(advantages.detach()) > 0,
            "trains": segments.lengths > 0,
        }

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        segments = logprobs.segments
        prompts, seen = StepPrompts.seen(self, logprobs, batch_info, advantages)
        positive, trains = seen["positive"].bool(), seen["trains"].bool()
        signed = torch.where(positive, -seen["score"], seen["score"]) / self.tau
        classes = [prompts.sum(signed.exp().where(trains & one, 0.0)) for one in (positive, ~positive)]
        sizes = [prompts.sum((trains & one).double()) for one in (positive, ~positive)]
        both = (sizes[0] > 0) & (sizes[1] > 0)
        value = prompts.here(sum(x.log1p() for x in classes).where(both, 0.0))  # type: ignore[union-attr]
        mine = segments.mean(advantages.detach()) > 0
        total = torch.where(mine, prompts.here(classes[0]), prompts.here(classes[1]))
        score = self._score(logprobs)
        own = torch.where(mine, -score, score) / self.tau
        push = (own.detach().exp() / (1 + total) * prompts.here(sizes[0] + sizes[1])).where(prompts.here(both), 0.0)
        per_sequence = value + push * (own - own.detach())
        return TokenLoss(segments.spread(per_sequence.to(logprobs.current.dtype)))

    def _score(self, logprobs: LogProbs) -> Float[Tensor, " b"]:
        """S of every sequence, nats, float64. Gradient: to `logprobs.logp`."""
        return logprobs.segments.mean(clamped(log_ratio(logprobs, on=self.on)).double())
