"""Inverse questions about the unified bound: how much drift, or how long a horizon, keeps it below a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.certificate import all_bounds, tightest
from offdrift.certificate.bounds import LABELS
from offdrift.certificate.inverse import LONGEST, kl_of_sequences, largest, vacuous_horizon
from offdrift.errors import BadValueError

QUESTIONS = {
    "delta": ("Largest token KL δ", "nats"),
    "eps": ("Largest token TV ε", ""),
    "kl_seq": ("Largest KL of whole sequences", "nats"),
    "T": ("Longest horizon T", "tokens"),
}
"""Name and unit of each parameter that can be solved for."""


def answer_rows(
    solve: str,
    *,
    target: float | int,
    horizon: int | None = None,
    kl_rate: float | int | None = None,
    constants: Sequence[str] = ("paper", "sharp"),
    **premises: Any,
) -> list[dict[str, Any]]:
    """The largest value of one parameter that keeps B* within a target, ready for JSON.

    Args:
        solve: "delta", "eps", "kl_seq" or "T".
        target: largest acceptable error, in units of the reward; for T it is not reached.
        horizon: tokens; not needed for "T".
        kl_rate: mean token KL, nats per token, in place of `kl_seq`.
        constants: one row each.
        premises: the other premises and `reward_range`, as in `all_bounds`.

    Returns: dicts of `constants`, `solve`, `value` (None if there is no largest one), `any` (whether
        every value keeps the target) and `attained_by`, the row of B* there.

    Raises: as in `largest` and `vacuous_horizon`.

    Example:
        >>> answer_rows("T", target=1, delta=1e-4, constants=["sharp"])
        [{'constants': 'sharp', 'solve': 'T', 'value': 9999, 'any': False, 'attained_by': 'sequence_kl'}]
    """
    rows = []
    for c in constants:
        if solve == "T":
            first = vacuous_horizon(target=target, kl_rate=kl_rate, constants=c, **premises)
            every, value = first is None, LONGEST if first is None else first - 1
            kl_seq = kl_of_sequences(value, premises.get("kl_seq"), kl_rate)
            at = {**premises, "kl_seq": kl_seq, "horizon": value}
        else:
            assert horizon is not None
            others = {name: x for name, x in premises.items() if name != solve or x is not None}
            if solve == "kl_seq" and kl_rate is not None:
                raise BadValueError("kl_seq is solved for and kl_rate gives it; leave kl_rate out")
            if solve != "kl_seq":
                others["kl_seq"] = kl_of_sequences(horizon, premises.get("kl_seq"), kl_rate)
            value = largest(solve, target=target, horizon=horizon, constants=c, **others)
            every = value == (1.0 if solve == "eps" else math.inf)
            at = {**others, solve: value, "horizon": horizon}
            if at.get("mean_tv") is not None and at.get("eps") is not None:
                at["mean_tv"] = min(at["mean_tv"], at["eps"])
        rows.append(
            {
                "constants": c,
                "solve": solve,
                "value": None if every else value,
                "any": every,
                "attained_by": tightest(all_bounds(constants=c, **at)).name,
            }
        )
    return rows


def answer_table(rows: Sequence[dict[str, Any]], *, target: float | int, horizon: int | None) -> Table:
    """The rows of `answer_rows` for a terminal."""
    words, unit = QUESTIONS[rows[0]["solve"]]
    at = "" if horizon is None or rows[0]["solve"] == "T" else f" at T = {horizon:,}"
    sign = "<" if rows[0]["solve"] == "T" else "≤"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text(f"{words} with B* {sign} {target:g}{at}", style="bold"),
        title_justify="left",
        title_style="",
        pad_edge=False,
    )
    table.add_column("constants")
    table.add_column(unit or "value", justify="right")
    table.add_column("B* there is")
    for row in rows:
        exact = row["solve"] == "T"
        if row["any"]:
            value = f"any up to {LONGEST:.0e}" if exact else "any"
        else:
            value = f"{row['value']:,}" if exact else f"{row['value']:.6g}"
        table.add_row(row["constants"], Text(value, "bold green"), LABELS[row["attained_by"]])
    return table
