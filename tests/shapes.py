"""What `--jaxtyping-packages` puts around every function: the shapes of its first calls in a test are checked.

A loop that calls it a thousand times more has nothing to add, and takes several times as long: jaxtyping binds the
arguments of every call that it checks.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from beartype import beartype

CALLS = 2
"""Calls of each function that are checked in a test, its fixtures included."""
checks: Counter[Any] = Counter()
"""Checks of each function in this test: two a call, of its arguments and of its result."""


def begin() -> None:
    """A test begins, and with it the count; `tests/conftest.py` says when."""
    for function in checks:
        function.__no_type_check__ = False
    checks.clear()


def first_calls(signature: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype(signature)`, until the function has had its checks; then jaxtyping leaves it alone.

    Args:
        signature: a function with the signature alone, made by `jaxtyped`; the function itself stands in its frame.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "jaxtyped":
        frame = frame.f_back
    function = signature if frame is None else frame.f_locals["fn"]
    checked = functools.cache(lambda: beartype(signature))

    @functools.wraps(signature)
    def call(*args: Any, **kwargs: Any) -> Any:
        if sys.is_finalizing():  # a `__del__` at the end of the process, where nothing can be imported
            return None
        checks[function] += 1
        function.__no_type_check__ = checks[function] >= 2 * CALLS
        return checked()(*args, **kwargs)

    return call
