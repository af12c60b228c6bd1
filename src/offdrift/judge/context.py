"""`Context`: what is known of a run beside its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
"""Numbers by metric name; None, NaN, infinities and whatever is no number mean missing."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What is known of a run beside its metrics. Everything is optional: None means unknown."""

    framework: str = "offdrift"
    """Whose snippet stands first in a finding: "verl", "trl", "prime-rl", "slime", ..."""
    same_weights: bool | None = None
    """Whether both policies held the same weights by construction: a zero-update test."""
    mixture_of_experts: bool | None = None
    """Whether the model routes tokens to experts."""
    method: str | None = None
    """The row of `METHODS` that the run trains with: says which gates and weights are configured."""
    temperature: float | None = None
    """Sampling temperature of the rollouts."""
    by_lag: Sequence[Row] = ()
    """Metrics by version lag: rows with "low", the smallest lag of the bucket, in updates."""
    overall: Row = field(default_factory=dict)
    """Metrics over all tokens of the run."""
    facets: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """Metrics by bucket of a property ("length", "lag", ...): rows with "low"."""
