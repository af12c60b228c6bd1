"""The part of the weights that stayed behind in a server, from an earlier checkpoint.

The server's log-probs lie between those of two checkpoints. One backward pass ranks every tensor, layer and group by
how well its earlier weights explain the difference (`engines.sync_units`); those that rank first are put into the
model in turn, and the one that leaves the smallest difference is named, if it leaves less than half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.check.tokens import TokensRead, misfit, read_by
from offdrift.engines.score import score
from offdrift.engines.sync_units import (
    EVERYTHING,
    GROUPS,
    Units,
    evidence_of,
    put,
    put_back,
    spread_of,
    tied_ends,
    untied,
    with_gradients,
)
from offdrift.engines.verify_sync import clipped
from offdrift.records.rollouts import Rollouts

TRIED = 12
"""Parts whose earlier weights are tried."""
MANY = 8
"""Sequences of the backward pass."""


@dataclass(frozen=True)
class StalePart:
    """A part of the weights that is of another checkpoint than the rest."""

    name: str
    before: float
    """Mean of (log pi - log mu)^2 / 2 without it, nat."""
    left: float
    """The same with the part's other weights."""
    logp: Float[Tensor, " n"]
    """log pi of every token with the part's other weights."""


def part_of_other(
    model: nn.Module, other: Sequence[Tensor], batches: Sequence[Rollouts], served: Float[Tensor, " n"], *, left: float
) -> StalePart | None:
    """The part whose weights in `other` explain most of the difference to the server; None if none explains enough.

    Args:
        model: with the weights of the nearer checkpoint; they are the same afterwards.
        other: the other checkpoint's, in the order of `Units.weights`.
        batches: tokens, whose first sequences rank the parts; all decide.
        served: log mu of all tokens.
        left: largest share of the difference that may be left (`sync_explained`).
    """
    units = Units.of(model)
    before = misfit(read_by(model, batches).logp, served)
    tried = [(name, misfit(read.logp, served), read.logp) for name, read in _tries(model, units, other, batches)]
    name, after, logp = min(tried, key=lambda row: row[1], default=("", math.inf, served))
    return StalePart(name, before, after, logp) if after <= left * before else None


def _tries(
    model: nn.Module, units: Units, other: Sequence[Tensor], batches: Sequence[Rollouts]
) -> Iterator[tuple[str, TokensRead]]:
    """Parts, those with the strongest evidence first and the groups after them, and what the model reads with each."""
    z = _evidence(model, units, other, batches[0].select(torch.arange(min(MANY, batches[0].num_sequences))))
    first = [u for u in z.argsort(descending=True)[:TRIED].tolist() if z[u] > 0]
    groups = [u for u, name in enumerate(units.unions) if name in GROUPS and u not in first]
    for union in [*first, *groups]:
        if units.unions[union] == EVERYTHING:
            continue
        moved = put_back(units, other, union)
        try:
            yield units.unions[union], read_by(model, batches)
        finally:
            put(units, moved)
    at, ends = tied_ends(model, units)
    for end, name in zip(ends, ("output head", "input embedding"), strict=False):
        with untied(end, other[at]):
            yield f"the {name}, tied to {units.parts[at]}", read_by(model, batches)


def _evidence(model: nn.Module, units: Units, other: Sequence[Tensor], rollouts: Rollouts) -> Float[Tensor, " unions"]:
    """z of every union: how well its other weights explain the difference, to first order."""
    with with_gradients(model):
        scored = score(model, rollouts)
        spread = spread_of(scored.logp, scored.sum_pi_squared)
        difference = clipped((scored.logp.detach().cpu() - rollouts.logp_rollout) / spread)
        return evidence_of(units, other, scored.logp, difference, spread)
