"""The chart model of every page and picture: series of numbers, and the axes that they share.

A page stores the columns of its charts once each, long ones packed, and draws them by `assets/charts.js`: of a long
line the lowest and the highest value of every stretch, of the part that a reader looks at closer every value.
A point that is not a finite number, or not above 0 on a logarithmic axis,
is a gap. A color is a name of `page.css`, so that a series looks the same in every picture and page, in the light and
the dark theme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from offdrift.errors import BadValueError, ShapeError, check_choice
from offdrift.show.json_access import visible
from offdrift.show.numbers import short
from offdrift.show.packed import pack

Values = Sequence[Any] | np.ndarray
"""One number per point; None, NaN and infinity are gaps. Along x also one text per point."""

COLUMNS = ("x", "y", "low", "high", "texts", "labels")
"""Fields of a series with a value for each point."""
KINDS = ("line", "points", "dots", "steps", "bars")
DASHES = ("solid", "dashdot", "dot", "dash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon")
"""Markers by the number of a series, so that none is told by its color alone."""
NUM_COLORS = len(SYMBOLS)
"""Colors of `page.css` (`--arm-0` ...); beyond them they repeat with another dash and marker."""
MAX_POINTS = 1200
"""Points of a series that are drawn at once, the lowest and the highest of 600 stretches: more than a screen tells
apart. A longer column is stored packed."""
SERIES_IN_WORDS = 16
"""Series that the words about a chart describe."""
FEWEST_POINTS = 100
"""Points that a series keeps on a page, however full the page is."""

PAIR_COLORS = {"mismatch": "arm-0", "full": "arm-1", "staleness": "arm-2"}
PAIR_DASHES: dict[str, Literal["solid", "dash", "dot"]] = {"mismatch": "solid", "full": "dash", "staleness": "dot"}
"""How each pair of policies is drawn, the same in all charts."""


def symbol_of(number: int) -> str:
    """The marker of a series by its number; where its color comes again, another, so that points differ, too.

    Example:
        >>> symbol_of(0), symbol_of(8)
        ('circle', 'square')
    """
    return SYMBOLS[(number + number // NUM_COLORS) % NUM_COLORS]


@dataclass(frozen=True)
class Series:
    """One line, set of points, row of bars, or band."""

    name: str
    x: Values
    y: Values = ()
    """Absent for a band alone."""
    low: Values = ()
    """Lower and upper end of a band around `y`, both or neither; of "dots", error bars."""
    high: Values = ()
    kind: Literal["line", "points", "dots", "steps", "bars"] = "line"
    """ "points" are a line with its points, "dots" points alone."""
    color: str = ""
    """A color of `page.css`; `styled` chooses one for a series without."""
    dash: Literal["solid", "dashdot", "dot", "dash"] = "solid"
    symbol: str = SYMBOLS[0]
    strong: bool = False
    """Drawn thicker, behind the others: a line that coincides with another still shows; dots are larger."""
    faint: bool = False
    """Drawn thinner, and without its value under the pointer."""
    group: str = ""
    """What the legend's button hides together."""
    hover: str = ".4g"
    texts: Sequence[str] = ()
    """What is shown of each point instead of its value."""
    labels: Sequence[str] = ()
    """What stands beside each point on a page; of "dots"."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("dash", self.dash, DASHES)
        if (len(self.low) == 0) != (len(self.high) == 0):
            raise BadValueError(f"series {self.name!r} has one end of a band; give low and high")
        columns = {"x": self.x, "y": self.y, "low": self.low, "high": self.high}
        columns |= {"texts": self.texts, "labels": self.labels}
        sizes = {name: len(v) for name, v in columns.items() if name == "x" or len(v)}
        if len(set(sizes.values())) > 1 and len(sizes) > 1:
            raise ShapeError(f"series {self.name!r} has points of different counts: {sizes}")


@dataclass(frozen=True)
class Chart:
    """One pair of axes. Series without a point that can be drawn are left out."""

    title: str
    unit: str
    """Title of the y axis, beside the chart's own."""
    series: Sequence[Series]
    id: str = ""
    """Name of the chart on its page; `styled` numbers those without."""
    meaning: str = ""
    """What is drawn, and which direction is better, for a tooltip."""
    x_title: str = "step"
    log_x: bool = False
    log: bool = False
    """Whether the y axis is logarithmic."""
    share: bool = False
    """Whether y is a share, drawn from 0 to 100 %."""
    lines: Sequence[tuple[float | int, str]] = ()
    """Horizontal reference lines: height and label."""
    upright: Sequence[tuple[float | int, str]] = ()
    """Vertical reference lines: place and label."""
    y_range: tuple[float | int, float | int] | None = None
    """Lower and upper end of the y axis; absent, what the data needs."""
    x_ticks: Sequence[tuple[float | int, str]] = ()
    """Places and labels of the ticks along x; absent, as the axis chooses."""
    wide: bool = False
    legend: bool = False
    """Whether the series are named below the chart: they differ from those of the other charts."""
    drawn: Sequence[dict[str, list[Any]]] = field(init=False, repr=False, compare=False)
    """The `points` of each series: a page that is too full asks for them again for each number that may stay."""
    unplaced: int = field(init=False, default=0)
    """Values at or below 0 that a logarithmic axis has no place for."""

    def __post_init__(self) -> None:
        names = [s.name for s in self.series if not s.color]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise BadValueError(f"chart {self.title!r} has two series named {repeated[0]!r}")
        heights = [*self.lines, *((end, "y_range") for end in self.y_range or ())]
        for log, references in ((self.log, heights), (self.log_x, self.upright)):
            for value, label in references:
                if not math.isfinite(value) or (log and value <= 0):
                    raise BadValueError(f"chart {self.title!r}: {label!r} has no place at {value}")
        below = (v is not None and -math.inf < v <= 0 for s in self.series for v in s.y)
        object.__setattr__(self, "unplaced", sum(below) * self.log)
        with_points = [(s, points(self, s)) for s in self.series]
        visible_ones = [(s, p) for s, p in with_points if any(v is not None for v in p["y"] or p["low"])]
        object.__setattr__(self, "series", tuple(s for s, _ in visible_ones))
        object.__setattr__(self, "drawn", tuple(p for _, p in visible_ones))

    @property
    def if_empty(self) -> str:
        """Text in place of a chart without series."""
        return "No value above 0 was recorded." if self.log else "Not recorded."

    @property
    def gaps(self) -> str:
        """Why lines have gaps, "" where none has one for want of a place on a logarithmic axis.

        Example:
            >>> Chart("KL", "nat", [Series("a", [1, 2], [-0.5, 2.0])], log=True).gaps
            'Gaps: 1 value of 0 or below, which a logarithmic axis cannot show.'
        """
        values = f"{self.unplaced:,} value{'' if self.unplaced == 1 else 's'}"
        return f"Gaps: {values} of 0 or below, which a logarithmic axis cannot show." if self.unplaced else ""

    @property
    def in_words(self) -> str:
        """The chart for those who cannot see it: what is drawn, from where to where, and the extremes of each series.

        Example:
            >>> Chart("KL", "nat", [Series("a", [1, 2], [0.5, 2.0])]).in_words.split(". ")[1]
            'a: 2 points, first 0.500, last 2.00, lowest 0.500 at 1, highest 2.00 at 2.'
        """
        kinds = {"line": "Line", "points": "Line", "dots": "Dot", "steps": "Step", "bars": "Bar"}
        places = [v for s in self.series for v in s.x if v is not None and (isinstance(v, str) or math.isfinite(v))]
        ends = [v for v in places if not isinstance(v, str)]
        over = f" over {self.x_title}" if self.x_title else ""
        span = f", {_place(min(ends))} to {_place(max(ends))}" if ends and len(ends) == len(places) else ""
        kind = kinds[self.series[0].kind] if self.series else "Empty"
        words = [f"{kind} chart of {len(self.series)} series{over}{span}."]
        words += [f"{s.name}: {_extremes(s)}." for s in self.series[:SERIES_IN_WORDS] if len(s.y)]
        more = len(self.series) - SERIES_IN_WORDS
        return " ".join([*words, *([f"{more} more series are not described."] if more > 0 else [])])

    @property
    def categories(self) -> list[str]:
        """The texts along x, in order; empty where x is numeric."""
        return list(dict.fromkeys(v for s in self.series for v in s.x if isinstance(v, str)))

    def as_dict(self, columns: PageColumns) -> dict[str, Any]:
        """For the script; what stands in the page's text is not repeated."""
        entries = []
        # Strong ones last, before the others.
        order = sorted(zip(self.series, self.drawn, strict=True), key=lambda of: not of[0].strong)
        for series, drawn in order:
            fields = {k: v for k, v in vars(series).items() if k not in COLUMNS}
            stored = {**drawn, "texts": series.texts, "labels": series.labels}
            entries.append(
                {k: v for k, v in fields.items() if v not in ("", False)}
                | {"name": _escaped(series.name)}
                | columns.series(stored)
            )
        return {
            "id": self.id,
            "x_title": _escaped(self.x_title),
            "log": self.log,
            "log_x": self.log_x,
            "share": self.share,
            "y_range": self.y_range,
            "categories": [_escaped(c) for c in self.categories],
            "x_ticks": [[place, _escaped(label)] for place, label in self.x_ticks],
            "lines": [[place, _escaped(label)] for place, label in self.lines],
            "upright": [[place, _escaped(label)] for place, label in self.upright],
            "series": entries,
        }


