"""Baselines of least variance: siblings weighted by how much their gradient would vary.

A baseline may be any number that does not depend on the sampled token. The one of least variance is
the mean of the returns weighted by the squared norm of the score gradient, squared importance
weights included. Only their proportions within a group matter, so they may be of any size.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from offdrift.advantages.base import Credit, best_and_second, group_max
from offdrift.advantages.token import returns_to_go
from offdrift.errors import BadValueError, EvidenceError
from offdrift.segments import Groups

EPS = 1e-8
"""Added to a sum of squared norms before dividing by it, as in verl: norms are of order 1, and so is
the largest weight of a group, or it is made so (`_of_order_one`)."""


def optimal_token_baseline(credit: Credit) -> Float[Tensor, " n"]:
    """Reward-to-go minus a baseline of its own for each column of the group. Gradient: none.

        s_t = 1 - 2 pi_old(y_t) + sum_v pi_old(v)^2    (squared norm of onehot(y_t) - pi_old)
        s_t <- s_t (W_t / min(1, max W))^2             (where `weight` is given; max of the group)
        E_{i,t} = sum_{j <= t} s_j
        B_t = sum_i G_{i,t} E_{i,t} / (sum_i E_{i,t} + 1e-8),  A_{i,t} = G_{i,t} - B_t

    A column is a token's place in the original response, `position`: after a tool's output,
    unrelated tokens meet (`tir_optimal_token_baseline` counts trainable tokens instead). A group in
    which one sequence counts has no baseline, and neither has the one longest sequence at columns that
    the second longest is too short for (lengths in trainable tokens), where it would be its own.

    Raises: `EvidenceError` without `logp_old` or `sum_pi_squared`.

    Example:
        >>> import torch
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([1, 1], group_ids=torch.tensor([7, 7]))
        >>> logp_old, squares = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.5])
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="optimal_token_baseline",
        ...               logp_old=logp_old, sum_pi_squared=squares)
        tensor([ 0.5000, -0.5000])

    Reference: OTB, arXiv:2602.07078.
    """
    column = credit.segments.position if credit.position is None else credit.position
    return _apart_from_column(credit, column, "optimal_token_baseline")


def tir_optimal_token_baseline(credit: Credit) -> Float[Tensor, " n"]:
    """`optimal_token_baseline` with the t-th trainable token as column. Gradient: none.

    For tool-integrated reasoning, where masked tool output stands between trainable tokens; `position` is not read.

    Reference: OTB, arXiv:2602.07078, as in verl's variant for several turns.
    """
    return _apart_from_column(credit, credit.segments.position, "tir_optimal_token_baseline")


def opob(credit: Credit) -> Float[Tensor, " n"]:
    """Distance from the off-policy baseline of least variance. Gradient: none.

        b = sum_i w_i^2 |g_i|^2 R_i / (sum_i w_i^2 |g_i|^2 + 1e-8),  A_i = R_i - b

    w is the sequence's `weight`, 1 unless given, relative to the largest of its group where that is
    below 1. |g|^2 is `grad_norm_squared` or else its
    stand-in, the sum over the sequence of the s_t of `optimal_token_baseline`, which leaves out what
    lies before the logits. A lone sequence is its own baseline and learns nothing.

    Raises: `EvidenceError` without gradient norms and without what their stand-in needs;
        `BadValueError` naming a sequence whose weight is not one number.

    Example:
        >>> import torch
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([1, 1], group_ids=torch.tensor([7, 7]))
        >>> norms = torch.tensor([3.0, 1.0])
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="opob", grad_norm_squared=norms)
        tensor([ 0.2500, -0.7500])

    Reference: VCPO, arXiv:2602.17616.
    """
    groups, importance = credit.segments.groups, _gradient_norm(credit) * credit.counts
    if credit.weight is not None:
        weight = _sequence_weight(credit)
        importance = importance * (weight / _of_order_one(weight, credit)).square()
    baseline = groups.sum(importance * credit.scores) / (groups.sum(importance) + EPS)
    return credit.segments.spread(credit.scores - groups.spread(baseline))


def _apart_from_column(credit: Credit, column: Int[Tensor, " n"], estimator: str) -> Float[Tensor, " n"]:
    segments = credit.segments
    norm = _score_norm(credit, estimator)
    if credit.weight is not None:
        unit = _of_order_one(segments.max(credit.weight), credit)
        norm = norm * (credit.weight / segments.spread(unit)).square()
    energy = segments.prefix_sum(norm) * segments.spread(credit.counts)
    returns = returns_to_go(credit.token_rewards, segments)
    # One cell per group and column: a reduction over sequences that share both.
    width = int(column.max()) + 1 if len(column) else 1
    cells = Groups.from_ids(segments.spread(segments.groups.index) * width + column)
    baseline = cells.sum(returns * energy) / (cells.sum(energy) + EPS)
    # Tokens of a group's one longest sequence at columns that no other reaches by its length.
    lengths = segments.lengths.double()
    longest, second = best_and_second(lengths, credit)
    alone = (lengths == longest) & (longest > second) & (credit.counts > 0)
    tail = segments.spread(alone) & (column >= segments.spread(second))
    has_baseline = segments.spread(credit.siblings > 1) & ~tail
    return returns - cells.spread(baseline).where(has_baseline, 0.0)


def _score_norm(credit: Credit, estimator: str) -> Float[Tensor, " n"]:
    """Squared norm of onehot(y) - pi_old: what the logits' gradient would be."""
    logp_old = credit.require("logp_old", estimator)
    return 1 - 2 * logp_old.exp() + credit.require("sum_pi_squared", estimator)


def _gradient_norm(credit: Credit) -> Float[Tensor, " b"]:
    if credit.grad_norm_squared is not None:
        return credit.grad_norm_squared
    missing = [name for name in ("logp_old", "sum_pi_squared") if getattr(credit, name) is None]
    if missing:
        raise EvidenceError(
            "advantage estimator 'opob' needs grad_norm_squared, or logp_old and sum_pi_squared "
            f"for its stand-in, and {', '.join(missing)} was not given; give grad_norm_squared= "
            "(one per sequence), score the tokens for the stand-in, or choose 'opo'"
        )
    return credit.segments.sum(_score_norm(credit, "opob"))


def _of_order_one(weight: Float[Tensor, " b"], credit: Credit) -> Float[Tensor, " b"]:
    """The largest weight of a sequence's counted siblings where it lies in (0, 1), else 1."""
    largest = group_max(weight, credit)
    return largest.where((largest > 0) & (largest < 1), 1.0)


def _sequence_weight(credit: Credit) -> Float[Tensor, " b"]:
    assert credit.weight is not None
    low, high = credit.segments.min(credit.weight), credit.segments.max(credit.weight)
    uneven = high - low > 1e-6 * high.abs()
    if bool(uneven.any()):
        i = int(uneven.nonzero()[0])
        raise BadValueError(
            f"weight of sequence {i} runs from {low[i].item():g} to {high[i].item():g}; opob takes "
            "one weight per sequence: give the sequence's weight on each of its tokens"
        )
    return high
