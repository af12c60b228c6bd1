"""Policies that make a bound fail, if there are any: gradient ascent on |Error| / bound.

Both policies of a pair are free; rewards need no search, the worst ones are known in closed form
(`worst_rewards`, `worst_state_rewards`). For every bound many pairs start at random and climb side
by side, with a smooth copy of the bounds in torch to give directions. What is reported is not that
copy: the best pair that each start came across is handed to the library's own bounds.

The drift is a direction times a size that is learned by itself, on a logarithmic scale: some bounds
are attained only as the drift goes to 0. It is kept above `SMALLEST`, where rounding is far away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.certificate.bounds import ROWS
from offdrift.errors import BadValueError
from offdrift.lab.automaton import Automaton
from offdrift.lab.enumerate import Divergences
from offdrift.lab.markov import from_logits
from offdrift.lab.pairs import MACHINES, Batch, enumerated, followed
from offdrift.lab.policy import TabularPolicy

SMALLEST, LARGEST = 1e-4, 10.0
"""Limits of the drift's size, nats."""
GOALS = tuple(ROWS)
"""Bounds that are attacked."""
RATE = 0.05
"""Step of Adam; decays to 0 along half a cosine."""

Logits = list[Float[Tensor, "p _ v"]]
Measure = Callable[[Logits, Logits], Batch]


