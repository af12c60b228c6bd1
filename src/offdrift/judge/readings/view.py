"""`Window`: the last steps of a run in bounded memory. `View`: what a reading may look at. `Table`: readings."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from numbers import Real
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import numpy as np

from offdrift.judge.findings import Context, Row, number
from offdrift.judge.scatter import about_line, error_of_mean

EARLY = 5
"""Last steps at the same weights that are kept; they are kept apart, because they may be long ago."""

BLOCK = 5
"""Steps whose means show a slow wander under fresh noise."""


class StepMean(NamedTuple):
    """The mean of some steps, and how well it is known."""

    value: float
    error: float
    """Standard error, for autocorrelated steps."""
    dof: float
    """Degrees of freedom of that error."""

    @staticmethod
    def of(values: Sequence[float], past: Sequence[float] = ()) -> StepMean:
        """Mean of at least one value, with its error. The scatter is that of `past` about its line, given two values or
        more.
        """
        mean, line = fmean(values), len(past) > 1
        about = about_line(past) if line else np.asarray(values, dtype=np.float64) - mean
        return StepMean(mean, *error_of_mean(about, 2 if line else 1, len(values), BLOCK))


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
        self.steps_told = 0
        """Rows so far that say whether they are such rows."""
        self.first: dict[str, float] | None = None
        self.peak: dict[str, float] = {}
        """Largest value ever of each share that says whether a configured part acts."""
        self.tokens = self.unscored = 0.0
        """Tokens so far, and those of them that no engine scored, where a run logs them."""
        self.best_held_out: float | None = None
        """Largest held-out reward so far, where it is measured."""
        self.best_reward: StepMean | None = None
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
        self.steps_told += same_weights is not None
        if same_weights:
            self.same_weights.append(kept)
            self.steps_same += 1
            if len(self.first_same) < EARLY:
                self.first_same.append(kept)
        for name, x in kept.items():
            if name.endswith("_frac") or "drop_frac" in name:
                self.peak[name] = max(x, self.peak.get(name, x))
        if (held_out := kept.get("eval/reward")) is not None:
            self.best_held_out = held_out if self.best_held_out is None else max(held_out, self.best_held_out)
        outside = kept.get("unscored_tokens", 0.0)  # left out before the statistics were taken
        self.tokens += kept.get("batch/tokens", 0.0) + outside
        self.unscored += kept.get("batch/unscored_tokens", 0.0) + outside
        rewards = self.column("reward/mean", self.trend)
        best = -math.inf if self.best_reward is None else self.best_reward.value
        if "reward/mean" in kept and len(rewards) == self.trend and fmean(rewards) >= best:
            self.best_reward = StepMean.of(rewards, self.column("reward/mean", self.long))
        return kept

    def same_throughout(self, least: int) -> float | None:
        """1 if all rows so far, so many at least, were drawn from the weights that scored them; None if none says."""
        return float(self.steps_same == self.steps >= least) if self.steps_told else None

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


class ReadNumber(NamedTuple):
    """A number and the metric that it was read from."""

    value: float
    metric: str


class Reading(dict[str, float]):
    """Numbers by the names of `READINGS`. What could not be read is absent."""

    def __init__(self, values: Mapping[str, float] = {}, metrics: Mapping[str, str] = {}) -> None:
        super().__init__(values)
        self.metrics = dict(metrics)
        """The metric that each was read from, by name of the reading."""


@dataclass(frozen=True)
class View:
    """Data that a reading may use at one step."""

    window: Window
    context: Context
    limits: Mapping[str, float]
    """Thresholds by name: windows and what counts as rising are thresholds, too."""
    overall: Row | None = None
    """Metrics of the whole run: levels are taken from here if given."""

    @cached_property
    def newest(self) -> Row:
        """Metrics of the whole run, else of its last step."""
        return self.overall or (self.window.rows[-1] if self.window.rows else {})

    @cached_property
    def on(self) -> str:
        """The engine ratio."""
        for on in ("mismatch", "full"):
            if any(number(self.newest, f"{on}/{name}") is not None for name in ("k1", "k3", "pearson")):
                return on
        return "mismatch"

    def size(self, name: str) -> int:
        """A window in steps, from the thresholds."""
        return int(self.limits[name])

    def level(self, metric: str) -> float | None:
        """The typical value of a metric now, or over the whole run; `{on}` is the engine ratio."""
        metric = self.named(metric)
        if metric not in self.known_levels:
            value = None if self.overall is None else number(self.overall, metric)
            self.known_levels[metric] = self.window.level(metric, self.size("window_level")) if value is None else value
        return self.known_levels[metric]

    @cached_property
    def known_levels(self) -> dict[str, float | None]:
        """The levels that were asked for: several readings look at the same metric."""
        return {}

    def first(self, *metrics: str) -> ReadNumber | None:
        """The level of the first of these metrics that there is."""
        for metric in metrics:
            if (value := self.level(metric)) is not None:
                return ReadNumber(value, self.named(metric))
        return None

    def largest(self, *metrics: str) -> ReadNumber | None:
        """The largest level of these metrics."""
        return max(self.levels(*metrics), key=lambda m: m.value, default=None)

    def levels(self, *metrics: str) -> list[ReadNumber]:
        """The levels of those of these metrics that there are."""
        return [ReadNumber(value, self.named(m)) for m in metrics if (value := self.level(m)) is not None]

    def named(self, metric: str) -> str:
        """A metric's name with the engine ratio in place of `{on}`."""
        return metric.replace("{on}", self.on) if "{on}" in metric else metric

    def mapped(self, metric: str, function: Callable[[float], float]) -> ReadNumber | None:
        """A function of the level of a metric."""
        measured = self.first(metric)
        return None if measured is None else ReadNumber(float(function(measured.value)), measured.metric)

    def recent(self, metric: str) -> list[float]:
        """The values of a metric over the window of trends."""
        return self.window.column(metric, self.size("window_trend"))


Value = Callable[[View], ReadNumber | float | None]
V = TypeVar("V", bound=Value)


@dataclass(frozen=True)
class Definition:
    """One row of the table: how a reading is made."""

    unit: str
    about: str
    value: Value
    metric: str = ""
    """The metric whose level it is; "" where it is derived."""


class Table(dict[str, Definition]):
    """Readings by name. A function becomes one by `@table.reading()`; its docstring says what it is."""

    def reading(self, unit: str = "1") -> Callable[[V], V]:
        """Register a function under its own name."""

        def register(value: V) -> V:
            about = " ".join((value.__doc__ or "").split()).rstrip(".")
            self[value.__name__] = Definition(unit, about, value)  # type: ignore[attr-defined]
            return value

        return register

    def rows(self, rows: Mapping[str, tuple[str | Value, str]], unit: str = "1") -> None:
        """Register readings by name: the metric whose level each is, or a function of the view, and what it is."""
        for name, (value, about) in rows.items():
            made = (lambda view, metric=value: view.first(metric)) if isinstance(value, str) else value
            self[name] = Definition(unit, about, made, value if isinstance(value, str) else "")


def read(view: View, table: Mapping[str, Definition]) -> Reading:
    """Every reading of the table that this view allows."""
    reading = Reading()
    for name, row in table.items():
        measured = row.value(view)
        if measured is None:
            continue
        value, metric = measured if isinstance(measured, ReadNumber) else (measured, name)
        reading[name] = float(value)
        reading.metrics[name] = metric
    return reading
