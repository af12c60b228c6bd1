"""Search for pairs of policies that violate a bound: random pairs, and gradient ascent on |Error| / bound.

Bounds are the rows of Table 1, the guarantees without preconditions, and the statements of
`offdrift_lab.exact.statements`. Rewards need no search: the worst ones are known in closed form. Many pairs
climb side by side along a smooth copy of the bounds in torch; what is reported is computed by the library's own
bounds, pair by pair. The drift is a direction times a size on a logarithmic scale: some bounds are attained only
as it goes to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.certificate import all_bounds
from offdrift.certificate.bounds import BEYOND, CONSTANTS, ROWS
from offdrift.certificate.guarantees import masked_guarantee
from offdrift.certificate.regions import sample_ratio_error
from offdrift.errors import BadValueError
from offdrift_lab.exact.markov import Automaton, from_logits
from offdrift_lab.exact.pairs import MACHINES, PairBatch, enumerated, followed
from offdrift_lab.exact.policy import Divergences, TabularPolicy
from offdrift_lab.exact.statements import LABELS, SMOOTH, STATEMENTS

SMALLEST, LARGEST = 1e-4, 10.0
"""Limits of the drift's size, nats."""
GOALS = tuple(name for name, row in ROWS.items() if {*row.uses} <= {"delta", "eps", "kl_seq", "tv_seq", "mean_tv"})
"""Bounds of Table 1 and beyond that are attacked: those that take divergences alone, whatever the reward."""
CLIMBED = tuple(name for name in LABELS if name.partition(":")[0] in SMOOTH)
"""Statements that are attacked where sequences can be enumerated."""
RATE = 0.05
"""Step of Adam; decays to 0 along half a cosine."""

Logits = list[Float[Tensor, "p _ v"]]
Measure = Callable[[Logits, Logits, bool], PairBatch]
"""Logits of both policies, and whether gradients are needed, to what the bounds take."""


@dataclass(frozen=True)
class Arena:
    """A search space: the shapes of the logits, and how a pair is measured."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    """Contexts and vocabulary of each block of logits."""
    measure: Measure
    goals: tuple[str, ...] = GOALS


def tree(vocab: int, horizon: int) -> Arena:
    """All pairs over a tree that can be enumerated, against all rewards."""

    def measure(first: Logits, second: Logits, climbing: bool) -> PairBatch:
        mu, pi = (TabularPolicy(tuple(x.softmax(-1) for x in xs)) for xs in (first, second))
        return enumerated("tree", vocab, horizon, mu=mu, pi=pi, statements=SMOOTH if climbing else STATEMENTS)

    shapes = tuple((vocab**t, vocab) for t in range(horizon))
    return Arena(f"V={vocab}, T={horizon}", shapes, measure, GOALS + CLIMBED)


def remembering(name: str, machine: Automaton, horizon: int) -> Arena:
    """Pairs that remember a state and are the same at every position, against its rewards."""

    def measure(first: Logits, second: Logits, climbing: bool) -> PairBatch:
        mu, pi = (from_logits(machine, xs[0][:, None], horizon) for xs in (first, second))
        return followed(name, mu, pi)

    return Arena(f"{name}, T={horizon}", ((machine.states, machine.vocab),), measure)


def arenas() -> list[Arena]:
    """Arenas in which `offdrift lab bounds` searches."""
    trees = [tree(2, t) for t in (2, 3, 4, 6, 8)] + [tree(3, t) for t in (2, 3, 4)] + [tree(4, 2)]
    return trees + [remembering(m, MACHINES[m], t) for m in ("parity", "majority") for t in (16, 64)]


def attack(arena: Arena, *, restarts: int, steps: int, seed: int, tick: Callable[[], None] = lambda: None) -> PairBatch:
    """The best pair for each goal of the arena and each of `restarts` starts.

    Args:
        tick: called after each step, for a progress bar.

    Raises: `BadValueError` unless there is at least one start; no steps is a random search.
    """
    if restarts < 1 or steps < 0:
        raise BadValueError(f"restarts = {restarts}, steps = {steps}; give at least 1 and 0")
    g = torch.Generator().manual_seed(seed)
    goal = torch.arange(len(arena.goals)).repeat_interleave(restarts)
    free = _starts(arena, len(goal), g)
    optimizer = torch.optim.Adam(free, lr=RATE)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: (1 + math.cos(math.pi * n / max(steps, 1))) / 2)
    best = [x.detach().clone() for x in free]
    record = torch.zeros(len(goal), dtype=torch.float64)
    for step in range(steps + 1):
        batch = _measured(arena, free, climbing=True)
        table = batch.error / smooth_bounds(batch.divergences, batch.horizon)
        sides = (batch.sides[name] for name in arena.goals[len(GOALS) :])
        statements = [(side.value - sums_to_zero(batch)) / side.bound for side in sides]
        ratio = torch.cat([table, *(x[None] for x in statements)]).gather(0, goal[None])[0]
        better = ratio.detach() > record
        record = torch.where(better, ratio.detach(), record)
        for champion, now in zip(best, free, strict=True):
            champion[better] = now.detach()[better]
        if step < steps:
            optimizer.zero_grad()
            (-ratio.clamp(min=1e-30).log()).sum().backward()
            for x in free:  # where a probability underflows there is no direction: stay
                x.grad = None if x.grad is None else x.grad.nan_to_num(0.0, 0.0, 0.0)
            optimizer.step()
            decay.step()
            tick()
    with torch.no_grad():
        return _measured(arena, best, climbing=False)


def smooth_bounds(d: Divergences, horizon: int) -> Float[Tensor, "r p"]:
    """The sharp bounds in the order of `GOALS`, for many pairs and with gradients.

    Only for search directions: reported numbers come from `offdrift.certificate`.
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
    return torch.stack([2 * rows[name] for name in GOALS])


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


