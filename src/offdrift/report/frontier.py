"""The frontier of bias and variance, in a table and in a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.lab.frontier import Estimate, Verdict, conjecture, verdict
from offdrift.report.figure import Panel, Series

SMALLEST = 1e-4
"""Bias at which a point is drawn that has less: exact methods would stretch the axis otherwise."""
FAMILIES = ("token", "prefix", "turn", "geometric", "variational", "sequence", "uncorrected", "other")  # fmt: skip


def by_horizon(estimates: Sequence[Estimate]) -> list[Verdict]:
    """Who wins at each horizon."""
    ordered = sorted(estimates, key=lambda e: e.horizon)
    return [verdict(list(group)) for _, group in groupby(ordered, key=lambda e: e.horizon)]


def frontier_table(title: str, estimates: Sequence[Estimate]) -> Table:
    """Progress of the best method of every family at every horizon; the winners are marked."""
    verdicts = by_horizon(estimates)
    table = Table(
        title=Text(f"{title}: progress P of the best method of each family", style="bold"),
        title_justify="left",
        caption=Text(
            f"conjecture (an intermediate unit is best from T = 200): {conjecture(verdicts)}"
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("family", no_wrap=True)
    for v in verdicts:
        table.add_column(f"T={v.horizon}", justify="right", no_wrap=True)
    longest = verdicts[-1]
    table.add_column(f"best at {longest.horizon}", no_wrap=True)
    table.add_column("bias", justify="right")
    table.add_column("spread", justify="right")
    for name in FAMILIES:
        found = [v.best.get(name) for v in verdicts]
        last = found[-1]
        if last is None:
            continue
        cells = [_cell(e, v) for e, v in zip(found, verdicts, strict=True)]
        table.add_row(name, *cells, last.method, f"{last.bias:.2g}", f"{last.spread:.2g}")
    return table


def frontier_panels(found: Mapping[str, Sequence[Estimate]]) -> list[Panel]:
    """For every testbed, progress against the horizon, then bias against spread at the longest."""
    pairs = [_panels(title, estimates) for title, estimates in found.items()]
    return [p for p, _ in pairs] + [c for _, c in pairs]


def _panels(title: str, estimates: Sequence[Estimate]) -> tuple[Panel, Panel]:
    verdicts = by_horizon(estimates)
    names = [f for f in FAMILIES if any(f in v.best for v in verdicts)]
    progress = [
        Series(
            name,
            [v.horizon for v in verdicts if name in v.best],
            [v.best[name].progress for v in verdicts if name in v.best],
        )
        for name in names
    ]
    longest = [e for e in estimates if e.horizon == verdicts[-1].horizon]
    clouds = [
        Series(
            name,
            [max(e.bias, SMALLEST) for e in longest if e.family == name],
            [e.spread for e in longest if e.family == name],
            style="points",
        )
        for name in names
    ]
    return (
        Panel(f"{title}: progress of the best of each family", "horizon T, tokens", "P / |∇J|²", progress, log_x=True, log_y=True),
        Panel(f"{title}: every method at T = {verdicts[-1].horizon}", f"bias / |∇J| (at least {SMALLEST:g})", "spread of a batch / |∇J|", clouds, log_x=True, log_y=True),
    )  # fmt: skip


def frontier_rows(title: str, estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Everything, ready for JSON."""
    verdicts = by_horizon(estimates)
    return {
        "testbed": title,
        "conjecture": conjecture(verdicts),
        "winners": [
            {"horizon": v.horizon, "method": v.winner.method, "family": v.winner.family,
             "tied": list(v.tied), "plain": v.plain and v.plain.method}
            for v in verdicts
        ],
        "estimates": [vars(e) for e in estimates],
    }  # fmt: skip


def _caption(verdicts: Sequence[Verdict]) -> str:
    plain = [f"{v.plain.method} at {v.horizon}" for v in verdicts if v.plain is not None]
    among = f"\nbest of the plainest of each family: {', '.join(plain)}" if plain else ""
    return f"conjecture (an intermediate unit is best from T = 200): {conjecture(verdicts)}{among}"


def _cell(e: Estimate | None, v: Verdict) -> Text:
    if e is None:
        return Text("")
    won = e is v.winner
    error = f"±{e.progress_se:.0e}" if e.progress_se > 0.01 * e.progress else ""
    return Text(f"{e.progress:.3g}{error}", style="bold green" if won else "")
