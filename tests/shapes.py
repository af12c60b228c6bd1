"""What `--jaxtyping-packages` puts around every function: the shapes of its first calls in a test are checked.

A loop that calls it a thousand times more has nothing to add, and takes several times as long: jaxtyping binds the
arguments of every call that it checks. Of a test with many cases the same is true of functions and cases: a function is
checked in its first calls in each test, and in its first calls for each case of a file (a row of the method table, say),
whichever of the file's tests comes to it first. A fault that shows in one test, or for one case, is seen; every test
with every case is not checked again: that took two thirds of the time of the laws.

A function without an array in its signature has no shapes: pyright sees its types, and it runs as it is. The rules of
the diagnosis ask such functions millions of times.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import jaxtyping
from beartype import beartype

CALLS = 2
"""Calls of each function that are checked in a test, its fixtures included, and for a case."""
Checks = Counter[Hashable]
"""Checks by function: two a call, of its arguments and of its result."""
everywhere: defaultdict[Hashable, Checks] = defaultdict(Counter)
"""Those of every test and of every case so far."""
now: list[Checks] = [Counter(), Counter()]
"""Those of the test that runs, and of its case."""
checkers: dict[Hashable, Callable[..., Any]] = {}
"""What beartype makes of each signature, which takes longer than a check."""
functions: dict[Hashable, Any] = {}
"""Every function that was checked."""
off: list[Any] = []
"""Functions that this test leaves alone."""


def begin(test: Hashable = None, case: Hashable = None) -> None:
    """A test begins, with one of its cases; `tests/conftest.py` says when. Without names, nothing was checked before."""
    for function in off:
        function.__no_type_check__ = False
    off.clear()
    now[:] = [Counter() if key is None else everywhere[key] for key in (test, case)]
    for name in now[0].keys() & now[1].keys():
        _leave_alone(name)


def _enough(name: Hashable) -> bool:
    return all(checks[name] >= 2 * CALLS for checks in now)


def _leave_alone(name: Hashable) -> None:
    """From here to the end of the test, if the function has had its checks."""
    if _enough(name):
        functions[name].__no_type_check__ = True
        off.append(functions[name])


def first_calls(signature: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype(signature)`, until the function has had its checks; then jaxtyping leaves it alone.

    Args:
        signature: a function with the signature alone, made by `jaxtyped`; the function itself stands in its frame.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "jaxtyped":
        frame = frame.f_back
    if frame is None:  # which argument of a call that was refused is at fault
        return beartype(signature)
    function = frame.f_locals["fn"]
    # One that is made anew in every call of another, by the same lines, is the same function.
    lines = getattr(inspect.unwrap(function), "__code__", None)
    name = (function.__module__, function.__qualname__, lines and lines.co_firstlineno)
    if lines is not None and lines.co_flags & inspect.CO_NESTED and _enough(name):
        function.__no_type_check__ = True

    @functools.wraps(signature)
    def call(*args: Any, **kwargs: Any) -> Any:
        if sys.is_finalizing() or _enough(name):  # finalizing: a `__del__` where nothing can be imported
            return None
        for checks in now:
            checks[name] += 1
        functions[name] = function
        _leave_alone(name)
        kind = (*name, signature.__code__.co_kwonlyargcount)  # one more where the result is checked
        if kind not in checkers:
            checkers[kind] = beartype(signature)
        return checkers[kind](*args, **kwargs)

    return call


def has_arrays(thing: Any) -> bool:
    """Whether a signature, or a field of a dataclass, names an array type, itself or by an alias of its module."""
    if isinstance(thing, property):
        return any(has_arrays(part) for part in (thing.fget, thing.fset) if part is not None)
    names = vars(sys.modules[thing.__module__]) if thing.__module__ in sys.modules else {}
    texts = [note if isinstance(note, str) else repr(note) for note in getattr(thing, "__annotations__", {}).values()]
    words = {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}
    return any("jaxtyping" in repr(names.get(word)) for word in words) or any("jaxtyping" in text for text in texts)


def leave_scalars() -> None:
    """From here on what `--jaxtyping-packages` puts around functions goes around those with arrays alone."""
    everything = jaxtyping.jaxtyped

    def with_arrays(*args: Any, **options: Any) -> Any:
        if args:
            return everything(*args, **options)
        check = everything(**options)
        return lambda thing: check(thing) if has_arrays(thing) else thing

    jaxtyping.jaxtyped = with_arrays
