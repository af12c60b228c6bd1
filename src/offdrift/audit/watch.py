"""Follow a run that is being written: new metrics and log lines become rows, and are shown in the terminal.

A run of this library writes its metrics, which are taken as they are. Any other log is read by its framework's reader
as it grows. A step's row is given once it is complete: in a file of lines when a later step appears; in whole files,
which several processes may write, when nothing was added for a while. Until then the file of one rank may take the
place of another's: a pipeline's last stage writes the samples of the stages before it again, with the log-probs.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offdrift.audit.coverage import unread_frac
from offdrift.audit.facets import Facets
from offdrift.audit.partial import Unread
from offdrift.audit.tally import Tally, ageless, still
from offdrift.errors import RecordError
from offdrift.records.readers import Detected, Piece, detect, pieces, read
from offdrift.show.findings import SEVERITY_STYLE, finding_view
from offdrift.show.json_access import mapping, number
from offdrift.show.numbers import short
from offdrift.texts import parse_json

LINES = (".jsonl", ".json", ".ndjson")
CHUNK = 1 << 20
RECENT = 20
"""Steps over which workers are compared: one step holds few responses of each."""


@dataclass(frozen=True)
class Row:
    """The metrics of one step of one source."""

    source: str
    """An arm of a run, or "log"."""
    numbers: Mapping[str, float | int]
    workers: Sequence[Mapping[str, Any]] = ()
    """The facet by rollout worker of the last `RECENT` steps; empty where the log names none."""


@dataclass
class Metrics:
    """The growing `metrics.jsonl` of an arm."""

    file: Path
    name: str
    read_to: int = 0

    def finish(self) -> Iterator[Row]:
        """Nothing: every row was given when it was written."""
        yield from ()

    def poll(self) -> Iterator[Row]:
        """Rows that were added; a line that is still being written waits."""
        start, end = _grown(self.file, self.read_to)
        try:
            with self.file.open("rb") as f:
                f.seek(start)
                text = f.read(end - start).decode("utf-8", "replace")
        except OSError:
            text, end = "", start
        self.read_to = end
        for line in text.splitlines():
            try:
                row = mapping(parse_json(line))
            except ValueError:
                continue  # a resumed run may leave half a line behind
            numbers = {k: v for k, v in row.items() if number(v) is not None}
            if row:
                yield Row(self.name, {"step": int(number(row.get("update")) or 0), **numbers})


@dataclass
class Log:
    """A growing log of any framework."""

    paths: list[str]
    columns: Mapping[str, str] = field(default_factory=dict)
    settle: float | int = 15.0
    """Seconds without anything new after which a step counts as complete: longer than a `Recorder`
    holds a batch back."""
    clock: Callable[[], float] = time.monotonic
    rows: int = 0
    """Sequences that were read."""
    bad_rows: int = 0
    late_rows: int = 0
    """Rows of steps whose numbers were given already."""

    def __post_init__(self) -> None:
        self.read_to: dict[str, int] = {}
        self.whole: set[str] = set()
        self.open: dict[int, dict[str, Tally]] = {}
        """Tallies of the steps that wait, by step and file."""
        self.rows_of: dict[str, int] = {}
        """Sequences that count in `rows`, of each whole file."""
        self.last_step = -1
        self.recent: deque[Facets] = deque(maxlen=RECENT)
        """By worker alone, of the last steps that were given."""
        self.grew: dict[int, float] = {}
        """When a whole file last added to an open step."""
        self.changed = self.clock()
        self.versions: tuple[float, ...] | None = None
        """Versions of the first complete step; another step with the same says nothing of age."""

    def poll(self) -> Iterator[Row]:
        """Rows of the steps that became complete."""
        try:
            log = detect(self.paths, columns=self.columns)
        except RecordError:  # nothing is there yet
            return
        for piece in self._new_pieces(log):
            self._take(piece, log)
        for file in self.whole.intersection(log.repeats):  # its samples stand in another file
            steps = [step for step, tallies in self.open.items() if file in tallies]
            if steps:
                self.rows -= self.rows_of.pop(file, 0)
            for step in steps:
                del self.open[step][file]
                if not self.open[step]:
                    del self.open[step]
        yield from self._complete(everything=self.clock() - self.changed >= self.settle)

    def finish(self) -> Iterator[Row]:
        """Rows of every step that is left: nothing more will come."""
        yield from self._complete(everything=True)

    def _new_pieces(self, log: Detected) -> Iterator[Piece]:
        for file in log.files:
            if file in self.whole:
                continue
            if file.endswith(LINES):
                start, end = _grown(Path(file), self.read_to.get(file, 0))
                self.read_to[file] = end
                if end > start:
                    yield Piece(file, start, end, log.format)
            else:
                yield from pieces(replace(log, files=(file,)))

    def _take(self, piece: Piece, log: Detected) -> None:
        """Add the sequences of a piece to the tallies of their steps."""
        batches, bad = read(piece, log)
        lines = piece.file.endswith(LINES)
        if not lines and not batches:
            return  # being written; it is tried again
        if not lines:
            self.whole.add(piece.file)
        self.bad_rows += Unread.of(bad, {}).rows
        sequences = sum(batch.num_sequences for batch in batches)
        self.rows += sequences
        if not lines:
            self.rows_of[piece.file] = self.rows_of.get(piece.file, 0) + sequences
        self.changed = self.clock()
        for step in sorted({step for batch in batches for step in batch.step.tolist()}):
            rows = [(batch.step == step).nonzero().squeeze(-1) for batch in batches]
            if step <= self.last_step:
                self.late_rows += sum(map(len, rows))
                continue
            tally = Tally.over([batch.select(at) for batch, at in zip(batches, rows)], file=piece.file)
            tallies = self.open.setdefault(step, {})
            before = tallies.get(piece.file)
            tallies[piece.file] = tally if before is None else before.merge(tally)
            if not lines:
                self.grew[step] = self.changed

    def _complete(self, *, everything: bool) -> Iterator[Row]:
        newest = max(self.open, default=0)
        for step in sorted(self.open):
            waits = self.clock() - self.grew.get(step, -math.inf) < self.settle
            if not everything and (waits or step == newest):
                return
            tally = functools.reduce(Tally.merge, self.open.pop(step).values())
            self.grew.pop(step, None)
            self.last_step = step
            (row,) = tally.as_dict()["steps"]
            self.recent.append(Facets(named=tally.facets.named))
            workers = functools.reduce(Facets.merge, self.recent).rows()["worker"]
            versions = tally.versions
            if self.versions is not None and versions == self.versions and still(versions):
                row = ageless(row)
            self.versions = self.versions or versions
            numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
            unread = unread_frac(Unread(self.bad_rows), self.rows)
            yield Row("log", {**numbers, "data/unread_frac": unread}, workers)


def sources(path: Path, *, columns: Mapping[str, str] | None = None) -> list[Metrics | Log]:
    """What there is to follow at a path: the arms of a run, one arm, or a log.

    Arms that start later are found by asking again.
    """
    arms = [path] if (path / "metrics.jsonl").is_file() else sorted((path / "arms").glob("*"))
    files = [arm / "metrics.jsonl" for arm in arms if (arm / "metrics.jsonl").is_file()]
    if files or (path / "run.json").is_file():
        return [Metrics(file, file.parent.name) for file in files]
    return [Log([str(path)], columns or {})]


def _grown(file: Path, start: int) -> tuple[int, int]:
    """Where to read on and up to where: whole lines only.

    A file that became shorter was written anew, and is read from its beginning.
    """
    try:
        size = file.stat().st_size
        start = 0 if size < start else start
        stop = size
        with file.open("rb") as f:
            while stop > start:  # the last line end, from the back
                first = max(start, stop - CHUNK)
                f.seek(first)
                at = f.read(stop - first).rfind(b"\n")
                if at >= 0:
                    return start, first + at + 1
                stop = first
    except OSError:
        pass
    return start, start


COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("KL", ("divergence/kl_rollout_current_mean", "divergence/kl_rollout_old_mean", "mismatch/k3", "full/k3")),
    ("KL max", ("divergence/kl_rollout_current_max", "divergence/kl_rollout_old_max")),
    ("chi2", ("mismatch/chi2_token", "full/chi2_token")),
    ("ESS", ("mismatch/ess_frac", "full/ess_frac")),
    ("reward", ("reward/mean",)),
    ("length", ("response/length_mean",)),
    ("grad norm", ("optim/grad_norm",)),
)  # fmt: skip
"""Columns of the terminal table: each shows the first of these metrics that a source's rows hold."""


