"""Reads what a JSON file holds without trusting its shape: what is absent or of another kind is empty.

An audit may come from an older version, another machine or a log with almost nothing in it; a view
of it leaves out what is not there, and never fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one; keys are texts.

    Example:
        >>> mapping({"a": 1}), mapping(None), mapping([1])
        ({'a': 1}, {}, {})
    """
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def rows(value: object) -> list[dict[str, Any]]:
    """The mappings in a list; anything else in it is left out.

    Example:
        >>> rows([{"a": 1}, None, 3]), rows("text"), rows(None)
        ([{'a': 1}], [], [])
    """
    return [mapping(x) for x in value if isinstance(x, Mapping)] if is_list(value) else []  # type: ignore[union-attr]


def items(value: object) -> list[Any]:
    """A list as it is, anything else as an empty one."""
    return list(value) if is_list(value) else []  # type: ignore[call-overload]


def text(value: object) -> str:
    """A text as it is, a number or a truth value as text, anything else as "".

    Example:
        >>> text("a"), text(3), text(None), text([1])
        ('a', '3', '', '')
    """
    return str(value) if isinstance(value, str | int | float) else ""


def numbers(value: object) -> list[float | None]:
    """A list of numbers; what is not a finite one is None.

    Example:
        >>> numbers([1, "x", float("nan"), 2.5]), numbers(None)
        ([1.0, None, None, 2.5], [])
    """
    return [number(x) for x in items(value)]


def column(table: list[dict[str, Any]], key: str) -> list[float | None]:
    """One number of every row; None where a row lacks it."""
    return [number(row.get(key)) for row in table]


def at(fields: Fields, *path: str) -> Any:
    """What stands at a path of keys; None if the path leads nowhere.

    Example:
        >>> at({"a": {"b": 3}}, "a", "b"), at({"a": None}, "a", "b")
        (3, None)
    """
    value: Any = fields
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def is_list(value: object) -> bool:
    """Whether a value is what JSON calls an array."""
    return isinstance(value, list | tuple)


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
