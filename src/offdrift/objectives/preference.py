"""Preference losses: of two answers to a prompt, the better one is to become more likely than the worse one.

Which is better, their rewards say (online DPO). No importance weight is taken, and no advantage is read: a pair is as
informative whatever policy drew it, which is why the objective bears stale answers well (arXiv:2410.18252).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.errors import MethodError, check_choice, check_positive
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped
from offdrift.objectives.base import PerToken, StepPrompts, TokenLoss, prompt_ids
from offdrift.ratios import RatioName, log_ratio


def dpo(better: Float[Tensor, "*pairs"], worse: Float[Tensor, "*pairs"], *, beta: float | int) -> Tensor:
    """Loss of each pair of answers to one prompt:

        L = -log sigmoid(beta (s_better - s_worse)),   s = log pi(y) - log pi_ref(y)

    Args:
        better: s of the preferred answer, summed over its tokens, nats.
        worse: s of the other.
        beta: reward per nat: the strength of the pull to the reference policy.

    Returns: nats, one per pair.

    Gradient: -beta sigmoid(-beta (s_better - s_worse)) to `better`, its negative to `worse`.

    Example:
        >>> import torch
        >>> dpo(torch.tensor([1.0]), torch.tensor([-1.0]), beta=0.5)
        tensor([0.3133])

    Reference: Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, eq. 7.
    """
    return softplus(-beta * (better - worse))


def extremes(
    rewards: Float[Tensor, " s"], trains: Bool[Tensor, " s"], prompts: StepPrompts
) -> tuple[Bool[Tensor, " s"], Bool[Tensor, " s"]]:
    """Mark the answers that earn most and least among those to their prompt; none where all earn alike.

    Args:
        rewards: one per sequence of the step.
        trains: sequences that have a token to train on; no other is chosen.
        prompts: which of them answer the same prompt.

    Gradient: none.

    Example:
        >>> import torch
        >>> ids = torch.tensor([5, 5, 5, 8, 8])
        >>> rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0])
        >>> best, worst = extremes(rewards, torch.ones(5, dtype=torch.bool), StepPrompts.of(ids, ids))
        >>> best.tolist(), worst.tolist()
        ([True, False, False, False, False], [False, True, False, False, False])
    """
    most = prompts.spread(prompts.max(rewards.where(trains, -torch.inf)))
    least = -prompts.spread(prompts.max((-rewards).where(trains, -torch.inf)))
    differ = trains & (most > least)
    return differ & (rewards == most), differ & (rewards == least)


class Pairs(NamedTuple):
    """The pairs that the sequences of a piece are in: a row per sequence, a column per sequence of the step."""

    margin: Float[Tensor, "b s"]
    """s of the better minus s of the worse answer, nats; the gradient reaches the row's own answer alone."""
    share: Float[Tensor, "b s"]
    """1 over the pairs of the prompt; 0 where the two are no pair."""
    best: Bool[Tensor, " b"]
    """Whether the row's answer is the better one of its pairs."""
    siblings: Float[Tensor, " b"]
    """Answers to the row's prompt in the step."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """`dpo` between the best and the worst answer to each prompt; use seq_mean_token_mean.

        L_i = n/2 mean over the pairs of answer i of  -log sigmoid(beta (s_best - s_worst))

    n counts the answers to the prompt, and each of a pair carries half of its loss, so that the mean over sequences is
    the mean over prompts where all have as many answers. Where several answers earn most, or least, every one of them
    is paired, and a pair counts for one over their number: what a choice by lot would give on average. A prompt whose
    answers all earn alike has no pair and no gradient. Reads rewards, prompt groups and the reference policy, and no
    advantages. The partner of an answer is that of the whole step, in whatever piece it lies.

    At the reference policy the expected gradient is that of (beta n / 2) times the chance that a response is the best
    of n less the chance that it is the worst, both held fixed; with two answers and rewards of 0 and 1, of beta J.

    Args:
        beta: see `dpo`; 0.1 in the paper.

    Raises: `EvidenceError` when called on a batch without rewards, group ids or log-probs of the reference policy.

    Example:
        >>> Preference().formula
        'L = -log sigmoid(0.1 (s(best) - s(worst))) over the prompt, s = sum log(pi / pi_ref)'

    Reference: Guo et al., Online AI Feedback, arXiv:2402.04792; best and worst of a group: Noukhovitch et al.,
    Asynchronous RLHF, arXiv:2410.18252.
    """

    beta: float = 0.1
    needs = ("rewards",)
    needs_reference = True
    whole_prompts = True
    trained_return = "E[Pr(best of the answers | R) - Pr(worst of the answers | R)] near the reference policy"
    on = None

    def __post_init__(self) -> None:
        check_positive(self, "beta")

    @property
    def formula(self) -> str:
        return f"L = -log sigmoid({self.beta:g} (s(best) - s(worst))) over the prompt, s = sum log(pi / pi_ref)"

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Prompt id, reward and s of each sequence, and whether it has a token. Gradient: none."""
        segments = logprobs.segments
        return {
            "prompt": prompt_ids(segments),
            "reward": batch_info.required("rewards").detach().double(),
            "s": segments.sum((logprobs.current - logprobs.reference).detach().double()),
            "trains": segments.lengths > 0,
        }

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        pairs = self.pairs(logprobs, batch_info)
        losses = dpo(pairs.margin, torch.zeros_like(pairs.margin), beta=self.beta)
        # Half of the value, as the partner carries the other half, and all of the gradient, which is of one's own s.
        per_sequence = pairs.siblings * (pairs.share * (losses - losses.detach() / 2)).sum(1)
        return TokenLoss(logprobs.segments.spread(per_sequence.to(logprobs.current.dtype)))

    def pairs(self, logprobs: LogProbs, batch_info: BatchInfo) -> Pairs:
        """The pairs of this piece's sequences, float64. Gradient: to `logprobs.logp`."""
        segments = logprobs.segments
        prompts, observed = StepPrompts.seen(self, logprobs, batch_info)
        rewards, trains = observed["reward"], observed["trains"]
        best, worst = extremes(rewards, trains, prompts)
        count = prompts.here(prompts.sum(best.double()) * prompts.sum(worst.double()))
        siblings = prompts.here(prompts.sum(trains.double()))
        rewards_here = batch_info.required("rewards").double()
        trained = segments.lengths > 0
        is_best, is_worst = (
            trained & (rewards_here == prompts.here(prompts.max(rewards.where(x, -torch.inf)))) for x in (best, worst)
        )
        alike = prompts.mine[:, None] == prompts.index
        pair = alike & (is_best[:, None] & worst | is_worst[:, None] & best)
        share = pair.double() / count.clamp(min=1)[:, None]
        s = segments.sum((logprobs.current - logprobs.reference).double())
        margin = torch.where(is_best, 1.0, -1.0)[:, None] * (s[:, None] - observed["s"])
        return Pairs(margin.where(pair, 0.0), share, is_best, siblings)

    def sums(self, logprobs: LogProbs, batch_info: BatchInfo) -> dict[str, Tensor]:
        """Sums behind the metrics `preference/...`; they add over pieces. Gradient: none."""
        with torch.no_grad():
            margin, share, best, siblings = self.pairs(logprobs, batch_info)
            share = share * best[:, None]
            trained = logprobs.segments.lengths > 0
            return {
                "preference/prompts": (trained / siblings.clamp(min=1)).sum(),
                "preference/pairs": share.sum(),
                "preference/right": (share * (margin > 0)).sum(),
                "preference/margin": self.beta * (share * margin).sum(),
            }


# REAL: right and wrong answers as two classes. A push is bounded and falls off once its answer is on its side.


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
    trained_return = "E[n / (1 + n_same)] for right answers less that for wrong ones, n_same the answers of its class"

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
