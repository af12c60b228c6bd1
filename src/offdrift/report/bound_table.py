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

from offdrift.certificate import Bound, Premises, all_bounds, premises, tightest

LABELS = {
    "classical_kl": "Classical KL",
    "classical_tv": "Classical TV",
    "coupling": "Coupling",
    "pinsker_marginal_kl": "Pinsker-Marginal KL",
    "pinsker_marginal_tv": "Pinsker-Marginal TV",
    "mixed_kl": "Mixed KL",
    "mixed_tv": "Mixed TV",
    "adaptive_kl": "Adaptive KL",
    "adaptive_tv": "Adaptive TV",
    "adaptive": "Adaptive",
    "pointwise": "Pointwise",
    "unified": "Unified B*",
}
"""What each bound is called where a person reads it."""


def bound_rows(
    *,
    horizon: int,
    delta: float,
    eps: float | None = None,
    kl_seq: float | None = None,
    tv_seq: float | None = None,
    mean_tv: Float[np.ndarray, " t"] | float | None = None,
    reward_range: float = 1.0,
) -> list[dict[str, Any]]:
    """The numbers of `bound_table`, one dict per row, ready for JSON; the last row is unified.

    Without `mean_tv` the adaptive bound is given for eps at every position, its largest value, and
    does not enter the minimum. A number that is infinite or does not exist is None.

    Args, Raises: as in `offdrift.certificate.all_bounds`.

    Returns: for each row `bound`, `route`, `equation`, `scaling`, `paper`, `sharp`, `closed_form`
        (paper constants), `worst_case`, `attains` (which of "paper" and "sharp" have their minimum
        here), `vacuous` (with the sharper of the two constants) and `note`.

    Example:
        >>> rows = bound_rows(horizon=4096, delta=1e-4, eps=5e-3, kl_seq=0.01, tv_seq=0.05)
        >>> rows[-1]["bound"], round(rows[-1]["paper"], 3), round(rows[-1]["sharp"], 3)
        ('unified', 4.096, 2.039)
    """
    known = premises(
        horizon=horizon, delta=delta, eps=eps, kl_seq=kl_seq, tv_seq=tv_seq, mean_tv=mean_tv
    )
    given: dict[str, Any] = {
        "horizon": horizon,
        "delta": delta,
        "eps": eps,
        "kl_seq": kl_seq,
        "tv_seq": tv_seq,
        "mean_tv": mean_tv,
        "reward_range": reward_range,
    }
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
) -> Table:
    """Table 1 of the paper for these divergences, with the sharp constants beside it.

    Args, Raises: as in `offdrift.certificate.all_bounds`.

    Reference: Li et al., arXiv:2512.23075v5, Table 1.
    """
    given: dict[str, Any] = {
        "horizon": horizon,
        "delta": delta,
        "eps": eps,
        "kl_seq": kl_seq,
        "tv_seq": tv_seq,
        "mean_tv": mean_tv,
    }
    rows = bound_rows(**given, reward_range=reward_range)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=_title(premises(**given), given, reward_range),
        title_justify="left",
        title_style="",
        caption=_caption(rows, reward_range, worst_case=mean_tv is None),
        caption_justify="left",
        caption_style="",
        pad_edge=False,
    )
    for name in ("bound", "route", "equation", "growth"):
        table.add_column(name, no_wrap=True)
    for name in ("closed form", "paper", "sharp"):
        table.add_column(name, justify="right", no_wrap=True)
    decimals = _decimals(rows[-1])
    for i, row in enumerate(rows):
        table.add_row(*_cells(row, decimals, reward_range), end_section=i == len(rows) - 2)
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


