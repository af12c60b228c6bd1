"""`Automaton`: what a policy remembers of the tokens so far, when that is one of few states.

A policy over long sequences can be written down if the next token depends on the context only
through such a state. Rewards are functions of the last one, so an automaton also says what can be
rewarded. `product` runs two side by side: one to steer the policy, one to score the sequence.

Where a sequence starts is drawn from `start`: a law over prompts, each prompt a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError


@dataclass(frozen=True)
class Automaton:
    """A finite summary of contexts, shared by all policies that are compared.

    Args:
        next_state: state after reading token v in state s.
        start: law of the state before the first token; one state per kind of prompt.

    Raises: `ShapeError` if the two disagree about the number of states; `BadValueError` for a
        vocabulary of one token, a state that does not exist, or a start that is not a law.
    """

    next_state: Int[Tensor, "s v"]
    start: Float[Tensor, " n"]

    def __post_init__(self) -> None:
        if self.start.shape != self.next_state.shape[:1]:
            raise ShapeError(
                f"start has {self.start.shape[0]} states and next_state has "
                f"{self.next_state.shape[0]}; give one probability per state"
            )
        if self.vocab < 2:
            raise BadValueError("vocabulary of 1 token: every policy is the same; give at least 2")
        if not bool(((self.next_state >= 0) & (self.next_state < self.states)).all()):
            raise BadValueError(
                f"next_state leaves the {self.states} states; its entries are states, "
                f"0 to {self.states - 1}"
            )
        if not bool((self.start >= 0).all()) or not abs(float(self.start.sum()) - 1) < 1e-9:
            raise BadValueError("start is not a law; it must be non-negative and sum to 1")

    @property
    def states(self) -> int:
        """Number of states, s."""
        return self.next_state.shape[0]

    @property
    def vocab(self) -> int:
        """Tokens in the vocabulary, v."""
        return self.next_state.shape[1]

    def kernel(self, weights: Float[Tensor, "p t s v"]) -> Float[Tensor, "p t s s"]:
        """Weights of tokens gathered into weights of moves from state to state.

        With probabilities of tokens, the transition matrix. Gradient: to `weights`.
        """
        moves = weights.new_zeros(*weights.shape[:3], self.states)
        return moves.scatter_add(3, self.next_state.expand(weights.shape), weights)

    def final_states(self, start: int, horizon: int) -> Int[Tensor, " y"]:
        """The last state of each of the v^horizon sequences, numbered in base v."""
        states = torch.tensor([start])
        for _ in range(horizon):
            states = self.next_state[states].flatten()
        return states

    def same_as(self, other: Automaton) -> bool:
        """Whether both summarize contexts alike."""
        return torch.equal(self.next_state, other.next_state) and torch.equal(
            self.start, other.start
        )


def memoryless(vocab: int) -> Automaton:
    """One state: tokens are independent of each other."""
    return _from_zero(torch.zeros(1, vocab, dtype=torch.long))


def counter(vocab: int, modulus: int, *, token: int = 1) -> Automaton:
    """How often `token` has occurred, modulo `modulus`; with 2, its parity.

    Example:
        >>> counter(2, 3).next_state.tolist()
        [[0, 1], [1, 2], [2, 0]]
    """
    states = torch.arange(modulus)[:, None].repeat(1, vocab)
    states[:, token] = (states[:, token] + 1) % modulus
    return _from_zero(states)


def last_tokens(vocab: int, count: int = 1) -> Automaton:
    """The last `count` tokens, numbered in base v; before the first token, all zeros."""
    states = torch.arange(vocab**count)[:, None]
    return _from_zero((states * vocab + torch.arange(vocab)) % vocab**count)


def walk(vocab: int, limit: int) -> Automaton:
    """A majority: token 0 steps down, the last token up, between -limit and limit.

    State `limit` is the middle, where it starts; tokens in between stay.
    """
    step = torch.zeros(vocab, dtype=torch.long)
    step[0], step[-1] = -1, 1
    states = torch.arange(2 * limit + 1)[:, None]
    start = torch.zeros(2 * limit + 1, dtype=torch.float64)
    start[limit] = 1
    return Automaton((states + step).clamp(0, 2 * limit), start)


def pattern(vocab: int, tokens: Sequence[int]) -> Automaton:
    """Whether the tokens have occurred in a row; state k has seen the first k, the last is kept.

    Example:
        >>> pattern(2, [1, 1, 0]).next_state.tolist()
        [[0, 1], [0, 2], [3, 2], [3, 3]]
    """
    word = list(tokens)

    def after(seen: int, token: int) -> int:
        if seen == len(word):
            return seen
        read = [*word[:seen], token]
        return next(k for k in range(len(read), -1, -1) if word[:k] == read[len(read) - k :])

    states = [[after(k, v) for v in range(vocab)] for k in range(len(word) + 1)]
    return _from_zero(torch.tensor(states))


def product(first: Automaton, second: Automaton) -> Automaton:
    """Both at once: state (a, b) is `a * second.states + b`.

    Raises: `ShapeError` if they read different vocabularies.
    """
    if first.vocab != second.vocab:
        raise ShapeError(f"vocabularies of {first.vocab} and {second.vocab} tokens; use one")
    both = first.next_state[:, None] * second.states + second.next_state[None]
    start = first.start[:, None] * second.start[None]
    return Automaton(both.flatten(0, 1), start.flatten())


def prompts(automaton: Automaton, laws: Sequence[float]) -> Automaton:
    """The same automaton once per prompt, chosen with these probabilities.

    State (prompt, a) is `prompt * automaton.states + a`; the prompt is remembered throughout.
    """
    share = torch.tensor(list(laws), dtype=torch.float64)
    shifts = torch.arange(len(share))[:, None, None] * automaton.states
    start = (share[:, None] * automaton.start).flatten()
    return Automaton((automaton.next_state + shifts).flatten(0, 1), start)


def random_automaton(states: int, vocab: int, *, generator: torch.Generator) -> Automaton:
    """Any token leads anywhere; starts in state 0."""
    return _from_zero(torch.randint(states, (states, vocab), generator=generator))


def _from_zero(next_state: Int[Tensor, "s v"]) -> Automaton:
    start = torch.zeros(len(next_state), dtype=torch.float64)
    start[0] = 1
    return Automaton(next_state, start)
