"""One setting given as text or as a plain value: read, typed by the field that it changes, or refused by name.

The environment, `--set`, recipes and adapters give settings of methods and schedules; all of them end here, so that
`false` is false wherever it is written and a value that no part can have never starts a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offdrift.errors import MethodError
from offdrift.texts import parse_toml

SHORT_NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")
"""Numbers that Python reads and TOML does not: `.5` and `5.`."""
PAIRS = re.compile(r",(?![^\[]*\])")
"""A comma between pairs: one inside brackets belongs to a value."""
NUMBERS = {float: "a number", int: "a whole number"}


def parse_setting(text: str) -> Any:
    """Return what a value written behind `=` says: TOML, or a bare word taken as text.

    Example:
        >>> [parse_setting(x) for x in ("false", ".5", "4", "[0.1, 0.2]", "token_mean")]
        [False, 0.5, 4, [0.1, 0.2], 'token_mean']
    """
    text = text.strip()
    if SHORT_NUMBER.fullmatch(text):
        return float(text)
    try:
        values = parse_toml(f"x = {text}")
    except ValueError:
        return text
    return values["x"] if values.keys() == {"x"} else text


def parse_settings(text: str) -> dict[str, Any]:
    """Return the settings of "path=value" pairs with commas between them.

    Raises: `MethodError` naming what is not a pair.

    Example:
        >>> parse_settings("gate.high=0.02, weight.normalize=false, aggregate=token_mean")
        {'gate.high': 0.02, 'weight.normalize': False, 'aggregate': 'token_mean'}
    """
    settings = {}
    for pair in filter(None, (part.strip() for part in PAIRS.split(text))):
        path, equals, value = (x.strip() for x in pair.partition("="))
        if not (path and equals and value):
            raise MethodError(f'{pair!r} is not a setting; write "path=value", as in "weight.cap=5"')
        settings[path] = parse_setting(value)
    return settings


def typed_fields(part: Any, values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return values for fields of a dataclass, each as its field's annotation says.

    Args:
        part: the dataclass, or an object of it.
        path: where its fields stand, for messages: "gate" for `gate.high`.

    Raises: `MethodError` naming path, value and what is allowed.
    """
    kind = part if isinstance(part, type) else type(part)
    names, where = [f.name for f in fields(kind) if f.init], f"{path}." if path else ""
    try:
        kinds = get_type_hints(kind)
    except (NameError, TypeError):  # a part of the user's, whose annotations only its own module can read
        kinds = {}
    for name in values:
        if name not in names:
            raise MethodError(f"'{where}{name}': {kind.__name__} has no {name!r}, only {', '.join(names) or 'nothing'}")
    return {name: typed(f"{where}{name}", value, kinds.get(name, Any)) for name, value in values.items()}


def typed(path: str, value: Any, kind: Any) -> Any:
    """Return a setting's value in the type of its field.

    Args:
        path: the setting, for the message.
        value: a plain value of TOML, JSON or Python. "none" stands for None where the field allows that, and a list
            for a tuple; a whole number for a float; nothing else is converted.
        kind: the field's type: bool, int, float, str, a Literal, a tuple of these, any of them or None. What is none
            of these is passed on.

    Raises: `MethodError` naming setting, value and what is allowed.

    Example:
        >>> typed("weight.cap", 2, float | None), typed("weight.cap", "none", float | None)
        (2.0, None)
        >>> typed("weight.normalize", "maybe", bool)
        Traceback (most recent call last):
        offdrift.errors.MethodError: weight.normalize = 'maybe': must be true or false
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if isinstance(value, str) and value == "none" and type(None) in kinds:
        return None
    for one in kinds:
        if (found := _as(value, one)) is not _UNFIT:
            return found
    allowed = " or ".join(dict.fromkeys(map(_allowed, kinds)))
    raise MethodError(f"{path} = {value!r}: must be {allowed}")


_UNFIT = object()


def _as(value: Any, kind: Any) -> Any:
    """The value as one type, or `_UNFIT`."""
    kinds = get_args(kind)
    if get_origin(kind) is Literal:
        return value if any(type(value) is type(word) and value == word for word in kinds) else _UNFIT
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            return _UNFIT
        if kinds[1:] == (Ellipsis,):
            return _as(value, tuple[kinds[:1] * len(value)])
        parts = [_as(x, k) for x, k in zip(value, kinds, strict=False)]
        return _UNFIT if len(kinds) != len(value) or any(x is _UNFIT for x in parts) else tuple(parts)
    if isinstance(value, bool) and kind in (int, float):
        return _UNFIT
    if kind is float and isinstance(value, int | float):
        return _UNFIT if math.isnan(value) else float(value)
    return value if kind is Any or not isinstance(kind, type) or isinstance(value, kind) else _UNFIT


def _allowed(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        numbers = " of numbers" if set(kinds) <= {int, float, Ellipsis} else ""
        return "a list" + numbers if Ellipsis in kinds else f"[{', '.join(map(_allowed, kinds))}]"
    words = {bool: "true or false", type(None): "none", str: "text", **NUMBERS}
    return words.get(kind) or f"an object of {getattr(kind, '__name__', kind)}, which Python alone can give"
