"""Lines on what a command is doing until it shows something: nobody takes a silent start for a hang."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from offdrift.cli.lines import ProgressLines

DELAY_S = 0.7
"""Seconds after which a terminal says what is being done: a command that ends before shows its result alone."""


@contextmanager
def loading() -> Iterator[None]:
    """Import without collections of garbage, and leave what was imported out of later ones.

    What an import makes stays: with torch a million objects, which every collection would look through.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()


class Waiting:
    """Says what is being done, from `begin` to `end`: lines in a log, on a terminal a line that vanishes.

    Args:
        console: on stderr.

    Example:
        >>> waiting = Waiting(Console(quiet=True))
        >>> waiting.begin("loading")
        >>> waiting.end()
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._lines: ProgressLines | None = None
        self._close: Callable[[], object] | None = None

    def begin(self, stage: str) -> None:
        """Say from now on that this is being done."""
        if self._lines is not None:  # still waiting: the silence goes on
            self._lines(stage, 0, 1)
            return
        self.end()
        if self._console.is_terminal:
            self._begin_status(stage)
            return
        self._lines = ProgressLines(self._print)
        self._lines(stage, 0, 1)
        self._lines.__enter__()
        self._close = self._lines.__exit__

    def end(self) -> None:
        """Say nothing more; what a terminal shows of it is gone when this returns."""
        close, self._close, self._lines = self._close, None, None
        if close is not None:
            close()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True, style="dim")

    def _begin_status(self, stage: str) -> None:
        status, ended = self._console.status(escape(stage)), threading.Event()

        def start() -> None:
            with self._lock:
                if not ended.is_set():
                    status.start()

        timer = threading.Timer(DELAY_S, start)
        timer.daemon = True
        timer.start()

        def close() -> None:
            timer.cancel()
            with self._lock:
                ended.set()
                status.stop()

        self._close = close
