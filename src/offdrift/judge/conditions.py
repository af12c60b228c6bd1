"""What a rule asks of a reading: comparisons, joined by `all` and `any`. Data, never code.

    {metric = "kl", above = "kl_large"}        a reading against a threshold, or a number
    {metric = "kl_same_ckpt", missing = true}  a reading that could not be made
    {any = [...]}, {all = [...]}               joined

A comparison with a missing reading does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from offdrift.judge.findings import Evidence
from offdrift.judge.readings.view import Reading

Relation = Literal["<", "<=", ">", ">=", "=", "missing"]
RELATIONS: dict[str, Relation] = {
    "below": "<",
    "at_most": "<=",
    "above": ">",
    "at_least": ">=",
    "is": "=",
    "missing": "missing",
}
HOLDS = {
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "=": lambda x, y: x == y,
}


@dataclass(frozen=True)
class Threshold:
    """A named number that readings are held against."""

    value: float
    unit: str = "1"
    source: str = ""
    about: str = ""


@dataclass(frozen=True)
class Compared:
    """One reading against one threshold, or a test that it is missing."""

    reading: str
    relation: Relation
    threshold: str | float | None = None
    """A name of the thresholds, a number, or None for `missing`."""

    def holds(
        self, reading: Mapping[str, float], limits: Mapping[str, Threshold], source: str = ""
    ) -> tuple[Evidence, ...] | None:
        """The evidence that it holds, or None."""
        value = reading.get(self.reading)
        metrics = reading.metrics if isinstance(reading, Reading) else {}
        metric = metrics.get(self.reading, self.reading)
        if self.relation == "missing":
            return (Evidence(metric, None, "missing", None, source=source),) if value is None else None  # fmt: skip
        if isinstance(self.threshold, str):
            limit = limits[self.threshold]
        else:
            limit = Threshold(float(self.threshold or 0.0), source=source)
        if value is None or not HOLDS[self.relation](value, limit.value):
            return None
        return (Evidence(metric, value, self.relation, limit.value, limit.unit, limit.source or source),)

    @property
    def readings(self) -> set[str]:
        """Every reading that is looked at."""
        return {self.reading}

    def describe(self, limits: Mapping[str, Threshold]) -> str:
        """The condition in one line, with the numbers that stand behind names."""
        if self.relation == "missing":
            return f"{self.reading} missing"
        limit = self.threshold
        value = limits[limit].value if isinstance(limit, str) else limit
        return f"{self.reading} {self.relation} {value:g}"


@dataclass(frozen=True)
class Joined:
    """Several conditions: all of them, or any."""

    how: Literal["all", "any"]
    parts: tuple[Compared | Joined, ...]

    def holds(
        self, reading: Mapping[str, float], limits: Mapping[str, Threshold], source: str = ""
    ) -> tuple[Evidence, ...] | None:
        """The evidence of the parts that hold; None if too few do."""
        held = [part.holds(reading, limits, source) for part in self.parts]
        found = [e for e in held if e is not None]
        if not found or (self.how == "all" and len(found) < len(held)):
            return None
        return tuple(dict.fromkeys(e for evidence in found for e in evidence))

    @property
    def readings(self) -> set[str]:
        """Every reading that is looked at."""
        return set().union(*(part.readings for part in self.parts))

    def describe(self, limits: Mapping[str, Threshold]) -> str:
        """The condition in one line, with the numbers that stand behind names."""
        told = [(p, p.describe(limits)) for p in self.parts]
        word = " and " if self.how == "all" else " or "
        return word.join(f"({t})" if isinstance(p, Joined) else t for p, t in told)


Condition = Compared | Joined
