"""One mechanism for every plot: panels of series, as a picture and as an interactive page.

`write_figure` draws the same panels twice. The PNG (matplotlib) is for a README, a post or a paper;
the HTML (plotly, self-contained) follows the reader's light or dark theme and answers to the mouse.
Both take their colors from `page.css`, so that a series looks the same there and in the report. A
point that is not a finite number, or not above 0 on a logarithmic axis, is a gap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from offdrift.errors import BadValueError, OffdriftError, ShapeError, check_choice

Numbers = Sequence[float | int] | np.ndarray
"""One number per point, on the host."""

STYLES = ("line", "dashed", "points")
NUM_COLORS = 8
"""Colors of `page.css` (`--arm-0` ...); beyond them they repeat, with another dash and marker."""


@dataclass(frozen=True)
class Series:
    """One line, or one set of points. Series of one name have one color in all panels."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    """Lower and upper end of a band around `y`, both or neither."""
    high: Numbers | None = None
    style: Literal["line", "dashed", "points"] = "line"
    strong: bool = False
    """Drawn thicker, behind the others: a line that coincides with another still shows."""

    def __post_init__(self) -> None:
        check_choice("style", self.style, STYLES)
        if (self.low is None) != (self.high is None):
            raise BadValueError(f"series {self.name!r} has one end of a band; give low and high")
        columns = {"x": self.x, "y": self.y, "low": self.low, "high": self.high}
        sizes = {name: len(v) for name, v in columns.items() if v is not None}
        if len(set(sizes.values())) > 1:
            raise ShapeError(f"series {self.name!r} has points of different counts: {sizes}")


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `x` and `y` are their titles, with units."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    marks: Sequence[tuple[str, float | int]] = ()
    """Horizontal reference lines: label and height."""
    x_marks: Sequence[tuple[str, float | int]] = ()
    """Vertical reference lines: label and place."""
    y_range: tuple[float | int, float | int] | None = None
    """Lower and upper end of the y axis; absent, what the data needs."""

    def __post_init__(self) -> None:
        names = [s.name for s in self.series]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise BadValueError(f"panel {self.title!r} has two series named {repeated[0]!r}")
        ends = [("y_range", value) for value in self.y_range or ()]
        for log, lines in ((self.log_y, [*self.marks, *ends]), (self.log_x, self.x_marks)):
            for label, value in lines:
                if not math.isfinite(value) or (log and value <= 0):
                    raise BadValueError(f"panel {self.title!r}: {label!r} has no place at {value}")


def write_figure(stem: Path, panels: Sequence[Panel], *, title: str, caption: str = "") -> tuple[Path, Path]:
    """Write `stem.png` and `stem.html`, each whole or not at all, and say where they are.

    Args:
        stem: path without its ending; folders are made, earlier files replaced.
        panels: one or more; series of one name have one color in all of them.
        title: what the figure shows, in one line.
        caption: what the reader should see in it, and where the numbers are from.

    Returns: paths of the picture and of the page.

    Raises: `BadValueError` without panels; `RecordError` if a file cannot be written;
        `OffdriftError` if matplotlib or plotly is not installed.

    Example:
        >>> import tempfile
        >>> squares = Series("T²", x=[1, 2, 4], y=[1.0, 4.0, 16.0])
        >>> panel = Panel("Growth", "T (tokens)", "bound", [squares], log_x=True, log_y=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = write_figure(Path(folder) / "growth", [panel], title="Two words")
        >>> [f.name for f in files]
        ['growth.png', 'growth.html']
    """
    try:
        from offdrift.records.store import write_atomically
        from offdrift.show.figure_html import html_of
        from offdrift.show.figure_png import png_of
    except ModuleNotFoundError as e:
        raise OffdriftError(f"figures need {e.name}, which is not installed; pip install 'offdrift[train]'") from e
    if not panels:
        raise BadValueError("a figure without panels; give at least one")
    picture, page = (stem.with_name(stem.name + ending) for ending in (".png", ".html"))
    drawn = png_of(panels, title=title, caption=caption)
    text = html_of(panels, title=title, caption=caption)
    write_atomically(picture, lambda partial: Path(partial).write_bytes(drawn))
    write_atomically(page, lambda partial: Path(partial).write_text(text, encoding="utf-8"))
    return picture, page


# -- what both drawings share -----------------------------------------------------------------


@cache
def palette() -> dict[str, dict[str, str]]:
    """The colors of `page.css`, by theme ("light", "dark") and name."""
    css = (Path(__file__).parent / "assets" / "page.css").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\n *\}", css, flags=re.DOTALL)
    return {
        theme: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for theme, block in zip(("light", "dark"), blocks)
    }


def order(panels: Sequence[Panel]) -> dict[str, int]:
    """Number of each series name, in order of appearance: its color, dash and marker."""
    names = dict.fromkeys(s.name for panel in panels for s in panel.series)
    return {name: i for i, name in enumerate(names)}


def points(panel: Panel, series: Series) -> dict[str, Any]:
    """Arrays x, y, low and high in float64 with NaN where there is nothing to draw.

    Example:
        >>> panel = Panel("", "", "", [Series("a", [1, 2], [0.0, 3.0])], log_y=True)
        >>> points(panel, panel.series[0])["y"]
        array([nan,  3.])
    """
    x, y = _drawable(series.x, log=panel.log_x), _drawable(series.y, log=panel.log_y)
    gap = np.isnan(x) | np.isnan(y)
    drawn: dict[str, Any] = {"x": x, "y": np.where(gap, np.nan, y), "low": None, "high": None}
    if series.low is not None and series.high is not None:
        low, high = _finite(series.low), _finite(series.high)
        gap |= np.isnan(low) | np.isnan(high) | (panel.log_y & (np.nan_to_num(high) <= 0))
        if panel.log_y:  # a band that reaches 0 goes down to the smallest thing drawn
            shown = np.concatenate([low[low > 0], y[y > 0], [np.inf]])
            low = np.where(low <= 0, shown.min(), low)
        drawn |= {"low": np.where(gap, np.nan, low), "high": np.where(gap, np.nan, high)}
    return drawn


def _finite(values: Numbers) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def _drawable(values: Numbers, *, log: bool) -> np.ndarray:
    array = _finite(values)
    return np.where(array > 0, array, np.nan) if log else array


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon")
"""Marker of an arm, so that no arm is told by its colour alone."""
