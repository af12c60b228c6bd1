"""`View`: what a reading may look at, and how a table of definitions becomes a `Reading`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from offdrift.judge.context import Context, Row
from offdrift.judge.window import Window, number


class Found(NamedTuple):
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
    """What a reading may look at."""

    window: Window
    context: Context
    limits: Mapping[str, float]
    """Thresholds by name: windows and what counts as rising are thresholds, too."""
    overall: Row | None = None
    """Metrics of the whole run: levels are taken from here if given."""

    @property
    def on(self) -> str:
        """The engine ratio."""
        last = self.overall or (self.window.rows[-1] if self.window.rows else {})
        for on in ("mismatch", "full"):
            if any(number(last, f"{on}/{name}") is not None for name in ("k1", "k3", "pearson")):
                return on
        return "mismatch"

    def size(self, name: str) -> int:
        """A window in steps, from the thresholds."""
        return int(self.limits[name])

    def level(self, metric: str) -> float | None:
        """The typical value of a metric now, or over the whole run."""
        if self.overall is not None and (value := number(self.overall, metric)) is not None:
            return value
        return self.window.level(metric, self.size("window_level"))

    def found(self, *metrics: str) -> Found | None:
        """The level of the first of these metrics that there is."""
        for metric in metrics:
            if (value := self.level(metric)) is not None:
                return Found(value, metric)
        return None

    def recent(self, metric: str) -> list[float]:
        """The values of a metric over the window of trends."""
        return self.window.column(metric, self.size("window_trend"))


@dataclass(frozen=True)
class Definition:
    """One row of the table: how a reading is made."""

    unit: str
    about: str
    value: Callable[[View], Found | float | None]


def read(view: View, table: Mapping[str, Definition]) -> Reading:
    """Every reading of the table that this view allows."""
    reading = Reading()
    for name, row in table.items():
        found = row.value(view)
        if found is None:
            continue
        value, metric = found if isinstance(found, Found) else (found, name)
        reading[name] = float(value)
        reading.metrics[name] = metric
    return reading