class PageColumns:
    """The columns of numbers and texts on a page, each stored once: long ones of numbers packed, see `pack`.

    Args:
        limit: points that a series may keep; absent, all. Of a longer one the lowest and the highest value of every
            stretch stay.

    Example:
        >>> columns = PageColumns()
        >>> columns.add([0.123456789, None]), columns.add(["a"]), columns.add([0.123456789, None]), columns.stored
        (0, 1, 0, [[0.12346, None], ['a']])
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._places: dict[tuple[Any, ...], int] = {}

    def add(self, values: Iterable[Any]) -> int:
        """Store a column; its place."""
        values = list(values)
        if len(values) <= MAX_POINTS:
            column = tuple(_escaped(v) if isinstance(v, str) else rounded(v) for v in values)
        else:  # what is packed is rounded there
            column = tuple([_escaped(v) if isinstance(v, str) else v for v in _drawable(values)])
        return self._places.setdefault(column, len(self._places))

    def series(self, fields: Mapping[str, Values]) -> dict[str, int]:
        """Store the columns of one series; their places, and as `of` how many points there were if some are left out.

        Args:
            fields: columns of one length by their names, `COLUMNS`; empty ones are left out.
        """
        columns = {name: values for name, values in fields.items() if len(values)}
        limit = self.limit
        if any(isinstance(v, str) for name in ("x", "texts", "labels") for v in columns.get(name, ())):
            limit = min(limit or MAX_POINTS, MAX_POINTS)  # texts are not packed
        values = columns.get("y", columns.get("high", columns["x"]))
        rows = None if limit is None else extreme_rows(list(values), limit)
        if rows is None:
            return {name: self.add(column) for name, column in columns.items()}
        ids = {name: self.add([column[i] for i in rows]) for name, column in columns.items()}
        return {**ids, "of": len(values)}

    @property
    def longest(self) -> int:
        """Values of the longest column."""
        return max(map(len, self._places), default=0)

    @property
    def stored(self) -> list[list[Any] | dict[str, Any]]:
        """All columns by their place."""
        return [
            pack(column) if len(column) > MAX_POINTS and not any(isinstance(v, str) for v in column) else list(column)
            for column in self._places
        ]


def chart_data(charts: Iterable[Chart], columns: PageColumns | None = None) -> dict[str, Any]:
    """Data from which a page's script draws charts; those without series are left out.

    Args:
        columns: those of the page, which may hold something already, for other parts of it.
    """
    columns = PageColumns() if columns is None else columns
    entries = [chart.as_dict(columns) for chart in charts if chart.series]
    return {"charts": entries, "columns": columns.stored}


def styled(charts: Sequence[Chart]) -> list[Chart]:
    """Charts where every series has a color: series of one name have one color, dash and symbol in all of them."""
    names = dict.fromkeys(s.name for chart in charts for s in chart.series if not s.color)
    numbers = {name: i for i, name in enumerate(names)}

    def look(series: Series) -> Series:
        if series.color:
            return series
        number = numbers[series.name]
        again = DASHES[min(number // NUM_COLORS, 2)] if series.dash == "solid" else series.dash
        return replace(
            series, color=f"arm-{number % NUM_COLORS}", dash=again, symbol=symbol_of(number), group=series.name
        )

    return [
        replace(chart, id=chart.id or f"{i}", series=[look(s) for s in chart.series]) for i, chart in enumerate(charts)
    ]


def points(chart: Chart, series: Series) -> dict[str, list[Any]]:
    """Columns x, y, low and high as they are drawn, with None where there is nothing to draw.

    Example:
        >>> points(Chart("", "", [], log=True), Series("a", [1, 2], [0.0, 3.0]))["y"]
        [None, 3.0]
    """
    x = _drawable(series.x, log=chart.log_x)
    y = [None if at is None else v for at, v in zip(x, _drawable(series.y, log=chart.log))]
    low, high = _drawable(series.low), _drawable(series.high, log=chart.log)
    if chart.log and low:  # a band that reaches 0 goes down to the smallest value drawn
        smallest = min((v for v in [*low, *y] if v is not None and v > 0), default=None)
        low = [smallest if v is not None and v <= 0 else v for v in low]
    if low or high:
        complete = [None not in row for row in zip(x, low, high, y or x)]
        low, high = ([v if w else None for v, w in zip(ends, complete)] for ends in (low, high))
    return {"x": x, "y": y, "low": low, "high": high}


def _drawable(values: Values, *, log: bool = False) -> list[Any]:
    """Finite numbers, above 0 on a logarithmic axis, and texts; None for anything else."""
    finite, least = math.isfinite, 0 if log else -math.inf
    return [v if v is None or isinstance(v, str) or (finite(v) and v > least) else None for v in values]


def _extremes(series: Series) -> str:
    """The values of a series in words: how many, the first, the last, the lowest and the highest."""
    pairs = [(x, float(y)) for x, y in zip(series.x, series.y) if y is not None and math.isfinite(y)]
    if len(pairs) < 2:
        return f"{short(pairs[0][1])} at {_place(pairs[0][0])}" if pairs else "no value"
    low, high = min(pairs, key=lambda p: p[1]), max(pairs, key=lambda p: p[1])
    return (
        f"{len(pairs):,} points, first {short(pairs[0][1])}, last {short(pairs[-1][1])}, "
        f"lowest {short(low[1])} at {_place(low[0])}, highest {short(high[1])} at {_place(high[0])}"
    )


def _place(value: Any) -> str:
    """A place along x in words."""
    if value is None or isinstance(value, str):
        return value or "nowhere"
    return f"{value:,.0f}" if float(value).is_integer() else short(float(value))


def _escaped(text: str) -> str:
    """Text that plotly cannot read as markup."""
    return html.escape(visible(text), quote=False)


def rounded(value: Any) -> Any:
    """Five significant digits, one more than a chart shows; whole numbers, such as steps, stay as they are.

    Example:
        >>> rounded(0.00123456789), rounded(1234567.0), rounded(math.inf), rounded(None)
        (0.0012346, 1234567.0, None, None)
    """
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, float):
        return value if value.is_integer() and abs(value) < 2**53 else float(f"{value:.5g}")
    return int(value)


def extreme_rows(values: Sequence[Any], limit: int = MAX_POINTS) -> list[int] | None:
    """Rows of the lowest and the highest value of every stretch, at most `limit`; None if all may stay.

    A spike of one step among ten thousand stays visible, which evenly chosen rows would lose.

    Example:
        >>> extreme_rows([0, 0, 9, 0, 1, 0, 0, -5], 6)
        [0, 2, 4, 7]
    """
    if len(values) <= limit:
        return None
    numbers = np.array([math.nan if v is None or isinstance(v, str) else v for v in values], float)
    low, high = (np.where(np.isnan(numbers), ends, numbers) for ends in (math.inf, -math.inf))
    stretches = np.array_split(np.arange(len(values)), max(1, limit // 2 - 1))
    lowest = {int(rows[0] + low[rows[0] : rows[-1] + 1].argmin()) for rows in stretches}
    highest = {int(rows[0] + high[rows[0] : rows[-1] + 1].argmax()) for rows in stretches}
    return sorted(lowest | highest | {0, len(values) - 1})
