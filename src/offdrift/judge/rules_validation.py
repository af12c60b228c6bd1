"""Refusals that teach: what was found, what could stand there, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

from offdrift.errors import RecipeError

KINDS = {str: "text", dict: "a table", list: "a list", bool: "true or false"}


def refuse(message: str) -> RecipeError:
    """The error for a rules file that cannot mean anything."""
    return RecipeError(message)


def _nearest(word: object, choices: Collection[str]) -> str:
    near = difflib.get_close_matches(str(word), choices, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def known(where: str, row: Iterable[str], choices: Collection[str]) -> None:
    """Refuse a key that is not one of these."""
    for key in row:
        if key not in choices:
            raise refuse(f"{where}: unknown key {key!r}; {_nearest(key, choices)}Known: {', '.join(choices)}")  # fmt: skip


def one_of(where: str, value: Any, choices: Collection[str]) -> str:
    """Refuse a name that is not in a table."""
    if not isinstance(value, str) or value not in choices:
        raise refuse(f"{where} = {value!r} is not known; {_nearest(value, choices)}Known: {', '.join(choices)}")  # fmt: skip
    return value


def choice(where: str, value: Any, choices: Collection[str]) -> None:
    """Refuse a word that is not one of a few."""
    if value not in choices:
        raise refuse(f"{where} = {value!r} must be one of {', '.join(map(repr, choices))}")


def kind(where: str, value: Any, expected: type | tuple[type, ...]) -> Any:
    """The value, if it is of this kind."""
    number = isinstance(expected, tuple)
    wrong = not isinstance(value, expected) or (number and isinstance(value, bool))
    if wrong or (number and value != value):
        word = "a number" if number else KINDS[expected]  # type: ignore[index]
        raise refuse(f"{where} = {value!r} must be {word}")
    return value
