"""Look-ups over methods and systems together: all facts, one row by name, rows by what they do."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, get_args

from offdrift.errors import MethodError
from offdrift.methods import describe as axes
from offdrift.methods import systems
from offdrift.methods.systems import SYSTEMS
from offdrift.methods.table import FAMILIES, METHODS
from offdrift.ratios import RatioName

Rows = dict[str, dict[str, Any]]

KINDS = ("method", "system", *FAMILIES, *systems.FAMILIES)
CHOICES: dict[str, tuple[str, ...]] = {
    "unit": tuple(axes.UNITS),
    "ratio": (*get_args(RatioName), "none"),
    "evidence": tuple(axes.EVIDENCE),
    "sign": tuple(axes.SIGNS),
    "stop_gradient": tuple(axes.STOPPED),
    "bias": tuple(axes.BIASES),
    "kind": KINDS,
}
"""What each filter can be asked for; `reference` takes any text."""
ALSO = {"seq_max": "worst"}


def catalog() -> Rows:
    """Facts of every method and every system, by name.

    Example:
        >>> catalog()["trm_max"]["evidence"]
        ['exact']
    """
    methods = {name: axes.facts(name, row) for name, row in METHODS.items()}
    return methods | {name: systems.facts(name, row) for name, row in SYSTEMS.items()}


def find(name: str) -> dict[str, Any]:
    """Facts of one row; case, spaces and hyphens do not matter.

    Raises: `MethodError` with names that are called alike, or rows that mention it.

    Example:
        >>> find("GSPO-token")["name"], find("Keep Routing")["kind"]
        ('gspo_token', 'system')
    """
    key = _key(name)
    if key in METHODS:
        return axes.facts(key, METHODS[key])
    if key in SYSTEMS:
        return systems.facts(key, SYSTEMS[key])
    raise MethodError(
        f"no method {name!r}; {_hint(key)}`offdrift methods` lists all {len(METHODS) + len(SYSTEMS)}"
    )


def select(rows: Rows, **wanted: str | None) -> Rows:
    """The rows that have every wanted axis.

    Args:
        rows: of `catalog`.
        wanted: an axis of `CHOICES` and one of its values (or its beginning, if that is enough), or
            `reference` and a text that the reference contains; None for any.

    Raises: `MethodError` for an unknown value, naming the choices, and for an empty result, naming
        the filter to drop.

    Example:
        >>> list(select(catalog(), unit="prefix", stop_gradient="no"))
        ['ctpo_paper']
    """
    given = {axis: chosen(axis, value) for axis, value in wanted.items() if value is not None}
    found = _having(rows, given)
    if not found:
        raise MethodError(_nothing(rows, given))
    return found


def chosen(axis: str, value: str) -> str:
    """A value of an axis as it is called in `CHOICES`. Raises: `MethodError` naming the choices."""
    if axis == "reference":
        return value
    if axis not in CHOICES:
        raise MethodError(f"no filter {axis!r}; filters are {', '.join([*CHOICES, 'reference'])}")
    choices = CHOICES[axis]
    exact = [c for c in choices if _key(c) == _key(ALSO.get(_key(value), value))]
    starting = [c for c in choices if _key(c).startswith(_key(value))]
    if exact or len(starting) == 1:
        return (exact or starting)[0]
    raise MethodError(f"{_flag(axis)} {value!r} is not one of: {'; '.join(choices)}")


def _having(rows: Rows, given: Mapping[str, str]) -> Rows:
    return {n: row for n, row in rows.items() if all(_has(row, a, v) for a, v in given.items())}


def _has(row: Mapping[str, Any], axis: str, value: str) -> bool:
    return READ.get(axis, _read)(row, axis, value)


def _read(row: Mapping[str, Any], axis: str, value: str) -> bool:
    mine = row[axis]
    return value in mine if isinstance(mine, list) else value == mine


READ: dict[str, Callable[[Mapping[str, Any], str, str], bool]] = {
    "ratio": lambda row, axis, value: (
        _read(row, axis, value) or (value == "none" and row["kind"] == "method" and not row[axis])
    ),
    "kind": lambda row, axis, value: value in (row["kind"], row["family"]),
    "reference": lambda row, axis, value: value.casefold() in row[axis].casefold(),
}


def _nothing(rows: Rows, given: Mapping[str, str]) -> str:
    """Which filter to drop when nothing is left."""
    asked = " ".join(f"{_flag(axis)} {value!r}" for axis, value in given.items())
    ways = []
    for axis in given:
        left = list(_having(rows, {a: v for a, v in given.items() if a != axis}))
        few = f" ({', '.join(left)})" if len(left) <= 5 else ""
        ways += [f"drop {_flag(axis)} for {len(left)}{few}"] if left else []
    if not ways:
        alone = [f"{_flag(a)} alone has {len(_having(rows, {a: v}))}" for a, v in given.items()]
        ways = [f"drop more than one: {', '.join(alone)}"]
    return f"nothing has {asked}; {' or '.join(ways)}"


def _hint(key: str) -> str:
    """Rows that mention a name, else those that are called alike."""
    said = {n: f"{n} {row.reference} {row.summary}" for n, row in METHODS.items()}
    said |= {n: f"{n} {s.reference} {s.title} {s.summary}" for n, s in SYSTEMS.items()}
    near = difflib.get_close_matches(key, said, n=3, cutoff=0.75)
    mention = [n for n, text in said.items() if len(key) > 2 and f"_{key}_" in f"_{_key(text)}_"]
    if mention and not near:
        return f"it is part of {' and '.join(mention[:5])}; "
    near = near or difflib.get_close_matches(key, said, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _flag(axis: str) -> str:
    return "--" + axis.replace("_", "-")


def _key(text: str) -> str:
    """Names as they are compared: "R²VPO" is "r2vpo", "GSPO-token" is "gspo_token"."""
    flat = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"[^a-z0-9]+", "_", flat).strip("_")
