"""`METRIC_NAMES`: names that frameworks give to metrics, and ours for the same quantity.

The table is `metric_names.toml` beside this file: data, so that a name can be added without code. A framework's name
is taken for ours only where its definition is the same, or differs as its note says; names that look like drift and
measure something else are listed apart, with what they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from offdrift.judge.findings import Row
from offdrift.texts import read_toml

HERE = Path(__file__).parent
OUR_GROUPS = "mismatch staleness full divergence weight gate version_lag objective"
OUR_PREFIXES = tuple(f"{group}/" for group in OUR_GROUPS.split())
"""Groups of metrics that only this library logs."""
STEPS = ("update", "step", "global_step", "_step", "Step")
"""Names of the step beside those of a framework, the first that a row has counts."""
LARGEST_STEP = 2**53


@dataclass(frozen=True)
class MetricName:
    """One name of a framework, and what it measures."""

    framework: str
    theirs: str
    ours: str
    note: str = ""
    """In what their definition differs from ours; "" if in nothing."""
    beside: str = ""
    """Another name that the row must hold for this one to mean `ours`; "" if none."""


@dataclass(frozen=True)
class MetricNames:
    """The table of all frameworks."""

    names: tuple[MetricName, ...]
    sources: Mapping[str, str]
    """What each framework's names were read from."""
    steps: tuple[str, ...]
    """Names of the step, the frameworks' first."""
    records: Mapping[str, str]
    """What has the tokens of each framework recorded."""
    not_read: Mapping[str, Mapping[str, str]]
    """By framework, names that look like drift, and what they are."""
    _by_name: Mapping[str, list[tuple[int, MetricName]]] = field(init=False, repr=False)
    """Rows of the table by name, each with its place in the table."""

    def __post_init__(self) -> None:
        by_name: dict[str, list[tuple[int, MetricName]]] = {}
        for place, name in enumerate(self.names):
            by_name.setdefault(name.theirs, []).append((place, name))
        object.__setattr__(self, "_by_name", by_name)

    def find(self, name: str) -> list[MetricName]:
        """The rows of the table for a framework's name: several where frameworks share it."""
        return [entry for _, entry in self._by_name.get(name, [])]

    def framework_of(self, names: Collection[str]) -> str | None:
        """The framework that most of these names belong to; "offdrift" for this library's, None if none is known.

        Example:
            >>> metric_names().framework_of({"rollout_corr/kl", "actor/grad_norm", "timing_s/gen"})
            'verl'
        """
        counts = dict.fromkeys(self.sources, 0)
        for name in names:
            for framework in {entry.framework for entry in self.find(name)}:
                counts[framework] += 1
        ours = sum(name.startswith(OUR_PREFIXES) for name in names)
        best = max(counts, key=lambda framework: counts[framework])
        if ours and ours >= counts[best]:
            return "offdrift"
        return best if counts[best] else None

    def step(self, row: Row) -> int | None:
        """The step of a row: a whole number from 0 on, by the first of its names; None if there is none.

        Example:
            >>> metric_names().step({"_step": 7, "train/global_step": 70.0})
            70
        """
        for name in (*self.steps, *STEPS):
            value = finite(row.get(name))
            if value is not None and 0 <= value < LARGEST_STEP and value == int(value):
                return int(value)
        return None

    def entries(self, row: Row) -> dict[str, MetricName]:
        """The name of the table that each of our metrics is read from, without those that have our name already."""
        best: dict[str, tuple[int, MetricName]] = {}
        for name in row:
            for place, entry in self._by_name.get(name, ()):
                if entry.ours in row or (entry.beside and entry.beside not in row):
                    continue
                if entry.ours not in best or place < best[entry.ours][0]:
                    best[entry.ours] = (place, entry)
        return {ours: entry for ours, (_, entry) in best.items()}

    def translate(self, row: Row) -> dict[str, Any]:
        """The row with our names beside the frameworks'; a metric that has our name already keeps its value.

        Example:
            >>> metric_names().translate({"rollout_corr/k3_kl": 0.02})["mismatch/k3"]
            0.02
        """
        added = self.entries(row)
        if not added:
            return dict(row)
        translated = {**row, **{ours: row[entry.theirs] for ours, entry in added.items()}}
        if "step" not in row and "update" not in row and (step := self.step(row)) is not None:
            translated["step"] = step
        return translated


def finite(value: object) -> float | None:
    """A finite number as float; None for anything else, a truth value and a number too large included."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


@cache
def metric_names() -> MetricNames:
    """The built-in table."""
    tables = read_toml(HERE / "metric_names.toml")
    return MetricNames(
        names=tuple(entry for framework, table in tables.items() for entry in _entries(framework, table)),
        sources={framework: table["source"] for framework, table in tables.items()},
        steps=tuple(dict.fromkeys(step for table in tables.values() for step in table["steps"])),
        records={framework: table["record"] for framework, table in tables.items()},
        not_read={framework: table.get("not_read", {}) for framework, table in tables.items()},
    )


def _entries(framework: str, table: Mapping[str, Any]) -> Iterator[MetricName]:
    """The names of one framework, each also with the prefixes that its trackers put before it."""
    for theirs, value in table["names"].items():
        fields = {"ours": value} if isinstance(value, str) else value
        for prefix in ("", *table.get("prefixes", ())):
            beside = prefix + fields["beside"] if "beside" in fields else ""
            yield MetricName(framework, prefix + theirs, **{**fields, "beside": beside})
