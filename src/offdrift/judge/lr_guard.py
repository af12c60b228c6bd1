"""The learning-rate guard: what to multiply the base learning rate by, given the lengths so far."""

from __future__ import annotations

from collections.abc import Iterable

from offdrift.judge.context import Row
from offdrift.judge.window import number
from offdrift.methods.schedules import LengthSurge, SurgeState


def lr_guard(history: Iterable[Row], surge: LengthSurge | None = None) -> float:
    """The factor of the *base* learning rate after these steps: 1 until responses surge, then 0.5.

        surge at s:  mean length(s) / mean length(s - 100) > 1.2
        factor <- max(0.1, factor / 2), and no further surge counts for 100 steps

    It is a function of the history, so it may be called at every step and after a restart; the
    survey's `lr *= 0.5` would halve the rate at each of the hundred steps that one surge lasts.
    Steps without a length are passed over.

    Args:
        history: one row per step, oldest first, with "response/length_mean" in tokens.
        surge: another detector, for instance `LengthSurge()` with the paper's periods.

    Example:
        >>> calm = [{"response/length_mean": 200.0}] * 100
        >>> lr_guard(calm), lr_guard([*calm, {"response/length_mean": 241.0}])
        (1.0, 0.5)

    Reference: Zhang et al., arXiv:2602.01826; survey, cause F.
    """
    rule = surge or LengthSurge(mode="survey")
    state = SurgeState()
    for row in history:
        if (length := number(row, "response/length_mean")) is not None:
            state = rule.after(state, length)
    return state.scale
