"""What is exactly true about two tabular policies: every sequence is visited, none is sampled.

The rollout policy `mu` draws, the current policy `pi` is to be judged, rewards sit on whole
sequences. The surrogate is written without ratios,

    L'(pi) = E_mu[R sum_t (w_t - 1)] = sum_t (J(mu with position t drawn by pi) - J(mu)),

so that it also holds where the rollout policy cannot draw a token (top-k, top-p).

Reference: Li et al., arXiv:2512.23075v5, Definitions 2.2-2.3, eqs. 3 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import ShapeError
from offdrift.lab.policy import TabularPolicy


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
    """KL(first || second) of each row, nats; infinite where second lacks a token of first's."""
    return (torch.xlogy(first, first) - torch.xlogy(first, second)).sum(-1).clamp(min=0)


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
        kl_max=torch.cat(kl, dim=1).amax(1),
        tv_max=torch.cat(tv, dim=1).amax(1),
        kl_seq=torch.stack([_mean(law, x) for law, x in zip(laws, kl)]).sum(0),
        tv_seq=token_tv(laws[-1], current.law()),
        mean_tv=torch.stack([_mean(law, x) for law, x in zip(laws, tv)], dim=1),
    )


def surrogate_weights(rollout: TabularPolicy, current: TabularPolicy) -> Float[Tensor, "p y"]:
    """How much the reward of each sequence counts in L': mu(y) sum_t (w_t - 1).

    Gradient: to both policies' levels.
    """
    _same_tree(rollout, current)
    swapped = [rollout.with_level(t, current).law() for t in range(rollout.horizon)]
    return torch.stack(swapped).sum(0) - rollout.horizon * rollout.law()


def error_weights(rollout: TabularPolicy, current: TabularPolicy) -> Float[Tensor, "p y"]:
    """How much the reward of each sequence counts in the error: Error = sum_y weight(y) R(y).

    Gradient: to both policies' levels.
    """
    return current.law() - rollout.law() - surrogate_weights(rollout, current)


def returns(
    rollout: TabularPolicy, current: TabularPolicy, rewards: Float[Tensor, "p y"]
) -> Returns:
    """Expected rewards, surrogate and error, by enumeration.

    Args:
        rewards: reward of every sequence, numbered in base v.

    Gradient: to both policies' levels and the rewards.

    Raises: `ShapeError` if policies or rewards live on different trees.
    """
    expected = (rollout.pairs, rollout.vocab**rollout.horizon)
    if tuple(rewards.shape) != expected:
        raise ShapeError(
            f"rewards has shape {tuple(rewards.shape)}, expected {expected}: "
            "one reward for every sequence of every pair"
        )
    j_rollout = (rollout.law() * rewards).sum(1)
    j_current = (current.law() * rewards).sum(1)
    surrogate = (surrogate_weights(rollout, current) * rewards).sum(1)
    return Returns(j_rollout, j_current, surrogate, j_current - j_rollout - surrogate)


def worst_rewards(rollout: TabularPolicy, current: TabularPolicy) -> Float[Tensor, "p y"]:
    """The rewards in [0, 1] with the largest error: 1 where a reward adds to it, else 0.

    The error is linear in the rewards and its weights sum to 0, so the largest |Error| over all
    rewards in [0, 1] is the sum of the positive weights.
    """
    return (error_weights(rollout, current) > 0).double()


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
