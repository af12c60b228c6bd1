"""Charts as one PNG or SVG, drawn by matplotlib: labels beside the ends of lines where they fit, else a legend."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter

from offdrift.show.charts import SYMBOLS, Chart, Series, points, styled
from offdrift.show.json_access import visible

WIDTH, HEIGHT, DPI = 6.0, 4.4, 150
"""Inches of one panel, and dots per inch."""
WIDE = 1.4
"""A single panel that asks to be wide is larger by this."""

MOST_LABELS = 12
"""Lines of one panel that are labeled at their ends; more get a legend."""

DASHES: dict[str, Any] = {
    "solid": "-",
    "dashdot": (0, (6, 1.5, 1, 1.5)),
    "dot": (0, (1, 1.2)),
    "dash": (0, (4, 2)),
}
MARKERS: dict[str, str] = dict(zip(SYMBOLS, "osD^P*hp"))

FONT: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10.5,
    "figure.titlesize": 13,
    "axes.unicode_minus": True,
    "svg.hashsalt": "offdrift",
    "svg.fonttype": "none",
}


def picture_of(charts: Sequence[Chart], *, title: str, caption: str, kind: str = "png") -> bytes:
    """The picture's bytes, "png" or "svg", the same for the same charts."""
    charts = styled(charts)
    columns = min(len(charts), 2 if len(charts) in (2, 4) else 3)
    rows = -(-len(charts) // columns)
    with mpl.rc_context(FONT), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        colors = palette()["light"]
        wide = WIDE if len(charts) == 1 and charts[0].wide else 1.0
        width, height = WIDTH * columns * wide, HEIGHT * rows * wide
        figure = Figure((width, height), DPI)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.04)
        FigureCanvasAgg(figure)
        figure.set_facecolor(colors["card"])
        fits = int(13.5 * width)
        left: dict[str, Any] = {"x": 0.012, "ha": "left", "parse_math": False}
        figure.suptitle(textwrap.fill(visible(title), int(fits * 0.62)), color=colors["ink"], fontweight="bold", **left)
        if caption:
            lines = [textwrap.fill(visible(part), fits) for part in caption.splitlines()]
            figure.supxlabel("\n".join(lines), color=colors["soft"], fontsize=8.5, **left)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(charts) :]:
            axes.set_axis_off()
        labels = [_draw(axes, chart, colors) for axes, chart in zip(grid, charts)]
        figure.draw_without_rendering()  # the layout decides how far apart labels must be
        figure.set_layout_engine("none")
        for axes, texts in zip(grid, labels):
            # Each label at the height of its line's end, moved no further than the others demand.
            window, right = axes.get_window_extent(), axes.get_xlim()[1]
            sizes = [1.15 * Text.get_window_extent(t).height / window.height for t in texts]  # without the line
            ends = [axes.transData.transform((right, t.xy[1]))[1] for t in texts]
            places = spread([float((end - window.y0) / window.height) for end in ends], sizes)
            for label, place in zip(texts, places):
                label.set_position((1.035, place))
        file = io.BytesIO()
        nothing = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
        figure.savefig(file, format=kind, metadata=nothing[kind])
    return file.getvalue()


@cache
def palette() -> dict[str, dict[str, str]]:
    """The colors of `page.css`, by theme ("light", "dark") and name."""
    css = (Path(__file__).parent / "assets" / "page.css").read_text("utf-8")
    blocks = re.findall(r":root(?::not\(\.paper\))? \{(.*?)\n *\}", css, flags=re.DOTALL)
    return {
        theme: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for theme, block in zip(("light", "dark"), blocks)
    }


