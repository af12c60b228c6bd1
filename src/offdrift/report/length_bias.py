"""Which gates punish length, in a table and in a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.lab.length_bias import Curve
from offdrift.report.figure import Panel, Series

LABELS = {
    "trm_max": "TRM-Max",
    "trm_avg": "TRM-Avg",
    "ln_trm": "LN-TRM",
    "ser": "SER",
    "seq_product": "sequence product",
}


def length_bias_table(title: str, curves: Sequence[Curve], *, width: int = 140) -> Table:
    """Acceptance at every length that fits and the fitted growth, one row per gate."""
    stated = width >= 120
    fits = max(2, (width - (79 if stated else 62)) // 8)
    shown = _spread(len(curves[0].lengths), fits)
    table = Table(
        title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("gate", no_wrap=True)
    table.add_column("threshold", justify="right", no_wrap=True)
    for i in shown:
        table.add_column(f"T={curves[0].lengths[i]}", justify="right", no_wrap=True)
    table.add_column("γ", justify="right", no_wrap=True)
    table.add_column("with length", no_wrap=True)
    if stated:
        table.add_column("Table 2", no_wrap=True, style="dim")
    for c in curves:
        some = [c.acceptance[i] for i in shown]
        shares = [Text(f"{a:.2f}", style="bold red" if a < 0.5 else "") for a in some]
        gamma = "" if c.exponent is None else f"{c.exponent:.2f}"
        last = [c.stated] if stated else []
        table.add_row(LABELS[c.gate], f"{c.threshold:.3g}", *shares, gamma, verdict(c), *last)
    return table


def _spread(count: int, most: int) -> list[int]:
    """At most so many of the positions, from first to last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def verdict(curve: Curve) -> str:
    """What acceptance does with length, in words."""
    if curve.exponent is None:
        return "unchanged"
    first, last = curve.acceptance[0], curve.acceptance[-1]
    overlap = curve.low[0] <= last <= curve.high[0] or curve.low[-1] <= first <= curve.high[-1]
    if overlap or abs(first - last) < 0.02:
        return "about constant"
    if last > first:
        return "grows"
    return "falls exponentially" if curve.exponent > 0.85 else "falls"


def length_bias_panels(results: Sequence[tuple[str, Sequence[Curve]]]) -> list[Panel]:
    """One panel per stream and choice of thresholds."""
    return [
        Panel(
            title=title,
            x="length T, tokens",
            y="accepted sequences",
            log_x=True,
            series=[
                Series(LABELS[c.gate], c.lengths, c.acceptance, low=c.low, high=c.high)
                for c in curves
            ],
        )
        for title, curves in results
    ]


def length_bias_rows(results: Sequence[tuple[str, Sequence[Curve]]]) -> list[dict[str, Any]]:
    """The same numbers, ready for JSON."""
    return [
        {"stream": title, **vars(c), "verdict": verdict(c)} for title, cs in results for c in cs
    ]
