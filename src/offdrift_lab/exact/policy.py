"""Tabular policies, many at a time, and exact divergences and returns of pairs of them.

A policy over sequences of `horizon` tokens from a vocabulary of `v` is one row of probabilities per
context: 1 context at the first position, v at the second, v^2 at the third. On such a tree every
expectation is a finite sum, so nothing has to be estimated. The leading dimension `p` holds that many
policies side by side. Contexts are numbered in base v: the context after tokens (a, b) is `a * v + b`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError


@dataclass(frozen=True)
class TabularPolicy:
    """Probabilities of the next token at every context, for `p` policies.

    Args:
        levels: for position t = 1 .. T the probabilities `[p, v^(t-1), v]`, float64.

    Raises: `ShapeError` if the levels do not form a tree; `BadValueError` if a row is not a
        distribution.

    Example:
        >>> policy = TabularPolicy.independent([[0.4, 0.6], [0.7, 0.3]])
        >>> policy.law()
        tensor([[0.2800, 0.1200, 0.4200, 0.1800]], dtype=torch.float64)
    """

    levels: tuple[Float[Tensor, "p _ v"], ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise ShapeError("levels is empty; a sequence has at least 1 token")
        pairs, _, vocab = self.levels[0].shape
        if vocab < 2:
            raise BadValueError("vocabulary of 1 token: every policy is the same; give at least 2")
        for t, level in enumerate(self.levels):
            if level.shape != (pairs, vocab**t, vocab):
                raise ShapeError(
                    f"levels[{t}] has shape {tuple(level.shape)}, expected "
                    f"{(pairs, vocab**t, vocab)}: one row of probabilities per context"
                )
            refuse_rows(f"levels[{t}]", level)

    @staticmethod
    def independent(tokens: Sequence[Sequence[float]]) -> TabularPolicy:
        """One policy whose token at each position ignores the tokens before it.

        Args:
            tokens: for each position, the probability of each token.
        """
        rows = torch.tensor(tokens, dtype=torch.float64)
        vocab = rows.shape[1]
        return TabularPolicy(tuple(r.expand(1, vocab**t, vocab) for t, r in enumerate(rows)))

    @property
    def pairs(self) -> int:
        """Policies side by side, p."""
        return self.levels[0].shape[0]

    @property
    def vocab(self) -> int:
        """Tokens in the vocabulary, v."""
        return self.levels[0].shape[2]

    @property
    def horizon(self) -> int:
        """Tokens in a sequence, T."""
        return len(self.levels)

    def context_laws(self) -> tuple[Float[Tensor, "p _"], ...]:
        """d_t, the probability of every context, for t = 1 .. T + 1; the last are sequences.

        Gradient: to `levels`.
        """
        laws = [self.levels[0].new_ones(self.pairs, 1)]
        for level in self.levels:
            laws.append((laws[-1].unsqueeze(-1) * level).flatten(1))
        return tuple(laws)

    def law(self) -> Float[Tensor, "p y"]:
        """Probability of every whole sequence, y = v^T of them. Gradient: to `levels`."""
        return self.context_laws()[-1]

    def with_level(self, t: int, other: TabularPolicy) -> TabularPolicy:
        """This policy, with position `t` (from 0) drawn by `other`."""
        return TabularPolicy((*self.levels[:t], other.levels[t], *self.levels[t + 1 :]))


def random_policies(
    pairs: int, *, vocab: int, horizon: int, spread: float = 1.0, generator: torch.Generator
) -> TabularPolicy:
    """Policies with independent normal logits at every context.

    Args:
        spread: standard deviation of the logits; 0 is uniform, 5 nearly deterministic.
    """
    shapes = [(pairs, vocab**t, vocab) for t in range(horizon)]
    logits = (_normal(shape, generator) * spread for shape in shapes)
    return TabularPolicy(tuple(rows.softmax(-1) for rows in logits))


def perturbed(
    policy: TabularPolicy, *, scale: float | Float[Tensor, " p"], touched: float = 1.0, generator: torch.Generator
) -> TabularPolicy:
    """The policy with normal noise on its logits, at some of its contexts.

    Args:
        scale: standard deviation of the noise, nats; one number, or one per policy.
        touched: probability that a context drifts; small values give the sparse drift of
            routing flips.
    """

    size = torch.as_tensor(scale, dtype=torch.float64).reshape(-1, 1, 1)

    def drifted(level: Float[Tensor, "p c v"]) -> Float[Tensor, "p c v"]:
        chosen = torch.rand((*level.shape[:2], 1), generator=generator) < touched
        noise = _normal(tuple(level.shape), generator) * size
        return (level.log() + noise).softmax(-1).where(chosen, level)

    return TabularPolicy(tuple(drifted(level) for level in policy.levels))


def tilted_pair(eps: float, *, horizon: int) -> tuple[TabularPolicy, TabularPolicy]:
    """A fair coin at every position, and the same coin with TV `eps` more heads at each.

    The drift of a constant bias: per token as small as TV allows, and all in one direction. At two
    tokens, with the right reward, it attains the sharp constants of the error bounds.

    Returns: rollout and current policy.

    Raises: `BadValueError` unless 0 <= eps <= 1/2.
    """
    if not 0 <= eps <= 0.5:
        raise BadValueError(f"eps = {eps}; a fair coin can be tilted by a TV of 0 to 0.5")
    fair = TabularPolicy.independent([[0.5, 0.5]] * horizon)
    return fair, TabularPolicy.independent([[0.5 - eps, 0.5 + eps]] * horizon)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "p c v"]:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# Exact quantities of two policies: `mu` draws, `pi` is to be judged, rewards sit on whole sequences, and
#
#     L'(pi) = sum_t (J(mu with position t drawn by pi) - J(mu)),
#
# which is E_mu[R sum_t (w_t - 1)] where mu can draw whatever pi can, and its limit where it cannot. One pass down the
# tree, without differences of large numbers: with d, e the probability of a context and how much likelier pi makes it,
# and F the weight of its reward in the error,
#
#     d' = d mu,    e' = e pi + d (pi - mu),    F' = F mu + e (pi - mu).
#
# Reference: Li et al., arXiv:2512.23075v5, Definitions 2.2-2.3, eqs. 3 and 9.


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
    return torch.where(x.abs() < _NEAR, first * k3(x), change - first * torch.log1p(x)).sum(-1)


def k3(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """x - log(1 + x) >= 0 of x = ratio - 1, nats, to every digit; infinite at a ratio of 0."""
    near = x.abs() < _NEAR
    series = torch.zeros_like(x)
    for n in range(_TERMS, 1, -1):  # x^2/2 - x^3/3 + x^4/4 - ...
        series = 1 / n - x.where(near, 0.0) * series
    return torch.where(near, x * x * series, x - torch.log1p(x))


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
    """Weights of the reward of each sequence in the gain, pi(y) - mu(y), and in the error.

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


