"""`TabularPolicy`: autoregressive policies small enough to write down, many at a time.

A policy over sequences of `horizon` tokens from a vocabulary of `v` is one row of probabilities per
context: 1 context at the first position, v at the second, v^2 at the third. On such a tree every
expectation is a finite sum (`offdrift.lab.enumerate`), so nothing has to be estimated. The leading
dimension `p` holds that many policies side by side.

Contexts are numbered in base v: the context after tokens (a, b) is `a * v + b`.
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
            if not bool((level >= 0).all()) or not bool(((level.sum(-1) - 1).abs() < 1e-9).all()):
                raise BadValueError(
                    f"levels[{t}] holds a row that is not a distribution; every row must be "
                    "non-negative and sum to 1"
                )

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

    def select(self, rows: slice) -> TabularPolicy:
        """Some of the policies."""
        return TabularPolicy(tuple(level[rows] for level in self.levels))


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
    policy: TabularPolicy,
    *,
    scale: float | Float[Tensor, " p"],
    touched: float = 1.0,
    generator: torch.Generator,
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
