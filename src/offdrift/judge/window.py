"""`Window`: the last steps of a run and a few running facts about all of it, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from numbers import Real
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from offdrift.judge.findings import Row
from offdrift.judge.scatter import about_line, error_of_mean

EARLY = 5
"""Last steps at the same weights that are kept; they are kept apart, because they may be long ago."""

BLOCK = 5
"""Steps whose means show a slow wander under fresh noise."""


def number(row: Row, name: str) -> float | None:
    """A finite number of the row; None if there is none of that name."""
    value = row.get(name)
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


class Mean(NamedTuple):
    """The mean of some steps, and how well it is known."""

    value: float
    error: float
    """Standard error, for autocorrelated steps."""
    dof: float
    """Degrees of freedom of that error."""

    @staticmethod
    def of(values: Sequence[float], past: Sequence[float] = ()) -> Mean:
        """Of at least one value; the scatter is that of `past` about its line, if two values make one."""
        mean, line = fmean(values), len(past) > 1
        about = about_line(past) if line else np.asarray(values, dtype=np.float64) - mean
        return Mean(mean, *error_of_mean(about, 2 if line else 1, len(values), BLOCK))


class Window:
    """The last `span` steps, oldest first, and running facts of the whole run.

    Args:
        span: steps kept; memory and time of an update do not depend on the length of the run.
        trend: steps over which the reward is averaged before its best is remembered.
        long: steps, up to then, whose scatter says how well that mean is known.
    """

    def __init__(self, span: int, trend: int = 20, long: int = 100) -> None:
        self.trend, self.long = trend, long
        self.rows: deque[dict[str, float]] = deque(maxlen=span)
        self.steps = 0
        """Rows so far, over the whole run."""
        self.step = 0
        self.broken: str | None = None
        """A loss or gradient norm of the last row that was NaN or infinite."""
        self.same_weights: deque[dict[str, float]] = deque(maxlen=EARLY)
        """The last rows whose rollouts were drawn from the weights that scored them."""
        self.first_same: list[dict[str, float]] = []
        """The first such rows, as many."""
        self.steps_same = 0
        """Such rows so far."""
        self.first: dict[str, float] | None = None
        self.peak: dict[str, float] = {}
        """Largest value ever of each share that says whether a configured part acts."""
        self.tokens = self.unscored = 0.0
        """Tokens so far, and those of them that no engine scored, where a run logs them."""
        self.best_reward: Mean | None = None
        """Largest mean reward over `trend` consecutive steps."""

    def add(self, row: Row, *, same_weights: bool | None) -> dict[str, float]:
        """Take one more step; returns its finite numbers."""
        kept = {name: x for name in row if (x := number(row, name)) is not None}
        watched = ("optim/loss", "optim/grad_norm")
        bad = [n for n in watched if isinstance(row.get(n), Real) and n not in kept]
        self.broken = bad[0] if bad else None
        self.steps += 1
        self.step = int(kept.get("step", kept.get("update", self.step + 1)))
        kept["step"] = float(self.step)
        self.rows.append(kept)
        self.first = self.first or kept
        if same_weights:
            self.same_weights.append(kept)
            self.steps_same += 1
            if len(self.first_same) < EARLY:
                self.first_same.append(kept)
        for name, x in kept.items():
            if name.endswith("_frac") or "drop_frac" in name:
                self.peak[name] = max(x, self.peak.get(name, x))
        outside = kept.get("unscored_tokens", 0.0)  # left out before the statistics were taken
        self.tokens += kept.get("batch/tokens", 0.0) + outside
        self.unscored += kept.get("batch/unscored_tokens", 0.0) + outside
        rewards = self.column("reward/mean", self.trend)
        best = -math.inf if self.best_reward is None else self.best_reward.value
        if "reward/mean" in kept and len(rewards) == self.trend and fmean(rewards) >= best:
            self.best_reward = Mean.of(rewards, self.column("reward/mean", self.long))
        return kept

    def column(self, name: str, last: int | None = None) -> list[float]:
        """The values of a metric in the last rows, oldest first; rows without it are passed over."""
        rows = islice(reversed(self.rows), last)
        return [row[name] for row in rows if name in row][::-1]

    def level(self, name: str, last: int) -> float | None:
        """The median of a metric over the last rows; None if none has it."""
        values = self.column(name, last)
        return median(values) if values else None

    def since(self, name: str, steps_ago: int, width: int, young: int) -> list[float]:
        """A metric from the `width` rows up to `steps_ago` steps before the last row on, to the last.

        A run that is younger gives all its rows; of fewer than `young` steps, none.
        """
        rows = [row for row in self.rows if name in row]
        if len(rows) < 2 * width or self.step - rows[0]["step"] < young:
            return []
        past = sum(row["step"] <= self.step - steps_ago for row in rows)
        return [row[name] for row in rows[max(0, past - width) :]]
