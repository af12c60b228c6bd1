"""The thresholds of a check, one row per metric, as its terminal view and its page show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from offdrift.report.fields import Fields, rows, text
from offdrift.report.findings import LEVELS
from offdrift.report.headline import correlation
from offdrift.report.stored import number
from offdrift.report.table import short

OUTSIDE = "○"
"""Sign of a missed budget."""
BUDGET = "outside a budget: nothing is broken, but a correction may gain"


class Held(NamedTuple):
    """A metric beside its thresholds."""

    metric: str
    value: float | None
    healthy: str
    """The strictest threshold: "< 0.02"."""
    otherwise: str
    """What missing it means; where that depends on the size, from where on it is worse."""
    level: str
    """Of the worst threshold that is missed."""
    holds: bool
    outside: bool
    """Whether what is missed is a budget, which changes no verdict."""
    sources: tuple[str, ...]
    missed: str
    """What the worst miss says, or nothing."""


def held(check: Fields) -> list[Held]:
    """The rows of `thresholds`, those of one metric together."""
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for row in rows(check.get("thresholds")):
        by_metric.setdefault(text(row.get("metric")), []).append(row)
    return [_held(metric, group) for metric, group in by_metric.items()]


def cited(judged: Iterable[Held]) -> list[str]:
    """The sources of all rows, each once, in the order in which they appear."""
    return list(dict.fromkeys(source for row in judged for source in row.sources))


def correlation_or_short(value: float | None) -> str:
    """A number near 1 keeps the digits that tell it from 1.

    Example:
        >>> correlation_or_short(0.99957), correlation_or_short(0.0123)
        ('0.99957', '0.0123')
    """
    return correlation(value) if value is not None and 0.9 <= value < 1 else short(value)


def _held(metric: str, group: list[dict[str, Any]]) -> Held:
    group = sorted(group, key=_urgency, reverse=True)
    first, *worse = group
    missed = [row for row in group if row.get("holds") is not True]
    budget = first.get("kind") == "budget"
    words = [text(first.get("level")), *(f"{text(r.get('level'))} if {_limit(r, negated=True)}" for r in worse)]  # fmt: skip
    return Held(
        metric,
        number(first.get("value")),
        _limit(first),
        "no change of the verdict" if budget else "; ".join(filter(None, words)),
        text(missed[-1].get("level")) if missed else "ok",
        not missed,
        bool(missed) and budget,
        tuple(dict.fromkeys(s for row in group if (s := text(row.get("source"))))),
        text(missed[-1].get("missed")) if missed else "",
    )


def _urgency(row: Fields) -> int:
    level = text(row.get("level"))
    return LEVELS.index(level) if level in LEVELS else 0


def _limit(row: Fields, *, negated: bool = False) -> str:
    limit, relation = number(row.get("threshold")), text(row.get("relation"))
    signs = {"<": "≥", "<=": ">", ">": "≤", ">=": "<"} if negated else {"<=": "≤", ">=": "≥"}
    return "" if limit is None else f"{signs.get(relation, relation)} {limit:g}".strip()
