"""Progress where no bar can be drawn: lines in a log, so that nobody takes a long step for a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.progress import Progress
from rich.text import Text

SILENCE_S = 2.5
"""Seconds without a line after which one says what is being done; of a long wait, a tenth of it."""
POLL_S = 0.2


class ProgressLines:
    """Writes a stage when it is told of, if the last line is `SILENCE_S` ago, and while a stage lasts; notes always.

    A stage of 0 parts is a note.

    Args:
        write: takes a line.
        every: write every stage as it begins.
        clock: seconds, going up.
    """

    def __init__(
        self, write: Callable[[str], object], *, every: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._every, self._clock = write, every, clock
        self._stage, self._since, self._last = "", clock(), clock()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ProgressLines:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Note what is being done now, and write it if a line is due."""
        with self._lock:
            self._stage, self._since = f"{done}/{total} {stage}" if total > 1 else stage, self._clock()
            if not total or self._every or self._since - self._last >= SILENCE_S:
                self._line(self._stage)

    def due(self) -> None:
        """Write how long the stage has lasted, if a line is due."""
        with self._lock:
            now = self._clock()
            waited = now - self._since
            if self._stage and now - self._last >= max(SILENCE_S, waited / 10):
                self._line(f"{self._stage}: {waited:.0f} s so far")

    def _line(self, text: str) -> None:
        self._last = self._clock()
        self._write(text)

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self.due()


class TaskLines(ProgressLines):
    """Lines about the newest task of a bar that is not drawn.

    Args:
        bar: told how far its tasks are.
    """

    def __init__(
        self, bar: Progress, write: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(write, clock=clock)
        self._bar = bar

    def due(self) -> None:
        """Write how far the newest task is, if a line is due."""
        if tasks := self._bar.tasks:
            task = tasks[-1]
            done = f"{task.completed:,.0f}" + (f"/{task.total:,.0f}" if task.total else "")
            with self._lock:
                self._stage = f"{done} {Text.from_markup(task.description).plain}".rstrip()
        super().due()
