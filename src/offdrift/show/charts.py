"""Charts of an audit as plain data: what the page's script hands to plotly.

A series names the columns of numbers that it draws, so that a column which several charts show is on
the page once; it holds no color but the name of one, which differs in the light and the dark theme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offdrift.show.sanitize import visible

MAX_POINTS = 2000
"""Points of a series on a page; more cannot be told apart on any screen."""

Column = list[float | None]

SERIES_COLORS = {"mismatch": "arm-0", "full": "arm-1", "staleness": "arm-2"}
DASHES = {"mismatch": "solid", "full": "dash", "staleness": "dot"}
"""How each pair of policies is drawn, the same in all charts."""


@dataclass(frozen=True)
class Series:
    """One line, band or row of bars.

    `x`, `y`, `low` and `high` are names of columns; a band has `low` and `high` and no `y`.
    """

    name: str
    x: str
    y: str = ""
    low: str = ""
    high: str = ""
    color: str = "arm-0"
    dash: str = "solid"
    kind: str = "line"
    """ "line", "points" (a line with its points), "dots" (points alone), "steps" or "bars"."""
    group: str = ""
    """What the legend's button hides together."""
    hover: str = ".3g"
    texts: str = ""
    """Column of texts to show at each point instead of the value."""

    def as_dict(self) -> dict[str, Any]:
        """The fields that are set; the name escaped, as plotly reads some markup in names."""
        fields = {k: v for k, v in vars(self).items() if v != ""}
        return fields | {"name": html.escape(visible(self.name), quote=False)}


@dataclass(frozen=True)
class Chart:
    """What one figure shows; without series it says why there is nothing to see."""

    id: str
    title: str
    unit: str
    meaning: str
    series: tuple[Series, ...] = ()
    log: bool = False
    share: bool = False
    x_title: str = "step"
    categories: str = ""
    """Column of the texts along x; without it x is numeric."""
    lines: tuple[tuple[float, str], ...] = ()
    """Dashed reference lines: height and label."""
    wide: bool = False
    legend: bool = False
    """Whether the series are named below the chart: they differ from those of the other charts."""
    layout: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the script; what stands in the page's text is not repeated."""
        return {
            "id": self.id,
            "log": self.log,
            "share": self.share,
            "x_title": self.x_title,
            "categories": self.categories,
            "lines": [[y, html.escape(visible(label), quote=False)] for y, label in self.lines],
            "series": [s.as_dict() for s in self.series],
            "layout": dict(self.layout),
        }


class Columns:
    """Columns of numbers or texts by name, each stored once and shortened to what a chart can show."""

    def __init__(self) -> None:
        self.held: dict[str, list[Any]] = {}

    def add(self, name: str, values: Iterable[Any]) -> str:
        """Store a column; its name if it holds anything to draw, else "".

        Example:
            >>> columns = Columns()
            >>> columns.add("a", [0.123456789, None]), columns.add("b", [None]), columns.held
            ('a', '', {'a': [0.12346, None]})
        """
        kept = [_plain(v) for v in thinned(list(values))]
        if name in self.held or any(v is not None for v in kept):
            self.held.setdefault(name, kept)
            return name
        return ""

    def add_positive(self, name: str, values: Iterable[float | None]) -> str:
        """The same for a logarithmic axis: what is not above 0 is a gap."""
        return self.add(f"{name}+", [v if v is not None and v > 0 else None for v in values])

    def used(self, charts: Iterable[Chart]) -> dict[str, list[Any]]:
        """The columns that these charts draw."""
        names = {n for c in charts for s in c.series for n in (s.x, s.y, s.low, s.high, s.texts)}
        names |= {c.categories for c in charts}
        return {name: values for name, values in self.held.items() if name in names}


def _plain(value: Any) -> Any:
    """What a column holds: a shortened number, or a text that plotly cannot read as markup."""
    if isinstance(value, str):
        return html.escape(visible(value), quote=False)
    return rounded(value) if isinstance(value, float) else value


def rounded(value: float) -> float | None:
    """Five significant digits: all that a chart can show, in a third of the bytes.

    Example:
        >>> rounded(0.00123456), rounded(math.inf)
        (0.0012346, None)
    """
    return float(f"{value:.5g}") if math.isfinite(value) else None


def thinned(values: list[Any], limit: int = MAX_POINTS) -> list[Any]:
    """At most `limit` values, evenly chosen, the first and the last among them.

    Example:
        >>> thinned(list(range(9)), 3)
        [0, 4, 8]
    """
    if len(values) <= limit:
        return values
    return [values[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)]
