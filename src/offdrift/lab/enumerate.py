"""What is exactly true about two tabular policies: every sequence is visited, none is sampled.

The rollout policy `mu` draws, the current policy `pi` is to be judged, rewards sit on whole
sequences. The surrogate is written without ratios,

    L'(pi) = sum_t (J(mu with position t drawn by pi) - J(mu)).

That is E_mu[R sum_t (w_t - 1)] where the rollout policy can draw whatever the current one can. Where
it cannot (top-k, top-p) it is its limit, and what a batch measures is smaller, by the reward of what
mu never draws.

Everything is carried down the tree once. Small drift is not found as a difference of large numbers:
with d, e the probability of a context and how much likelier the current policy makes it, and F the
weight of its reward in the error,

    d' = d mu,    e' = e pi + d (pi - mu),    F' = F mu + e (pi - mu),

so an error of second order in the drift keeps its digits. Time and memory grow with p v^T: about
ten float64 arrays of that size, so 10^6 sequences take 0.1 GB for one pair; take many pairs in
slices (`TabularPolicy.select`).

Reference: Li et al., arXiv:2512.23075v5, Definitions 2.2-2.3, eqs. 3 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift.lab.policy import TabularPolicy

_NEAR, _TERMS = 1e-2, 10
"""Below this |x|, x - log(1 + x) is its power series: 2 x^9 / 11 is under 2^-52."""


@dataclass(frozen=True)
class Divergences:
    """Exact divergences of `p` pairs of policies: what the error bounds take."""

    kl_max: Float[Tensor, " p"]
    """delta: maximum over all contexts of KL(rollout || current), nats."""
    tv_max: Float[Tensor, " p"]
    """eps: maximum over all contexts of TV."""
    kl_seq: Float[Tensor, " p"]
    """KL(rollout || current) of whole sequences, nats."""
    tv_seq: Float[Tensor, " p"]
    """TV of whole sequences."""
    mean_tv: Float[Tensor, "p t"]
    """Dbar_t: mean TV under the rollout policy at each position."""


@dataclass(frozen=True)
class Returns:
    """Exact expected rewards of `p` pairs of policies; error = gain - surrogate."""

    rollout: Float[Tensor, " p"]
    """J(mu)."""
    current: Float[Tensor, " p"]
    """J(pi)."""
    surrogate: Float[Tensor, " p"]
    """L'(pi)."""
    error: Float[Tensor, " p"]
    """J(pi) - J(mu) - L'(pi)."""


def token_kl(first: Float[Tensor, "*s v"], second: Float[Tensor, "*s v"]) -> Float[Tensor, "*s"]:
    """KL(first || second) of each row, nats; infinite where second lacks a token of first's.

        sum_v first (x - log(1 + x)),   x = (second - first) / first

    The added x sums to 0 and makes every term positive: a small KL keeps its digits.
    """
    change = second - first
    x = change / first.clamp(min=torch.finfo(first.dtype).tiny)
    near = x.abs() < _NEAR
    series = torch.zeros_like(x)
    for n in range(_TERMS, 1, -1):  # x^2/2 - x^3/3 + x^4/4 - ...
        series = 1 / n - x.where(near, 0.0) * series
    terms = first * x * x * series
    return torch.where(near, terms, change - first * torch.log1p(x)).sum(-1)


def token_tv(first: Float[Tensor, "*s v"], second: Float[Tensor, "*s v"]) -> Float[Tensor, "*s"]:
    """TV of each row, half the L1 distance."""
    return (first - second).abs().sum(-1) / 2


def divergences(rollout: TabularPolicy, current: TabularPolicy) -> Divergences:
    """Every divergence the error bounds take, by enumeration.

    Raises: `ShapeError` if the policies live on different trees.

    Example:
        >>> mu = TabularPolicy.independent([[0.4, 0.6], [0.7, 0.3]])
        >>> pi = TabularPolicy.independent([[0.5, 0.5], [0.6, 0.4]])
        >>> divergences(mu, pi).tv_seq
        tensor([0.1200], dtype=torch.float64)
    """
    _same_tree(rollout, current)
    levels = list(zip(rollout.levels, current.levels, strict=True))
    kl = [token_kl(mu, pi) for mu, pi in levels]
    tv = [token_tv(mu, pi) for mu, pi in levels]
    laws = rollout.context_laws()
    return Divergences(
        kl_max=torch.stack([x.amax(1) for x in kl]).amax(0),
        tv_max=torch.stack([x.amax(1) for x in tv]).amax(0),
        kl_seq=torch.stack([_mean(law, x) for law, x in zip(laws, kl)]).sum(0),
        tv_seq=weights_by_sequence(rollout, current)[0].abs().sum(1) / 2,
        mean_tv=torch.stack([_mean(law, x) for law, x in zip(laws, tv)], dim=1),
    )


