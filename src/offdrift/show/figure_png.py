"""A figure as a PNG, by matplotlib: labels beside the ends of lines where they fit, else a legend."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter

from offdrift.show.figure import NUM_COLORS, Panel, Series, order, palette, points
from offdrift.show.sanitize import visible

WIDTH, HEIGHT, DPI = 6.0, 4.4, 150
"""Inches of one panel, and dots per inch."""

MOST_LABELS = 12
"""Lines of one panel that are labeled at their ends; more get a legend."""

DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5, 1, 1.5)), (0, (1, 1.2)))
MARKERS = "osD^Pp*h"

FONT: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10.5,
    "figure.titlesize": 13,
    "axes.unicode_minus": True,
}


def png_of(panels: Sequence[Panel], *, title: str, caption: str) -> bytes:
    """The picture's bytes, the same for the same panels."""
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = -(-len(panels) // columns)
    with mpl.rc_context(FONT), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        colors, numbers = palette()["light"], order(panels)
        figure = Figure((WIDTH * columns, HEIGHT * rows), DPI)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.04)
        FigureCanvasAgg(figure)
        figure.set_facecolor(colors["card"])
        fits = int(13.5 * WIDTH * columns)
        _heading(figure, title, caption, fits, colors)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        labels = [_draw(axes, panel, numbers, colors) for axes, panel in zip(grid, panels)]
        figure.draw_without_rendering()  # the layout decides how far apart labels must be
        figure.set_layout_engine("none")
        for axes, texts in zip(grid, labels):
            _spread(axes, texts)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _heading(figure: Figure, title: str, caption: str, fits: int, colors: dict[str, str]) -> None:
    left: dict[str, Any] = {"x": 0.012, "ha": "left", "parse_math": False}
    shown = textwrap.fill(visible(title), int(fits * 0.62))
    figure.suptitle(shown, color=colors["ink"], fontweight="bold", **left)
    if caption:
        lines = [textwrap.fill(visible(part), fits) for part in caption.splitlines()]
        figure.supxlabel("\n".join(lines), color=colors["soft"], fontsize=8.5, **left)


