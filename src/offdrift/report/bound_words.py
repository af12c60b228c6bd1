"""The words around the bound table: what was asked, what B* is, where it ends to say anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from offdrift.certificate import Premises

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
    "sequence_kl": "Sequence KL",
    "unified": "Unified B*",
}
"""What each bound is called where a person reads it."""


CONSTANTS = {"sharp": "sharp constants", "paper": "the paper's constants"}
OTHERS = {"sharp": "sharp ones", "paper": "the paper's"}
ROUTES = {"tv": "TV", "kl": "KL", "tv_seq": "TV_seq", "kl_seq": "KL_seq", "one": "the cap of 1"}


def title(known: Premises, given: Mapping[str, Any], reward_range: float) -> Text:
    """The question and the premises; those that were not given are called derived."""

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


def caption(
    rows: Sequence[dict[str, Any]],
    reward_range: float,
    constants: Sequence[str],
    given: Mapping[str, Any],
    kl_rate: float | None,
    *,
    narrow: bool,
) -> Text:
    """B*, its horizon, the routes, and notes on the table, one line each."""
    lines = [_verdict(rows, reward_range, constants)]
    lines += [Text(line) for line in (_horizons(rows[-1], constants, given, kl_rate),) if line]
    lines += [Text(_routes(rows[-1]["routes"]))]
    lines += [Text(note, style="yellow") for note in dict.fromkeys(r["note"] for r in rows) if note]
    about = []
    if not narrow:
        about = ["closed form: eq. 14, Thm. 3.5; Table 1 prints it for Pinsker-Marginal, Adaptive."]
    if any(row["worst_case"] for row in rows):
        about.append("≤ adaptive: no mean TV per position given; ε everywhere, not in the minimum.")
    lines += [Text(line, style="dim") for line in about]
    return Text("\n").join(lines)


def _verdict(rows: Sequence[dict[str, Any]], reward_range: float, constants: Sequence[str]) -> Text:
    """What the smallest bound is, which rows attain it, and what it is good for."""
    best = min(constants, key=lambda c: rows[-1][c])
    value, color = rows[-1][best], "green"
    if value == 0:
        says = "The surrogate is exact: its gain is the gain of the true return."
    elif value < reward_range:
        says = "A surrogate gain above B* certifies an improvement."
    else:
        says, color = f"Vacuous: not below the reward range of {reward_range:g}.", "yellow"
    shown = Text.assemble((f"B* = {value:.4g}", f"bold {color}"), f" with {CONSTANTS[best]}")
    shown.append(f" ({_by(rows, best)})")
    if len(constants) > 1:
        other = next(c for c in constants if c != best)
        shown.append(f", {rows[-1][other]:.4g} with {OTHERS[other]} ({_by(rows, other)})")
    return shown.append(f".\n{says}")


def _by(rows: Sequence[dict[str, Any]], constants: str) -> str:
    first, *others = [LABELS[row["bound"]] for row in rows if constants in row["attains"]]
    return f"{first}, {len(others)} more" if others else first


def _horizons(
    unified: dict[str, Any],
    constants: Sequence[str],
    given: Mapping[str, Any],
    kl_rate: float | None,
) -> str:
    """From which horizon on the minimum says nothing, and what was taken to hold there."""
    if isinstance(given["mean_tv"], Sequence) or getattr(given["mean_tv"], "ndim", 0):
        return ""
    at = {c: unified["vacuous_from"][c] for c in sorted(constants, reverse=True)}
    if set(at.values()) == {None}:
        return "Never vacuous up to 10^12 tokens, if these divergences hold at every T."
    fixed = [s for n, s in (("kl_seq", "KL_seq"), ("tv_seq", "TV_seq")) if given[n] is not None]
    if kl_rate is not None:
        fixed[0] = "KL_seq = T kl_rate"
    held = f", {' and '.join(fixed)} at every T" if fixed else ""
    where = ", ".join(f"{'no T' if t is None else f'T = {t:,}'} ({c})" for c, t in at.items())
    return f"Vacuous from {where}{held}."


def _routes(routes: Sequence[Sequence[Any]]) -> str:
    spans = [f"{ROUTES[name]} to token {last:,}" for name, _, last in routes]
    return f"Smallest route to the context shift (Lemma 3.2): {', '.join(spans)}."
