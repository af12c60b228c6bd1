"""Parquet files: where to cut them, and decoding a range of rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offdrift.errors import RecordError
from offdrift.integrations.logs.arrow import to_columns
from offdrift.integrations.logs.columns import Columns
from offdrift.integrations.logs.files import fingerprint, is_url, opened
from offdrift.integrations.logs.types import BadRow

Broken = (pa.ArrowException, OSError, ValueError, TypeError)
"""What a file that is not what it says raises while it is decoded."""

BUFFER = 1 << 20
"""Bytes of a column that are read at once, so that a large row group is never held whole."""


def schema(file: str) -> pa.Schema:
    """The columns of a file; `RecordError` if it is no whole Parquet file."""
    try:
        with _source(file) as source:
            return source.schema_arrow
    except Broken as e:
        raise RecordError(f"{file} is no whole Parquet file: {e}") from e


def cuts(file: str, columns: Mapping[str, str], piece_bytes: int) -> list[tuple[int, int]]:
    """Row ranges of pieces: whole row groups, or equal parts of a row group that is too large.

    A file that cannot be read is one piece, for the reader to report.
    """
    try:
        with _source(file) as source:
            meta = source.metadata
            groups = [_measured(meta.row_group(i), columns) for i in range(meta.num_row_groups)]
    except RecordError:
        raise
    except Broken:
        return [(0, 0)]
    found: list[tuple[int, int]] = []
    start, at, held = 0, 0, 0
    for rows, size in groups:
        if held and held + size > piece_bytes:
            found.append((start, at))
            start, held = at, 0
        if size > piece_bytes and rows > 1:
            step = -(-rows // -(-size // piece_bytes))
            found += [(at + i, at + min(i + step, rows)) for i in range(0, rows, step)]
            start = at + rows
        else:
            held += size
        at += rows
    if at > start or not found:
        found.append((start, at))
    return found


@contextmanager
def _source(file: str) -> Iterator[pq.ParquetFile]:
    """A file to decode; `RecordError` if it is gone.

    Never memory-mapped: a file that is cut short while it is read would end the process.
    """
    if is_url(file):
        with opened(file) as f:
            yield pq.ParquetFile(f, pre_buffer=True)
    else:
        with opened(file):
            pass
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER) as source:
            yield source


def _measured(group: Any, columns: Mapping[str, str]) -> tuple[int, int]:
    """Rows of a row group, and the bytes that its wanted columns decode to."""
    size = 0
    for i in range(group.num_columns):
        column = group.column(i)
        path = column.path_in_schema
        if any(path == c or path.startswith(f"{c}.") for c in columns.values()):
            size += column.total_uncompressed_size
    return group.num_rows, size


def read_rows(
    file: str, start: int, stop: int, wanted: Callable[[pa.Schema], dict[str, str]]
) -> tuple[list[Columns], list[BadRow]]:
    """Rows `start` to `stop` as columns; row groups that cannot be decoded are reported.

    Args:
        wanted: column by field, given what columns there are.
    """
    parts: list[Columns] = []
    bad: list[BadRow] = []
    for first, table in _tables(file, start, stop, wanted, bad):
        try:
            parts.append(to_columns(table, first, wanted(table.schema)))
        except Broken as e:
            bad.append(_undecoded(file, first, first + len(table), e))
    return parts, bad


def read_objects(
    file: str, start: int, stop: int
) -> tuple[list[tuple[int, list[dict[str, Any]]]], list[BadRow]]:
    """Rows `start` to `stop` as Python objects: (number of the first row, rows) of each part."""
    bad: list[BadRow] = []
    found = []
    for first, table in _tables(file, start, stop, None, bad):
        try:
            found.append((first + 1, table.to_pylist()))
        except Broken as e:
            bad.append(_undecoded(file, first, first + len(table), e))
    return found, bad


def _undecoded(file: str, first: int, stop: int, error: Exception) -> BadRow:
    return BadRow(file, first + 1, f"rows {first + 1} to {stop} cannot be decoded: {error}")


def _tables(
    file: str,
    start: int,
    stop: int,
    wanted: Callable[[pa.Schema], dict[str, str]] | None,
    bad: list[BadRow],
) -> Iterator[tuple[int, pa.Table]]:
    """Decoded parts of a range of rows, each with the place of its first row, from 0."""
    try:
        with _source(file) as source:
            names = None
            if wanted is not None:
                names = list(dict.fromkeys(wanted(source.schema_arrow).values()))
            for group, first, last in _groups(source, start, stop):
                begin, end = max(first, start), min(last, stop)
                try:
                    if (begin, end) == (first, last):
                        yield begin, source.read_row_group(group, names, use_threads=False)
                    else:
                        yield from _part(file, group, first, (begin, end), names)
                except Broken as e:
                    bad.append(_undecoded(file, begin, end, e))
    except RecordError:
        raise
    except Broken as e:
        bad.append(BadRow(file, 0, f"no whole Parquet file: {e}"))


def _groups(source: pq.ParquetFile, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Row groups that hold rows of a range, with their first row and the row after their last."""
    at = 0
    for i in range(source.metadata.num_row_groups):
        rows = source.metadata.row_group(i).num_rows
        if at < stop and start < at + rows:
            yield i, at, at + rows
        at += rows


class _Walk(threading.local):
    """Where the last reading of a part of a row group stopped.

    A row group has no entrance in the middle: what is before the wanted rows must be decoded and
    dropped. Pieces are mostly read in order, so the next one goes on where the last one ended.
    """

    key: tuple[object, ...] = ()
    batches: Iterator[pa.RecordBatch] = iter(())


_walk = _Walk()


def _part(
    file: str, group: int, first: int, rows: tuple[int, int], names: list[str] | None
) -> Iterator[tuple[int, pa.Table]]:
    """Some rows of a row group that begins at row `first`."""
    begin, end = rows
    about = (fingerprint(file), group, tuple(names or ()))
    at = begin
    if _walk.key != (*about, begin):
        _walk.batches, at = _batches(file, group, names, end - begin), first
    _walk.key = ()
    while at < end and (batch := next(_walk.batches, None)) is not None:
        low, high = max(begin - at, 0), min(end - at, len(batch))
        if low < high:
            yield at + low, pa.Table.from_batches([batch.slice(low, high - low)])
        at += len(batch)
    if at == end:
        _walk.key = (*about, end)


def _batches(file: str, group: int, names: list[str] | None, rows: int) -> Iterator[pa.RecordBatch]:
    with _source(file) as source:
        yield from source.iter_batches(rows, [group], names, use_threads=False)