def _measured(arena: Arena, free: list[Tensor], *, climbing: bool) -> PairBatch:
    blocks = len(arena.shapes)
    mu, push, size = free[:blocks], free[blocks : 2 * blocks], free[-1]
    amount = size.clamp(math.log(SMALLEST), math.log(LARGEST)).exp()
    return arena.measure(mu, [x + amount * d for x, d in zip(mu, push, strict=True)], climbing)


RELATIVE = 1e-9
"""Rounding allowed in a quotient of error and bound.

All are sums of products of at most T + 1 float64 factors. What cancels in them is at most T times
as large as the bound, so relative errors stay below some T^2 2^-53: 1e-10 at a thousand tokens.
"""

TABLE = [(n, c) for c in CONSTANTS for n in GOALS if not (c == "paper" and n in BEYOND)]
OTHERS = [("masked_ratio", "paper"), ("masked_ratio", "sharp"), ("masked_kl", "sharp")]
ROW_NAMES = TABLE + OTHERS + [(name, "sharp") for name in LABELS]
"""Every bound with every choice of constants: Table 1, the guarantees without preconditions, the statements.

`masked_ratio` and `masked_kl` bound what a masked surrogate overstates, over sequences with small
ratios and over those inside a trust region that others leave.
"""


@dataclass(frozen=True)
class Tightness:
    """Tightness of every bound for a batch of pairs."""

    family: str
    vocab: int
    horizon: int
    enumerated: bool
    eps: Float[np.ndarray, " p"]
    """Largest token TV of each pair."""
    tightness: Float[np.ndarray, "p r"]
    """|Error| / bound, one column per entry of `ROW_NAMES`; nan where both are 0, or not checked.
    Of a statement it is what the statement says is at most its bound, which may be less than |Error|."""
    checked: Bool[np.ndarray, "p r"]
    violated: Bool[np.ndarray, "p r"]


@dataclass(frozen=True)
class Row:
    """One bound over many pairs."""

    bound: str
    constants: str
    checked: int
    violations: int
    largest: float
    """Largest tightness; 0 if nothing drifted."""
    median: float
    where: str
    """The kind of pair where it was largest."""


def bound_values(batch: PairBatch) -> Float[np.ndarray, "p r"]:
    """The bounds of Table 1 for every pair, from the library, one column per entry of `TABLE`."""
    d = batch.divergences
    columns = [x.detach().tolist() for x in (d.kl_max, d.tv_max, d.kl_seq, d.tv_seq)]
    mean_tv = d.mean_tv.detach().numpy()
    rows = []
    for i, (delta, eps, kl_seq, tv_seq) in enumerate(zip(*columns, strict=True)):
        values = {
            (bound.name, constants): bound.value
            for constants in CONSTANTS
            for bound in all_bounds(
                horizon=batch.horizon,
                delta=delta,
                eps=min(eps, 1.0),  # a rounding above 1 is not a TV
                kl_seq=kl_seq,
                tv_seq=min(tv_seq, 1.0),
                mean_tv=mean_tv[i].clip(max=1.0),
                constants=constants,
            )
        }
        rows.append([values[key] for key in TABLE])
    return np.array(rows)


def other_values(batch: PairBatch) -> tuple[Float[np.ndarray, "p o"], Float[np.ndarray, "p o"]]:
    """Errors and their bounds, one column per entry of `OTHERS`; nan where one does not apply."""
    errors = np.full((len(batch.error), len(OTHERS)), np.nan)
    values = errors.copy()
    if batch.masked is None:
        return errors, values
    m = batch.masked
    errors[:, 0] = (m.overstated + m.lost).numpy()
    errors[:, 1] = m.overstated.numpy()
    errors[:, 2], values[:, 2] = m.overstated_kl.numpy(), m.prefix_kl.numpy()
    tv_seq = batch.divergences.tv_seq.clamp(max=1).tolist()
    for i, (tau, r, tv) in enumerate(zip(m.tau.tolist(), m.rejected.tolist(), tv_seq, strict=True)):
        if not math.isnan(tau):
            paper, sharp = (sample_ratio_error(horizon=batch.horizon, tau=tau, constants=c) for c in CONSTANTS)
            price = masked_guarantee(error=paper, rejected=r, tv_seq=tv)
            values[i, :2] = price.error + price.price, sharp
    return errors, values