def error_weights(rollout: TabularPolicy, current: TabularPolicy) -> Float[Tensor, "p y"]:
    """Weight of the reward of each sequence in the error: Error = sum_y weight(y) R(y).

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
    refuse_rewards(rewards, within)
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


def refuse_rows(name: str, rows: Float[Tensor, "*_ v"]) -> None:
    """Refuse rows of probabilities that are no distributions."""
    rows = rows.detach()
    if not bool((rows >= 0).all()) or not bool(((rows.sum(-1) - 1).abs() < 1e-9).all()):
        raise BadValueError(
            f"{name} holds a row that is not a distribution; every row must be non-negative and sum to 1"
        )


def refuse_rewards(rewards: Float[Tensor, "*_"], within: tuple[float | int, float | int]) -> None:
    """Refuse rewards that leave `within`."""
    smallest, largest = float(rewards.detach().min()), float(rewards.detach().max())
    if not (within[0] - 1e-9 <= smallest and largest <= within[1] + 1e-9):
        raise BadValueError(
            f"rewards go from {smallest:g} to {largest:g}, outside [{within[0]:g}, {within[1]:g}]; "
            "pass their range as within=, or rescale them"
        )


def _mean(law: Float[Tensor, "p c"], x: Float[Tensor, "p c"]) -> Float[Tensor, " p"]:
    """Mean over contexts; one that never occurs does not count, even if x is infinite there."""
    return (law * x.where(law > 0, 0.0)).sum(1)


def _same_tree(rollout: TabularPolicy, current: TabularPolicy) -> None:
    trees = [(p.pairs, p.vocab, p.horizon) for p in (rollout, current)]
    if trees[0] != trees[1]:
        raise ShapeError(
            f"rollout and current policy differ in (pairs, vocabulary, horizon): {trees[0]} and {trees[1]}"
        )
