"""`Credit`: everything an estimator may look at, and the statistics that several of them share.

Two rules hold for every estimator. A group statistic is taken over the sequences that *count*: all
that were sampled, or, on request, those that a gate kept. A statistic of the whole batch goes
through `total`, so that many processes get the numbers of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.errors import EvidenceError
from offdrift.segments import Segments

WAYS_OUT = {
    "keep": "give keep= (which sequences the gate kept), or baseline_over='sampled'",
    "values": "give values= (the critic's value at each token), or choose an estimator without a "
    "critic, such as 'grpo'",
    "greedy_rewards": "give greedy_rewards= (reward of a greedy response to the same prompt), or "
    "choose 'rloo', whose baseline is the sampled siblings",
    "components": "give components= (one column of rewards per component), or choose 'grpo', which "
    "takes their sum as rewards",
    "logp_old": "score the tokens with the training engine and give logp_old=, or choose 'opo', "
    "which takes a sequence's length as its variance",
    "sum_pi_squared": "have the scoring pass return the sum of squared probabilities and give "
    "sum_pi_squared=, or choose 'opo', which takes a sequence's length as its variance",
    "entropy": "have the scoring pass return the policy's entropy at every token and give entropy=, or "
    "choose 'grpo', which gives groups without a spread of rewards no advantage",
}


def identity(x: Tensor) -> Tensor:
    """The sum over all processes where there is one process."""
    return x


@dataclass(frozen=True, kw_only=True)
class Credit:
    """Evidence of how good the sequences of one batch were.

    Floats are float64 and carry no gradient. `advantages` makes one and checks it; the constructor
    checks nothing. Fields are what `advantages` says of its arguments of the same names.

    Args:
        counted: which sequences enter statistics; None for all.
    """

    rewards: Float[Tensor, " r"]
    segments: Segments
    counted: Bool[Tensor, " b"] | None = None
    gamma: float | int = 1.0
    lam: float | int = 1.0
    values: Float[Tensor, " n"] | None = None
    greedy_rewards: Float[Tensor, " b"] | None = None
    components: Float[Tensor, "b k"] | None = None
    component_weights: Float[Tensor, " k"] | None = None
    logp_old: Float[Tensor, " n"] | None = None
    sum_pi_squared: Float[Tensor, " n"] | None = None
    weight: Float[Tensor, " n"] | None = None
    grad_norm_squared: Float[Tensor, " b"] | None = None
    position: Int[Tensor, " n"] | None = None
    entropy: Float[Tensor, " n"] | None = None
    right_from: float | int = 1.0
    zvp_alpha: float | int = 0.1
    total: Callable[[Tensor], Tensor] = identity

    @property
    def by_sequence(self) -> bool:
        """Whether rewards are one per sequence; if there are as many tokens, they are."""
        return len(self.rewards) == len(self.segments)

    @cached_property
    def scores(self) -> Float[Tensor, " b"]:
        """Reward of each sequence: given, or the sum over its tokens."""
        return self.rewards if self.by_sequence else self.segments.sum(self.rewards)

    @cached_property
    def token_rewards(self) -> Float[Tensor, " n"]:
        """Reward of each token: given, or the sequence's on its last token and 0 before."""
        if not self.by_sequence:
            return self.rewards
        full = self.segments.lengths > 0
        last = self.segments.cu_seqlens[1:][full] - 1
        return self.rewards.new_zeros(self.segments.num_tokens).index_put((last,), self.rewards[full])

    @cached_property
    def counts(self) -> Float[Tensor, " b"]:
        """1 for a sequence that enters statistics, else 0."""
        if self.counted is None:
            return torch.ones_like(self.scores)
        return self.counted.to(self.scores.dtype)

    @cached_property
    def siblings(self) -> Float[Tensor, " b"]:
        """Number of sequences of the same group that count, itself included if it does."""
        groups = self.segments.groups
        return groups.spread(groups.sum(self.counts))

    def require(self, name: str, estimator: str) -> Tensor:
        """The input of that name, or `EvidenceError` with the way out."""
        value = getattr(self, name)
        if value is None:
            raise EvidenceError(
                f"advantage estimator {estimator!r} needs {name}, which was not given; " + WAYS_OUT[name]
            )
        return value


def group_mean(x: Float[Tensor, " b"], credit: Credit) -> Float[Tensor, " b"]:
    """Mean over the counted siblings of each sequence; 0 unless at least two count."""
    groups = credit.segments.groups
    total = groups.spread(groups.sum(x * credit.counts))
    return (total / credit.siblings.clamp(min=1)).where(credit.siblings > 1, 0.0)


def group_std(x: Float[Tensor, " b"], credit: Credit) -> Float[Tensor, " b"]:
    """Standard deviation (n - 1) over counted siblings; 1 unless at least two count."""
    groups = credit.segments.groups
    squares = (x - group_mean(x, credit)).square() * credit.counts
    variance = groups.spread(groups.sum(squares)) / (credit.siblings - 1).clamp(min=1)
    return variance.sqrt().where(credit.siblings > 1, 1.0)


def group_max(x: Float[Tensor, " b"], credit: Credit) -> Float[Tensor, " b"]:
    """Largest value among the counted siblings of each sequence; -inf if none counts."""
    groups = credit.segments.groups
    x = x.where(credit.counts > 0, -torch.inf)
    lowest = x.new_full((len(groups),), -torch.inf)
    return groups.spread(lowest.scatter_reduce(0, groups.index, x, "amax"))


def without_spread(x: Float[Tensor, " b"], credit: Credit) -> Bool[Tensor, " b"]:
    """Mark sequences with at least two siblings that count, where all that count have the same value."""
    return (group_max(x, credit) == -group_max(-x, credit)) & (credit.siblings > 1)


def best_and_second(x: Float[Tensor, " b"], credit: Credit) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Largest and second largest value among counted siblings, equal on a tie; -inf if missing."""
    groups = credit.segments.groups
    best = group_max(x, credit)
    is_best = (x == best) & (credit.counts > 0)
    tied = groups.spread(groups.sum(is_best.to(x.dtype))) > 1
    return best, best.where(tied, group_max(x.where(~is_best, -torch.inf), credit))


def whiten(x: Float[Tensor, " n"], credit: Credit) -> Float[Tensor, " n"]:
    """(x - mean) / sqrt(var + 1e-8) over the counted tokens of all processes, var with n - 1.

    Zeros if fewer than two tokens count, where a variance has no meaning.
    """
    counts = credit.segments.spread(credit.counts)
    n, summed = credit.total(torch.stack([counts.sum(), (x * counts).sum()]))
    centered = x - summed / n.clamp(min=1)
    squares = credit.total((centered.square() * counts).sum())
    variance = squares / (n - 1).clamp(min=1)
    return (centered * (variance + 1e-8).rsqrt()).where(n > 1, 0.0)
