"""Paired differences of a check in words, for the terminal and the page."""

from __future__ import annotations

from offdrift.show.findings import safe
from offdrift.show.json_access import Fields, items, mapping, number, rows, text
from offdrift.show.numbers import short

PAIRED = "The same tokens, one setting changed"
"""Title of these lines."""


TOGETHER = "Settings changed together"
"""Title of the lines of a factorial."""


def compound_lines(check: Fields) -> list[tuple[str, str]]:
    """Share of every setting in a compound drift, then effects alone and interactions; empty where none was run."""
    compound = mapping(check.get("compound"))
    if why := safe(text(compound.get("why"))):
        return [("not measured", why)]
    if not compound:
        return []
    before, after = (short(number(compound.get(key))) for key in ("before", "after"))
    lines = [
        (
            "all",
            f"KL {before} before, {after} with all changed, nat per token: {_change(mapping(compound.get('total')))}",
        )
    ]
    changed = mapping(compound.get("changed"))
    for row in rows(compound.get("shares")):
        name = text(row.get("factor"))
        lines.append((f"share of {_plain(name)}", f"{_change(row)} ({safe(text(changed.get(name)))})"))
    for row in rows(compound.get("effects")):
        names = [_plain(text(x)) for x in items(row.get("factors"))]
        kind = f"{names[0]} alone" if len(names) == 1 else f"interaction of {', '.join(names)}"
        lines.append((kind, _change(row)))
    return lines


def _change(row: Fields) -> str:
    mean, low, high = (number(row.get(key)) for key in ("change", "low", "high"))
    return f"{short(mean)}" + ("" if low is None or high is None else f" ({short(low)} to {short(high)})")


def _plain(name: str) -> str:
    return safe(name).replace("_", " ")


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
    return _plain(text(row.get("factor")))


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