def _cells(row: dict[str, Any], decimals: int | None, reward_range: float) -> list[Text]:
    last = row["bound"] == "unified"
    best = bool(row["attains"])
    style = "bold" if best or last else "dim" if row["vacuous"] else ""
    words = [LABELS[row["bound"]], row["route"], row["equation"], row["scaling"]]
    mark = "≤ " if row["worst_case"] else ""

    def number(column: str) -> Text:
        value, attained = row[column], last or column in row["attains"]
        color = "yellow" if value is None or value >= reward_range else "green"
        shown = _shown(value, decimals)
        text = Text(mark + shown if shown else "", style=f"bold {color}" if attained else style)
        return text.append(" ◂" if column in row["attains"] else "  ", style=f"bold {color}")

    closed = Text(_shown(row["closed_form"], decimals), style="dim")
    return [*(Text(w, style=style) for w in words), closed, number("paper"), number("sharp")]


def _shown(value: float | None, decimals: int | None) -> str:
    """Aligned decimals where they tell the value in nine characters, an exponent elsewhere."""
    if value is None:
        return ""
    plain = f"{value:,.{3 if decimals is None else decimals}f}"
    lost = decimals is None or value < 0.5 * 10**-decimals or len(plain) > 9
    return f"{value:.2e}" if value and lost else plain


def _decimals(unified: dict[str, Any]) -> int | None:
    """Decimals that give the smaller unified bound four digits; None asks for exponents."""
    smallest = unified["sharp"]
    if smallest == 0:
        return 3
    needed = 3 - math.floor(math.log10(smallest))
    return max(1, needed) if needed <= 6 else None


def _title(known: Premises, given: dict[str, Any], reward_range: float) -> Text:
    def value(name: str, symbol: str, unit: str = "") -> str:
        number = getattr(known, name)
        if math.isinf(number):
            return f"{symbol} unknown"
        derived = "" if given[name] is not None and name not in known.notes else " (derived)"
        return f"{symbol} = {number:.4g}{unit}{derived}"

    token = [value("delta", "max KL δ", " nats"), value("eps", "max TV ε")]
    sequence = [value("kl_seq", "KL_seq", " nats"), value("tv_seq", "TV_seq")]
    return Text.assemble(
        ("How far can the surrogate be from the true return?\n", "bold"),
        (f"horizon T = {known.horizon:,} token{'s' * (known.horizon > 1)}", "bold"),
        f"   rewards in a range of {reward_range:g}\n",
        f"per token      {'   '.join(token)}\n",
        f"per sequence   {'   '.join(sequence)}",
    )


def _caption(rows: Sequence[dict[str, Any]], reward_range: float, *, worst_case: bool) -> Text:
    lines = [_verdict(rows, reward_range)]
    lines += [Text(note, style="yellow") for note in dict.fromkeys(r["note"] for r in rows) if note]
    about = ["closed form: eq. 14, Thm. 3.5; Table 1 prints it for Pinsker-Marginal and Adaptive."]
    if worst_case:
        about.append("≤ adaptive: no mean TV per position given; ε everywhere, not in the minimum.")
    lines += [Text(line, style="dim") for line in about]
    return Text("\n").join(lines)


def _verdict(rows: Sequence[dict[str, Any]], reward_range: float) -> Text:
    """What the smallest bound is, which rows attain it, and what it is good for."""
    value, color = rows[-1]["sharp"], "green"
    if value == 0:
        says = "The surrogate is exact: its gain is the gain of the true return."
    elif value < reward_range:
        says = "A surrogate gain above B* certifies an improvement."
    else:
        says, color = f"Vacuous: not below the reward range of {reward_range:g}.", "yellow"
    return Text.assemble(
        (f"B* = {value:.4g}", f"bold {color}"),
        f" with sharp constants ({_attained_by(rows, 'sharp')}), {rows[-1]['paper']:.4g} with the "
        f"paper's ({_attained_by(rows, 'paper')}).\n{says}",
    )


def _attained_by(rows: Sequence[dict[str, Any]], constants: str) -> str:
    first, *others = [LABELS[row["bound"]] for row in rows if constants in row["attains"]]
    return f"{first}, {len(others)} more" if others else first
