"""Versions of frameworks that the adapters know, and how to change their modules.

`after_import` is for hooks that a framework loads before the modules that they change.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from offdrift.errors import FrameworkError


@dataclass(frozen=True)
class Framework:
    """A framework that an adapter plugs into."""

    distribution: str
    """Name of the package to install."""
    module: str
    oldest: str
    """The oldest version that the adapter can work with."""
    tested: str
    """The newest version it was tested against: the real package where `ran`, else its published source."""
    install: str
    """What to type to get it."""
    ran: bool
    """Whether the adapter's tests run the real framework."""


FRAMEWORKS = {
    "verl": Framework("verl", "verl", "0.8.0", "0.9.1", "pip install 'offdrift[verl]'", ran=True),
    "trl": Framework("trl", "trl", "1.8.0", "1.16.0", "pip install 'offdrift[trl]'", ran=True),
    "prime-rl": Framework("prime-rl", "prime_rl", "0.8.0", "0.8.0", "see docs/integrations/prime-rl.md", ran=False),
    "slime": Framework("slime", "slime", "0.3.1", "0.3.1", "see docs/integrations/slime.md", ran=False),
    "miles": Framework("miles", "miles", "0.1.0", "0.1.0", "see docs/integrations/slime.md", ran=False),
    "skyrl": Framework("skyrl", "skyrl", "0.3.0", "0.4.0", "see docs/integrations/skyrl.md", ran=False),
    "nemo-rl": Framework("nemo-rl", "nemo_rl", "0.6.0", "0.7.0", "see docs/integrations/nemo-rl.md", ran=False),
    "roll": Framework("roll", "roll", "0.3.0", "0.3.0", "see docs/integrations/roll.md", ran=False),
    "areal": Framework("areal", "areal", "1.0.4", "2.0.0", "see docs/integrations/areal.md", ran=False),
    "openrlhf": Framework("openrlhf", "openrlhf", "0.10.0", "0.11.2", "see docs/integrations/openrlhf.md", ran=False),
    "ms-swift": Framework("ms-swift", "swift", "4.6.0", "4.6.0", "see docs/integrations/ms-swift.md", ran=False),
    "trinity": Framework("trinity-rft", "trinity", "0.6.0", "0.6.0", "see docs/integrations/trinity.md", ran=False),
}  # fmt: skip


@cache
def require(name: str) -> ModuleType:
    """The framework's module.

    A version newer than any that was tested is used, with one warning.

    Raises: `FrameworkError` naming what was found, what is tested and what to install, if it is
        missing, cannot be imported, or is too old.

    Example:
        >>> require("verl-of-tomorrow")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        offdrift.errors.FrameworkError: no adapter for 'verl-of-tomorrow'; there are verl, trl, ...
    """
    if name not in FRAMEWORKS:
        raise FrameworkError(f"no adapter for {name!r}; there are {', '.join(FRAMEWORKS)}")
    framework = FRAMEWORKS[name]
    versions = f"tested: {framework.oldest} to {framework.tested}; {framework.install}"
    try:
        installed = version(framework.distribution)
    except PackageNotFoundError as e:
        raise FrameworkError(f"{name} is not installed ({versions})") from e
    if _release(installed) < _release(framework.oldest):
        raise FrameworkError(f"{name} {installed} is older than this adapter knows ({versions})")
    if _release(installed) > _release(framework.tested):
        log = logging.getLogger(f"offdrift.{name}")
        log.warning("%s %s is newer than tested (%s)", name, installed, versions)
    try:
        return import_module(framework.module)
    except ImportError as e:
        raise FrameworkError(f"{name} {installed} cannot be imported: {e} ({versions})") from e


def _release(text: str) -> tuple[int, ...]:
    """The release numbers of a version: "1.16.0rc1" is (1, 16, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = tuple(int(x) for x in match.group().split(".")) if match else ()
    return (*numbers, 0, 0, 0)[: max(3, len(numbers))]


Callbacks = list[Callable[[ModuleType], None]]


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` after the module of that name was imported; at once if it is.

    An error in `then` is an error of the import. The same function is called once.

    Example:
        >>> after_import("json", lambda module: print(module.__name__))
        json
    """
    module = sys.modules.get(name)
    if module is not None and name not in WAITING.running:
        then(module)
        return
    if WAITING not in sys.meta_path:
        sys.meta_path.insert(0, WAITING)
    queue = WAITING.running.get(name, WAITING.queues.setdefault(name, []))
    if then not in queue:
        queue.append(then)


class _Waiting(MetaPathFinder):
    """Finds what other finders find, and has the loader call back after the module was executed."""

    def __init__(self) -> None:
        self.queues: dict[str, Callbacks] = {}
        self.running: dict[str, Callbacks] = {}
        """Of modules that are being executed."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        queue = self.queues.pop(fullname, None)  # gone while the others are asked
        if queue is None:
            return None
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            self.queues[fullname] = queue
            return None
        execute = spec.loader.exec_module

        def then_call(module: ModuleType) -> None:
            self.running[fullname] = queue
            try:
                execute(module)
            except BaseException:
                self.queues[fullname] = queue  # it may be tried again
                raise
            finally:
                del self.running[fullname]
            for then in queue:
                then(module)

        spec.loader.exec_module = then_call  # of this module's loader alone: every module has its own
        return spec


WAITING = _Waiting()


class Replacements:
    """Attributes of a framework's modules that were replaced by ours, until they are restored."""

    def __init__(self) -> None:
        self._originals: dict[tuple[int, str], tuple[Any, Any, bool]] = {}

    def replace(self, holder: Any, name: str, ours: Any, *, everywhere: bool = False) -> None:
        """Set an attribute; the first value that it had is what `restore` puts back.

        Args:
            everywhere: also in modules that imported it by this name; ours must have another.
        """
        self._originals.setdefault((id(holder), name), (holder, getattr(holder, name), everywhere))
        self._set(holder, name, ours, everywhere)

    def original(self, name: str) -> Any:
        """The replaced attribute of this name as it was before; None if nothing of the name was replaced."""
        return next((value for (_, known), (_, value, _) in self._originals.items() if known == name), None)

    def restore(self) -> None:
        """Put the originals back. Idempotent."""
        for (_, name), (holder, original, everywhere) in self._originals.items():
            self._set(holder, name, original, everywhere)
        self._originals.clear()

    def __contains__(self, attribute: tuple[Any, str]) -> bool:
        holder, name = attribute
        return (id(holder), name) in self._originals

    def __bool__(self) -> bool:
        return bool(self._originals)

    @staticmethod
    def _set(holder: Any, name: str, value: Any, everywhere: bool) -> None:
        before = getattr(holder, name)
        setattr(holder, name, value)
        for module in list(sys.modules.values()) if everywhere else ():
            if getattr(module, "__dict__", {}).get(name) is before:
                setattr(module, name, value)
