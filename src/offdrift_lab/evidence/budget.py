"""The survey's mismatch budget: how small a mismatch has to be for corrections to be of no use.

    D95_TV < 1e-4,    chi2_seq < 0.1,    delta_router < 1e-3

The survey conjectures (problem 4) that within all three no correction (importance weights, rejection, masks) raises the
final quality by 0.3 % or more. `benchmarks/factorial.py` measures both sides of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from offdrift.errors import BadValueError
from offdrift.judge import load_rules


class Mismatch(NamedTuple):
    """Mismatch of engine and trainer at the same weights, as the budget limits it."""

    tv_p95: float
    """95 % quantile over tokens of TV(rollout, trainer)."""
    chi2_seq: float
    """mean over sequences of (prod_t ratio)^2, minus 1."""
    router_delta: float | None = None
    """Share of experts of a layer that one side chose and the other did not (`engines.routing.flip_rate`); None for a
    dense model."""


def budget_of(limits: Mapping[str, float] | None = None) -> Mismatch:
    """Return what every number of a mismatch has to be below.

    Args:
        limits: thresholds by name (`Rules.limits`), if not the built-in ones: `tv_budget`, `chi2_seq_budget` and
            `router_flip`. `budget_gain` is the gain that corrections stay below within the budget.

    Example:
        >>> budget_of()
        Mismatch(tv_p95=0.0001, chi2_seq=0.1, router_delta=0.001)
    """
    t = load_rules().limits if limits is None else limits
    return Mismatch(t["tv_budget"], t["chi2_seq_budget"], t["router_flip"])


def largest_gain(limits: Mapping[str, float] | None = None) -> float:
    """Return the gain that corrections stay below within the budget, in units of the reward's range: `budget_gain`."""
    return (load_rules().limits if limits is None else limits)["budget_gain"]


def over_budget(measured: Mismatch, limits: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """The names of what is not below its limit; empty within the budget.

    Args:
        measured: of the stack, at equal weights.
        limits: thresholds by name, if not the built-in ones; see `budget_of`.

    Raises: `BadValueError` for a number that is NaN, which was not measured.

    Example:
        >>> over_budget(Mismatch(tv_p95=8e-5, chi2_seq=0.01))
        ()
        >>> over_budget(Mismatch(tv_p95=8e-4, chi2_seq=0.01, router_delta=2e-3))
        ('tv_p95', 'router_delta')

    Reference: survey of off-policy RL for LLMs, 2026, problem 4.
    """
    over = []
    for name, value, limit in zip(Mismatch._fields, measured, budget_of(limits), strict=True):
        if value is None or limit is None:
            continue
        if math.isnan(value):
            raise BadValueError(f"{name} is NaN, so that nobody knows whether it is below {limit:g}; measure it")
        over += [] if value < limit else [name]
    return tuple(over)
