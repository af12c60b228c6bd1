"""A run in the terminal: live progress while it trains, and its table at the end; and the table of a sweep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from offdrift.judge import load_rules
from offdrift.show.findings import SEVERITY_STYLE
from offdrift.show.json_access import number
from offdrift.show.numbers import percent, short
from offdrift_lab.train.report.overlap import OVERLAP
from offdrift_lab.train.report.spread import ONE_SEED, spread
from offdrift_lab.train.report.stored import (
    NORMAL_ESS,
    NORMAL_KL,
    REMARK,
    Column,
    Run,
    columns_for,
    notes_of,
    verdict,
)
from offdrift_lab.train.sweep.sweep import worded
from offdrift_lab.train.sweep.sweep_results import explained, sentence, signed

if TYPE_CHECKING:  # importing it loads transformers
    from offdrift_lab.train.loop.context import Event


WIDE = 132
"""Terminal columns from which the table has an arm a row; below, an arm a column."""

LIVE: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "training reward": ("reward/mean", short),
    "KL mean": ("divergence/kl_rollout_current_mean", short),
    "KL max": ("divergence/kl_rollout_current_max", short),
    "accepted": ("gate/acceptance_seq", percent),
    "ESS": ("full/ess_frac", percent),
    "lag": ("version_lag/max", lambda x: "–" if x is None else f"{x:.0f}"),
    "tokens/s": ("throughput/tokens_per_s", lambda x: "–" if x is None else f"{x:,.0f}"),
}
"""Live columns of each update: name -> metric and how it is written."""


LONGEST_S = 30.0
SILENCE_S = 3.0
"""Longest time without a line, off a terminal, while something is new: the next line of the same wait comes after as
long again."""


class LiveProgress:
    """Shows a run as it happens: a bar and the newest numbers per arm, or plain lines off a terminal.

    Below the bars stands what the run is busy with, and for how long.

    Args:
        console: where to print; not a terminal means one line every `every` updates, one at least every three seconds
            while a count goes up, and in a wait without counts after 3, 6, 12, ... seconds, at most 30 apart.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.

    Example:
        >>> with LiveProgress(Console(quiet=True)) as watch:
        ...     watch  # doctest: +ELLIPSIS
        <offdrift_lab.train.report.view.LiveProgress object at ...>
    """

    def __init__(self, console: Console, *, every: int = 8, limits: Mapping[str, float] | None = None) -> None:
        self.console, self.every = console, every
        self.limits = load_rules().limits if limits is None else limits
        self.newest: dict[str, Mapping[str, Any]] = {}
        self.held_out: dict[str, list[float]] = {}
        self.progress = Progress(
            TextColumn("{task.description}", justify="right"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self.stage = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)
        self.last_line = self.since = time.monotonic()
        self.busy_with, self.ended = "starting", False
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._watch = threading.Thread(target=self._fill_silence, name="offdrift-progress", daemon=True)
        self.bars: dict[str, Any] = {}
        self.warned: set[str] = set()
        self.live = Live(console=console, get_renderable=self._display, refresh_per_second=4)

    def __enter__(self) -> LiveProgress:
        if self.console.is_terminal:
            self.live.start()
        else:
            self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self.console.is_terminal:
            self.live.stop()
        else:
            self._watch.join()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        with self._lock:
            for task in self.stage.task_ids:
                self.stage.remove_task(task)
            self.since = time.monotonic()
            where = [event.arm or event.kind.replace("_", " ")] if event.arm or event.total else []
            where += [f"{event.step}/{event.total}"] if event.total else []
            where += [event.text] if event.kind in ("setup", "stage") else []
            self.busy_with = " ".join(where)
            self.ended = event.kind in ("update", "eval", "warm_start")
            getattr(self, f"_on_{event.kind}", self._on_setup)(event)

    def _fill_silence(self) -> None:
        """Off a terminal: say what the run is busy with where nothing else has been said for a while."""
        while not self._ended.wait(0.2):
            with self._lock:
                silent, waited = time.monotonic() - self.last_line, time.monotonic() - self.since
                # While a count goes up its own lines say so, at its next step.
                if waited > SILENCE_S and silent > min(max(SILENCE_S, waited / 2), LONGEST_S):
                    words = f"nothing new for {waited:.0f} s" if self.ended else f"{waited:.0f} s so far"
                    self._print(Text(f"{self.busy_with}: {words}", style="dim"))

    def _on_setup(self, event: Event) -> None:
        self._on_stage(event)
        if not self.console.is_terminal:
            self._print(Text(event.text, style="dim"))

    def _on_zero_update(self, event: Event) -> None:
        self._print(Text(event.text, style="dim"))

    def _on_stage(self, event: Event) -> None:
        self.stage.add_task(escape(event.text), total=None)
        if event.kind == "stage" and not (self.console.is_terminal or event.arm in self.newest):
            where = f"{event.arm}: " if event.arm else ""
            self._print(Text(f"{where}{event.text}", style="dim"))  # the first update may take minutes

    def _due(self, step: int, every: int) -> bool:
        """Whether a counter deserves a line off a terminal: at round numbers, or after a silence."""
        silent = time.monotonic() - self.last_line > SILENCE_S
        return not self.console.is_terminal and (step % every == 0 or silent)

    def _on_warm_start(self, event: Event) -> None:
        self._bar("warm start", event)
        loss = number((event.metrics or {}).get("loss"))
        if self._due(event.step, 100):
            self._print(Text(f"warm start {event.step}/{event.total}  loss {short(loss)} nat"))

    def _on_arm(self, event: Event) -> None:
        self._bar(event.arm, event)
        self._print(Text.assemble((event.arm, "bold"), f"  {event.text}"))

    def _on_resume(self, event: Event) -> None:
        self._print(Text(f"{event.arm}: resumed at update {event.step} {event.text}", style="cyan"))

    def _on_eval(self, event: Event) -> None:
        reward = number((event.metrics or {}).get("reward"))
        if reward is not None:
            self.held_out.setdefault(event.arm, []).append(reward)
        if not self.console.is_terminal:
            counter = f"{event.arm} {event.step}/{event.total}"
            self._print(Text(f"{counter}  held-out reward {short(reward)}"))

    def _on_update(self, event: Event) -> None:
        self._bar(event.arm, event)
        self.newest[event.arm] = event.metrics or {}
        accepted = number(self.newest[event.arm].get("gate/acceptance_seq"))
        floor = self.limits["acceptance_low"]
        if accepted is not None and accepted < floor and event.arm not in self.warned:
            self.warned.add(event.arm)
            text = (
                f"{event.arm}: update {event.step} accepted {percent(accepted)} of its sequences; "
                f"less than {100 * floor:g} % ({REMARK})"
            )
            self._print(Text(text, style="yellow"))
        if self._due(event.step, self.every):
            words = [f"{name} {show}" for name, show in self._numbers(event.arm)]
            self._print(Text(f"{event.arm} {event.step}/{event.total}  " + "  ".join(words)))

    def _on_finding(self, event: Event) -> None:
        finding = event.metrics or {}
        severity = str(finding.get("severity", "watch"))
        where = f"{event.arm}: update {event.step}, {severity}: "
        text = f"{finding.get('symptom', event.text)} {finding.get('fix', '')}"
        line = Text(where, style=SEVERITY_STYLE[severity]).append(text, "default")
        self._print(line)

    def _on_arm_done(self, event: Event) -> None:
        after = number((event.metrics or {}).get("reward_after"))
        done = f"  done: held-out reward {short(after)} {event.text}"
        self._print(Text.assemble((event.arm, "bold"), done))

    def _bar(self, name: str, event: Event) -> None:
        if name not in self.bars:
            self.bars[name] = self.progress.add_task(name, total=event.total)
        self.progress.update(self.bars[name], completed=event.step, total=event.total)

    def _numbers(self, arm: str) -> list[tuple[str, str]]:
        newest = self.newest.get(arm, {})
        return [(name, show(number(newest.get(key)))) for name, (key, show) in LIVE.items()]

    def _display(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("arm")
        table.add_column("update", justify="right")
        for name in LIVE:
            table.add_column(name, justify="right")
        table.add_column("held-out", justify="right")
        for arm, newest in self.newest.items():
            rewards = self.held_out.get(arm, [])
            first_and_last = rewards[:: max(1, len(rewards) - 1)]
            evals = " → ".join(map(short, first_and_last))
            numbers = (value for _, value in self._numbers(arm))
            table.add_row(arm, str(newest.get("update", "")), *numbers, evals)
        parts = [self.progress, table] if self.newest else [self.progress]
        return Group(*parts, self.stage) if self.stage.tasks else Group(*parts)

    def _print(self, text: Text) -> None:
        self.last_line = time.monotonic()
        self.console.print(Text(time.strftime("%H:%M:%S "), style="dim") + text, soft_wrap=True)


IMPORTANT = (
    *("reward", "schedule", "worker_idle", "trainer_idle", "lag", "kl_mean", "speed"),
    *("acceptance", "ess", "kl_max", "precondition", "ppl_gap", "bound"),
)
"""Columns of the final table, those that a narrow terminal keeps first."""


NORMAL = f"KL mean: {NORMAL_KL}. ESS: {NORMAL_ESS}."
"""What is normal, below the table."""


@dataclass(frozen=True)
class RunTable:
    """The table of a run's arms, for a terminal of any width."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]
    """The titles of the columns behind a place for the corner, and the cells of every arm behind its name."""

    @classmethod
    def of(cls, run: Run) -> RunTable:
        """Take the columns that a run has numbers for; those of its schedule come behind the first."""
        columns = list(columns_for(run))
        if any(arm.schedule for arm in run.arms):
            columns = [columns[0], *(c for c in OVERLAP if c.id in IMPORTANT), *columns[1:]]
        rows = [[Text("arm"), *(_two_lines(c.title, c.unit) for c in columns)]]
        for arm in run.arms:
            cells = [c.cell(arm) for c in columns]
            shown = [_two_lines(c.text, c.note, "yellow" if c.flagged else "") for c in cells]
            rows.append([Text(arm.name, style="bold"), *shown])
        return cls(columns, rows)

    def fit(self, width: int) -> tuple[Table, list[str]]:
        """Return the table, an arm a row or an arm a column, and the titles of the columns that have no room."""
        by_column = [list(row) for row in zip(*self.rows, strict=True)]
        by_column[0][0] = Text()
        if width >= WIDE and sum(_needed(self.rows)) <= width:
            return _table(self.rows, width), []
        if sum(_needed(by_column)) <= width:
            return _table(by_column, width), []
        # An arm a line, with the columns that matter most.
        lines = [self.rows[0], *([cell.split(allow_blank=True)[0] for cell in row] for row in self.rows[1:])]
        first, *others = _needed(lines)
        room, fitting = width - first, []
        for at in sorted(range(len(self.columns)), key=lambda i: IMPORTANT.index(self.columns[i].id)):
            if others[at] > room:
                break
            room, fitting = room - others[at], [*fitting, at]
        table = _table([[row[0], *(row[at + 1] for at in sorted(fitting))] for row in lines], width, apart=False)
        return table, [c.title for at, c in enumerate(self.columns) if at not in fitting]


