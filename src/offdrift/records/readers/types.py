"""What is passed between finding logs, cutting them into pieces and reading a piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from offdrift.records.batch import Logged

LIMIT = 4 << 30
"""Bytes that one file may take in memory, or decompress to, where nobody says otherwise."""


class BadRow(NamedTuple):
    """A place that could not be read, and why: the one way in which a reader says what it left out."""

    file: str
    row: int
    """Line of a JSONL file, row of any other, from 1; 0: the whole file."""
    reason: str
    rows: int = 1
    """How many rows were lost there; 0: nobody knows, the rest of the file or all of it."""


@dataclass(frozen=True)
class Piece:
    """A part of one file that is read at once: the unit of parallel work and of resuming."""

    file: str
    start: int
    stop: int
    """Parquet: rows `start` to `stop`. JSONL: lines that begin at byte `start` or later, and
    before `stop`, of the decompressed file where it is compressed. Else the whole file."""
    format: str
    first_row: int = 1
    """Number of the first line or row."""


class Read(NamedTuple):
    """What a piece held."""

    batches: tuple[Logged, ...]
    """The good rows: those that lack a field apart from those that have it, so that every field
    that a batch has covers all of its tokens."""
    bad: tuple[BadRow, ...]


@dataclass(frozen=True)
class Detected:
    """Which logs were found, and how they will be read."""

    format: str
    framework: str
    files: tuple[str, ...]
    said: str
    """One sentence: what was detected, and from what."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of the log that each field comes from."""
    sizes: tuple[int, ...] = ()
    """Bytes of each file."""
    skipped: tuple[BadRow, ...] = ()
    """Files that cannot be opened at all, and why."""
    repeats: tuple[str, ...] = ()
    """Files of ranks whose samples stand in the files of other ranks; they are not read."""
    limit: int = LIMIT
    """Bytes that one file may take in memory, or decompress to."""
    without: tuple[str, ...] = ()
    """Fields that are not read, whatever the log calls by their name."""

    @property
    def bytes(self) -> int:
        return sum(self.sizes)
