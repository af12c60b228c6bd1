"""Follow a run that is being written: new metrics and log lines become rows.

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

from offdrift.audit.coverage import unread_frac
from offdrift.audit.facets import Facets
from offdrift.audit.partial import Unread
from offdrift.audit.tally import Tally
from offdrift.errors import RecordError
from offdrift.records.readers import Detected, Piece, pieces, read
from offdrift.records.readers.metrics import MetricLog
from offdrift.records.readers.metrics.find import state
from offdrift.records.readers.recognize import recognize
from offdrift.show.json_access import mapping, number
from offdrift.texts import open_file, parse_json

LINES = (".jsonl", ".json", ".ndjson")
CHUNK = 1 << 20
METRICS = "metrics"
"""Source of rows that another program's metrics hold, without any token."""
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
class MetricsOnly:
    """Growing metrics of another program, where there is no log of tokens.

    They are read anew when a file changes: a tracker may write a step in several rows, and in any order.
    """

    paths: list[str]
    settle: float | int
    clock: Callable[[], float]
    log: MetricLog | None = None
    """As it was read last."""
    last_step: int = -1

    def __post_init__(self) -> None:
        self.changed = self.clock()
        self.files: tuple[str, ...] = ()

    def unchanged(self) -> MetricLog | None:
        """The log as it was read, if there is one and no file was written since."""
        before, self.files = self.files, state(self.paths)
        return self.log if before == self.files else None

    def take(self, log: MetricLog) -> Iterator[Row]:
        """Rows of the steps that became complete: all but the newest, and that once nothing was added for a while."""
        if self.log is None or log.rows != self.log.rows:
            self.changed = self.clock()
        self.log = log
        newest = self.clock() - self.changed >= self.settle
        yield from self._rows(log.rows if newest else log.rows[:-1])

    def finish(self) -> Iterator[Row]:
        """Rows of every step that is left."""
        if self.log is not None:
            yield from self._rows(self.log.rows)

    def _rows(self, rows: Sequence[Mapping[str, float | int]]) -> Iterator[Row]:
        for row in rows:
            if row["step"] > self.last_step:
                self.last_step = int(row["step"])
                yield Row(METRICS, row)


@dataclass
class Log:
    """A growing log of any framework; where there are only metrics, these."""

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
        self.metrics = MetricsOnly(self.paths, self.settle, self.clock)
        self.framework = ""
        """Name of the framework that wrote it; "" before anything was read."""

    def poll(self) -> Iterator[Row]:
        """Rows of the steps that became complete."""
        if (same := self.metrics.unchanged()) is not None:
            yield from self.metrics.take(same)
            return
        try:
            log = recognize(self.paths, columns=self.columns)
        except RecordError:  # nothing is there yet, or it is being written
            return
        self.framework = log.framework
        if isinstance(log, MetricLog):
            yield from self.metrics.take(log)
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
        yield from self.metrics.finish()

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
            numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
            unread = unread_frac(Unread(self.bad_rows), self.rows)
            yield Row("log", {**numbers, "data/unread_frac": unread}, workers)


def sources(path: Path, *, columns: Mapping[str, str] | None = None) -> list[Metrics | Log]:
    """List what can be followed at a path: the arms of a run, one arm, or a log. Call again to find arms that start
    later.

    Arms that start later are found by asking again.
    """
    arms = [path] if _of_ours(path / "metrics.jsonl") else sorted((path / "arms").glob("*"))
    files = [arm / "metrics.jsonl" for arm in arms if (arm / "metrics.jsonl").is_file()]
    if files or (path / "run.json").is_file():
        return [Metrics(file, file.parent.name) for file in files]
    return [Log([str(path)], columns or {})]


def _of_ours(file: Path) -> bool:
    """Whether a file holds the metrics of an arm, which count in updates: other programs use the same name."""
    try:
        with open_file(file) as f:
            return '"update"' in f.readline(CHUNK).decode("utf-8", "replace") or (file.parent / "log").is_dir()
    except OSError:
        return False


def _grown(file: Path, start: int) -> tuple[int, int]:
    """Byte range of the new complete lines of a growing file.

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


class Follower:
    """Everything that is written at a path, as it grows: the arms of a run, later ones too, or one log."""

    def __init__(self, path: Path, columns: Mapping[str, str] | None = None) -> None:
        self.path, self.columns = path, columns
        self.sources = sources(path, columns=columns)

    def look(self) -> Iterator[Row]:
        """Rows that became complete since the last look."""
        arms = {s.name for s in self.sources if not isinstance(s, Log)}
        newer = sources(self.path, columns=self.columns)
        self.sources += [s for s in newer if not isinstance(s, Log) and s.name not in arms]
        for source in self.sources:
            yield from source.poll()

    def finish(self) -> Iterator[Row]:
        """Rows that were waiting for a later one."""
        for source in self.sources:
            yield from source.finish()

    @property
    def framework(self) -> str | None:
        """The framework that wrote the log or the metrics that are followed; None before anything was read."""
        return next((s.framework for s in self.sources if isinstance(s, Log) and s.framework), None)

    @property
    def unread(self) -> tuple[int, int]:
        """Rows that were bad, and rows of steps that had been given before."""
        logs = [source for source in self.sources if isinstance(source, Log)]
        return sum(log.bad_rows for log in logs), sum(log.late_rows for log in logs)