def run_summary(run: Run, *, width: int = 140) -> Group:
    """Table, notes and the one sentence, for a terminal of so many columns.

    The table has an arm a row, or an arm a column where the terminal is narrow. Where arms do not fit side by side
    either, an arm is a line with the columns that matter most, as many as fit; what is left out is named.
    """
    table, left_out = RunTable.of(run).fit(width)
    words = f"{', '.join(left_out)}: in a wider terminal, or on the page"
    rest = [Text(words, style="dim")] if left_out else []
    rest += [Text(NORMAL, style="dim")] if run.arms else []
    notes = [Text(f"{', '.join(names)}: {note}", style="dim") for note, names in notes_of(run.arms).items()]
    judged = [Text(run.judged_by, style="dim")] if run.judged_by else []
    return Group(table, *rest, Text(verdict(run)), *_spread_lines(run), *notes, *judged)


def _spread_lines(run: Run) -> list[Text]:
    """Ends of other seeds of a shipped recipe, a line an arm."""
    lines = [Text(f"  {arm} {words}") for arm, words in spread(run).items()]
    return [Text(ONE_SEED), *lines] if lines else []


FRAME = 3
"""Terminal columns around a column of the table."""


def _needed(rows: Sequence[Sequence[Text]]) -> list[int]:
    """Terminal columns that each column of a table needs, with its frame: heads, what stands on the left, and notes may
    wrap between words, the first line of another cell may not."""
    words = [[max(map(cell_len, cell.plain.split()), default=0) for cell in row] for row in rows]
    firsts = [[0, *(cell_len(cell.plain.split("\n")[0]) for cell in row[1:])] for row in rows[1:]]
    return [max(sizes) + FRAME for sizes in zip(*words, *firsts, strict=True)]