def _draw(axes: Axes, panel: Panel, numbers: dict[str, int], colors: dict[str, str]) -> list[Annotation]:
    """One panel; the labels that still have to be kept apart."""
    _frame(axes, panel, colors)
    shown = {s.name: points(panel, s) for s in panel.series}
    shown = {name: p for name, p in shown.items() if not np.isnan(p["y"]).all()}
    if not shown:
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center", color=colors["soft"])
        axes.set(xticks=[], yticks=[])
        return []
    for series in panel.series:
        if series.name in shown:
            _series(axes, series, shown[series.name], numbers[series.name], colors)
    for _, value in panel.marks:
        axes.axhline(value, color=colors["soft"], linewidth=1.1, linestyle=(0, (3, 2)), zorder=1.5)
    for label, value in panel.x_marks:
        axes.axvline(value, color=colors["soft"], linewidth=1.1, linestyle=(0, (1, 2)), zorder=1.5)
        axes.annotate(
            visible(label),
            (value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            color=colors["soft"],
            fontsize=8.5,
            parse_math=False,
        )
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    axes.margins(x=0.02 if any(s.style == "points" for s in panel.series) else 0)
    labels = [_label(axes, 1.0, v, n, colors["soft"]) for n, v in panel.marks]
    if _ends_at_the_right(panel, shown):
        for name, p in shown.items():
            last = np.flatnonzero(~np.isnan(p["y"]))[-1]
            color = colors[f"arm-{numbers[name] % NUM_COLORS}"]
            labels.append(_label(axes, p["x"][last], p["y"][last], name, color))
    else:
        _legend(axes, colors)
    return labels


def _frame(axes: Axes, panel: Panel, colors: dict[str, str]) -> None:
    text: dict[str, Any] = {"parse_math": False}
    axes.set_facecolor(colors["card"])
    title = textwrap.fill(visible(panel.title), 70)
    axes.set_title(title, loc="left", color=colors["ink"], pad=9, **text)
    axes.set_xlabel(visible(panel.x), color=colors["soft"], **text)
    axes.set_ylabel(visible(panel.y), color=colors["soft"], **text)
    if panel.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(_between_decades(axes.xaxis))
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(_between_decades(axes.yaxis))
    axes.grid(True, color=colors["grid"], linewidth=0.9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colors["rule"])
    axes.tick_params(which="both", color=colors["rule"], labelcolor=colors["soft"])


def _series(axes: Axes, series: Series, p: dict[str, Any], number: int, colors: dict[str, str]) -> None:
    color = colors[f"arm-{number % NUM_COLORS}"]
    again = min(number // NUM_COLORS, len(DASHES) - 1)
    alone = int((~np.isnan(p["y"])).sum()) == 1  # a single point draws no line
    marked = series.style == "points" or alone
    line = (0, (4, 2)) if series.style == "dashed" else DASHES[again]
    axes.plot(
        p["x"],
        p["y"],
        label=visible(series.name),
        color=color,
        linestyle="none" if marked else line,
        linewidth=4.5 if series.strong else 1.6,
        marker=MARKERS[number % len(MARKERS)] if marked else None,
        markersize=5.5,
        markeredgecolor=colors["card"],
        markeredgewidth=0.7,
        solid_capstyle="round",
        zorder=2.5 if series.strong else 3,
        alpha=0.45 if series.strong else 1,
        clip_on=not marked,
    )
    if p["low"] is not None and series.style == "points":
        ends = np.abs(np.stack([p["y"] - p["low"], p["high"] - p["y"]]))
        axes.errorbar(p["x"], p["y"], ends, color=color, linestyle="none", linewidth=1.1, capsize=2)
    elif p["low"] is not None:
        axes.fill_between(p["x"], p["low"], p["high"], color=color, alpha=0.16, linewidth=0)


# -- names of the lines -----------------------------------------------------------------------


def _ends_at_the_right(panel: Panel, shown: dict[str, dict[str, Any]]) -> bool:
    """Whether every series is a line that reaches the right edge, few enough to be labeled."""
    if len(shown) > MOST_LABELS or any(s.style == "points" for s in panel.series):
        return False
    scale = np.log if panel.log_x else np.asarray
    ends = [scale(p["x"][~np.isnan(p["y"])]) for p in shown.values()]
    low, high = min(e.min() for e in ends), max(e.max() for e in ends)
    return all(e[-1] >= high - 0.04 * (high - low) and len(e) > 1 for e in ends)


def _label(axes: Axes, x: float | int, y: float | int, name: str, color: str) -> Annotation:
    at = (1.0, y) if x == 1.0 else (x, y)
    return axes.annotate(
        textwrap.fill(visible(name), 30),
        at,
        xycoords=("axes fraction", "data") if x == 1.0 else "data",
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


def _spread(axes: Axes, labels: list[Annotation]) -> None:
    """Put each label at the height of its line's end, moved no further than the others demand."""
    if not labels:
        return
    box = axes.get_window_extent()
    heights = [Text.get_window_extent(t).height / box.height for t in labels]  # without the line
    ends = [_height_of(axes, t, box) for t in labels]
    for label, place in zip(labels, spread(ends, [1.15 * h for h in heights])):
        label.set_position((1.035, place))


def _height_of(axes: Axes, label: Annotation, box: Any) -> float:
    pixel = axes.transData.transform((axes.get_xlim()[1], label.xy[1]))[1]
    return float((pixel - box.y0) / box.height)


def spread(wanted: list[float], sizes: list[float]) -> list[float]:
    """Places near the wanted ones, in the same order, where intervals of these sizes do not overlap.

    Those that would overlap form a block, centered where its members want to be (the least squared
    displacement), within [0, 1] if they fit.

    Example:
        >>> [round(p, 3) for p in spread([0.5, 0.5, 0.9], [0.1, 0.1, 0.1])]
        [0.45, 0.55, 0.9]
    """
    by_height = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, list[int]]] = []  # lower end, members from below
    for i in by_height:
        blocks.append((wanted[i] - sizes[i] / 2, [i]))
        while len(blocks) > 1 and blocks[-2][0] + _sum(sizes, blocks[-2][1]) > blocks[-1][0]:
            members = blocks[-2][1] + blocks[-1][1]
            blocks[-2:] = [(_lower_end(wanted, sizes, members), members)]
    places = [0.0] * len(wanted)
    for low, members in blocks:
        for i in members:
            places[i] = low + sizes[i] / 2
            low += sizes[i]
    return places


def _sum(sizes: list[float], members: list[int]) -> float:
    return sum(sizes[i] for i in members)


def _lower_end(wanted: list[float], sizes: list[float], members: list[int]) -> float:
    """Where a block begins: the mean of where each member wants it to, kept inside [0, 1]."""
    offset, starts = 0.0, []
    for i in members:
        starts.append(wanted[i] - sizes[i] / 2 - offset)
        offset += sizes[i]
    mean = sum(starts) / len(starts)
    return max(-0.1, min(mean, 1.1 - offset))


def _legend(axes: Axes, colors: dict[str, str]) -> None:
    """Outside the axes, to the right: it never covers data."""
    legend = axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        frameon=False,
        fontsize=8.5,
        labelcolor=colors["ink"],
        handlelength=2.4,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _between_decades(axis: Axis) -> FuncFormatter:
    """Labels at 2 and 5 on axes shorter than two decades, where powers of ten alone are too few."""

    def label(value: float, _: int) -> str:
        low, high = sorted(axis.get_view_interval())
        digit = value / 10 ** math.floor(math.log10(value) + 1e-9)
        short = high < 100 * low
        return f"{value:g}" if short and round(digit, 6) in (2, 5) else ""

    return FuncFormatter(label)
