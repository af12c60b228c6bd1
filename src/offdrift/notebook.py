"""Results as a notebook shows them: a frame of numbers, and a few lines of HTML with small charts.

Every text is escaped and shown without hidden characters, no script runs and nothing is loaded: texts come from other
people's logs. Colors follow the notebook's own, light or dark.
"""

from __future__ import annotations

import html
import importlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from offdrift.errors import OffdriftError
from offdrift.texts import visible

FRAMES = ("pandas", "polars")
"""Libraries whose frames are made; of those imported already the first, else the first that is installed."""
WIDTH, HEIGHT = 100, 24
"""Box in which `spark_path` draws."""
POINTS = 240
"""Points of a small chart: of a longer series the lowest and the highest of every stretch."""
COLORS = {"stop": "#c62828", "act": "#b26a00", "watch": "#00838f", "ok": "#2e7d32"}
"""Of the word that says how urgent a result is; its sign and word say so, too."""
CELL = "text-align:left;padding:1px 12px 1px 0;border:none"


def frame(columns: Mapping[str, Sequence[Any]]) -> Any:
    """A frame of pandas or polars, whichever a program has imported, else whichever is installed (pandas first).

    Raises: `OffdriftError` if neither is installed.
    """
    order = sorted(FRAMES, key=lambda name: name not in sys.modules)
    for name in order:
        try:
            library = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        options: dict[str, Any] = {"strict": False} if name == "polars" else {}
        return library.DataFrame({key: list(values) for key, values in columns.items()}, **options)
    raise OffdriftError("a frame needs pandas or polars, and neither is installed: pip install pandas")


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns, in the order in which their names appear; None where a row lacks one.

    Example:
        >>> columns_of([{"step": 1}, {"step": 2, "kl": 0.5}])
        {'step': [1, 2], 'kl': [None, 0.5]}
    """
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def brief(*lines: str, width: int = 100) -> str:
    """The at most three lines of a short `repr`, cut to `width` characters, without hidden characters.

    Example:
        >>> print(brief("Audit: act", "", "  9 tokens", width=8))
        Audit: …
          9 tok…
    """
    cut_lines = [visible(line).replace("\n", " ").replace("\t", " ") for line in lines if line][:3]
    return "\n".join(line if len(line) <= width else f"{line[: width - 1]}…" for line in cut_lines)


def box(*parts: str) -> str:
    """HTML parts as one element, apart from the rest of a notebook."""
    return f'<div style="max-width:60em;line-height:1.45">{"".join(parts)}</div>'


def paragraph(words: str, *, strong: str = "", level: str = "") -> str:
    """A paragraph; `strong` stands before it, in the color of a level.

    Example:
        >>> paragraph("a < b", strong="Act", level="act")
        '<p style="margin:4px 0"><b style="color:#b26a00">Act</b> a &lt; b</p>'
    """
    color = COLORS.get(level, "inherit")
    before = f'<b style="color:{color}">{escaped(strong)}</b> ' if strong else ""
    return f'<p style="margin:4px 0">{before}{escaped(words)}</p>'


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table of texts; a cell that `chart` drew stands as it is."""
    lines = [_row(header, "th")] if header else []
    lines += [_row(row, "td") for row in rows]
    return f'<table style="border-collapse:collapse">{"".join(lines)}</table>'


def _row(cells: Sequence[str], kind: str) -> str:
    texts = [x if isinstance(x, Drawing) else escaped(x) for x in cells]
    return "<tr>" + "".join(f'<{kind} style="{CELL}">{x}</{kind}>' for x in texts) + "</tr>"


class Drawing(str):
    """Markup of a small chart, which `table` does not escape."""


def chart(values: Sequence[float | None], *, name: str) -> Drawing:
    """A series as a small line; nothing where it has fewer than two numbers.

    Args:
        values: None, NaN and infinity are gaps.
        name: of the series, for those who cannot see it.
    """
    path = spark_path(values)
    if not path:
        return Drawing()
    numbers = [v for v in values if _finite(v)]
    ends = f"from {numbers[0]:.3g} to {numbers[-1]:.3g}, lowest {min(numbers):.3g}, highest {max(numbers):.3g}"
    words = escaped(f"{name}: {len(values):,} points, {ends}")
    line = f'<path d="{path}" fill="none" stroke="currentColor" vector-effect="non-scaling-stroke"/>'
    return Drawing(
        f'<svg role="img" aria-label="{words}" width="160" height="28" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none"><title>{words}</title>{line}</svg>'
    )


def bar(value: float | None, most: float, *, name: str) -> Drawing:
    """A number as a bar beside others, of which the largest is `most`; nothing without a number."""
    if value is None or not (math.isfinite(value) and 0 < most < math.inf):
        return Drawing()
    words, width = escaped(f"{name}: {value:.3g}"), WIDTH * min(max(value / most, 0.0), 1.0)
    return Drawing(
        f'<svg role="img" aria-label="{words}" width="160" height="10" viewBox="0 0 {WIDTH} 10" '
        f'preserveAspectRatio="none"><title>{words}</title><rect width="{width:.1f}" height="10" fill="currentColor"/>'
        "</svg>"
    )


def spark_path(values: Sequence[float | None]) -> str:
    """Path of an SVG of 100 by 24, from the series' smallest value to its largest; "" for fewer than two numbers.

    Example:
        >>> spark_path([0.0, 1.0, None, 2.0])
        'M0.0 22.0L33.3 12.0M100.0 2.0'
    """
    numbers = [v for v in values if _finite(v)]
    if len(numbers) < 2:
        return ""
    low, span = min(numbers), max(numbers) - min(numbers) or 1.0
    strokes, pen = [], "M"
    for i in _telling(values):
        v = values[i]
        if _finite(v):
            x, y = WIDTH * i / (len(values) - 1), 22 - 20 * (v / span - low / span)
            strokes.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L" if _finite(v) else "M"
    return "".join(strokes)


def _telling(values: Sequence[float | None]) -> Sequence[int]:
    """Places of at most `POINTS` values: the lowest and the highest of every stretch, and a gap where one is whole."""
    if len(values) <= POINTS:
        return range(len(values))
    cut = -(-len(values) // (POINTS // 2))
    places = []
    for start in range(0, len(values), cut):
        stretch = range(start, min(start + cut, len(values)))
        numbers = [(v, i) for i in stretch if _finite(v := values[i])]
        places += sorted({min(numbers)[1], max(numbers)[1]}) if numbers else [start]
    return places


def escaped(words: str) -> str:
    """A text as HTML shows it: no markup, no hidden characters."""
    return html.escape(visible(words))


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
