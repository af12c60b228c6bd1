"""Estimate time, memory and disk of an audit from a few measured pieces of the log.

Time and memory go with bytes, so that every number is a ratio of what was measured times what is there:

    seconds = bytes * (seconds of the measured pieces) / (bytes of the measured pieces) / workers + pieces * merge

Memory does not grow with the log: a worker holds one piece at a time, and the process that merges holds one result.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from offdrift.audit.partial import AuditPartial, Job, work
from offdrift.errors import RecordError
from offdrift.numerics import one_thread
from offdrift.records.readers import Piece
from offdrift.show.numbers import counted, size_in_words

MEASURED = 3
"""Pieces that are read for a forecast: the first, one from the middle, and the last."""
HOUR = 3600.0


@dataclass(frozen=True)
class Forecast:
    """Estimated cost of reading a whole log, and how it can be split."""

    files: int
    bytes: int
    """Of the log, as it is stored."""
    pieces: int
    """Units of work: what is lost at most when a reader dies, and the most workers that have something to do."""
    measured_pieces: int
    tokens: int
    """Scored tokens, estimated; exact where all pieces were measured."""
    tokens_per_second: float
    """Of one process with one thread, on this machine, reading from where the log is."""
    seconds: float
    """Of all workers together, by the clock, merging included; more cores than workers are assumed."""
    workers: int
    merge_seconds: float
    """Of merging all parts, which one process does."""
    memory_mib: float
    """Peak of the process that measured, its imports included: what each worker takes."""
    parts_mib: float
    """Disk that the results of all pieces take until the audit is done."""
    slices: int
    """Slices of at most an hour for `workers` processes each."""

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """Lines that `offdrift audit --dry-run` prints."""
        exact = "" if self.measured_pieces == self.pieces else "about "
        processes = "one process" if self.workers == 1 else f"{self.workers} processes"
        lines = [
            f"{exact}{self.tokens:,} tokens in {counted(self.files, 'file')}, {size_in_words(self.bytes)}, "
            f"{counted(self.pieces, 'piece')}",
            f"one process reads {self.tokens_per_second / 1e6:,.1f} million tokens per second "
            f"({counted(self.measured_pieces, 'piece')} measured)",
            f"{processes}: {_duration(self.seconds)}, of which merging {_duration(self.merge_seconds)}; "
            f"{self.memory_mib:,.0f} MiB each, however large the log is; {self.parts_mib:,.1f} MiB of results on disk",
        ]
        if self.slices > 1:
            lines.append(
                f"to be done in an hour: {self.slices} machines with {processes} each, "
                f"--slice 1/{self.slices} to --slice {self.slices}/{self.slices} (docs/scale.md)"
            )
        return lines


def forecast(job: Job, pieces: Sequence[Piece], *, workers: int = 1) -> Forecast:
    """Read up to `MEASURED` pieces of a log, and say what all of it will take.

    Args:
        job: the log, and the share of it that methods are tried on.
        pieces: all of its pieces.
        workers: processes with a core each.

    Raises: `RecordError` if there is nothing to read.
    """
    if not pieces:
        raise RecordError("there is nothing to read: no file holds a row")
    chosen = sorted({0, len(pieces) // 2, len(pieces) - 1})[:MEASURED]
    sizes = dict(zip(job.found.files, job.found.sizes))
    shares = {file: sizes.get(file, 0) / n for file, n in _counts(pieces).items()}
    with one_thread():
        work(pieces[0], job)  # what is loaded once counts for no piece
        started = time.perf_counter()
        parts = [work(pieces[i], job) for i in chosen]
        reading = time.perf_counter() - started
    stored = [part.to_bytes() for part in parts]
    started = time.perf_counter()
    merged = reduce(AuditPartial.merge, map(AuditPartial.from_bytes, stored), AuditPartial())
    merging = (time.perf_counter() - started) / len(chosen)
    bytes_of = [sum(shares[each.file] for each in piece.each) for piece in pieces]
    scale = sum(bytes_of) / max(sum(bytes_of[i] for i in chosen), 1.0)
    if len(chosen) == len(pieces):
        scale = 1.0
    tokens = 0 if merged.tally is None else merged.tally.tokens
    at_once = max(1, min(workers, len(pieces)))
    busy, merge_seconds = scale * reading / at_once, merging * len(pieces)
    return Forecast(
        files=len(job.found.files),
        bytes=job.found.bytes,
        pieces=len(pieces),
        measured_pieces=len(chosen),
        tokens=round(scale * tokens),
        tokens_per_second=tokens / max(reading, 1e-9),
        seconds=busy + merge_seconds,
        workers=at_once,
        merge_seconds=merge_seconds,
        memory_mib=_peak_mib(),
        parts_mib=sum(map(len, stored)) / len(stored) * len(pieces) / 2**20,
        slices=min(len(pieces), math.ceil(busy / HOUR)),
    )


def _counts(pieces: Sequence[Piece]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in (each for piece in pieces for each in piece.each):
        counts[each.file] = counts.get(each.file, 0) + 1
    return counts


def _peak_mib() -> float:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _duration(seconds: float) -> str:
    """Seconds in the unit that a person would use.

    Example:
        >>> _duration(0.2), _duration(90.0), _duration(7200.0), _duration(400000.0)
        ('0.2 s', '1.5 min', '2.0 h', '4.6 days')
    """
    for unit, size in (("days", 86400.0), ("h", HOUR), ("min", 60.0)):
        if seconds >= (2 if unit == "days" else 1) * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
