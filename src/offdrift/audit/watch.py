"""Follow a run that is being written: new metrics and new log lines become rows, step by step.

Two kinds of places are followed. A run of this library writes its metrics; its rows are taken as
they are. Any other log is read by its framework's reader as it grows: whole lines only, whole files
where a format is not made of lines. A step's row is given once it is complete: in a file of lines when
a later step appears; where several processes may each write files, when nothing was added for a while.
Until then the file of one rank may take the place of another's that was read before: a pipeline's last
stage writes the samples of the stages before it again, and it alone has the trainer's log-probs.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offdrift.audit.coverage import unread_frac
from offdrift.audit.partial import Unread
from offdrift.audit.tally.tally import Tally, ageless, still
from offdrift.errors import RecordError
from offdrift.records.readers import Detected, Piece, detect, pieces, read

LINES = (".jsonl", ".json", ".ndjson")
CHUNK = 1 << 20


@dataclass(frozen=True)
class Row:
    """The metrics of one step of one source."""

    source: str
    """An arm of a run, or "log"."""
    numbers: Mapping[str, float | int]


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
        text, self.read_to = _new_lines(self.file, self.read_to)
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a resumed run may leave half a line behind
            numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
            yield Row(self.name, {"step": row.get("update", 0), **numbers})


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
        """Of the steps that wait, by file."""
        self.rows_of: dict[str, int] = {}
        """Sequences that count in `rows`, of each whole file."""
        self.given = -1
        self.grew: dict[int, float] = {}
        """When a whole file last added to an open step."""
        self.changed = self.clock()
        self.versions: tuple[float, ...] | None = None
        """Of the first step that was given; another step with the same says nothing of age."""

    def poll(self) -> Iterator[Row]:
        """Rows of the steps that became complete."""
        try:
            found = detect(self.paths, columns=self.columns)
        except RecordError:  # nothing is there yet
            return
        for piece in self._new(found):
            self._take(piece, found)
        for file in self.whole.intersection(found.repeats):
            self._drop(file)
        yield from self._complete(everything=self.clock() - self.changed >= self.settle)

    def finish(self) -> Iterator[Row]:
        """Rows of every step that is left: nothing more will come."""
        yield from self._complete(everything=True)

    def _new(self, found: Detected) -> Iterator[Piece]:
        for file in found.files:
            if file in self.whole:
                continue
            if file.endswith(LINES):
                start, end = _grown(Path(file), self.read_to.get(file, 0))
                self.read_to[file] = end
                if end > start:
                    yield Piece(file, start, end, found.format)
            else:
                yield from pieces(replace(found, files=(file,)))

    def _take(self, piece: Piece, found: Detected) -> None:
        batches, bad = read(piece, found)
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
            if step <= self.given:
                self.late_rows += sum(map(len, rows))
                continue
            mine = [batch.select(at) for batch, at in zip(batches, rows)]
            tally = Tally.over(mine, file=piece.file)
            tallies = self.open.setdefault(step, {})
            before = tallies.get(piece.file)
            tallies[piece.file] = tally if before is None else before.merge(tally)
            if not lines:
                self.grew[step] = self.changed

    def _drop(self, file: str) -> None:
        """Forget a file whose samples stand in another's, in the steps that are still open."""
        steps = [step for step, tallies in self.open.items() if file in tallies]
        if steps:
            self.rows -= self.rows_of.pop(file, 0)
        for step in steps:
            del self.open[step][file]
            if not self.open[step]:
                del self.open[step]

    def _complete(self, *, everything: bool) -> Iterator[Row]:
        newest = max(self.open, default=0)
        for step in sorted(self.open):
            waits = self.clock() - self.grew.get(step, -math.inf) < self.settle
            if not everything and (waits or step == newest):
                return
            yield self._give(step)

    def _give(self, step: int) -> Row:
        first, *others = self.open.pop(step).values()
        tally = functools.reduce(Tally.merge, others, first)
        self.grew.pop(step, None)
        self.given = step
        (row,) = tally.as_dict()["steps"]
        versions = tally.versions
        if self.versions is not None and versions == self.versions and still(versions):
            row = ageless(row)
        self.versions = self.versions or versions
        unread = unread_frac(Unread(self.bad_rows), self.rows)
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        return Row("log", {**numbers, "data/unread_frac": unread})


def sources(path: Path, *, columns: Mapping[str, str] | None = None) -> list[Metrics | Log]:
    """What there is to follow at a path: the arms of a run, one arm, or a log.

    Arms that start later are found by asking again.
    """
    arms = [path] if (path / "metrics.jsonl").is_file() else sorted((path / "arms").glob("*"))
    found: list[Metrics | Log] = [
        Metrics(arm / "metrics.jsonl", arm.name) for arm in arms if (arm / "metrics.jsonl").is_file()
    ]
    if found or (path / "run.json").is_file():
        return found
    return [Log([str(path)], columns or {})]


def _new_lines(file: Path, start: int) -> tuple[str, int]:
    """What was added since byte `start`, up to the last line end, and where that is."""
    start, end = _grown(file, start)
    try:
        with file.open("rb") as f:
            f.seek(start)
            return f.read(end - start).decode("utf-8", "replace"), end
    except OSError:
        return "", start


def _grown(file: Path, start: int) -> tuple[int, int]:
    """Where to read on and up to where: whole lines only.

    A file that became shorter was written anew, and is read from its beginning.
    """
    try:
        size = file.stat().st_size
        start = 0 if size < start else start
        with file.open("rb") as f:
            return start, _last_line_end(f, start, size)
    except OSError:
        return start, start


def _last_line_end(file: Any, start: int, size: int) -> int:
    """The byte after the last line end between the two, found from the back."""
    stop = size
    while stop > start:
        first = max(start, stop - CHUNK)
        file.seek(first)
        at = file.read(stop - first).rfind(b"\n")
        if at >= 0:
            return first + at + 1
        stop = first
    return start
