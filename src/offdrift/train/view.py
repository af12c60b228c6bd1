"""The same facts in the terminal: live progress while a run trains, and its table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from offdrift.certificate.certify import ACCEPTANCE_FLOOR
from offdrift.show.findings import SEVERITY_STYLE
from offdrift.show.json_access import number
from offdrift.show.numbers import percent, short
from offdrift.train.stored import Arm, Run
from offdrift.train.table import COLUMNS, Column, verdict


@runtime_checkable
class Happening(Protocol):
    """What a trainer reports; `offdrift.train.loop.Event` is one."""

    @property
    def kind(self) -> str: ...
    @property
    def arm(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def metrics(self) -> Mapping[str, Any] | None: ...


WIDE = 132
"""Terminal columns from which the table has an arm a row; below, an arm a column."""

LIVE: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "reward": ("reward/mean", short),
    "KL mean": ("divergence/kl_rollout_current_mean", short),
    "KL max": ("divergence/kl_rollout_current_max", short),
    "accepted": ("gate/acceptance_seq", percent),
    "ESS": ("full/ess_frac", percent),
    "lag": ("version_lag/max", lambda x: "–" if x is None else f"{x:.0f}"),
    "tokens/s": ("throughput/tokens_per_s", lambda x: "–" if x is None else f"{x:,.0f}"),
}
"""What is shown live of each update: column -> metric and how it is written."""


SILENCE_S = 10.0
"""Longest time without a line, off a terminal, while something can be counted."""


class LiveProgress:
    """Shows a run as it happens: a bar and the newest numbers per arm, or plain lines off a terminal.

    What the run is busy with stands below the bars with its own clock, from the first moment on.

    Args:
        console: where to print; not a terminal means one line every `every` updates, and one at
            least every ten seconds while a count goes up.

    Example:
        >>> with LiveProgress(Console(quiet=True)) as watch:
        ...     watch  # doctest: +ELLIPSIS
        <offdrift.train.view.LiveProgress object at ...>
    """

    def __init__(self, console: Console, *, every: int = 8) -> None:
        self.console, self.every = console, every
        self.newest: dict[str, Mapping[str, Any]] = {}
        self.held_out: dict[str, list[float]] = {}
        self.progress = Progress(
            TextColumn("{task.description}", justify="right"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self.stage = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
        )
        self.last_line = time.monotonic()
        self.bars: dict[str, Any] = {}
        self.warned: set[str] = set()
        self.live = Live(console=console, get_renderable=self._picture, refresh_per_second=4)

    def __enter__(self) -> LiveProgress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def __call__(self, event: Happening) -> None:
        """Take note of an event."""
        if event.kind not in ("setup", "stage"):
            self._stage(None)
        getattr(self, f"_on_{event.kind}", self._on_setup)(event)

    def _on_setup(self, event: Happening) -> None:
        self._stage(event.text)
        if not self.console.is_terminal:
            self._say(Text(event.text, style="dim"))

    def _on_stage(self, event: Happening) -> None:
        self._stage(event.text)

    def _stage(self, text: str | None) -> None:
        """Show what the run is busy with, with a clock of its own; None for nothing."""
        for task in self.stage.task_ids:
            self.stage.remove_task(task)
        if text is not None:
            self.stage.add_task(escape(text), total=None)

    def _due(self, step: int, every: int) -> bool:
        """Whether a counter deserves a line off a terminal: at round numbers, or after a silence."""
        silent = time.monotonic() - self.last_line > SILENCE_S
        return not self.console.is_terminal and (step % every == 0 or silent)

    def _on_warm_start(self, event: Happening) -> None:
        self._bar("warm start", event)
        loss = number((event.metrics or {}).get("loss"))
        if self._due(event.step, 100):
            self._say(Text(f"warm start {event.step}/{event.total}  loss {short(loss)} nat"))

    def _on_arm(self, event: Happening) -> None:
        self._bar(event.arm, event)
        self._say(Text.assemble((event.arm, "bold"), f"  {event.text}"))

    def _on_resume(self, event: Happening) -> None:
        self._say(Text(f"{event.arm}: resumed at update {event.step} {event.text}", style="cyan"))

    def _on_eval(self, event: Happening) -> None:
        reward = number((event.metrics or {}).get("reward"))
        if reward is not None:
            self.held_out.setdefault(event.arm, []).append(reward)
        if not self.console.is_terminal:
            self._say(
                Text(f"{event.arm} {event.step}/{event.total}  held-out reward {short(reward)}")
            )

    def _on_update(self, event: Happening) -> None:
        self._bar(event.arm, event)
        self.newest[event.arm] = event.metrics or {}
        accepted = number(self.newest[event.arm].get("gate/acceptance_seq"))
        if accepted is not None and accepted < ACCEPTANCE_FLOOR and event.arm not in self.warned:
            self.warned.add(event.arm)
            self._say(
                Text(
                    f"{event.arm}: update {event.step} accepted {percent(accepted)} of its sequences; "
                    "the TRM paper asks to watch for less than 70 % (Remark 4.3)",
                    style="yellow",
                )
            )
        if self._due(event.step, self.every):
            words = [f"{name} {show}" for name, show in self._numbers(event.arm)]
            self._say(Text(f"{event.arm} {event.step}/{event.total}  " + "  ".join(words)))

    def _on_finding(self, event: Happening) -> None:
        found = event.metrics or {}
        severity = str(found.get("severity", "watch"))
        head = Text(
            f"{event.arm}: update {event.step}, {severity}: ", style=SEVERITY_STYLE[severity]
        )
        self._say(
            head.append(f"{found.get('symptom', event.text)} {found.get('fix', '')}", "default")
        )

    def _on_arm_done(self, event: Happening) -> None:
        after = number((event.metrics or {}).get("reward_after"))
        self._say(
            Text.assemble(
                (event.arm, "bold"), f"  done: held-out reward {short(after)} {event.text}"
            )
        )

    def _bar(self, name: str, event: Happening) -> None:
        if name not in self.bars:
            self.bars[name] = self.progress.add_task(name, total=event.total)
        self.progress.update(self.bars[name], completed=event.step, total=event.total)

    def _numbers(self, arm: str) -> list[tuple[str, str]]:
        newest = self.newest.get(arm, {})
        return [(name, show(number(newest.get(key)))) for name, (key, show) in LIVE.items()]

    def _picture(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("arm")
        table.add_column("update", justify="right")
        for name in LIVE:
            table.add_column(name, justify="right")
        table.add_column("held-out", justify="right")
        for arm, newest in self.newest.items():
            evals = " → ".join(
                short(r)
                for r in (self.held_out.get(arm) or [])[
                    :: max(1, len(self.held_out.get(arm, [])) - 1)
                ]
            )
            table.add_row(
                arm, str(newest.get("update", "")), *(v for _, v in self._numbers(arm)), evals
            )
        shown = [self.progress, table] if self.newest else [self.progress]
        return Group(*shown, self.stage) if self.stage.tasks else Group(*shown)

    def _say(self, text: Text) -> None:
        self.last_line = time.monotonic()
        self.console.print(Text(time.strftime("%H:%M:%S "), style="dim") + text, soft_wrap=True)


def run_table(run: Run, *, width: int = 140) -> Table:
    """The run's table: an arm a row, or an arm a column where the terminal is narrow."""
    arms, titles = run.arms, [_titled(c) for c in COLUMNS]
    grid = [[_written(c, arm) for c in COLUMNS] for arm in arms]
    names = [Text(arm.name, style="bold") for arm in arms]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    if width >= WIDE:
        rows, head = [[name, *cells] for name, cells in zip(names, grid, strict=True)], titles
    else:
        columns = [list(cells) for cells in zip(*grid, strict=True)]
        rows, head = [[t, *cells] for t, cells in zip(titles, columns, strict=True)], names
    table.add_column("arm" if width >= WIDE else "")
    for title in head:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _titled(column: Column) -> Text:
    return Text(column.title) + Text(f"\n{column.unit}" if column.unit else "", style="dim")


def _written(column: Column, arm: Arm) -> Text:
    cell = column.cell(arm)
    text = Text(cell.text, style="yellow" if cell.flagged else "")
    return text + Text(f"\n{cell.note}" if cell.note else "", style="dim")


def run_summary(run: Run, *, width: int = 140) -> Group:
    """Table, notes and the one sentence, for a terminal of so many columns."""
    notes = [Text(f"{arm.name}: {note}", style="dim") for arm in run.arms for note in arm.notes]
    return Group(run_table(run, width=width), Text(verdict(run)), *notes)
