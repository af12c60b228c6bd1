"""Testbeds for gradient estimators: a reward, a rollout policy, and policies at a fixed drift from it.

All are Markov policies, so the true gradient is exact at any horizon. The drift per token is the same at
every horizon; only its sum changes with T.

    walk    a random walk on 17 places, rewarded by its last place: recent tokens matter
    chain   every token may be fatal, once in T on average: all tokens matter alike
    flip    the chain, with all drift in one of its states, as when an expert's routing flips
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.errors import BadValueError, check_choice
from offdrift.lab.bias import exact_loss
from offdrift.lab.markov import Automaton, MarkovPolicy, from_logits, shifted, walk
from offdrift.lab.recursions import markov_divergences, markov_returns
from offdrift.methods.method import Method

TESTBEDS = ("walk", "chain", "flip")
BISECTIONS = 40
PLACES = 8
"""Steps from the middle of the walk to either end."""
LIVING = 3
"""States of the chain that are not dead."""


@dataclass(frozen=True)
class Testbed:
    """One prompt, three policies, and the reward of every last state in [0, 1]."""

    __test__ = False  # pytest would take the name for a test case

    name: str
    rollout: MarkovPolicy
    old: MarkovPolicy
    current: MarkovPolicy
    rewards: Float[Tensor, " s"]

    @property
    def horizon(self) -> int:
        """Tokens in a sequence, T."""
        return self.rollout.horizon

    @property
    def kl_token(self) -> float:
        """Mean KL(rollout || current) of a token, nats."""
        return float(markov_divergences(self.rollout, self.current).mean_kl.mean())


def make_testbed(name: str, *, horizon: int, kl_token: float = 1e-3, seed: int = 0) -> Testbed:
    """The named testbed at a horizon and a drift.

    Half of the drift in logits is mismatch (rollout to old policy), half staleness (old to current).

    Args:
        name: "walk", "chain" or "flip".
        horizon: tokens in a sequence, T.
        kl_token: mean KL(rollout || current) of a token under the rollout policy, nats; 0 is on
            policy.

    Raises: `MethodError` for another name; `BadValueError` for a horizon below 2 or a KL that no
        scale of the drift reaches.

    Example:
        >>> round(make_testbed("walk", horizon=64, kl_token=1e-3).kl_token, 9)
        0.001
    """
    check_choice("testbed", name, TESTBEDS)
    if horizon < 2:
        raise BadValueError(f"horizon = {horizon}; drift adds up over at least 2 tokens")
    g = torch.Generator().manual_seed(seed)
    if name == "walk":
        machine = walk(3, PLACES)
        logits = torch.randn(1, 1, machine.states, 3, generator=g, dtype=torch.float64) / 2
        rollout = from_logits(machine, logits, horizon)
        rewards = torch.arange(machine.states, dtype=torch.float64) / (machine.states - 1)
    else:
        rollout, rewards = _chain(horizon, g)
    pushes = [torch.randn(rollout.tokens.shape, generator=g, dtype=torch.float64) for _ in "ab"]
    if name == "flip":
        pushes = [p * (torch.arange(p.shape[2]) == 1)[:, None] for p in pushes]
    scale = _scale(rollout, pushes[0] + pushes[1], kl_token)
    old = shifted(rollout, pushes[0], scale=scale)
    return Testbed(name, rollout, old, shifted(old, pushes[1], scale=scale), rewards)


def _chain(horizon: int, g: torch.Generator) -> tuple[MarkovPolicy, Tensor]:
    """Token 0 is fatal; any other leads to the living state of its number."""
    dead, vocab = LIVING, LIVING + 1
    states = torch.cat([torch.tensor([dead]), torch.arange(LIVING)]).repeat(LIVING + 1, 1)
    states[dead] = dead
    start = torch.tensor([1.0] + [0.0] * LIVING, dtype=torch.float64)
    logits = torch.randn(1, 1, LIVING + 1, vocab, generator=g, dtype=torch.float64) / 2
    # Odds of 1 to T - 1: probability 1/T of token 0, whatever the others are.
    logits[..., 0] = logits[..., 1:].logsumexp(-1) - math.log(horizon - 1)
    rewards = torch.tensor([1.0] * LIVING + [0.0], dtype=torch.float64)
    return from_logits(Automaton(states, start), logits, horizon), rewards


def _scale(rollout: MarkovPolicy, push: Tensor, kl_token: float) -> float:
    """The scale of `push` at which the mean token KL is `kl_token`."""

    def kl(scale: float) -> float:
        drifted = shifted(rollout, push, scale=scale)
        return float(markov_divergences(rollout, drifted).mean_kl.mean())

    low, high = 0.0, 1.0
    while kl(high) < kl_token and high < 64:
        high *= 2
    if not 0 <= kl_token <= kl(high):
        raise BadValueError(f"kl_token = {kl_token}: the drift reaches 0 to {kl(high):.3g} nats per token here")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(middle) < kl_token else (low, middle)
    return low if kl_token == 0 else high


# The gradient that a method takes from sampled sequences of a testbed, for every row of the table.
#
# One batch is one step's data: N answers to one prompt, advantages `R - J(mu)`, the exact baseline.
# A method reduces to a coefficient per token (the loss's gradient with respect to the token's
# log-prob), which the softmax turns into a gradient of the shape of the policy's logits:
#
#     g = sum_t c_t (onehot(y_t) - pi(. | s_t))
#
# As in `offdrift.lab.bias`, normalizers are scaled so that on policy every token is pushed by its
# advantage divided by N, penalties to a reference are left out, and version lag is 1.


TURNS = 8
"""Turns of a sequence at most, of equal length."""


@dataclass(frozen=True)
class Draw:
    """Sequences of a testbed: tokens, the state each was drawn in, and each sequence's reward."""

    tokens: Int[Tensor, "b t"]
    states: Int[Tensor, "b t"]
    rewards: Float[Tensor, " b"]

    def rows(self, which: slice) -> Draw:
        """Some of the sequences."""
        return Draw(self.tokens[which], self.states[which], self.rewards[which])