def statement_values(batch: PairBatch) -> tuple[Float[np.ndarray, "p o"], Float[np.ndarray, "p o"]]:
    """Compute both sides of the statements, one column per entry of `LABELS`; nan where one does not apply."""
    errors = np.full((len(batch.error), len(LABELS)), np.nan)
    values = errors.copy()
    for column, name in enumerate(LABELS):
        if name in batch.sides:
            side, applies = batch.sides[name], batch.sides[name].applies.numpy()
            errors[applies, column] = side.value.detach().numpy()[applies]
            # A bound that is not a number bounds nothing, and is a violation.
            values[applies, column] = side.bound.detach().nan_to_num(-torch.inf, torch.inf).numpy()[applies]
    return errors, values


def rounding(batch: PairBatch) -> Float[np.ndarray, "p r"]:
    """Error that rounding of the policies themselves may add, in units of the reward.

    The theorems are about rows that sum to 1; in float64 they do to v 2^-53 or so, and the
    difference of two rows sums to 0 as well as that. At position t it is multiplied with the
    shift of the contexts, whose L1 norm is at most 2 min(1, (t-1) eps). The sides of a statement also
    hold sums of w_t - 1, whose mean is 0 as well as that, whatever the shift.
    """
    eps = batch.divergences.tv_max.detach().numpy()
    reach = np.minimum(1.0, batch.horizon * eps)[:, None]
    reach = np.hstack([np.tile(reach, len(TABLE + OTHERS)), np.ones((len(eps), len(LABELS)))])
    return sums_to_zero(batch) * reach


def sums_to_zero(batch: PairBatch) -> float:
    """Distance from 0 at which rounding may leave a sum over all tokens of all positions that is 0."""
    return 2.0**-52 * 2 * batch.vocab * batch.horizon


def check(batch: PairBatch, *, factor: float = 1.0) -> Tightness:
    """Compare every bound with the worst error of every pair.

    Args:
        factor: what to multiply every bound with; below 1, sharp constants become wrong ones.
    """
    table, others, statements = bound_values(batch), other_values(batch), statement_values(batch)
    errors = np.hstack([np.tile(batch.error.detach().numpy()[:, None], len(TABLE)), others[0], statements[0]])
    values = factor * np.hstack([table, others[1], statements[1]])
    checked = np.ones_like(values, dtype=bool)
    checked[:, len(TABLE) :] = ~np.isnan(values[:, len(TABLE) :])
    slack = rounding(batch)
    allowed = values * (1 + RELATIVE) + slack
    violated = ~(errors <= allowed) & checked  # nan is a violation too
    nothing = ~checked | ((values == 0) & ~violated)
    # Where drift is as small as rounding, the small value of a statement may be nothing but rounding.
    slack[:, : len(TABLE + OTHERS)] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        tightness = np.where(nothing, np.nan, np.maximum(errors - slack, 0.0) / values)
    eps = batch.divergences.tv_max.detach().numpy()
    about = (batch.family, batch.vocab, batch.horizon, batch.enumerated)
    return Tightness(*about, eps, tightness, checked, violated)


def summarize(outcomes: Iterable[Tightness]) -> list[Row]:
    """One row per bound over all of these pairs; no rows without outcomes."""
    outcomes = list(outcomes)
    if not outcomes:
        return []
    tightness = np.concatenate([o.tightness for o in outcomes])
    checked = np.concatenate([o.checked for o in outcomes])
    violated = np.concatenate([o.violated for o in outcomes])
    kinds = [f"{o.family}, V={o.vocab}, T={o.horizon}" for o in outcomes]
    kind = np.repeat(np.arange(len(outcomes)), [len(o.eps) for o in outcomes])
    rows = []
    for column, (name, constants) in enumerate(ROW_NAMES):
        ratio = tightness[:, column]
        tight = ratio[~np.isnan(ratio)]
        best = int(np.nanargmax(ratio)) if tight.size else 0
        rows.append(
            Row(
                bound=name,
                constants=constants,
                checked=int(checked[:, column].sum()),
                violations=int(violated[:, column].sum()),
                largest=float(ratio[best]) if tight.size else 0.0,
                median=float(np.median(tight)) if tight.size else 0.0,
                where=kinds[kind[best]] if tight.size else "",
            )
        )
    return rows


def of_drift(outcome: Tightness, low: float, high: float) -> Tightness:
    """The pairs whose largest token TV is at least `low` and below `high`."""
    chosen = (outcome.eps >= low) & (outcome.eps < high)
    return replace(
        outcome,
        eps=outcome.eps[chosen],
        tightness=outcome.tightness[chosen],
        checked=outcome.checked[chosen],
        violated=outcome.violated[chosen],
    )
