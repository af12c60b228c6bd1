"""Testbeds for gradient estimators: a reward, a rollout policy, and policies at a fixed drift from it.

All are Markov policies, so the true gradient is known at any horizon, and the drift per token is
the same at every horizon: what changes with T is only how much of it adds up.

    walk    a random walk on 17 places, paid by the place where it ends: recent tokens matter
    chain   every token may be a fatal slip, once in T on average: all tokens matter alike
    flip    the chain, with all drift in one of its states, as when an expert's routing flips
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import BadValueError, check_choice
from offdrift.lab.automaton import Automaton, walk
from offdrift.lab.markov import MarkovPolicy, from_logits, shifted
from offdrift.lab.recursions import markov_divergences

TESTBEDS = ("walk", "chain", "flip")
BISECTIONS = 40
PLACES = 8
"""Steps from the middle of the walk to either end."""
LIVING = 3
"""States of the chain that are not dead."""


@dataclass(frozen=True)
class Testbed:
    """One prompt, three policies, and the reward of every last state in [0, 1]."""

    __test__ = False  # no test case, whatever pytest thinks of its name

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
    rollout, rewards = _walk(horizon, g) if name == "walk" else _chain(horizon, g)
    pushes = [torch.randn(rollout.tokens.shape, generator=g, dtype=torch.float64) for _ in "ab"]
    if name == "flip":
        pushes = [p * (torch.arange(p.shape[2]) == 1)[:, None] for p in pushes]
    scale = _scale(rollout, pushes[0] + pushes[1], kl_token)
    old = shifted(rollout, pushes[0], scale=scale)
    return Testbed(name, rollout, old, shifted(old, pushes[1], scale=scale), rewards)


def _walk(horizon: int, g: torch.Generator) -> tuple[MarkovPolicy, Tensor]:
    machine = walk(3, PLACES)
    logits = torch.randn(1, 1, machine.states, 3, generator=g, dtype=torch.float64) / 2
    rewards = torch.arange(machine.states, dtype=torch.float64) / (machine.states - 1)
    return from_logits(machine, logits, horizon), rewards


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
    """How far along `push` the mean token KL is what was asked for."""

    def kl(scale: float) -> float:
        found = markov_divergences(rollout, shifted(rollout, push, scale=scale))
        return float(found.mean_kl.mean())

    low, high = 0.0, 1.0
    while kl(high) < kl_token and high < 64:
        high *= 2
    if not 0 <= kl_token <= kl(high):
        raise BadValueError(
            f"kl_token = {kl_token}: the drift reaches 0 to {kl(high):.3g} nats per token here"
        )
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(middle) < kl_token else (low, middle)
    return low if kl_token == 0 else high
