"""Parquet files: where to cut them, and decoding a range of rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offdrift.errors import RecordError
from offdrift.records.readers.arrow import is_text, pc, to_columns
from offdrift.records.readers.columns import Columns
from offdrift.records.readers.files import fingerprint, is_url, opened, too_large
from offdrift.records.readers.types import LIMIT, BadRow

Broken = (pa.ArrowException, OSError, ValueError, TypeError, MemoryError)
"""What a file that is not what it says raises while it is decoded."""

WIDTH = 8
"""Bytes that a value takes at least once it is decoded: a run of equal ones takes none in the file."""

RATIO = 64
"""How many times its compressed size a row group may decode to, once that is more than the file may
take. The lists of a real log are never all runs of equal values."""

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
    ranges: list[tuple[int, int]] = []
    start, at, held = 0, 0, 0
    for rows, size in groups:
        if held and held + size > piece_bytes:
            ranges.append((start, at))
            start, held = at, 0
        if size > piece_bytes and rows > 1:
            step = -(-rows // -(-size // piece_bytes))
            ranges += [(at + i, at + min(i + step, rows)) for i in range(0, rows, step)]
            start = at + rows
        else:
            held += size
        at += rows
    if at > start or not ranges:
        ranges.append((start, at))
    return ranges


@contextmanager
def _source(file: str, texts: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    """A file to decode; `RecordError` if it is gone.

    Never memory-mapped: a file that is cut short while it is read would end the process.

    Args:
        file: its path.
        texts: columns to decode as a dictionary and indices into it.
    """
    how: Any = {"page_checksum_verification": True, "read_dictionary": list(texts) or None}
    if is_url(file):
        with opened(file) as f:
            yield pq.ParquetFile(f, pre_buffer=True, **how)
    else:
        with opened(file):
            pass
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER, **how) as source:
            yield source


def _measured(group: Any, columns: Mapping[str, str]) -> tuple[int, int]:
    """Rows of a row group, and the bytes that its wanted columns decode to."""
    return group.num_rows, sum(_decoded(c) for c in _wanted(group, columns.values()))


def _wanted(group: Any, names: Collection[str] | None) -> list[Any]:
    """What a row group says of the columns with these names, or of all."""
    columns = [group.column(i) for i in range(group.num_columns)]
    if names is None:
        return columns
    paths = [c.path_in_schema for c in columns]
    inside = [any(p == n or p.startswith(f"{n}.") for n in names) for p in paths]
    return [c for c, wanted in zip(columns, inside, strict=True) if wanted]


def _decoded(column: Any) -> int:
    return max(column.total_uncompressed_size, WIDTH * column.num_values)


def _check_group(group: Any, names: Collection[str] | None, limit: int) -> None:
    """Raises: `ValueError` where a row group decodes to far more than it has and than it may."""
    columns = _wanted(group, names)
    size = sum(map(_decoded, columns))
    if size > max(limit, RATIO * sum(c.total_compressed_size for c in columns)):
        raise ValueError(too_large(f"the row group decodes to {size / 2**20:,.0f} MiB,", limit))


def _check_texts(table: pa.Table, limit: int) -> None:
    """Raises: `ValueError` where few texts that are repeated make more than the file may take."""
    size = 0
    for chunk in (chunk for column in table.columns for chunk in column.chunks):
        if pa.types.is_dictionary(chunk.type):
            lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
            size += pc.sum(lengths.cast(pa.int64())).as_py() or 0
    if size > limit:
        raise ValueError(too_large(f"the texts decode to {size / 2**20:,.0f} MiB,", limit))


def _texts(schema: pa.Schema, names: Collection[str] | None) -> list[str]:
    """Columns of texts, of which a dictionary may repeat one many times."""
    wanted = schema.names if names is None else [n for n in names if n in schema.names]
    return [n for n in wanted if is_text(schema.field(n).type)]


def read_rows(
    file: str, start: int, stop: int, wanted: Callable[[pa.Schema], dict[str, str]], limit: int = LIMIT
) -> tuple[list[Columns], list[BadRow]]:
    """Rows `start` to `stop` as columns; row groups that cannot be decoded are reported.

    Args:
        wanted: column by field, given what columns there are.
        limit: bytes that a row group may decode to.
    """
    parts: list[Columns] = []
    bad: list[BadRow] = []
    for first, table in _tables(file, start, stop, wanted, bad, limit):
        try:
            parts.append(to_columns(table, first, wanted(table.schema)))
        except Broken as e:
            bad.append(_undecoded(file, first, first + len(table), e))
    return parts, bad


def read_objects(
    file: str, start: int, stop: int, limit: int = LIMIT
) -> tuple[list[tuple[int, list[dict[str, Any]]]], list[BadRow]]:
    """Rows `start` to `stop` as Python objects: (number of the first row, rows) of each part."""
    bad: list[BadRow] = []
    parts = []
    for first, table in _tables(file, start, stop, None, bad, limit):
        try:
            parts.append((first + 1, table.to_pylist()))
        except Broken as e:
            bad.append(_undecoded(file, first, first + len(table), e))
    return parts, bad


def _undecoded(file: str, first: int, stop: int, error: Exception) -> BadRow:
    reason = f"rows {first + 1} to {stop} cannot be decoded: {error}"
    return BadRow(file, first + 1, reason, rows=stop - first)


def _tables(
    file: str,
    start: int,
    stop: int,
    wanted: Callable[[pa.Schema], dict[str, str]] | None,
    bad: list[BadRow],
    limit: int,
) -> Iterator[tuple[int, pa.Table]]:
    """Decoded parts of a range of rows, each with the place of its first row, from 0."""
    try:
        with _source(file) as source:
            whole = source.schema_arrow
        names = None if wanted is None else list(dict.fromkeys(wanted(whole).values()))
        texts = _texts(whole, names)
        with _source(file, texts) as source:
            for group, first, last in _groups(source, start, stop):
                begin, end = max(first, start), min(last, stop)
                try:
                    _check_group(source.metadata.row_group(group), names, limit)
                    if (begin, end) == (first, last):
                        parts = iter([(begin, source.read_row_group(group, names, use_threads=False))])
                    else:
                        parts = _part(file, group, first, (begin, end), names, texts)
                    for at, table in parts:
                        _check_texts(table, limit)
                        yield at, table
                except Broken as e:
                    bad.append(_undecoded(file, begin, end, e))
    except RecordError:
        raise
    except Broken as e:
        bad.append(BadRow(file, 0, f"no whole Parquet file: {e}", rows=0))


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
    file: str, group: int, first: int, rows: tuple[int, int], names: list[str] | None, texts: list[str]
) -> Iterator[tuple[int, pa.Table]]:
    """Some rows of a row group that begins at row `first`."""
    begin, end = rows
    about = (fingerprint(file), group, tuple(names or ()))
    at = begin
    if _walk.key != (*about, begin):
        _walk.batches, at = _batches(file, group, names, texts, end - begin), first
    _walk.key = ()
    while at < end and (batch := next(_walk.batches, None)) is not None:
        low, high = max(begin - at, 0), min(end - at, len(batch))
        if low < high:
            yield at + low, pa.Table.from_batches([batch.slice(low, high - low)])
        at += len(batch)
    if at == end:
        _walk.key = (*about, end)


def _batches(file: str, group: int, names: list[str] | None, texts: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    with _source(file, texts) as source:
        yield from source.iter_batches(rows, [group], names, use_threads=False)
