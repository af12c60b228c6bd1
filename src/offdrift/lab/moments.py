"""Exact mean and variance of a gradient estimator at any horizon, by recursion.

For estimators of the form

    g = A(y) M(y) sum_t f(s_t, y_t) h(s_t, y_t),    M = prod_t m(s_t, y_t),    h = onehot(y) - pi(. | s)

where `f` is a weight of each token (none, a ratio, a truncated one), and `m` multiplies over the
sequence (the ratio, for sequence importance sampling; 1 or 0, for a gate on the worst token). The
recursion carries, for every state, the mass of `M^k`, the sum and the sum of squares so far:

    n' = n K,    x' = x K + n (K o f h),    q' = q K + 2 x.(K o f h) + n (K o f^2 |h|^2)

with K the transition weights under mu times m (mean) or m^2 (second moment).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.lab.enumerate import token_kl
from offdrift.lab.recursions import markov_returns
from offdrift.lab.testbeds import Testbed

Table = Float[Tensor, "s v"]


class Moments(NamedTuple):
    """Of the gradient of one sequence."""

    mean: Float[Tensor, " d"]
    variance: float
    """Trace of the covariance."""


def exact_moments(bed: Testbed, each: Table, product: Table) -> Moments:
    """Mean and variance of `A M sum_t f h`.

    Args:
        each: f, weight of a token in a state.
        product: m, factor of a token in a state.
    """
    mu, pi = bed.rollout.tokens[0, 0], bed.current.tokens[0, 0]
    states, vocab = mu.shape
    advantage = bed.rewards - markov_returns(bed.rollout, bed.rollout, bed.rewards[None]).rollout
    push = torch.zeros(states, vocab, states * vocab, dtype=torch.float64)  # f h, flat over cells
    cells = torch.arange(states * vocab).view(states, vocab)
    push.scatter_(2, cells[..., None], 1.0)
    own = torch.zeros(states, states * vocab, dtype=torch.float64)
    own.scatter_(1, cells, pi)
    push = each[..., None] * (push - own[:, None])

    first = _carried(bed, mu * product, push)
    second = _carried(bed, mu * product.square(), push)
    mean = advantage @ first[1]
    square = float(advantage.square() @ second[2])
    return Moments(mean, square - float(mean @ mean))


def _carried(bed: Testbed, weight: Table, push: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """n, x and q after the last token, per state."""
    machine, horizon = bed.rollout.automaton, bed.horizon
    states = machine.states
    to = torch.nn.functional.one_hot(machine.next_state, states).double()  # [s, v, s']
    moves = torch.einsum("sv,svz->sz", weight, to)
    pushed = torch.einsum("sv,svz,svd->szd", weight, to, push)
    squared = torch.einsum("sv,svz,svd->sz", weight, to, push.square())
    n = machine.start.clone()
    x = n.new_zeros(states, push.shape[-1])
    q = n.new_zeros(states)
    for _ in range(horizon):
        q = q @ moves + 2 * torch.einsum("sd,szd->z", x, pushed) + n @ squared
        x = moves.T @ x + torch.einsum("s,szd->zd", n, pushed)
        n = n @ moves
    return n, x, q


def known_moments(bed: Testbed) -> dict[str, Moments]:
    """The rows of the method table that have this form, with the table's thresholds."""
    mu, pi = bed.rollout.tokens[0, 0], bed.current.tokens[0, 0]
    w, one = pi / mu, torch.ones_like(mu)
    inside = (token_kl(mu, pi) <= 0.05).double()[:, None].expand_as(mu)
    forms = {
        "none": (one, one),
        "token_is": (w, one),
        "full_is": (one, w),
        "trm_max": (w, inside),
        "trm_ratio": (w, (w.log().abs() <= 0.1).double()),
    }
    return {name: exact_moments(bed, f, m) for name, (f, m) in forms.items()}