@dataclass(frozen=True)
class Arena:
    """A place to search: which logits there are, and how a pair is measured."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    """Contexts and vocabulary of each block of logits."""
    measure: Measure


def tree(vocab: int, horizon: int) -> Arena:
    """All pairs over a tree that can be enumerated, against all rewards."""

    def measure(first: Logits, second: Logits) -> Batch:
        mu, pi = (TabularPolicy(tuple(x.softmax(-1) for x in xs)) for xs in (first, second))
        return enumerated("tree", vocab, horizon, mu, pi)

    shapes = tuple((vocab**t, vocab) for t in range(horizon))
    return Arena(f"V={vocab}, T={horizon}", shapes, measure)


def remembering(name: str, machine: Automaton, horizon: int) -> Arena:
    """Pairs that remember a state and are the same at every position, against its rewards."""

    def measure(first: Logits, second: Logits) -> Batch:
        mu, pi = (from_logits(machine, xs[0][:, None], horizon) for xs in (first, second))
        return followed(name, mu, pi)

    return Arena(f"{name}, T={horizon}", ((machine.states, machine.vocab),), measure)


def arenas() -> list[Arena]:
    """Where `offdrift lab bounds` searches."""
    trees = [tree(2, t) for t in (2, 3, 4, 6, 8)] + [tree(3, t) for t in (2, 3, 4)] + [tree(4, 2)]
    return trees + [
        remembering(m, MACHINES[m], t) for m in ("parity", "majority") for t in (16, 64)
    ]


def attack(
    arena: Arena,
    *,
    restarts: int,
    steps: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Batch:
    """The pairs found: for each of `GOALS`, the best that each of `restarts` starts came by.

    Args:
        tick: called after each step, for a progress bar.

    Raises: `BadValueError` unless there is at least one start; no steps is a random search.
    """
    if restarts < 1 or steps < 0:
        raise BadValueError(f"restarts = {restarts}, steps = {steps}; give at least 1 and 0")
    g = torch.Generator().manual_seed(seed)
    goal = torch.arange(len(GOALS)).repeat_interleave(restarts)
    free = _starts(arena, len(goal), g)
    optimizer = torch.optim.Adam(free, lr=RATE)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: _cosine(n, steps))
    best = [x.detach().clone() for x in free]
    record = torch.zeros(len(goal), dtype=torch.float64)
    for step in range(steps + 1):
        batch = _measured(arena, free)
        bounds = smooth_bounds(batch.divergences, batch.horizon)
        ratio = batch.error / bounds.gather(0, goal[None])[0]
        better = ratio.detach() > record
        record = torch.where(better, ratio.detach(), record)
        for kept, now in zip(best, free, strict=True):
            kept[better] = now.detach()[better]
        if step < steps:
            optimizer.zero_grad()
            (-ratio.clamp(min=1e-30).log()).sum().backward()
            for x in free:  # where a probability underflows there is no direction: stay
                x.grad = None if x.grad is None else x.grad.nan_to_num(0.0, 0.0, 0.0)
            optimizer.step()
            decay.step()
            tick()
    with torch.no_grad():
        return _measured(arena, best)


def smooth_bounds(d: Divergences, horizon: int) -> Float[Tensor, "r p"]:
    """The sharp bounds in the order of `GOALS`, for many pairs and with gradients.

    Only for directions to search in: what counts is what `offdrift.certificate` says.
    """
    steps = torch.arange(horizon, dtype=torch.float64)
    kl = (d.kl_max / 2).sqrt().clamp(max=1)
    tv = torch.minimum(d.tv_max, kl)
    by_kl, by_tv = steps.sqrt() * kl[:, None], steps * tv[:, None]
    by_either = torch.minimum(by_kl, by_tv)
    seq_kl = (d.kl_seq / 2).sqrt().clamp(max=1)
    seq_tv = torch.minimum(d.tv_seq, seq_kl)
    pairs = horizon * (horizon - 1) / 2

    def total(shift: Float[Tensor, "p t"]) -> Float[Tensor, " p"]:
        return shift.clamp(max=1).sum(1)

    def future(shift: Float[Tensor, "p t"]) -> Float[Tensor, " p"]:
        return (d.mean_tv * shift.clamp(max=1).flip(1)).sum(1)

    rows = {
        "classical_kl": pairs * d.kl_max / 2,
        "classical_tv": pairs * tv.square(),
        "coupling": tv * total(by_tv),
        "pinsker_marginal_kl": kl * total(by_kl),
        "pinsker_marginal_tv": tv * total(by_kl),
        "mixed_kl": horizon * kl * seq_kl,
        "mixed_tv": horizon * tv * seq_tv,
        "adaptive_kl": future(by_kl),
        "adaptive_tv": future(by_tv),
        "adaptive": future(by_either),
        "pointwise": tv * total(torch.minimum(by_either, seq_tv[:, None])),
        "sequence_kl": d.kl_seq / 2,
    }
    return torch.stack([2 * rows[name] for name in ROWS])


def _starts(arena: Arena, count: int, g: torch.Generator) -> list[Tensor]:
    """Logits of the rollout policy, directions of the drift, and the logarithm of its size.

    From uniform to nearly deterministic; every other start treats all contexts nearly alike.
    """
    spread = 6 * torch.rand(count, 1, 1, generator=g, dtype=torch.float64)
    alike = (torch.arange(count) % 2 == 0)[:, None, None]
    common = torch.randn(2, count, 1, arena.shapes[0][1], generator=g, dtype=torch.float64)

    def block(shape: tuple[int, int], shared: Tensor) -> Tensor:
        noise = torch.randn(count, *shape, generator=g, dtype=torch.float64)
        return torch.where(alike, shared + 0.01 * noise, noise)

    mu = [block(shape, common[0]) * spread for shape in arena.shapes]
    push = [block(shape, common[1]) for shape in arena.shapes]
    size = math.log(1e-2) + 2 * torch.randn(count, 1, 1, generator=g, dtype=torch.float64)
    return [x.requires_grad_() for x in (*mu, *push, size)]


def _measured(arena: Arena, free: list[Tensor]) -> Batch:
    blocks = len(arena.shapes)
    mu, push, size = free[:blocks], free[blocks : 2 * blocks], free[-1]
    amount = size.clamp(math.log(SMALLEST), math.log(LARGEST)).exp()
    return arena.measure(mu, [x + amount * d for x, d in zip(mu, push, strict=True)])


def _cosine(step: int, steps: int) -> float:
    return (1 + math.cos(math.pi * step / max(steps, 1))) / 2