def _table(rows: Sequence[Sequence[Text]], width: int, *, apart: bool = True) -> Table:
    """Rows below their head, the first column on the left; what the terminal has room for does not wrap."""
    widths = _needed(rows)
    longest = [max(cell_len(line.plain) for cell in column for line in cell.split()) for column in zip(*rows)]
    while sum(widths) < width and any(w - FRAME < most for w, most in zip(widths, longest, strict=True)):
        narrow = min((w, i) for i, w in enumerate(widths) if w - FRAME < longest[i])[1]
        widths[narrow] += 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=apart)
    head, *cells = rows
    for i, (title, needed) in enumerate(zip(head, widths, strict=True)):
        table.add_column(title, justify="right" if i else "left", width=needed - FRAME)
    for row in cells:
        table.add_row(*row)
    return table


def _two_lines(text: str, below: str, style: str = "") -> Text:
    return Text(text, style=style) + Text(f"\n{below}" if below else "", style="dim")


VERDICT_STYLE = {"better": "green", "worse": "red", "undecided": "dim"}


def sweep_summary(document: Mapping[str, Any], *, width: int = 140) -> Group:
    """The table of a sweep (`sweep.json`), the sentence, and how to read them, for a terminal of so many columns."""
    heads = ("setting", document["metric"], "less baseline", "verdict", "runs")
    rows = [[Text(head, style="bold") for head in heads]]
    for row in document["settings"]:
        change, failed = row["difference"] or {}, row["failed"]
        amiss = ", ".join(f"{row[kind]} {kind}" for kind in ("failed", "collapsed") if row[kind])
        verdict_word = row["verdict"] or "baseline"
        count = change.get("n", 0)
        certainty = f"p {short(change['p_holm'])}" if count > 1 else "one seed" * count
        rows.append(
            [
                _two_lines(row["arm"], ", ".join(f"{k}={worded(v)}" for k, v in row["values"].items())),
                _two_lines(short(number(row["mean"])), _interval(row, short)),
                _two_lines(signed(change.get("mean")), _interval(change, signed)) if change else Text(),
                _two_lines(
                    verdict_word,
                    certainty,
                    VERDICT_STYLE.get(verdict_word, ""),
                ),
                _two_lines(f"{row['finished']} of {row['runs']}", amiss, "yellow" if failed else ""),
            ]
        )
    lines = [*explained(document), *filter(None, [document.get("judged_by")])]
    notes = [Text(line, style="dim") for line in lines]
    return Group(_table(rows, width), Text(sentence(document)), *notes)


def _interval(mean: Mapping[str, Any], write: Callable[[float | None], str]) -> str:
    """The ends of an interval; empty where the seeds do not tell."""
    low, high = number(mean.get("low")), number(mean.get("high"))
    return "" if low is None or high is None else f"{write(low)} to {write(high)}"
