"""Statements of sources on a method besides its formula: ranges of settings, the scale at which it was shown, and
entries of the survey that differ.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offdrift.correction import Gate, Weight
from offdrift.methods.method import Method

_TABLES = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class PublishedRange:
    """Values of a setting that a source recommends, both ends included, in the unit of the setting."""

    low: float
    high: float
    source: str

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


RANGES: dict[str, PublishedRange] = {
    row["part"]: PublishedRange(low=row["low"], high=row["high"], source=row["source"]) for row in _TABLES["ranges"]
}
"""Ranges by the kind of part that they are for."""
STOP_GRADIENT: Mapping[str, Mapping[str, str]] = _TABLES["stop_gradient"]
"""Methods whose ratios are constants here and are not in the survey's map: its entry as `survey`, and `why`."""


NOT_STATED = "not stated"


@dataclass(frozen=True, kw_only=True)
class ShownAt:
    """Scale of the largest published runs with a method, parameters, and the models of these runs."""

    scale: str = NOT_STATED
    models: str = NOT_STATED
    """"dense", "MoE" or "both"."""
    source: str = ""
    """Where it is read; "" if no source that was read states it."""


SHOWN_AT: Mapping[str, ShownAt] = {
    name: ShownAt(scale=row["scale"], models=row["models"], source=table["source"])
    for table in _TABLES["scale"]
    for row in table["shown"]
    for name in row["methods"]
}
"""Scale by method or system; what is missing here is `ShownAt()`."""


def kind_of_part(part: Any) -> tuple[str, str]:
    """Name the kind of a gate or weight, a key of `RANGES`, and its field that has the range; "" of any other."""
    if isinstance(part, Gate) and part.statistic == "ratio_error" and part.unit == "seq_mean":
        return "ratio_error", "high"
    if not isinstance(part, Weight) or part.outside != "truncate" or part.cap is None or part.floor:
        return "", ""
    everywhere = part.advantage == part.outcome == "any"
    if everywhere and part.on in ("full", "mismatch") and part.unit in ("token", "sequence"):
        return f"{part.unit} truncation", "cap"
    return "", ""


def published_ranges(row: Method) -> dict[str, PublishedRange]:
    """Settings of a method for which a source recommends a range, by their path for `override`.

    The mean of |w - 1| over a response, and truncated importance weights that correct for the rollout engine, over a
    token or a response. Weights on staleness are clips, and have no such range.

    Example:
        >>> from offdrift.methods import METHODS
        >>> {path: str(r) for path, r in published_ranges(METHODS["seq_tis"]).items()}
        {'weight.cap': '2 to 10'}
    """
    ranges = {}
    for role, several in (("gate", row.correction.gates), ("weight", row.correction.weights)):
        for i, part in enumerate(several):
            kind, field = kind_of_part(part)
            if kind:
                ranges[f"{role}.{field}" if len(several) == 1 else f"{role}.{i}.{field}"] = RANGES[kind]
    return ranges


def outside_ranges(row: Method, settings: Mapping[str, Any]) -> list[str]:
    """Sentences on settings that lie outside what their source recommends; empty if none does.

    Args:
        settings: values by path, such as an arm's `override`, flattened; only these are judged.

    Example:
        >>> from offdrift.methods import METHODS
        >>> outside_ranges(METHODS["ser"], {"gate.high": 0.3})[0].partition(":")[0]
        'gate.high = 0.3 is outside 0.03 to 0.1'
    """
    return [
        f"{path} = {settings[path]:g} is outside {r}: {r.source}"
        for path, r in published_ranges(row).items()
        if path in settings and not r.low <= settings[path] <= r.high
    ]
