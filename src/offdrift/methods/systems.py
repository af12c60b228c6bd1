"""`SYSTEMS`: techniques that act in an engine, a kernel, a scheduler or an optimizer, not in a loss.

They shrink the drift that methods correct, or bound it. Nothing here runs: a row says what the
technique does, who would have to do it, what this library has for it, and which numbers show that it
works. What is left of the drift is a method's business: see `related`.
"""

from __future__ import annotations

from typing import Any

from offdrift.methods import in_engines, in_schedulers
from offdrift.methods.system import System

FAMILIES: dict[str, dict[str, System]] = {
    "in the engine": in_engines.ROWS,
    "around the loss": in_schedulers.ROWS,
}

SYSTEMS: dict[str, System] = {n: row for rows in FAMILIES.values() for n, row in rows.items()}


def facts(name: str, row: System) -> dict[str, Any]:
    """All that is known of a row, as plain data, with the keys that `axes.facts` has, too."""
    return {
        "name": name,
        "kind": "system",
        "family": next(title for title, rows in FAMILIES.items() if name in rows),
        "title": row.title,
        "summary": row.summary,
        "unit": [],
        "ratio": [],
        "evidence": [],
        "sign": None,
        "stop_gradient": None,
        "aggregate": row.aggregation,
        "mechanism": row.mechanism,
        "is_treatment": row.is_treatment,
        "target": row.target,
        "model_class": row.model_class,
        "fails": row.fails,
        "bias": None,
        "reference": row.reference,
        "status": row.status,
        "experimental": row.status == "unverified",
        "where": row.where,
        "here": list(row.here),
        "watch": list(row.watch),
        "related": list(row.related),
    }
