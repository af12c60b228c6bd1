"""Exact divergences and returns of two Markov policies, by recursion over positions.

The same quantities as `offdrift.lab.policy`, without visiting sequences. Small drift is not
computed as a difference of large numbers: with e_t = d_t^pi - d_t^mu and F_t the error's weights,

    e_{t+1} = e_t pi_t + d_t (pi_t - mu_t)        shift of the contexts
    F_{t+1} = F_t mu_t + e_t (pi_t - mu_t)        Error = sum_s F_{T+1}(s) R(s)

so the error, of second order in the drift, keeps its digits however small it is. The Hellinger
distance is a recursion of non-negative terms for the same reason.

Reference: Li et al., arXiv:2512.23075v5, Definitions 2.2-2.3, eqs. 3 and 9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import ShapeError
from offdrift.lab.markov import MarkovPolicy, backward
from offdrift.lab.policy import Returns, refuse_rewards, token_kl, token_tv


@dataclass(frozen=True)
class MarkovDivergences:
    """Exact divergences of `p` pairs of Markov policies; TV of sequences as an interval."""

    kl_max: Float[Tensor, " p"]
    """delta: maximum of KL(rollout || current) over states either policy reaches, nats."""
    tv_max: Float[Tensor, " p"]
    """eps: maximum of TV over the same states."""
    mean_kl: Float[Tensor, "p t"]
    """Mean KL under the rollout policy at each position, nats."""
    mean_tv: Float[Tensor, "p t"]
    """Dbar_t: mean TV under the rollout policy at each position."""
    kl_seq: Float[Tensor, " p"]
    """KL(rollout || current) of whole sequences, nats."""
    hellinger: Float[Tensor, " p"]
    """Squared Hellinger distance of whole sequences, 1 - E_rollout[sqrt(w)]."""
    tv_seq_low: Float[Tensor, " p"]
    """At most the TV of whole sequences: TV of the last states, or the squared Hellinger."""
    tv_seq_high: Float[Tensor, " p"]
    """At least it: min(1, sum_t Dbar_t, sqrt(kl_seq / 2), sqrt(h (2 - h))) with h Hellinger's."""


def markov_divergences(rollout: MarkovPolicy, current: MarkovPolicy) -> MarkovDivergences:
    """Every divergence the error bounds take, by recursion.

    Over several prompts (`Automaton.start`) means are means over prompts, and maxima maxima.

    Raises: `ShapeError` if the policies differ in pairs, horizon or automaton.

    Example:
        >>> from offdrift.lab.markov import memoryless
        >>> a, b = (MarkovPolicy(memoryless(2), torch.tensor([[[[x, 1 - x]]]], dtype=torch.float64),
        ...         horizon=1000) for x in (0.5, 0.51))
        >>> d = markov_divergences(a, b)
        >>> round(float(d.kl_seq), 4), round(float(d.tv_seq_high), 4)
        (0.2, 0.3085)
    """
    _same_tree(rollout, current)
    kl, tv = token_kl(rollout.tokens, current.tokens), token_tv(rollout.tokens, current.tokens)
    laws, shift, _ = _together(rollout, current)
    reached = rollout.reached()
    either = torch.maximum(reached, current.reached())[:, :-1] > 0
    mean_kl = _mean(laws[:, :-1], kl, reached[:, :-1])
    mean_tv = _mean(laws[:, :-1], tv, reached[:, :-1])
    kl_seq, hellinger = mean_kl.sum(1), squared_hellinger(rollout, current)
    routes = [mean_tv.sum(1), (kl_seq / 2).sqrt(), (hellinger * (2 - hellinger)).sqrt()]
    last = shift[:, -1].abs().sum(1) / 2
    return MarkovDivergences(
        kl_max=torch.where(either, kl, 0.0).amax((1, 2)),
        tv_max=torch.where(either, tv, 0.0).amax((1, 2)),
        mean_kl=mean_kl,
        mean_tv=mean_tv,
        kl_seq=kl_seq,
        hellinger=hellinger,
        tv_seq_low=torch.maximum(last, hellinger),
        tv_seq_high=torch.stack(routes).amin(0).clamp(max=1),
    )


def markov_returns(
    rollout: MarkovPolicy,
    current: MarkovPolicy,
    rewards: Float[Tensor, "#p s"],
    token_rewards: Float[Tensor, "#p #t s v"] | None = None,
    *,
    within: tuple[float | int, float | int] = (0, 1),
) -> Returns:
    """Expected rewards, surrogate and error, by recursion.

    Args:
        rewards: reward of a sequence by its last state.
        token_rewards: what each token adds to it.
        within: smallest and largest reward a sequence can have; bounds scale with their difference.

    Gradient: to both policies' tokens and the rewards.

    Raises: `ShapeError` for policies of different pairs, horizon or automaton; `BadValueError` if
        some sequence has a reward outside `within`.
    """
    _same_tree(rollout, current)
    refuse_rewards(*_extremes(rollout, rewards, token_rewards), within)
    machine, horizon = rollout.automaton, rollout.horizon
    moved = current.tokens - rollout.tokens
    final = rewards.expand(rollout.pairs, -1)
    each = torch.zeros(1, 1, 1, 1) if token_rewards is None else token_rewards
    own = (rollout.tokens * each).sum(-1).expand(-1, horizon, -1)
    values = backward(machine.kernel(rollout.tokens), horizon, final=final, source=own)
    # The advantage of one token by the current policy, the rest by the rollout policy: g_t.
    gain = (machine.kernel(moved) @ values[:, 1:].unsqueeze(-1)).squeeze(-1)
    gain = gain + (moved * each).sum(-1)
    j_rollout = (machine.start * values[:, 0]).sum(1)
    laws, shift, _ = _together(rollout, current)
    surrogate = (laws[:, :-1] * gain).sum((1, 2))
    error = (shift[:, :-1] * gain).sum((1, 2))
    return Returns(j_rollout, j_rollout + surrogate + error, surrogate, error)


