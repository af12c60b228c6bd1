"""Environment variables that configure hooks without arguments of their own.

OFFDRIFT_METHOD     row of METHODS
OFFDRIFT_SETTINGS   single values: "gate.high=0.02,weight.cap=5"
OFFDRIFT_RECORD     folder to record tokens in
OFFDRIFT_ON_IDLE    "error" (default) or "warn"
"""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

from offdrift.errors import MethodError, check_choice

OnIdle = Literal["error", "warn"]


def options() -> dict[str, Any]:
    """`settings`, `record` and `on_idle`, as an `Adapter` takes them. Raises: `MethodError` for what is none."""
    return {"settings": settings(), "record": record(), "on_idle": on_idle()}


def method() -> str | None:
    """The row of `METHODS`; None if it is not set."""
    return os.environ.get("OFFDRIFT_METHOD") or None


def settings() -> dict[str, Any]:
    """Single values of the method, as paths for `override`. Raises: `MethodError`."""
    return settings_of(os.environ.get("OFFDRIFT_SETTINGS", ""))


def record() -> str | None:
    """The folder to record in; None if it is not set."""
    return os.environ.get("OFFDRIFT_RECORD") or None


def on_idle() -> OnIdle:
    """Whether a part that cannot act is an error. Raises: `MethodError`."""
    chosen: Any = os.environ.get("OFFDRIFT_ON_IDLE") or "error"
    check_choice("OFFDRIFT_ON_IDLE", chosen, get_args(OnIdle))
    return chosen


def settings_of(text: str) -> dict[str, Any]:
    """Settings from "path=value" pairs with commas between them.

    Raises: `MethodError` naming what is no pair.

    Example:
        >>> settings_of("gate.high=0.02, aggregate=token_mean")
        {'gate.high': 0.02, 'aggregate': 'token_mean'}
    """
    settings = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        path, equals, value = (x.strip() for x in pair.partition("="))
        if not (path and equals and value):
            raise MethodError(f'{pair!r} is no setting; write "path=value", as in "weight.cap=5"')
        try:
            settings[path] = float(value)
        except ValueError:
            settings[path] = value
    return settings
