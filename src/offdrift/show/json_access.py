"""Access to a JSON file that trusts neither its shape nor its texts.

An audit may come from an older version, another machine or a log with almost nothing in it: what is absent or of
another kind is empty, and a view leaves it out. Escaping keeps a text from being markup; `visible` keeps it from
deceiving: control characters, marks that reorder their neighbors, and half surrogates are written as their codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offdrift.texts import LARGEST_DATA, parse_json, read_bytes
from offdrift.texts import visible as visible

Fields = Mapping[str, Any]


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one; keys are texts."""
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def rows(value: object) -> list[dict[str, Any]]:
    """The mappings in a list; anything else in it is left out.

    Example:
        >>> rows([{"a": 1}, None, 3]), rows("text"), rows(None)
        ([{'a': 1}], [], [])
    """
    return [mapping(x) for x in items(value) if isinstance(x, Mapping)]


def items(value: object) -> list[Any]:
    """A list as it is, anything else as an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def text(value: object) -> str:
    """A text as it is, a number or a truth value as text, anything else as "".

    Example:
        >>> text("a"), text(3), text(None), text([1])
        ('a', '3', '', '')
    """
    return str(value) if isinstance(value, str | int | float) else ""


def numbers(value: object) -> list[float | None]:
    """A list of numbers; what is not a finite one is None."""
    return [number(x) for x in items(value)]


def column(table: list[dict[str, Any]], key: str) -> list[float | None]:
    """One number of every row; None where a row lacks it."""
    return [number(row.get(key)) for row in table]


def at(fields: Fields, *path: str) -> Any:
    """Value at a path of keys; None if the path leads nowhere.

    Example:
        >>> at({"a": {"b": 3}}, "a", "b"), at({"a": None}, "a", "b")
        (3, None)
    """
    value: Any = fields
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a line file, and how many lines before the last, which may be half written, were not one.

    Raises: `OSError` for what is there and is no file, or larger than `LARGEST_DATA`.
    """
    try:
        content = read_bytes(path, limit=LARGEST_DATA)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return [], 0
    # Split on \n alone: str.splitlines would also cut a text at a raw U+2028.
    lines = [line for line in content.decode("utf-8", "replace").split("\n") if line.strip()]
    rows, bad = [], 0
    for position, line in enumerate(lines):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif position < len(lines) - 1:
            bad += 1
    return rows, bad


def any_number(values: list[float | None]) -> bool:
    """Whether there is a number among the values."""
    return any(v is not None for v in values)


def number(value: object) -> float | None:
    """The value if it is a finite number, else None.

    Example:
        >>> number(2), number(True), number("2"), number(float("nan"))
        (2.0, 1.0, None, None)
    """
    if not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return as_float if math.isfinite(as_float) else None


def visible_token(text: str) -> str:
    """A token as it is shown: a newline also as a sign, an empty token as one."""
    return visible(text).replace("\n", "↵\n") or "∅"


MAX_TEXT = 4000
"""Characters of one text that a page holds."""


def clipped(words: str, limit: int = MAX_TEXT) -> str:
    """A text, cut where it is longer than a page should hold, saying so.

    Example:
        >>> clipped("abcdef", 4)
        'abcd… (2 more characters)'
    """
    return words if len(words) <= limit else f"{words[:limit]}… ({len(words) - limit:,} more characters)"
