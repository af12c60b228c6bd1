"""`View`: what a reading may look at, and how functions become a table of readings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from offdrift.judge.findings import Context, Row
from offdrift.judge.window import Window, number


class Measured(NamedTuple):
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
    """What a reading may look at, at one moment."""

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
        if self.overall is not None and (value := number(self.overall, metric)) is not None:
            return value
        return self.window.level(metric, self.size("window_level"))

    def first(self, *metrics: str) -> Measured | None:
        """The level of the first of these metrics that there is."""
        return next(iter(self.levels(*metrics)), None)

    def largest(self, *metrics: str) -> Measured | None:
        """The largest level of these metrics."""
        return max(self.levels(*metrics), key=lambda m: m.value, default=None)

    def levels(self, *metrics: str) -> list[Measured]:
        """The levels of those of these metrics that there are."""
        return [Measured(value, self.named(m)) for m in metrics if (value := self.level(m)) is not None]

    def named(self, metric: str) -> str:
        """A metric's name with the engine ratio in place of `{on}`."""
        return metric.replace("{on}", self.on) if "{on}" in metric else metric

    def recent(self, metric: str) -> list[float]:
        """The values of a metric over the window of trends."""
        return self.window.column(metric, self.size("window_trend"))


Value = Callable[[View], Measured | float | None]
V = TypeVar("V", bound=Value)


@dataclass(frozen=True)
class Definition:
    """One row of the table: how a reading is made."""

    unit: str
    about: str
    value: Value


class Table(dict[str, Definition]):
    """Readings by name. A function becomes one by `@table.reading()`; its docstring says what it is."""

    def reading(self, unit: str = "1") -> Callable[[V], V]:
        """Register a function under its own name."""

        def register(value: V) -> V:
            about = " ".join((value.__doc__ or "").split()).rstrip(".")
            self[value.__name__] = Definition(unit, about, value)  # type: ignore[attr-defined]
            return value

        return register

    def levels(self, rows: Mapping[str, tuple[str, str]], unit: str = "1") -> None:
        """Register readings that are the level of one metric: by name the metric and what it is."""
        for name, (metric, about) in rows.items():
            self[name] = Definition(unit, about, lambda view, metric=metric: view.first(metric))


def read(view: View, table: Mapping[str, Definition]) -> Reading:
    """Every reading of the table that this view allows."""
    reading = Reading()
    for name, row in table.items():
        measured = row.value(view)
        if measured is None:
            continue
        value, metric = measured if isinstance(measured, Measured) else (measured, name)
        reading[name] = float(value)
        reading.metrics[name] = metric
    return reading
