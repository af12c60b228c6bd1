"""Markov policies: the next token depends on the context through one of few states.

An `Automaton` maps the tokens so far to a state; rewards are functions of the last state. `product`
runs two side by side: one to steer the policy, one to score the sequence. Prompts are initial
states, drawn from `start`. A `MarkovPolicy` holds one distribution over tokens per state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift.lab.policy import TabularPolicy


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
                f"next_state leaves the {self.states} states; its entries are states, 0 to {self.states - 1}"
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
        return torch.equal(self.next_state, other.next_state) and torch.equal(self.start, other.start)


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

    def after(matched: int, token: int) -> int:
        if matched == len(word):
            return matched
        read = [*word[:matched], token]
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


def _from_zero(next_state: Int[Tensor, "s v"]) -> Automaton:
    start = torch.zeros(len(next_state), dtype=torch.float64)
    start[0] = 1
    return Automaton(next_state, start)


# Expectations of Markov policies are recursions over positions (`offdrift.lab.recursions`), batched over
# `p` policies, so horizons in the thousands are exact too.


@dataclass(frozen=True)
class MarkovPolicy:
    """Probabilities of the next token at every state, for `p` policies.

    Args:
        automaton: how contexts are summarized.
        tokens: probabilities, float64; t = horizon, or 1: the same at every position.
        horizon: tokens in a sequence, T.

    Raises: `ShapeError` if `tokens` does not fit automaton and horizon; `BadValueError` for a
        horizon below 1 or a row that is not a distribution.

    Example:
        >>> from offdrift.lab.markov import counter
        >>> coin = torch.tensor([0.4, 0.6], dtype=torch.float64).expand(1, 1, 2, 2)
        >>> MarkovPolicy(counter(2, 2), coin, horizon=3).laws()[0, -1]  # parity of three coins
        tensor([0.4960, 0.5040], dtype=torch.float64)
    """

    automaton: Automaton
    tokens: Float[Tensor, "p t s v"]
    horizon: int

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise BadValueError(f"horizon = {self.horizon}; a sequence has at least 1 token")
        expected = (self.automaton.states, self.automaton.vocab)
        if self.tokens.shape[2:] != expected or self.tokens.shape[1] not in (1, self.horizon):
            raise ShapeError(
                f"tokens has shape {tuple(self.tokens.shape)}; give (p, t, states, vocabulary) = "
                f"(p, 1 or {self.horizon}, {expected[0]}, {expected[1]})"
            )
        rows = self.tokens.detach()
        if not bool((rows >= 0).all()) or not bool(((rows.sum(-1) - 1).abs() < 1e-9).all()):
            raise BadValueError(
                "tokens holds a row that is not a distribution; every row must be non-negative and sum to 1"
            )

    @property
    def pairs(self) -> int:
        """Policies side by side, p."""
        return self.tokens.shape[0]

    @property
    def vocab(self) -> int:
        """Tokens in the vocabulary, v."""
        return self.automaton.vocab

    @property
    def states(self) -> int:
        """States of the automaton, s."""
        return self.automaton.states

    def at(self, t: int) -> Float[Tensor, "p s v"]:
        """Probabilities at position `t`, from 0."""
        return self.tokens[:, t if self.tokens.shape[1] > 1 else 0]

    def laws(self) -> Float[Tensor, "p t1 s"]:
        """d_t, the probability of every state before position t, for t = 1 .. T + 1.

        Gradient: to `tokens`.
        """
        start = self.automaton.start.expand(self.pairs, -1)
        return forward(self.automaton.kernel(self.tokens), self.horizon, start=start)

    def reached(self) -> Float[Tensor, "p t1 s"]:
        """1 where a state can occur before position t, else 0; exact, however small its law."""
        drawn = self.tokens > 0
        if bool(drawn.all()):  # then every policy reaches what the automaton allows
            drawn = drawn[:1, :1]
        moves = (self.automaton.kernel(drawn.double()) > 0).double()
        now = (self.automaton.start > 0).double().expand(len(drawn), -1)
        rows = [now]
        for t in range(self.horizon):
            now = (_step(now, moves, t) > 0).double()
            rows.append(now)
        return torch.stack(rows, dim=1).expand(self.pairs, -1, -1)

    def sample(
        self, count: int, *, generator: torch.Generator, row: int = 0
    ) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
        """Sequences drawn by one of the policies.

        Args:
            count: sequences, b.
            row: which of the p policies.

        Returns: tokens, and the state in which each was drawn. The state after the last is
            `automaton.next_state[states[:, -1], tokens[:, -1]]`.
        """
        uniform = torch.rand(self.horizon + 1, count, 1, generator=generator, dtype=torch.float64)
        state = _draw(self.automaton.start.cumsum(0).expand(count, -1), uniform[0])
        sums = self.tokens[row].cumsum(-1)
        tokens, states = [], []
        for t in range(self.horizon):
            token = _draw(sums[t if len(sums) > 1 else 0, state], uniform[t + 1])
            tokens.append(token)
            states.append(state)
            state = self.automaton.next_state[state, token]
        return torch.stack(tokens, dim=1), torch.stack(states, dim=1)

    def tabular(self, start: int = 0) -> TabularPolicy:
        """The same policies with every context written down, from one starting state.

        For horizons that can be enumerated: the last level has v^T entries per policy.
        """
        levels = []
        states = torch.tensor([start])
        for t in range(self.horizon):
            levels.append(self.at(t)[:, states])
            states = self.automaton.next_state[states].flatten()
        return TabularPolicy(tuple(levels))


def from_logits(automaton: Automaton, logits: Float[Tensor, "p t s v"], horizon: int) -> MarkovPolicy:
    """The softmax policy of these logits. Gradient: to `logits`."""
    return MarkovPolicy(automaton, logits.softmax(-1), horizon)


def random_markov(
    automaton: Automaton,
    pairs: int,
    *,
    horizon: int,
    spread: float = 1.0,
    stationary: bool = True,
    generator: torch.Generator,
) -> MarkovPolicy:
    """Policies with independent normal logits at every state.

    Args:
        spread: standard deviation of the logits; 0 is uniform, 5 nearly deterministic.
        stationary: the same at every position.
    """
    shape = (pairs, 1 if stationary else horizon, automaton.states, automaton.vocab)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    return from_logits(automaton, spread * logits, horizon)


def shifted(
    policy: MarkovPolicy, push: Float[Tensor, "#p #t #s #v"], *, scale: float | int | Float[Tensor, " p"] = 1
) -> MarkovPolicy:
    """The policy with `scale * push` added to its logits.

    `scale` is one number, or one per policy. `push` decides the kind of drift: noise on every row
    (numerical noise), one state (a flipped expert), the same vector everywhere (a systematic tilt), or
    some positions.
    """
    push = push.expand(-1, max(push.shape[1], policy.tokens.shape[1]), -1, -1)
    size = torch.as_tensor(scale, dtype=torch.float64).reshape(-1, 1, 1, 1)
    logits = policy.tokens.log() + size * push
    return from_logits(policy.automaton, logits, policy.horizon)


def drift_noise(policy: MarkovPolicy, *, generator: torch.Generator) -> Float[Tensor, "p t s v"]:
    """Unit normal noise for every row of the policy."""
    return torch.randn(policy.tokens.shape, generator=generator, dtype=torch.float64)


def drift_flip(policy: MarkovPolicy, *, generator: torch.Generator) -> Float[Tensor, "p 1 s v"]:
    """Unit normal noise at one state per policy, as when routing flips; 0 elsewhere."""
    state = torch.randint(policy.states, (policy.pairs, 1, 1), generator=generator)
    chosen = torch.arange(policy.states)[None, :, None] == state
    noise = torch.randn(policy.pairs, 1, 1, policy.vocab, generator=generator, dtype=torch.float64)
    return noise * chosen[:, None]


def drift_tilt(policy: MarkovPolicy, *, token: int = 0) -> Float[Tensor, "1 1 1 v"]:
    """One nat on `token` everywhere: the smallest drift per token that adds up fastest."""
    return torch.eye(policy.vocab, dtype=torch.float64)[token].expand(1, 1, 1, -1)


# -- the two recursions -----------------------------------------------------------------------


def forward(kernel: Float[Tensor, "p t s s"], horizon: int, *, start: Float[Tensor, "p s"]) -> Float[Tensor, "p t1 s"]:
    """x_{t+1} = x_t K_t for t = 1 .. T, with x_1 = start. Gradient: to both."""
    rows = [start]
    for t in range(horizon):
        rows.append(_step(rows[-1], kernel, t))
    return torch.stack(rows, dim=1)


def backward(
    kernel: Float[Tensor, "p t s s"],
    horizon: int,
    *,
    final: Float[Tensor, "p s"],
    source: Float[Tensor, "p horizon s"] | None = None,
) -> Float[Tensor, "p t1 s"]:
    """x_t = source_t + K_t x_{t+1} for t = T .. 1, with x_{T+1} = final. Gradient: to all."""
    rows = [final]
    for t in reversed(range(horizon)):
        back = (kernel[:, t if kernel.shape[1] > 1 else 0] @ rows[-1].unsqueeze(-1)).squeeze(-1)
        rows.append(back if source is None else back + source[:, t])
    return torch.stack(rows[::-1], dim=1)


def _step(rows: Float[Tensor, "p s"], kernel: Float[Tensor, "p t s s"], t: int) -> Float[Tensor, "p s"]:
    return (rows.unsqueeze(1) @ kernel[:, t if kernel.shape[1] > 1 else 0]).squeeze(1)


def _draw(sums: Float[Tensor, "b n"], uniform: Float[Tensor, "b 1"]) -> Int[Tensor, " b"]:
    """The first entry whose running sum exceeds the uniform number; never one of probability 0."""
    scaled = uniform * sums[:, -1:]
    return (sums <= scaled).sum(-1).clamp(max=sums.shape[1] - 1)
