"""What `--jaxtyping-packages` puts around every function: the shapes of its first calls in a test are checked.

A loop that calls it a thousand times more has nothing to add, and takes twice as long.
"""

import functools
from collections.abc import Callable
from typing import Any

from beartype import beartype

CALLS = 2
"""Calls of each function that are checked in a test, its fixtures included."""
tests = 0
"""How many tests have begun; `tests/conftest.py` counts."""


def first_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype(function)` in the first `CALLS` calls of every test, `function` itself in the others."""
    test, calls = -1, 0

    @functools.cache
    def checked() -> Callable[..., Any]:
        return beartype(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal test, calls
        if test != tests:
            test, calls = tests, 0
        if calls == CALLS:
            return function(*args, **kwargs)
        calls += 1
        return checked()(*args, **kwargs)

    return call
