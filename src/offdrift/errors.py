"""Every error this library raises on purpose.

One tree, so that `except OffdriftError` catches all of them; each member also inherits the builtin
that it refines, so code that never heard of this library still catches it. A message says what was
expected, what was found (field, sequence, value) and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class OffdriftError(Exception):
    """Base of all errors of this library."""


class ShapeError(OffdriftError, ValueError):
    """Tensors that should describe the same tokens do not have matching shapes."""


class BadValueError(OffdriftError, ValueError):
    """A number that no policy or reward can produce (NaN, +inf, a log-prob above zero, ...)."""


class EvidenceError(OffdriftError, LookupError):
    """A method needs evidence (old log-probs, exact divergences, ...) that the batch does not carry."""


class MethodError(OffdriftError, ValueError):
    """A name that is not in the method table, or a composition that cannot mean anything."""


class RecordError(OffdriftError, ValueError):
    """A rollout file that cannot be written, or whose content is not what it claims to be."""


class EngineError(OffdriftError, RuntimeError):
    """A rollout engine that is missing, or cannot do what was asked of it."""


class NotOfferedError(EngineError):
    """The request needs something that this machine or these engines do not have."""


class SyncError(EngineError):
    """The engine's weights are not the trainer's weights although they were just synchronised."""


class RecipeError(OffdriftError, ValueError):
    """A recipe or a rules file with an unknown key, a wrong type, or values that contradict each other."""


class RewardError(OffdriftError, RuntimeError):
    """A reward function of the user's that failed or returned what is no reward, or rewards that teach nothing."""


class EpisodeError(OffdriftError, RuntimeError):
    """An environment of the user's that failed, or answered what is no answer."""


class FrameworkError(OffdriftError, ImportError):
    """A training framework that is missing, or of a version that an adapter does not know."""


class LivenessError(OffdriftError, RuntimeError):
    """A configured part of a correction that is never called, or that cannot act."""


class CheckpointError(OffdriftError, RuntimeError):
    """A checkpoint that cannot be read back, or does not belong to this recipe."""


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise `MethodError` unless `value` is one of `choices`; it asks for the nearest."""
    if value not in choices:
        near = get_close_matches(str(value), choices, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise MethodError(f"{name}={value!r} is not one of {tuple(choices)}{hint}")


def check_positive(part: Any, *names: str, hint: str = "") -> None:
    """Raise `MethodError` unless each of these settings of a part is a number above 0."""
    for name in names:
        value = getattr(part, name)
        check_number(name, value)
        if value is None or not value > 0:
            raise MethodError(f"{name}={value} must be positive{hint}")


def check_range(part: Any, low: str = "eps_low", high: str = "eps_high") -> None:
    """Raise `MethodError` unless two settings of a part are distances below and above ratio 1."""
    below, above = getattr(part, low), getattr(part, high)
    check_number(low, below)
    check_number(high, above)
    if below is None or above is None or not (0 < below <= 1 and above > 0):
        raise MethodError(
            f"{low}={below} must lie in (0, 1] and {high}={above} above 0; they are distances from ratio 1"
        )


def check_number(name: str, value: Any) -> None:
    """Raise `MethodError` unless `value` is None or a number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and (not number or math.isnan(value)):
        raise MethodError(f"{name}={value!r} must be a number")


def check_count(name: str, count: Any) -> None:
    """Raise `BadValueError` unless `count` is a whole number from 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadValueError(f"{name} = {count!r}; give a whole number from 1")