def draw(bed: Testbed, sequences: int, *, generator: torch.Generator) -> Draw:
    """Sequences drawn by the rollout policy."""
    tokens, states = bed.rollout.sample(sequences, generator=generator)
    last = bed.rollout.automaton.next_state[states[:, -1], tokens[:, -1]]
    return Draw(tokens, states, bed.rewards[last])


def all_sequences(bed: Testbed) -> tuple[Draw, Float[Tensor, " b"]]:
    """Every sequence that starts in the first state of the testbed, and its probability under mu."""
    machine, horizon = bed.rollout.automaton, bed.horizon
    number = torch.arange(machine.vocab**horizon)
    tokens = number[:, None] // machine.vocab ** torch.arange(horizon).flip(0) % machine.vocab
    state = machine.start.argmax().expand(len(number))
    states = []
    for t in range(horizon):
        states.append(state)
        state = machine.next_state[state, tokens[:, t]]
    sequences = Draw(tokens, torch.stack(states, 1), bed.rewards[state])
    return sequences, bed.rollout.tokens[0, 0].log()[sequences.states, tokens].sum(1).exp()


def coefficients(row: Method, bed: Testbed, drawn: Draw) -> Float[Tensor, "b t"]:
    """Minus the gradient of N times the row's loss with respect to each token's log-prob.

    On policy it is the advantage of the token's sequence. Gradient: none.
    """
    sequences, horizon = drawn.tokens.shape
    turns = min(TURNS, horizon)
    policies = {"rollout": bed.rollout, "old": bed.old, "current": bed.current}
    laws = {name: policy.tokens[0, 0] for name, policy in policies.items()}
    states, tokens = drawn.states.reshape(-1), drawn.tokens.reshape(-1)
    logp = laws["current"].log()[states, tokens].requires_grad_()
    loss = exact_loss(
        row,
        laws,
        states,
        tokens,
        logp,
        rewards=drawn.rewards,
        baseline=markov_returns(bed.rollout, bed.rollout, bed.rewards[None]).rollout,
        turns=[horizon // turns + (i < horizon % turns) for i in range(turns)],
        divisor=1.0,
    )
    return -torch.autograd.grad(loss, logp)[0].view(sequences, horizon)


def gradients(bed: Testbed, drawn: Draw, c: Float[Tensor, "b t"], *, batch: int) -> Float[Tensor, "k d"]:
    """The gradient of each batch of `batch` consecutive sequences, flat over states and tokens."""
    states, vocab = bed.current.states, bed.current.vocab
    which = torch.arange(len(c)) // batch
    cell = (which[:, None] * states + drawn.states) * vocab + drawn.tokens
    pushed = c.new_zeros((int(which[-1]) + 1) * states * vocab)
    pushed = pushed.index_add(0, cell.reshape(-1), c.reshape(-1)).view(-1, states, vocab)
    return (pushed - bed.current.tokens[0, 0] * pushed.sum(-1, keepdim=True)).flatten(1) / batch
