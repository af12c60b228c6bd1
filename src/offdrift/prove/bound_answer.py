"""Inverse questions about the unified bound, answered in a table: how much drift, how long a horizon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.certificate import all_bounds, tightest
from offdrift.certificate.bounds import LABELS
from offdrift.certificate.inverse import (
    LONGEST,
    kl_of_sequences,
    largest,
    vacuous_horizon,
)
from offdrift.errors import BadValueError

QUESTIONS = {
    "delta": ("Largest token KL δ", "nats"),
    "eps": ("Largest token TV ε", ""),
    "kl_seq": ("Largest KL of whole sequences", "nats"),
    "T": ("Longest horizon T", "tokens"),
}
"""What can be solved for: the words, and the unit."""


def answer_rows(
    solve: str,
    *,
    target: float | int,
    horizon: int | None = None,
    kl_rate: float | int | None = None,
    constants: Sequence[str] = ("paper", "sharp"),
    **given: Any,
) -> list[dict[str, Any]]:
    """The largest value of one parameter that keeps B* within a target, ready for JSON.

    Args:
        solve: "delta", "eps", "kl_seq" or "T".
        target: largest acceptable error, in units of the reward; for T it is not reached.
        horizon: tokens; not needed for "T".
        kl_rate: mean token KL, nats per token, in place of `kl_seq`.
        constants: one row each.
        given: the other premises and `reward_range`, as in `all_bounds`.

    Returns: dicts of `constants`, `solve`, `value` (None if there is no largest one), `any` (whether
        every value keeps the target) and `attained_by`, the row of B* there.

    Raises: as in `largest` and `vacuous_horizon`.

    Example:
        >>> answer_rows("T", target=1, delta=1e-4, constants=["sharp"])
        [{'constants': 'sharp', 'solve': 'T', 'value': 9999, 'any': False, 'attained_by': 'sequence_kl'}]
    """
    if solve == "T":
        return [_longest(c, target, kl_rate, **given) for c in constants]
    assert horizon is not None
    if solve == "kl_seq" and kl_rate is not None:
        raise BadValueError("kl_seq is solved for and kl_rate gives it; leave kl_rate out")
    if solve != "kl_seq":
        given["kl_seq"] = kl_of_sequences(horizon, given.get("kl_seq"), kl_rate)
    rows = []
    for c in constants:
        asked = {name: v for name, v in given.items() if name != solve or v is not None}
        value = largest(solve, target=target, horizon=horizon, constants=c, **asked)
        every = value == (1.0 if solve == "eps" else math.inf)
        at = tightest(all_bounds(horizon=horizon, constants=c, **_lowered(asked | {solve: value})))
        rows.append(_row(c, solve, None if every else value, every, at.name))
    return rows


def _longest(
    constants: str, target: float | int, kl_rate: float | int | None, **given: Any
) -> dict[str, Any]:
    first = vacuous_horizon(target=target, kl_rate=kl_rate, constants=constants, **given)
    horizon = LONGEST if first is None else first - 1
    given["kl_seq"] = kl_of_sequences(horizon, given.get("kl_seq"), kl_rate)
    at = tightest(all_bounds(horizon=horizon, constants=constants, **given))
    return _row(constants, "T", None if first is None else horizon, first is None, at.name)


def _row(
    constants: str, solve: str, value: float | int | None, every: bool, name: str
) -> dict[str, Any]:
    return {
        "constants": constants,
        "solve": solve,
        "value": value,
        "any": every,
        "attained_by": name,
    }


def _lowered(given: dict[str, Any]) -> dict[str, Any]:
    mean, eps = given.get("mean_tv"), given.get("eps")
    return given if mean is None or eps is None else given | {"mean_tv": min(mean, eps)}


def answer_table(
    rows: Sequence[dict[str, Any]], *, target: float | int, horizon: int | None
) -> Table:
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
        table.add_row(row["constants"], Text(_shown(row), "bold green"), LABELS[row["attained_by"]])
    return table


def _shown(row: dict[str, Any]) -> str:
    if row["any"]:
        return f"any up to {LONGEST:.0e}" if row["solve"] == "T" else "any"
    return f"{row['value']:,}" if row["solve"] == "T" else f"{row['value']:.6g}"
