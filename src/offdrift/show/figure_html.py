"""A figure as one HTML page that needs nothing but itself, drawn by plotly.

Like the report: every text is escaped, data reaches the script as escaped JSON, and the page's
Content-Security-Policy lets nothing else run or load.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from offdrift.show.figure import NUM_COLORS, SYMBOLS, Panel, Series, order, points
from offdrift.show.html import content_security_policy
from offdrift.show.sanitize import visible

DASHES = ("solid", "dashdot", "dot")

STYLE = """
.charts { grid-template-columns: repeat(auto-fit, minmax(min(500px, 100%), 1fr)) }
.plot { height: 420px }
h1 { font-size: 1.45rem }
.legend { position: static; padding: 14px 0 }
.legend svg { width: 30px; height: 10px; margin-right: 8px; vertical-align: middle }
.legend svg { stroke: var(--arm); fill: var(--arm); overflow: visible }
.caption { color: var(--soft); max-width: 90ch; margin-top: 14px; white-space: pre-line }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="offdrift">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<p class="brand">offdrift</p>
<h1>{title}</h1>
<div class="legend" role="group" aria-label="Series; press to hide or show">{legend}</div>
<div class="charts">{figures}</div>
<p class="caption">{caption}</p>
</main>
<!-- plotly brings a style sheet for maps, which the policy blocks, unless this id is taken -->
<div id="9f215cf04c5486422605d13261cb87401f4e7763b6296af81e98efbc0130da53" hidden></div>
<script type="application/json" id="figure-data">{data}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def html_of(panels: Sequence[Panel], *, title: str, caption: str) -> str:
    """The page as text, the same for the same panels."""
    here = Path(__file__).parent / "assets"
    style = (here / "page.css").read_text("utf-8") + STYLE
    script, plotly = (here / "figure.js").read_text("utf-8"), get_plotlyjs()
    numbers = order(panels)
    drawn = [_panel(panel, numbers) for panel in panels]
    data = json.dumps(drawn, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return PAGE.format(
        policy=html.escape(content_security_policy(scripts=(plotly, script), styles=(style,))),
        title=_text(title),
        caption=_text(caption),
        style=style,
        legend=_legend(panels, numbers),
        figures="".join(_figure(i, panel) for i, panel in enumerate(panels)),
        data=data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        plotly=plotly,
        script=script,
    )


def _text(text: str) -> str:
    return html.escape(visible(text))


def _figure(i: int, panel: Panel) -> str:
    return f'<figure><figcaption>{_text(panel.title)}</figcaption><div class="plot" id="panel-{i}"></div></figure>'


def _legend(panels: Sequence[Panel], numbers: dict[str, int]) -> str:
    first = {s.name: s for panel in reversed(panels) for s in reversed(panel.series)}
    return "".join(
        f'<button aria-pressed="true" data-series="{i}" class="arm-{i % NUM_COLORS}">'
        f"{_swatch(first[name], i)}{_text(name)}</button>"
        for name, i in numbers.items()
    )


def _swatch(series: Series, number: int) -> str:
    """A piece of the line, or a point: told apart without color too."""
    if series.style == "points":
        return '<svg viewBox="0 0 30 10" aria-hidden="true"><circle cx="15" cy="5" r="4"/></svg>'
    dashes = {"solid": "", "dashdot": "9 3 2 3", "dot": "2 3", "dash": "6 4"}[_dash(series, number)]
    width = 5 if series.strong else 2
    line = f'<line x1="0" x2="30" y1="5" y2="5" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    return f'<svg viewBox="0 0 30 10" aria-hidden="true">{line}</svg>'


def _dash(series: Series, number: int) -> str:
    again = min(number // NUM_COLORS, len(DASHES) - 1)
    return "dash" if series.style == "dashed" else DASHES[again]


# -- what plotly draws ------------------------------------------------------------------------


def _panel(panel: Panel, numbers: dict[str, int]) -> dict[str, Any]:
    traces = [t for s in panel.series for t in _traces(panel, s, numbers[s.name])]
    across = [_reference("x", label, value, log=panel.log_y) for label, value in panel.marks]
    upright = [_reference("y", label, value, log=panel.log_x) for label, value in panel.x_marks]
    lines, labels = zip(*across, *upright) if across or upright else ((), ())
    y_axis = _axis(panel.y, panel.log_y)
    if panel.y_range:
        y_axis["range"] = [_placed(end, log=panel.log_y) for end in panel.y_range]
    axes = {"xaxis": _axis(panel.x, panel.log_x), "yaxis": y_axis}
    # behind the others first: plotly draws in this order
    traces.sort(key=lambda t: not t["meta"]["strong"])
    return {"data": traces, "layout": axes | {"shapes": lines, "annotations": labels}}


def _reference(along: str, label: str, value: float | int, *, log: bool) -> tuple[dict, dict]:
    """A dashed line along one axis, and its label: above it, or to its left at the top."""
    other = "y" if along == "x" else "x"
    line = {"type": "line", f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1}
    at = {f"{other}0": value, f"{other}1": value}
    text: dict[str, Any] = {"text": _plotly_text(label), "showarrow": False}
    text |= {f"{along}ref": "paper", other: _placed(value, log=log)}
    if along == "x":
        return line | at, text | {"x": 0.01, "xanchor": "left", "yanchor": "bottom"}
    return line | at, text | {"y": 1, "xanchor": "right", "yanchor": "top"}


def _placed(value: float | int, *, log: bool) -> float:
    """Where plotly wants a coordinate of an annotation or a range: the exponent on a log axis."""
    return math.log10(value) if log else float(value)


def _plotly_text(text: str) -> str:
    """Plotly reads some markup in names and labels."""
    return html.escape(visible(text), quote=False)


def _axis(title: str, log: bool) -> dict[str, Any]:
    scale: dict[str, Any] = {"type": "log", "dtick": 1} if log else {}
    return {"title": {"text": _plotly_text(title), "standoff": 6}} | scale


def _traces(panel: Panel, series: Series, number: int) -> list[dict[str, Any]]:
    p = points(panel, series)
    if np.isnan(p["y"]).all():
        return []
    alone = int((~np.isnan(p["y"])).sum()) == 1
    mode = "markers" if series.style == "points" or alone else "lines"
    common = {"type": "scatter", "meta": {"series": number, "color": number % NUM_COLORS, "strong": series.strong}}
    main: dict[str, Any] = common | {
        "mode": mode,
        "opacity": 0.5 if series.strong else 1,
        "name": _plotly_text(series.name),
        "x": _listed(p["x"]),
        "y": _listed(p["y"]),
        "line": {"width": 5 if series.strong else 2, "dash": _dash(series, number)},
        "marker": {"size": 8, "symbol": SYMBOLS[number % len(SYMBOLS)]},
        "hovertemplate": "%{y:.4g}",
    }
    if p["low"] is None:
        return [main]
    main["customdata"] = list(zip(_listed(p["low"]), _listed(p["high"])))
    main["hovertemplate"] = "%{y:.4g}  (%{customdata[0]:.4g} to %{customdata[1]:.4g})"
    if series.style == "points":
        up, down = p["high"] - p["y"], p["y"] - p["low"]
        ends = {"type": "data", "symmetric": False, "array": _listed(up), "arrayminus": _listed(down)}
        return [main | {"error_y": ends | {"thickness": 1.2, "width": 3}}]
    return [_band(p, common), main]


def _band(p: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """One closed outline for every run of points without a gap."""
    there = np.flatnonzero(~np.isnan(p["low"]))
    runs = np.split(there, np.flatnonzero(np.diff(there) > 1) + 1)
    x: list[float | None] = []
    y: list[float | None] = []
    for run in runs:
        x += [*_listed(p["x"][run]), *_listed(p["x"][run[::-1]]), None]
        y += [*_listed(p["high"][run]), *_listed(p["low"][run[::-1]]), None]
    return common | {"mode": "none", "x": x, "y": y, "fill": "toself", "hoverinfo": "skip"}


def _listed(values: np.ndarray) -> list[float | None]:
    """Six significant digits, all that a chart can show; None where there is a gap."""
    return [None if np.isnan(v) else float(f"{v:.6g}") for v in values]
