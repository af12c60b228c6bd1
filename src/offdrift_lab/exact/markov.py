"""Markov policies: the next token depends on the context through one of few states.

An `Automaton` maps the tokens so far to a state; rewards are functions of the last state. Divergences and returns
of two policies are those of `offdrift_lab.exact.policy`, by recursion over positions, so horizons in the
thousands are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift_lab.exact.policy import Returns, refuse_rewards, refuse_rows, token_kl, token_tv


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


def counter(vocab: int, modulus: int, *, token: int = 1) -> Automaton:
    """Automaton that counts `token`, modulo `modulus`: with 2 its parity, with 1 nothing (tokens are independent).

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
    """Automaton that detects the tokens in a row; state k has seen the first k, the last is kept.

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
    """Combine two automata: state (a, b) is `a * second.states + b`.

    Raises: `ShapeError` if they read different vocabularies.
    """
    if first.vocab != second.vocab:
        raise ShapeError(f"vocabularies of {first.vocab} and {second.vocab} tokens; use one")
    both = first.next_state[:, None] * second.states + second.next_state[None]
    start = first.start[:, None] * second.start[None]
    return Automaton(both.flatten(0, 1), start.flatten())


def prompts(automaton: Automaton, laws: Sequence[float]) -> Automaton:
    """Repeat the automaton once per prompt, chosen with these probabilities.

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
        refuse_rows("tokens", self.tokens)

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

    def laws(self) -> Float[Tensor, "p t1 s"]:
        """d_t, the probability of every state before position t, for t = 1 .. T + 1.

        Gradient: to `tokens`.
        """
        start = self.automaton.start.expand(self.pairs, -1)
        return forward(self.automaton.kernel(self.tokens), self.horizon, start=start)

    def reached(self) -> Float[Tensor, "p t1 s"]:
        """1 where a state can occur before position t, else 0; exact, however small its law."""
        possible = self.tokens > 0
        if bool(possible.all()):  # then every policy reaches what the automaton allows
            possible = possible[:1, :1]
        moves = (self.automaton.kernel(possible.double()) > 0).double()
        now = (self.automaton.start > 0).double().expand(len(possible), -1)
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


# -- two policies ---------------------------------------------------------------------------------
#
# Small drift is not computed as a difference of large numbers: with e_t = d_t^pi - d_t^mu and F_t the error's weights,
#
#     e_{t+1} = e_t pi_t + d_t (pi_t - mu_t)        shift of the contexts
#     F_{t+1} = F_t mu_t + e_t (pi_t - mu_t)        Error = sum_s F_{T+1}(s) R(s)


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
    tv_seq_high: Float[Tensor, " p"]
    """At least it: min(1, sum_t Dbar_t, sqrt(kl_seq / 2), sqrt(h (2 - h))) with h Hellinger's."""


def markov_divergences(rollout: MarkovPolicy, current: MarkovPolicy) -> MarkovDivergences:
    """Every divergence the error bounds take, by recursion.

    Over several prompts (`Automaton.start`) means are means over prompts, and maxima maxima.

    Raises: `ShapeError` if the policies differ in pairs, horizon or automaton.

    Example:
        >>> a, b = (MarkovPolicy(counter(2, 1), torch.tensor([[[[x, 1 - x]]]], dtype=torch.float64),
        ...         horizon=1000) for x in (0.5, 0.51))
        >>> d = markov_divergences(a, b)
        >>> round(float(d.kl_seq), 4), round(float(d.tv_seq_high), 4)
        (0.2, 0.3085)
    """
    _same_tree(rollout, current)
    kl, tv = token_kl(rollout.tokens, current.tokens), token_tv(rollout.tokens, current.tokens)
    laws, _, _ = _together(rollout, current)
    reached = rollout.reached()
    either = torch.maximum(reached, current.reached())[:, :-1] > 0
    mean_kl = _mean_of(laws[:, :-1], kl, reached[:, :-1])
    mean_tv = _mean_of(laws[:, :-1], tv, reached[:, :-1])
    kl_seq, hellinger = mean_kl.sum(1), squared_hellinger(rollout, current)
    routes = [mean_tv.sum(1), (kl_seq / 2).sqrt(), (hellinger * (2 - hellinger)).sqrt()]
    return MarkovDivergences(
        kl_max=torch.where(either, kl, 0.0).amax((1, 2)),
        tv_max=torch.where(either, tv, 0.0).amax((1, 2)),
        mean_kl=mean_kl,
        mean_tv=mean_tv,
        kl_seq=kl_seq,
        hellinger=hellinger,
        tv_seq_high=torch.stack(routes).amin(0).clamp(max=1),
    )


def markov_returns(
    rollout: MarkovPolicy,
    current: MarkovPolicy,
    rewards: Float[Tensor, "#p s"],
    *,
    within: tuple[float | int, float | int] = (0, 1),
) -> Returns:
    """Expected rewards, surrogate and error, by recursion.

    Args:
        rewards: reward of a sequence by its last state.
        within: smallest and largest reward a sequence can have; bounds scale with their difference.

    Gradient: to both policies' tokens and the rewards.

    Raises: `ShapeError` for policies of different pairs, horizon or automaton; `BadValueError` if
        some sequence has a reward outside `within`.
    """
    _same_tree(rollout, current)
    refuse_rewards(rewards, within)
    machine, horizon = rollout.automaton, rollout.horizon
    moved = current.tokens - rollout.tokens
    final = rewards.expand(rollout.pairs, -1)
    values = backward(machine.kernel(rollout.tokens), horizon, final=final)
    # The advantage of one token by the current policy, the rest by the rollout policy: g_t.
    gain = (machine.kernel(moved) @ values[:, 1:].unsqueeze(-1)).squeeze(-1)
    j_rollout = (machine.start * values[:, 0]).sum(1)
    laws, shift, _ = _together(rollout, current)
    surrogate = (laws[:, :-1] * gain).sum((1, 2))
    error = (shift[:, :-1] * gain).sum((1, 2))
    return Returns(j_rollout, j_rollout + surrogate + error, surrogate, error)


def state_error_weights(rollout: MarkovPolicy, current: MarkovPolicy) -> Float[Tensor, "p s"]:
    """Weight of the reward of each last state in the error: Error = sum_s weight(s) R(s).

    Gradient: to both policies' tokens.
    """
    return _together(rollout, current)[2][:, -1]


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
        unchanged, moved = (rows[-1] @ kernel[:, t if kernel.shape[1] > 1 else 0]).chunk(2, dim=-1)
        rows.append(unchanged + mixed @ moved)
    laws, shift, error = torch.stack(rows, dim=2).unbind(1)
    return laws, shift, error


def _mean_of(
    law: Float[Tensor, "p t s"], x: Float[Tensor, "p _ s"], reached: Float[Tensor, "p t s"]
) -> Float[Tensor, "p t"]:
    """Mean over states; one that never occurs does not count, even if x is infinite there."""
    x = torch.where(reached > 0, x, 0.0)
    return torch.where(x < math.inf, law * x, math.inf).sum(-1)


def _same_tree(rollout: MarkovPolicy, current: MarkovPolicy) -> None:
    sizes = [(p.pairs, p.horizon) for p in (rollout, current)]
    if sizes[0] != sizes[1]:
        raise ShapeError(f"rollout and current policy differ in (pairs, horizon): {sizes[0]} and {sizes[1]}")
    ours, theirs = rollout.automaton, current.automaton
    if not (torch.equal(ours.next_state, theirs.next_state) and torch.equal(ours.start, theirs.start)):
        raise ShapeError("rollout and current policy live on different automata; build both on the same one")
