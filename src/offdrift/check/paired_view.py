"""Paired differences of a check in words, for the terminal and the page."""

from __future__ import annotations

from offdrift.show.findings import safe
from offdrift.show.json_access import Fields, number, rows, text
from offdrift.show.numbers import short

PAIRED = "The same tokens, one setting changed"
"""Title of these lines."""


def paired_lines(check: Fields) -> list[tuple[str, str]]:
    """Name and sentence of every paired difference, empty where none was measured."""
    found = list(rows(check.get("paired")))
    unasked = [row for row in found if text(row.get("why")) and text(row.get("changed"))]
    lines = [(_name(row), _words(row)) for row in found if row not in unasked]
    if unasked:
        options = "; ".join(f"{_name(row)}, {safe(text(row.get('changed')))}" for row in unasked)
        lines.append(("not changed", f"{safe(text(unasked[0].get('why')))}: {options}"))
    return lines


def _name(row: Fields) -> str:
    return safe(text(row.get("factor"))).replace("_", " ")


def _words(row: Fields) -> str:
    if why := safe(text(row.get("why"))):
        return f"not measured: {why}"
    tokens, equal = number(row.get("tokens")) or 0, number(row.get("equal_tokens")) or 0
    change, low, high = (number(row.get(k)) for k in ("kl_change", "kl_change_low", "kl_change_high"))
    words = f"{safe(text(row.get('changed')))}: {equal:,.0f} of {tokens:,.0f} tokens have the same bits"
    if equal < tokens:
        largest, own = short(number(row.get("abs_log_ratio_max"))), short(number(row.get("self_kl")))
        words += f", log-probs differ by up to {largest} nat (KL to itself {own})"
        interval = "" if low is None or high is None else f" ({short(low)} to {short(high)})"
        words += f"; divergence from the trainer changes by {short(change)} nat per token{interval}"
    return f"{words}; {safe(text(row.get('computed')))}"
