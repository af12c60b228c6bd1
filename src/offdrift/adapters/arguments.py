"""Arguments that a framework passes to what an adapter replaces: used, passed on, or refused by name.

A framework that moved says so in its arguments: a new switch that a replacement takes no notice of would silently
turn into the method that replaces it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from offdrift.adapters.frameworks import FRAMEWORKS
from offdrift.errors import FrameworkError, MethodError

OFF = (None, False)
"""Values with which an argument asks for nothing."""


def refuse_unknown(framework: str, function: str, given: Mapping[str, Any], *, known: Collection[str] = ()) -> None:
    """Refuse arguments that the adapter has never heard of, unless they are off (None or False).

    Args:
        function: what is replaced, in the framework's words.
        given: arguments by name.
        known: those that the adapter uses, passes on, or replaces by the method's own.

    Raises: `FrameworkError` naming each argument, its value and the versions that the adapter knows.

    Example:
        >>> refuse_unknown("areal", "grpo_loss_fn", {"use_new_loss": True})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        offdrift.errors.FrameworkError: areal passes use_new_loss=True to grpo_loss_fn, which this adapter ...
    """
    unknown = {name: x for name, x in given.items() if name not in known and not any(x is off for off in OFF)}
    if not unknown:
        return
    raise FrameworkError(
        f"{framework} passes {_named(unknown)} to {function}, which this adapter replaces and does not know to "
        f"have such a setting: it would be lost without a word. Tested: {FRAMEWORKS[framework].tested}; leave it at "
        "its default, or take a version that was tested"
    )


def refuse_set(given: Mapping[str, Any], neutral: Mapping[str, Any], *, whose: str, way_out: str) -> None:
    """Refuse settings of a loss that is replaced, unless they have the value with which they ask for nothing.

    Args:
        given: settings by name; those that `neutral` does not name are left alone.
        neutral: the value of each without effect.
        whose: the loss that they belong to, for the message.
        way_out: what to do.

    Raises: `MethodError` naming each setting and its value.

    Example:
        >>> refuse_set({"use_sapo_loss": True}, {"use_sapo_loss": False}, whose="AReaL's own loss", way_out="drop it")
        Traceback (most recent call last):
        offdrift.errors.MethodError: use_sapo_loss=True: part of AReaL's own loss, which is replaced; drop it
    """
    asked = {name: given[name] for name, off in neutral.items() if name in given and given[name] != off}
    if asked:
        raise MethodError(f"{_named(asked)}: part of {whose}, which is replaced; {way_out}")


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={str(x)[:60] if not isinstance(x, str) else repr(x[:60])}" for name, x in values.items())
