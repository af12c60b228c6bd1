"""Every error bound in one table: the paper's constants beside the sharp ones, and the minimum.

`bound_rows` holds the numbers, `bound_table` shows them. A bound that is not below the range of the
reward is vacuous, it limits nothing, and is shown dimmed; the rows that attain the unified bound
are marked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float
from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.certificate import Bound, all_bounds, premises, tightest
from offdrift.certificate.inverse import (
    kl_of_sequences,
    route_crossovers,
    vacuous_horizon,
)
from offdrift.report.bound_words import LABELS as LABELS
from offdrift.report.bound_words import caption, title


def bound_rows(
    *,
    horizon: int,
    delta: float,
    eps: float | None = None,
    kl_seq: float | None = None,
    tv_seq: float | None = None,
    mean_tv: Float[np.ndarray, " t"] | float | None = None,
    reward_range: float = 1.0,
    kl_rate: float | None = None,
) -> list[dict[str, Any]]:
    """The numbers of `bound_table`, one dict per row, ready for JSON; the last row is unified.

    Without `mean_tv` the adaptive bound is given for eps at every position, its largest value, and
    does not enter the minimum. A number that is infinite or does not exist is None.

    Args, Raises: as in `offdrift.certificate.all_bounds`; `kl_rate` as in `vacuous_horizon`.

    Returns: for each row `bound`, `route`, `equation`, `scaling`, `paper`, `sharp`, `closed_form`
        (paper constants), `worst_case`, `attains` (which of "paper" and "sharp" have their minimum
        here), `vacuous` (with the sharper of the two constants) and `note`; for the last row also
        `vacuous_from`, the shortest horizon at which it is (None: never, or a mean TV per
        position), and `routes`, by which route the context shift is smallest, first to last token.

    Example:
        >>> rows = bound_rows(horizon=4096, delta=1e-4, eps=5e-3, kl_seq=0.01, tv_seq=0.05)
        >>> rows[-1]["bound"], round(rows[-1]["paper"], 3), round(rows[-1]["sharp"], 3)
        ('unified', 4.096, 0.01)
    """
    kl_seq = kl_of_sequences(horizon, kl_seq, kl_rate)
    token: dict[str, Any] = {"delta": delta, "eps": eps, "tv_seq": tv_seq, "mean_tv": mean_tv}
    known = premises(horizon=horizon, kl_seq=kl_seq, **token)
    given = {"horizon": horizon, "kl_seq": kl_seq, "reward_range": reward_range} | token
    paper, sharp = (all_bounds(**given, constants=c) for c in ("paper", "sharp"))
    best = {"paper": tightest(paper).value, "sharp": tightest(sharp).value}
    if mean_tv is None:
        worst: dict[str, Any] = given | {"mean_tv": known.eps}
        paper, sharp = (all_bounds(**worst, constants=c) for c in ("paper", "sharp"))
    by_name = {b.name: b for b in paper}
    if mean_tv is None:  # at its worst the hybrid is below Pinsker-Marginal TV, as Table 1 notes
        closed = by_name["pinsker_marginal_tv"].closed_form
        by_name["adaptive"] = replace(by_name["adaptive"], closed_form=closed)
    rows = [
        _row(by_name.get(b.name), b, best, worst_case=mean_tv is None)
        for b in sharp
        if not (mean_tv is None and b.name in ("adaptive_kl", "adaptive_tv"))
    ]
    rows.append(_unified_row(best))
    sequence: dict[str, Any] = {"kl_seq": kl_seq} if kl_rate is None else {"kl_rate": kl_rate}
    rows[-1]["vacuous_from"] = {
        c: None
        if isinstance(mean_tv, np.ndarray)
        else vacuous_horizon(**token, **sequence, reward_range=reward_range, constants=c)
        for c in best
    }
    routes = route_crossovers(horizon=horizon, delta=delta, eps=eps, kl_seq=kl_seq, tv_seq=tv_seq)
    rows[-1]["routes"] = [[r.name, r.first, r.last] for r in routes]
    for row in rows:
        row["vacuous"] = row["sharp"] is None or row["sharp"] >= reward_range
    return rows


def bound_table(
    *,
    horizon: int,
    delta: float,
    eps: float | None = None,
    kl_seq: float | None = None,
    tv_seq: float | None = None,
    mean_tv: Float[np.ndarray, " t"] | float | None = None,
    reward_range: float = 1.0,
    kl_rate: float | None = None,
    constants: Sequence[str] = ("paper", "sharp"),
    narrow: bool = False,
) -> Table:
    """Table 1 of the paper for these divergences, with the sharp constants beside it.

    Args:
        constants: which columns are shown, "paper", "sharp" or both.
        narrow: without equations, growth and closed forms; fits 80 columns.
        others: as in `offdrift.certificate.all_bounds`; `kl_rate` as in `vacuous_horizon`.

    Raises: as in `offdrift.certificate.all_bounds`.

    Reference: Li et al., arXiv:2512.23075v5, Table 1.
    """
    known: dict[str, Any] = {"delta": delta, "eps": eps, "tv_seq": tv_seq, "mean_tv": mean_tv}
    rows = bound_rows(
        horizon=horizon, **known, kl_seq=kl_seq, kl_rate=kl_rate, reward_range=reward_range
    )
    given = known | {"horizon": horizon, "kl_seq": kl_of_sequences(horizon, kl_seq, kl_rate)}
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title(premises(**given), given, reward_range),
        title_justify="left",
        title_style="",
        caption=caption(rows, reward_range, constants, given, kl_rate, narrow=narrow),
        caption_justify="left",
        caption_style="",
        pad_edge=False,
    )
    left = ("bound", "route") if narrow else ("bound", "route", "equation", "growth")
    right = constants if narrow else ("closed form", *constants)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    decimals = _decimals(rows[-1])
    shown = [row for row in rows if any(row[c] is not None for c in constants)]
    for i, row in enumerate(shown):
        cells = _cells(row, decimals, reward_range, (*left, *right))
        table.add_row(*cells, end_section=i == len(shown) - 2)
    return table


# -- rows -------------------------------------------------------------------------------------


def _row(
    paper: Bound | None, sharp: Bound, best: dict[str, float], *, worst_case: bool
) -> dict[str, Any]:
    worst_case = worst_case and sharp.name == "adaptive"
    values = {"paper": None if paper is None else paper.value, "sharp": sharp.value}
    candidate = sharp.unified and not worst_case
    return {
        "bound": sharp.name,
        "route": sharp.route,
        "equation": sharp.equation,
        "scaling": sharp.scaling,
        **{name: _finite(value) for name, value in values.items()},
        "closed_form": None if paper is None else _finite(paper.closed_form),
        "worst_case": worst_case,
        "attains": [k for k, v in values.items() if candidate and v is not None and v == best[k]],
        "note": sharp.note,
    }


def _unified_row(best: dict[str, float]) -> dict[str, Any]:
    return {
        "bound": "unified",
        "route": "minimum",
        "equation": "eq. 21",
        "scaling": "",
        **best,
        "closed_form": None,
        "worst_case": False,
        "attains": [],
        "note": "",
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


# -- how they look ----------------------------------------------------------------------------


def _cells(
    row: dict[str, Any], decimals: int | None, reward_range: float, columns: Sequence[str]
) -> list[Text]:
    last = row["bound"] == "unified"
    style = "bold" if row["attains"] or last else "dim" if row["vacuous"] else ""
    mark = "≤ " if row["worst_case"] else ""
    words = {
        "bound": LABELS[row["bound"]],
        "route": row["route"],
        "equation": row["equation"],
        "growth": row["scaling"],
    }

    def cell(column: str) -> Text:
        if column in words:
            return Text(words[column], style=style)
        if column == "closed form":
            return Text(_shown(row["closed_form"], decimals), style="dim")
        value, attained = row[column], last or column in row["attains"]
        color = "yellow" if value is None or value >= reward_range else "green"
        shown = _shown(value, decimals)
        text = Text(mark + shown if shown else "", style=f"bold {color}" if attained else style)
        return text.append(" ◂" if column in row["attains"] else "  ", style=f"bold {color}")

    return list(map(cell, columns))


def _shown(value: float | None, decimals: int | None) -> str:
    """Aligned decimals where they tell the value in nine characters, an exponent elsewhere."""
    if value is None:
        return ""
    plain = f"{value:,.{3 if decimals is None else decimals}f}"
    lost = decimals is None or value < 0.5 * 10**-decimals or len(plain) > 9
    return f"{value:.2e}" if value and lost else plain


def _decimals(unified: dict[str, Any]) -> int | None:
    """Decimals that give the paper's unified bound four digits; None asks for exponents."""
    smallest = unified["paper"]
    if smallest == 0:
        return 3
    needed = 3 - math.floor(math.log10(smallest))
    return max(1, needed) if needed <= 6 else None
