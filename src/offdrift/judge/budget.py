"""The survey's mismatch budget: how small a mismatch has to be for corrections to be of no use.

    D95_TV < 1e-4,    chi2_seq < 0.1,    delta_router < 1e-3

The survey conjectures (problem 4) that within all three no correction (importance weights, rejection, masks) raises the
final quality by 0.3 % or more. `benchmarks/factorial.py` measures both sides of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from offdrift.errors import BadValueError

LARGEST_GAIN = 0.003
"""Gain that corrections stay below within the budget, in units of the reward's range."""


class Mismatch(NamedTuple):
    """What the budget limits, of engine and trainer at the same weights."""

    tv_p95: float
    """95 % quantile over tokens of TV(rollout, trainer)."""
    chi2_seq: float
    """mean over sequences of (prod_t ratio)^2, minus 1."""
    router_delta: float | None = None
    """Share of experts of a layer that one side chose and the other did not (`engines.routing.flip_rate`); None for a
    dense model."""


LIMITS = Mismatch(tv_p95=1e-4, chi2_seq=0.1, router_delta=1e-3)
"""The survey's numbers."""


def over_budget(measured: Mismatch, limits: Mismatch = LIMITS) -> tuple[str, ...]:
    """The names of what is not below its limit; empty within the budget.

    Args:
        measured: of the stack, at equal weights.
        limits: what every number has to be below.

    Raises: `BadValueError` for a number that is NaN, which was not measured.

    Example:
        >>> over_budget(Mismatch(tv_p95=8e-5, chi2_seq=0.01))
        ()
        >>> over_budget(Mismatch(tv_p95=8e-4, chi2_seq=0.01, router_delta=2e-3))
        ('tv_p95', 'router_delta')

    Reference: survey of off-policy RL for LLMs, 2026, problem 4.
    """
    over = []
    for name, value, limit in zip(Mismatch._fields, measured, limits, strict=True):
        if value is None or limit is None:
            continue
        if math.isnan(value):
            raise BadValueError(f"{name} is NaN, so that nobody knows whether it is below {limit:g}; measure it")
        over += [] if value < limit else [name]
    return tuple(over)
