"""Progress of a long call: a function that is told the stage, how far it is, and of how many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Watch = Callable[[str, int, int], object]
"""Called with a stage, the parts of it that are done, and their number; 0 parts: a note."""


def progress_bar(console: Console, unit: str = "") -> Progress:
    """A bar that vanishes when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class ProgressBar:
    """A bar that long work tells of its stages.

    Args:
        note: takes a stage of 0 parts, which is to stay on the screen.
    """

    def __init__(self, console: Console, unit: str = "", note: Callable[[str], object] = lambda text: None) -> None:
        self._bar, self._note = progress_bar(console, unit), note
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show a stage, and how far it is."""
        if not total:
            self._note(stage)
        self._bar.update(self._task, description=escape(stage), completed=done, total=total or None)


@contextmanager
def watched(progress: bool | Watch) -> Iterator[Watch]:
    """Yield whom to tell: a bar on stderr for True, nobody for False, else the function that was given."""
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda stage, done, total: None
    else:
        with ProgressBar(Console(stderr=True)) as bar:
            yield bar
