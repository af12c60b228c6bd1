"""Estimators of a token's own return: GAE, discounted reward-to-go, a greedy baseline.

Masked tokens (a tool's output) were dropped when the batch was packed, so that the next token is the next
trainable one: nothing is discounted across them and no value is read there.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.advantages.base import Credit, whiten
from offdrift.segments import Segments


def returns_to_go(rewards: Float[Tensor, " n"], segments: Segments, *, gamma: float | int = 1.0) -> Float[Tensor, " n"]:
    """Discounted sum of the rewards from each token to its sequence's end. Gradient: none.

        G_t = r_t + gamma G_{t+1}

    At gamma = 1 one prefix sum; else a doubling scan, log2(longest sequence) vector steps.

    Args:
        rewards: per token, float64 for full accuracy.
        segments: sequences.
        gamma: discount per token, in [0, 1].

    Example:
        >>> s = Segments.from_lengths([3, 1])
        >>> returns_to_go(torch.tensor([0.0, 0.0, 1.0, 2.0]), s, gamma=0.5)
        tensor([0.2500, 0.5000, 1.0000, 2.0000])
    """
    y = rewards.detach()
    if gamma == 1:
        return segments.spread(segments.sum(y)) - segments.prefix_sum(y) + y
    reach, longest = 1, segments.longest
    while reach < longest:
        # y_t so far holds `reach` terms; the next `reach` are y_{t + reach}, if still inside.
        further = y[reach:].where(segments.position[reach:] >= reach, 0.0)
        y = torch.cat([y[:-reach] + gamma**reach * further, y[-reach:]])
        reach *= 2
    return y


def generalized_advantage(
    rewards: Float[Tensor, " n"],
    values: Float[Tensor, " n"],
    segments: Segments,
    *,
    gamma: float | int = 1.0,
    lam: float | int = 1.0,
) -> Float[Tensor, " n"]:
    """GAE before whitening; the critic's target is this plus `values`. Gradient: none.

        delta_t = r_t + gamma V_{t+1} - V_t   with V = 0 after the last token
        a_t = delta_t + gamma lam a_{t+1}

    Args:
        rewards: per token.
        values: the critic's value at each token, in reward units.
        segments: sequences.
        gamma: discount per token, in [0, 1].
        lam: weight of longer returns, in [0, 1]; 1 is the return minus the value.

    Example:
        >>> s = Segments.from_lengths([2])
        >>> generalized_advantage(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.75]), s, lam=0.5)
        tensor([0.3750, 0.2500])

    Reference: arXiv:1506.02438, eq. 16.
    """
    values = values.detach()
    following = torch.cat([values, values.new_zeros(1)])[1:]
    inside = segments.position + 1 < segments.spread(segments.lengths)
    delta = rewards.detach() + gamma * following.where(inside, 0.0) - values
    return returns_to_go(delta, segments, gamma=gamma * lam)


def gae(credit: Credit) -> Float[Tensor, " n"]:
    """Generalized advantage estimation with a critic, whitened over all tokens. Gradient: none.

        a_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}),  A = whitened a

    Raises: `EvidenceError` without `values`.

    Example:
        >>> import offdrift as od
        >>> s, values = od.Segments.from_lengths([1, 1]), torch.tensor([0.5, 0.5])
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="gae", values=values)
        tensor([ 0.7071, -0.7071])

    Reference: arXiv:1506.02438, eq. 16.
    """
    values = credit.require("values", "gae")
    raw = generalized_advantage(credit.token_rewards, values, credit.segments, gamma=credit.gamma, lam=credit.lam)
    return whiten(raw, credit)


def reinforce_plus_plus(credit: Credit) -> Float[Tensor, " n"]:
    """Discounted reward-to-go, whitened over all tokens. Gradient: none.

        G_t = r_t + gamma G_{t+1},  A = whitened G

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([1, 1])
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="reinforce_plus_plus")
        tensor([ 0.7071, -0.7071])

    Reference: REINFORCE++, arXiv:2501.03262.
    """
    returns = returns_to_go(credit.token_rewards, credit.segments, gamma=credit.gamma)
    return whiten(returns, credit)


def remax(credit: Credit) -> Float[Tensor, " n"]:
    """Reward-to-go minus the reward of a greedy response to the same prompt. Gradient: none.

        A_t = G_t - R_greedy   with G not discounted

    Raises: `EvidenceError` without `greedy_rewards`.

    Example:
        >>> import offdrift as od
        >>> s, greedy = od.Segments.from_lengths([2]), torch.tensor([0.25])
        >>> od.advantages(torch.tensor([1.0]), s, how="remax", greedy_rewards=greedy)
        tensor([0.7500, 0.7500])

    Reference: ReMax, arXiv:2310.10505.
    """
    greedy = credit.require("greedy_rewards", "remax")
    return returns_to_go(credit.token_rewards, credit.segments) - credit.segments.spread(greedy)
