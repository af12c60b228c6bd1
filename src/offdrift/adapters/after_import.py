"""Run a function once a module has been imported, without importing it.

For hooks that a framework loads before the modules that they change: importing those at once would
be slow, or circular.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]


def after_import(name: str, then: Then) -> None:
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
    """Finds what others find, and has the loader call back."""

    def __init__(self) -> None:
        self.queues: dict[str, list[Then]] = {}
        self.running: dict[str, list[Then]] = {}
        """Of modules that are being executed."""

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        queue = self.queues.pop(fullname, None)  # gone while the others are asked
        if queue is None:
            return None
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            self.queues[fullname] = queue
            return None
        spec.loader = _Then(spec.loader, queue)
        return spec


class _Then(Loader):
    """A loader that calls functions after the module was executed; otherwise the one it wraps."""

    def __init__(self, loader: Loader, queue: list[Then]) -> None:
        self._loader, self._queue = loader, queue

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        name = module.__name__
        WAITING.running[name] = self._queue
        try:
            self._loader.exec_module(module)
        except BaseException:
            WAITING.queues[name] = self._queue  # it may be tried again
            raise
        finally:
            del WAITING.running[name]
        for then in self._queue:
            then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


WAITING = _Waiting()
