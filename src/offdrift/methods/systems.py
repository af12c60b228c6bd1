"""`SYSTEMS`, the rows of systems.toml: techniques that act in an engine, a scheduler or an optimizer, not in a loss.

They shrink the drift that methods correct, or bound it. Nothing here runs: a row says what the technique does, who
would have to do it, what this library has for it, and which numbers show that it works. What is left of the drift is
a method's business: see `related`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offdrift.methods.method import Status


@dataclass(frozen=True, kw_only=True)
class System:
    """A technique that no loss can contain.

    Example:
        >>> from offdrift.methods.systems import SYSTEMS
        >>> SYSTEMS["tbik"].target
        'engines with different tensor-parallel sizes'
    """

    title: str
    summary: str
    aggregation: str = "n/a"
    """At what level it works, where it works at one."""
    mechanism: str
    is_treatment: str = "none"
    target: str
    model_class: Literal["dense", "MoE", "both"] = "both"
    fails: str
    where: str
    """Who would have to implement it, and what part of it is here."""
    here: tuple[str, ...] = ()
    """Functions of this library that compute a part of it."""
    watch: tuple[str, ...] = ()
    """Metrics that show whether it works."""
    related: tuple[str, ...] = ()
    """Methods that correct what it leaves."""
    reference: str
    status: Status = "stated"


WATCH = {
    "in the engine": ("mismatch/k3", "mismatch/abs_log_ratio_max"),
    "around the loss": ("version_lag/max", "staleness/k3"),
}
"""What most rows of a family are watched by."""

_TABLES = tomllib.loads(Path(__file__).with_name("systems.toml").read_text(encoding="utf-8"))


def _row(family: str, fields: dict[str, Any]) -> System:
    tuples = {k: tuple(x) if isinstance(x, list) else x for k, x in fields.items()}
    return System(**{"watch": WATCH[family], **tuples})


FAMILIES: dict[str, dict[str, System]] = {
    family: {name: _row(family, fields) for name, fields in rows.items()} for family, rows in _TABLES.items()
}
"""Rows that act in an engine (what is replayed, which kernels, which precision), and around the loss (asynchrony,
buffers, the optimizer, the model)."""

SYSTEMS: dict[str, System] = {n: row for rows in FAMILIES.values() for n, row in rows.items()}


FACTS = (
    "name kind family title summary unit ratio evidence sign stop_gradient certifies raises aggregate mechanism "
    "is_treatment target model_class fails bias reference status experimental where here watch related"
)
"""What is said of a row, in this order; what a technique outside the loss does not have is None."""


def facts(name: str, row: System) -> dict[str, Any]:
    """All that is known of a row, as plain data, with the keys that `axes.facts` has, too."""
    words = {k: list(x) if isinstance(x, tuple) else x for k, x in vars(row).items()}
    words |= {"name": name, "kind": "system", "aggregate": row.aggregation, "experimental": row.status == "unverified"}
    words |= {"family": next(title for title, rows in FAMILIES.items() if name in rows)}
    words |= {"unit": [], "ratio": [], "evidence": []}
    return {key: words.get(key) for key in FACTS.split()}