def over_prompts(each: Divergences, laws: Float[Tensor, " n"]) -> Divergences:
    """Divergences of pairs that answer several prompts, drawn with probabilities `laws`.

    Means are means over prompts; the maxima are over all contexts of all prompts.

    Args:
        each: of every pair on every prompt, the prompts of a pair next to each other.
    """
    shape = (-1, laws.shape[0])
    mean_tv = each.mean_tv.unflatten(0, shape)
    return Divergences(
        kl_max=each.kl_max.unflatten(0, shape).amax(1),
        tv_max=each.tv_max.unflatten(0, shape).amax(1),
        kl_seq=each.kl_seq.unflatten(0, shape) @ laws,
        tv_seq=each.tv_seq.unflatten(0, shape) @ laws,
        mean_tv=(mean_tv * laws[:, None]).sum(1),
    )


def weights_by_sequence(
    rollout: TabularPolicy, current: TabularPolicy
) -> tuple[Float[Tensor, "p y"], Float[Tensor, "p y"]]:
    """How much the reward of each sequence counts in the gain, pi(y) - mu(y), and in the error.

    Gradient: to both policies' levels.
    """
    _same_tree(rollout, current)
    law = rollout.levels[0].new_ones(rollout.pairs, 1)
    shift, error = torch.zeros_like(law), torch.zeros_like(law)
    for mu, pi in zip(rollout.levels, current.levels, strict=True):
        change = pi - mu
        d, e, f = law[..., None], shift[..., None], error[..., None]
        error = (f * mu + e * change).flatten(1)
        shift = (e * pi + d * change).flatten(1)
        law = (d * mu).flatten(1)
    return shift, error


def surrogate_weights(rollout: TabularPolicy, current: TabularPolicy) -> Float[Tensor, "p y"]:
    """How much the reward of each sequence counts in L': mu(y) sum_t (w_t - 1).

    Gradient: to both policies' levels.
    """
    shift, error = weights_by_sequence(rollout, current)
    return shift - error


def error_weights(rollout: TabularPolicy, current: TabularPolicy) -> Float[Tensor, "p y"]:
    """How much the reward of each sequence counts in the error: Error = sum_y weight(y) R(y).

    Gradient: to both policies' levels.
    """
    return weights_by_sequence(rollout, current)[1]


def returns(
    rollout: TabularPolicy,
    current: TabularPolicy,
    rewards: Float[Tensor, "p y"],
    *,
    within: tuple[float | int, float | int] = (0, 1),
) -> Returns:
    """Expected rewards, surrogate and error, by enumeration.

    Args:
        rewards: reward of every sequence, numbered in base v.
        within: smallest and largest reward there can be; bounds scale with their difference.

    Gradient: to both policies' levels and the rewards.

    Raises: `ShapeError` if policies or rewards live on different trees; `BadValueError` for a
        reward outside `within`.
    """
    expected = (rollout.pairs, rollout.vocab**rollout.horizon)
    if tuple(rewards.shape) != expected:
        raise ShapeError(
            f"rewards has shape {tuple(rewards.shape)}, expected {expected}: "
            "one reward for every sequence of every pair"
        )
    refuse_rewards(rewards, rewards, within)
    shift, weights = weights_by_sequence(rollout, current)
    j_rollout = (rollout.law() * rewards).sum(1)
    gain, error = (shift * rewards).sum(1), (weights * rewards).sum(1)
    return Returns(j_rollout, j_rollout + gain, gain - error, error)


def worst_rewards(rollout: TabularPolicy, current: TabularPolicy) -> Float[Tensor, "p y"]:
    """The rewards in [0, 1] with the largest error: 1 where a reward adds to it, else 0.

    The error is linear in the rewards and its weights sum to 0, so the largest |Error| over all
    rewards in [0, 1] is the sum of the positive weights.
    """
    return (error_weights(rollout, current) > 0).double()


def refuse_rewards(
    low: Float[Tensor, "*_"], high: Float[Tensor, "*_"], within: tuple[float | int, float | int]
) -> None:
    """Refuse rewards from `low` to `high` that leave `within`."""
    smallest, largest = float(low.detach().min()), float(high.detach().max())
    if not (within[0] - 1e-9 <= smallest and largest <= within[1] + 1e-9):
        raise BadValueError(
            f"rewards go from {smallest:g} to {largest:g}, outside [{within[0]:g}, {within[1]:g}]; "
            "say within= what they lie, or rescale them"
        )


def _mean(law: Float[Tensor, "p c"], x: Float[Tensor, "p c"]) -> Float[Tensor, " p"]:
    """Mean over contexts; one that never occurs does not count, even if x is infinite there."""
    return (law * x.where(law > 0, 0.0)).sum(1)


def _same_tree(rollout: TabularPolicy, current: TabularPolicy) -> None:
    trees = [(p.pairs, p.vocab, p.horizon) for p in (rollout, current)]
    if trees[0] != trees[1]:
        raise ShapeError(
            "rollout and current policy differ in (pairs, vocabulary, horizon): "
            f"{trees[0]} and {trees[1]}"
        )
