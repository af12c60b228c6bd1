"""`Source`: one kind of log, how it is recognized and how its rows become rows of the plain schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offdrift.records.readers.columns import Row
from offdrift.records.schema import COLUMNS


@dataclass(frozen=True)
class Source:
    """A kind of log.

    With `adapt`, each row (of JSON, of a payload) is translated by it. Without, rows are of the
    plain schema, under the names in `columns` where those differ.
    """

    format: str
    framework: str
    what: str
    """What the log is, after "found"."""
    because: str
    """What it was recognized by."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The log's name of each field."""
    adapt: Callable[[Mapping[str, Any]], Row | list[Row]] | None = None
    amend: Callable[[Mapping[str, Any], Row], Row] | None = None
    """What else a row tells: called with it and the row of the plain schema, without `adapt`."""
    distinct: Callable[[Sequence[str], int], list[str]] | None = None
    """Of files and the bytes that each may take, those that hold every sequence once."""
    step_in_name: str = r"(?:^|[/_.-])step[_-]?(\d+)"
    """Where a file's path tells the step of rows that do not."""
    note: str = ""
    """What to know about it, in a sentence."""

    def step(self, file: str) -> int | None:
        """The step that a file's path tells."""
        steps = re.findall(self.step_in_name, file)
        # The innermost folder or the name itself; a number that fits no tensor is none.
        return int(steps[-1]) if steps and len(steps[-1]) < 19 else None

    def resolve(self, names: Iterable[str], mapped: Mapping[str, str]) -> dict[str, str]:
        """Column by field: as mapped, or as this source calls it, or by a known name."""
        there = set(names)
        columns = {}
        for name, f in COLUMNS.items():
            tried = (self.columns.get(name), name, *f.spellings)
            own = next((n for n in tried if n is not None and n in there), None)
            if name in mapped or own is not None:
                columns[name] = mapped.get(name, own)
        return {name: column for name, column in columns.items() if column}


PER_ROW = tuple(name for name, f in COLUMNS.items() if f.per == "sequence")
"""Fields that may be mapped whatever the log: they need no alignment with tokens."""


def look_up(row: Mapping[str, Any], name: str) -> Any:
    """A value by its key, or by dotted keys into objects; None if it is not there."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def translate(row: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    """A row by field."""
    return {name: look_up(row, column) for name, column in columns.items()}
