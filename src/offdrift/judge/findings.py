"""`Finding`: what is wrong, how that is known, what most likely causes it, and the smallest fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["info", "watch", "act", "stop"]
"""How urgent: for your information; keep an eye on it; correct it; do not train on."""

Confidence = Literal["low", "medium", "high"]


@dataclass(frozen=True)
class Evidence:
    """One measured number beside the threshold that it was held against."""

    metric: str
    value: float | None
    """None if the evidence is that the number is missing."""
    relation: Literal["<", "<=", ">", ">=", "=", "missing"]
    threshold: float | None
    unit: str = "1"
    source: str = ""
    """Where the threshold comes from."""


@dataclass(frozen=True)
class Finding:
    """One rule that fired."""

    rule: str
    """Name of the rule, an identifier."""
    cause: str
    """Name of the most likely cause, an identifier (`precision`, `stale_engine`, ...)."""
    letter: str
    """The survey's class of it: "A" to "F"; "A/B" where only a measurement could tell; "" if it has none."""
    severity: Severity
    confidence: Confidence
    symptom: str
    """One sentence: what is seen."""
    evidence: tuple[Evidence, ...]
    explanation: str
    """One or two sentences: the most likely cause, and why it looks like this."""
    fix: str
    """One sentence: the smallest change that helps."""
    refuted_by: str
    """What would show that this finding is wrong."""
    snippets: Mapping[str, str] = field(default_factory=dict)
    """The fix as configuration, by framework ("verl", "trl", "prime-rl", "slime", "offdrift", ...)."""
    method: str | None = None
    """The row of `METHODS` that the fix turns on, if it is a correction."""
    source: str = ""
    """Where the rule comes from."""
    step: int | None = None
    """The first step of the run at which it fired; None if it is about the whole."""
    steps: int = 0
    """At how many steps it fired."""

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return asdict(self)