class LiveWatch:
    """Shows rows (unless `table` is False) and findings; `close` leaves the last state on the screen."""

    def __init__(self, console: Console, title: str, framework: str, *, table: bool = True) -> None:
        self.console, self.title, self.framework, self.table = console, title, framework, table
        self.rows: dict[str, Mapping[str, float | int]] = {}
        self.worst: dict[str, str] = {}
        self.fired: dict[str, int] = {}
        # Without a terminal a redrawn table would be printed again and again.
        redrawn = table and console.is_terminal
        self.live = Live(self._view(), console=console, auto_refresh=False) if redrawn else None
        if self.live is not None:
            self.live.start()

    def show(self, source: str, numbers: Mapping[str, float | int], findings: Sequence[Mapping[str, Any]]) -> None:
        """A new row of a source, and what it set off."""
        self.rows[source] = numbers
        for finding in findings:
            self.fired[source] = self.fired.get(source, 0) + 1
            severities = list(SEVERITY_STYLE)
            before = self.worst.get(source, severities[0])
            self.worst[source] = max(before, finding["severity"], key=severities.index)
            head = Text(f"{source}, step {finding.get('step')}: ", style="bold")
            self.console.print(head, finding_view(finding, self.framework, self.console.width))
        if self.live is not None:
            self.live.update(self._view(), refresh=True)

    def close(self) -> None:
        """End the live display; the table stays."""
        if self.live is not None:
            self.live.update(self._view(), refresh=True)
            self.live.stop()
        elif self.table:
            self.console.print(self._view())

    def _view(self) -> Table | Text:
        if not self.rows:
            return Text(f"waiting for {self.title} to be written", style="dim")
        shown = [
            (title, names) for title, names in COLUMNS if any(n in row for n in names for row in self.rows.values())
        ]
        table = Table(box=None, pad_edge=False, title=None)
        table.add_column("")
        table.add_column("step", justify="right")
        for title, _ in shown:
            table.add_column(title, justify="right")
        table.add_column("")
        for source, row in self.rows.items():
            numbers = [short(next((row[n] for n in names if n in row), None)) for _, names in shown]
            severity, count = self.worst.get(source), self.fired.get(source, 0)
            status = Text("nothing found", style="green")
            if severity is not None:
                text = f"{severity}: {count} finding{'s' if count > 1 else ''}"
                status = Text(text, style=SEVERITY_STYLE[severity])
            table.add_row(Text(source), f"{row.get('step', 0):.0f}", *numbers, status)
        return table
