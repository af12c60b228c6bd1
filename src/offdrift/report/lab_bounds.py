"""How close the bounds come to the truth, in tables and in a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.lab.search import Outcome, Row, of_drift, summarize
from offdrift.report.bound_table import LABELS as BOUNDS
from offdrift.report.figure import Panel, Series

LABELS = BOUNDS | {
    "sequence_kl": "Sequence KL",
    "masked_ratio": "Masked, ratio region",
    "masked_kl": "Masked, trust region",
}
DRAWN = ("coupling", "pinsker_marginal_kl", "mixed_kl", "mixed_tv", "adaptive", "pointwise", "sequence_kl")  # fmt: skip
"""What the figure shows, with sharp constants: more lines than these hide each other."""
EDGES = (0.0, 1e-3, 1e-2, 1e-1, math.inf)
"""Largest token TV that separates sizes of drift."""


def violations(outcomes: Sequence[Outcome]) -> int:
    """Pairs and bounds for which the error exceeds the bound."""
    return sum(int(o.violated.sum()) for o in outcomes)


def bounds_table(
    outcomes: Sequence[Outcome], found: Sequence[Outcome], *, width: int = 140
) -> Table:
    """Every bound: pairs, violations, the largest |Error| / bound, and where that was.

    Args:
        outcomes: random pairs.
        found: pairs of the adversarial search; may be empty.
        width: columns of the screen; where is left out on a narrow one.
    """
    wide, narrow = width >= 150, width < 100
    random, searched = summarize(outcomes), summarize(found)
    table = Table(
        title=Text("|Error| / bound, at most 1 where the bound holds", style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("bound", "constants"):
        table.add_column(name, no_wrap=True)
    for name in ("pairs", "violations", *(() if narrow else ("median",)), "largest"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("at", style="dim")
    table.add_column("searched", justify="right", no_wrap=True)
    if wide:
        table.add_column("at", style="dim")
    for i, row in enumerate(random or searched):
        other = searched[i] if searched else None
        first = row if random else None
        wrong = sum(r.violations for r in (first, other) if r)
        table.add_row(
            LABELS[row.bound],
            row.constants,
            f"{first.checked:,}" if first else "–",
            Text(f"{wrong:,}", style="bold red" if wrong else ""),
            *(() if narrow else (f"{first.median:.4f}" if first else "–",)),
            *_cells(first)[: 2 if wide else 1],
            *_cells(other)[: 2 if wide else 1],
        )
    return table


def horizon_table(
    outcomes: Sequence[Outcome], found: Sequence[Outcome], *, width: int = 140
) -> Table:
    """The largest |Error| / bound at every horizon, random or searched, with sharp constants."""
    both = [*outcomes, *found]
    table = Table(
        title=Text("largest at every horizon, sharp constants", style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("bound", no_wrap=True)
    horizons = sorted({o.horizon for o in both})
    most = max(2, (width - 24) // 9)  # columns that fit; the first and the last are among them
    while len(horizons) > most:
        horizons.pop(len(horizons) // 2)
    columns = [_sharp([o for o in both if o.horizon == t]) for t in horizons]
    for t in horizons:
        table.add_column(f"T={t}", justify="right", no_wrap=True)
    for i, row in enumerate(columns[0]) if columns else ():
        cells = [f"{c[i].largest:.3f}" if c[i].checked and c[i].where else "–" for c in columns]
        table.add_row(LABELS[row.bound], *cells)
    return table


def bounds_panels(outcomes: Sequence[Outcome], found: Sequence[Outcome]) -> list[Panel]:
    """Tightness against the horizon: searched, random, typical; and against the drift's size."""
    panels = []
    one = (("attained", 1.0),)
    for title, chosen, value in (
        ("largest found by search", found, _largest),
        ("largest of random pairs", outcomes, _largest),
        ("median of random pairs", outcomes, _median),
    ):
        if not chosen:
            continue
        horizons = sorted({o.horizon for o in chosen})
        rows = [_sharp([o for o in chosen if o.horizon == t]) for t in horizons]
        log = value is _median
        panels.append(
            Panel(
                title, "horizon T, tokens", "|Error| / bound", _series(horizons, rows, value),
                log_x=True, log_y=log, marks=() if log else one,
            )
        )  # fmt: skip
    if outcomes:
        sizes = [_sharp([of_drift(o, *edges) for o in outcomes]) for edges in pairwise(EDGES)]
        places = [3e-4, 3e-3, 3e-2, 3e-1]
        panels.append(
            Panel(
                "median by size of drift", "largest token TV, by decade", "|Error| / bound",
                _series(places, sizes, _median), log_x=True, log_y=True,
            )
        )  # fmt: skip
    return panels


def bounds_rows(outcomes: Sequence[Outcome], found: Sequence[Outcome]) -> dict[str, Any]:
    """Everything, ready for JSON: all random pairs, what was searched, and random by regime."""
    return {
        "pairs": sum(len(o.eps) for o in outcomes),
        "violations": violations(outcomes) + violations(found),
        "random": _json(summarize(outcomes)),
        "searched": _json(summarize(found)),
        "by_horizon": _grouped(outcomes, lambda o: o.horizon),
        "searched_by_horizon": _grouped(found, lambda o: o.horizon),
        "by_family": _grouped(outcomes, lambda o: o.family),
        "by_drift": {
            f"{low:g} to {min(high, 1):g}": _json(
                summarize([of_drift(o, low, high) for o in outcomes])
            )
            for low, high in pairwise(EDGES)
        },
    }


def _cells(row: Row | None) -> tuple[Text, str]:
    if row is None or not row.where:
        return Text("–"), ""
    return Text(f"{row.largest:.4f}", style="bold" if row.largest > 0.99 else ""), row.where


def _sharp(outcomes: Sequence[Outcome]) -> list[Row]:
    return [r for r in summarize(outcomes) if r.constants == "sharp"]


def _largest(row: Row) -> float:
    return row.largest


def _median(row: Row) -> float:
    return row.median


def _series(
    places: Sequence[float | int], rows: Sequence[Sequence[Row]], value: Callable[[Row], float]
) -> list[Series]:
    """One line per bound that is drawn, with a gap where nothing was checked."""
    found = [{r.bound: value(r) if r.where else math.nan for r in each} for each in rows]
    return [Series(LABELS[n], places, [f.get(n, math.nan) for f in found]) for n in DRAWN]


def _grouped(
    outcomes: Sequence[Outcome], key: Callable[[Outcome], int | str]
) -> dict[str, list[dict[str, Any]]]:
    names = sorted({key(o) for o in outcomes}, key=lambda k: (isinstance(k, str), k))
    return {str(n): _json(summarize([o for o in outcomes if key(o) == n])) for n in names}


def _json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as mappings; infinite, a bound of 0 with an error above it, is null."""
    return [
        {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in vars(r).items()
        }
        for r in rows
    ]