def _draw(axes: Axes, chart: Chart, colors: dict[str, str]) -> list[Annotation]:
    """One chart; the labels that still have to be kept apart."""
    _frame(axes, chart, colors)
    if not chart.series:
        axes.text(0.5, 0.5, chart.if_empty, transform=axes.transAxes, ha="center", color=colors["soft"])
        axes.set(xticks=[], yticks=[])
        return []
    arrays = [_arrays(chart, s) for s in chart.series]
    for number, (series, p) in enumerate(zip(chart.series, arrays)):
        _series(axes, series, p, number=number, count=len(arrays), colors=colors)
    for value, _ in chart.lines:
        axes.axhline(value, color=colors["soft"], linewidth=1.1, linestyle=(0, (3, 2)), zorder=1.5)
    for value, label in chart.upright:
        axes.axvline(value, color=colors["soft"], linewidth=1.1, linestyle=(0, (1, 2)), zorder=1.5)
        axes.annotate(
            visible(label),
            (value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            **_note(colors),
        )
    ticks = list(enumerate(chart.categories)) or list(chart.x_ticks)
    if ticks:
        axes.set_xticks([place for place, _ in ticks], [visible(label) for _, label in ticks], parse_math=False)
    if chart.y_range:
        axes.set_ylim(*chart.y_range)
    elif chart.share:
        axes.set_ylim(0, max(1.04, axes.get_ylim()[1]))
    axes.margins(x=0 if all(s.kind == "line" for s in chart.series) else 0.02)
    if _ends_at_the_right(chart, arrays):
        labels = [_label(axes, None, value, label, colors["soft"]) for value, label in chart.lines]
        for series, p in zip(chart.series, arrays):
            last = np.flatnonzero(~np.isnan(p["y"]))[-1]
            labels.append(_label(axes, p["x"][last].item(), p["y"][last].item(), series.name, colors[series.color]))
        return labels
    for value, label in chart.lines:  # inside: to the right stands the legend
        axes.annotate(
            visible(label),
            (0, value),
            xycoords=("axes fraction", "data"),
            xytext=(4, 2),
            textcoords="offset points",
            va="bottom",
            **_note(colors),
        )
    legend = axes.legend(  # outside the axes, to the right, where it never covers data
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        frameon=False,
        fontsize=8.5,
        labelcolor=colors["ink"],
        handlelength=2.4,
        labelspacing=0.5 * min(1.0, MOST_LABELS / len(arrays)),
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return []


def _note(colors: dict[str, str]) -> dict[str, Any]:
    """Style of a reference line's label inside the axes: readable where curves pass."""
    back = {"facecolor": colors["card"], "edgecolor": "none", "pad": 1}
    return {"color": colors["soft"], "fontsize": 8.5, "parse_math": False, "zorder": 4, "bbox": back}


def _arrays(chart: Chart, series: Series) -> dict[str, np.ndarray]:
    """The columns of a series in float64, with NaN in gaps; texts along x by their place in the chart."""
    columns = points(chart, series)
    if places := {text: i for i, text in enumerate(chart.categories)}:
        columns["x"] = [places[x] for x in columns["x"]]
    return {name: np.array(values, dtype=np.float64) for name, values in columns.items()}


def _frame(axes: Axes, chart: Chart, colors: dict[str, str]) -> None:
    text: dict[str, Any] = {"parse_math": False}
    axes.set_facecolor(colors["card"])
    title = textwrap.fill(visible(chart.title), 70)
    axes.set_title(title, loc="left", color=colors["ink"], pad=9, **text)
    axes.set_xlabel(visible(chart.x_title), color=colors["soft"], **text)
    axes.set_ylabel(visible(chart.unit), color=colors["soft"], **text)
    if chart.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(_between_decades(axes.xaxis))
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(_between_decades(axes.yaxis))
    axes.grid(True, color=colors["grid"], linewidth=0.9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colors["rule"])
    axes.tick_params(which="both", color=colors["rule"], labelcolor=colors["soft"])


def _series(
    axes: Axes, series: Series, p: dict[str, np.ndarray], number: int, count: int, colors: dict[str, str]
) -> None:
    color, label = colors[series.color], visible(series.name)
    if p["low"].size and series.kind == "dots":
        ends = np.abs(np.stack([p["y"] - p["low"], p["high"] - p["y"]]))
        axes.errorbar(p["x"], p["y"], ends, color=color, linestyle="none", linewidth=1.1, capsize=2)
    elif p["low"].size:
        band = None if p["y"].size else label
        axes.fill_between(p["x"], p["low"], p["high"], color=color, alpha=0.16, linewidth=0, label=band)
    if not p["y"].size:
        return
    if series.kind == "bars":
        width = 0.65 / count
        axes.bar(p["x"] + (number - (count - 1) / 2) * width, p["y"], width, color=color, label=label)
        return
    alone = int((~np.isnan(p["y"])).sum()) == 1  # a single point draws no line
    marked = series.kind == "dots" or alone
    axes.plot(
        p["x"],
        p["y"],
        label=label,
        color=color,
        linestyle="none" if marked else DASHES[series.dash],
        drawstyle="steps-post" if series.kind == "steps" else "default",
        linewidth=4.5 if series.strong else 1.0 if series.faint else 1.6,
        marker=MARKERS[series.symbol] if marked or series.kind == "points" else None,
        markersize=5.5,
        markeredgecolor=colors["card"],
        markeredgewidth=0.7,
        solid_capstyle="round",
        zorder=2.5 if series.strong else 3,
        alpha=0.45 if series.strong or series.faint else 1,
        clip_on=not marked,
    )


# -- names of the lines -----------------------------------------------------------------------


def _ends_at_the_right(chart: Chart, shown: list[dict[str, np.ndarray]]) -> bool:
    """Whether every series is a line that ends at the right edge, few enough to be labeled."""
    if len(shown) > MOST_LABELS or any(s.kind != "line" or not len(s.y) for s in chart.series):
        return False
    scale = np.log if chart.log_x else np.asarray
    ends = [scale(p["x"][~np.isnan(p["y"])]) for p in shown]
    low, high = min(e.min() for e in ends), max(e.max() for e in ends)
    above = chart.y_range is not None and any(np.nanmax(p["y"]) > chart.y_range[1] for p in shown)
    return not above and all(e[-1] >= high - 0.04 * (high - low) and len(e) > 1 for e in ends)


def _label(axes: Axes, x: float | None, y: float | int, name: str, color: str) -> Annotation:
    """The name of a line, and a stroke to its last point; without x, to the right edge."""
    return axes.annotate(
        textwrap.fill(visible(name), 30),
        (1.0, y) if x is None else (x, y),
        xycoords=("axes fraction", "data") if x is None else "data",
        xytext=(1.035, 0.5),
        textcoords="axes fraction",
        color=color,
        fontsize=8.5,
        va="center",
        annotation_clip=False,
        parse_math=False,
        arrowprops={
            "arrowstyle": "-",
            "color": color,
            "linewidth": 0.7,
            "relpos": (0, 0.5),
            "shrinkA": 1,
            "shrinkB": 1,
        },
    )


def spread(wanted: list[float], sizes: list[float]) -> list[float]:
    """Places near the wanted ones, in the same order, where intervals of these sizes do not overlap.

    Those that would overlap form a block, centered where its members want to be (the least squared
    displacement), within [-0.1, 1.1] if they fit.

    Example:
        >>> [round(p, 3) for p in spread([0.5, 0.5, 0.9], [0.1, 0.1, 0.1])]
        [0.45, 0.55, 0.9]
    """
    blocks: list[tuple[float, list[int]]] = []  # lower end, members from below
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        blocks.append((wanted[i] - sizes[i] / 2, [i]))
        while len(blocks) > 1 and blocks[-2][0] + sum(sizes[j] for j in blocks[-2][1]) > blocks[-1][0]:
            members = blocks[-2][1] + blocks[-1][1]
            before = np.cumsum([0.0, *(sizes[j] for j in members)])
            low = float(np.mean([wanted[j] - sizes[j] / 2 - offset for j, offset in zip(members, before)]))
            blocks[-2:] = [(max(-0.1, min(low, 1.1 - float(before[-1]))), members)]
    places = [0.0] * len(wanted)
    for low, members in blocks:
        for i in members:
            places[i] = low + sizes[i] / 2
            low += sizes[i]
    return places


def _between_decades(axis: Axis) -> FuncFormatter:
    """Labels at 2 and 5 on axes shorter than two decades, where powers of ten alone are too few."""

    def label(value: float, _: int) -> str:
        low, high = sorted(axis.get_view_interval())
        digit = value / 10 ** math.floor(math.log10(value) + 1e-9)
        short = high < 100 * low
        return f"{value:g}" if short and round(digit, 6) in (2, 5) else ""

    return FuncFormatter(label)