def state_error_weights(rollout: MarkovPolicy, current: MarkovPolicy) -> Float[Tensor, "p s"]:
    """How much the reward of each last state counts in the error: Error = sum_s weight(s) R(s).

    Gradient: to both policies' tokens.
    """
    return _together(rollout, current)[2][:, -1]


def worst_state_rewards(rollout: MarkovPolicy, current: MarkovPolicy) -> Float[Tensor, "p s"]:
    """Among rewards of the last state in [0, 1], those with the largest error."""
    return (state_error_weights(rollout, current) > 0).double()


def squared_hellinger(rollout: MarkovPolicy, current: MarkovPolicy) -> Float[Tensor, " p"]:
    """1 - E_rollout[sqrt(w)] of whole sequences; h <= TV <= sqrt(h (2 - h)).

    By h_t(s) = h(s) + sum_v sqrt(mu pi) h_{t+1}(next), averaged over the start: terms that only add.
    """
    _same_tree(rollout, current)
    mu, pi, machine = rollout.tokens, current.tokens, rollout.automaton
    row = ((mu.sqrt() - pi.sqrt()).square().sum(-1) / 2).expand(-1, rollout.horizon, -1)
    final = row.new_zeros(rollout.pairs, rollout.states)
    values = backward(machine.kernel((mu * pi).sqrt()), rollout.horizon, final=final, source=row)
    return (machine.start * values[:, 0]).sum(1)


def return_gradient(policy: MarkovPolicy, rewards: Float[Tensor, "#p s"]) -> Float[Tensor, "p t s v"]:
    """The gradient of J with respect to the logits, of the shape of `policy.tokens`.

        dJ / dlogit_t(v | s) = d_t(s) pi(v | s) (Q_t(s, v) - V_t(s)),

    summed over positions if the policy is the same at all of them.
    """
    machine = policy.automaton
    final = rewards.expand(policy.pairs, -1)
    values = backward(machine.kernel(policy.tokens), policy.horizon, final=final)
    after = values[:, 1:][:, :, machine.next_state]
    advantage = after - values[:, :-1, :, None]
    each = policy.laws()[:, :-1, :, None] * policy.tokens * advantage
    return each if policy.tokens.shape[1] > 1 else each.sum(1, keepdim=True)


def _together(
    rollout: MarkovPolicy, current: MarkovPolicy
) -> tuple[Float[Tensor, "p t1 s"], Float[Tensor, "p t1 s"], Float[Tensor, "p t1 s"]]:
    """d, e and F of every state before every position, carried along side by side.

    With pi = mu + (pi - mu): x mu + mixed x (pi - mu), mixed as the equations above say.
    """
    _same_tree(rollout, current)
    machine = rollout.automaton
    mu, change = machine.kernel(rollout.tokens), machine.kernel(current.tokens - rollout.tokens)
    kernel = torch.cat([mu.expand(change.shape), change], dim=-1)
    mixed = mu.new_tensor([[0, 0, 0], [1, 1, 0], [0, 1, 0]])
    now = mu.new_zeros(3, machine.states)
    now[0] = machine.start
    rows = [now.expand(rollout.pairs, -1, -1)]
    for t in range(rollout.horizon):
        kept, moved = (rows[-1] @ kernel[:, t if kernel.shape[1] > 1 else 0]).chunk(2, dim=-1)
        rows.append(kept + mixed @ moved)
    laws, shift, error = torch.stack(rows, dim=2).unbind(1)
    return laws, shift, error


def _mean(
    law: Float[Tensor, "p t s"], x: Float[Tensor, "p _ s"], reached: Float[Tensor, "p t s"]
) -> Float[Tensor, "p t"]:
    """Mean over states; one that never occurs does not count, even if x is infinite there."""
    x = torch.where(reached > 0, x, 0.0)
    return torch.where(x < math.inf, law * x, math.inf).sum(-1)


def _same_tree(rollout: MarkovPolicy, current: MarkovPolicy) -> None:
    sizes = [(p.pairs, p.horizon) for p in (rollout, current)]
    if sizes[0] != sizes[1]:
        raise ShapeError(f"rollout and current policy differ in (pairs, horizon): {sizes[0]} and {sizes[1]}")
    if not rollout.automaton.same_as(current.automaton):
        raise ShapeError("rollout and current policy live on different automata; build both on the same one")


def _extremes(
    policy: MarkovPolicy, rewards: Float[Tensor, "#p s"], token_rewards: Float[Tensor, "#p #t s v"] | None
) -> tuple[Float[Tensor, "#p s"], Float[Tensor, "#p s"]]:
    """The smallest and the largest reward of any sequence, from each state."""
    low = high = rewards.detach()
    if token_rewards is not None:
        each = token_rewards.detach().expand(-1, policy.horizon, -1, -1)
        for t in reversed(range(policy.horizon)):
            low = (each[:, t] + low[:, policy.automaton.next_state]).amin(-1)
            high = (each[:, t] + high[:, policy.automaton.next_state]).amax(-1)
    return low, high
