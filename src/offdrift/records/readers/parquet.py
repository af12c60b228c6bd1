"""Parquet files: where to cut them, decoding a range of rows, and Arrow columns as columns of a log."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch
from torch import Tensor

from offdrift.errors import RecordError
from offdrift.records.readers.columns import LARGE, Columns, Lists, Numbers, text_of
from offdrift.records.readers.files import LIMIT, BadRow, Resume, fingerprint, is_url, opened, too_large
from offdrift.records.rollouts import cumulative
from offdrift.records.schema import COLUMNS, ROLLOUTS_KEY, LogField

pc: Any = pyarrow.compute
"""Its functions are made at import, where no type checker sees them."""

Broken = (pa.ArrowException, OSError, ValueError, TypeError, MemoryError)
"""What a file that is not what it says raises while it is decoded."""

WIDTH = 8
"""Bytes that a value takes at least once it is decoded: a run of equal ones takes none in the file."""

RATIO = 64
"""How many times its compressed size a row group may decode to, once that is more than the file may take. The lists of
a real log are never all runs of equal values."""

BUFFER, WHOLE = 1 << 20, 32 << 20
"""Bytes of a column that are read at once, so that a large row group is never held whole; and the compressed bytes of a
column of a row group up to which it is, which saves a copy."""

_resume = Resume()
"""Where the last reading of a part of a row group stopped. A row group has no entrance in the middle: what is before
the wanted rows must be decoded and dropped."""


def schema(file: str) -> pa.Schema:
    """The columns of a file; `RecordError` if it is no whole Parquet file."""
    try:
        with _source(file) as source:
            return source.schema_arrow
    except Broken as e:
        raise RecordError(f"{file} is no whole Parquet file: {e}") from e


@contextmanager
def _source(file: str, texts: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    """A file to decode, `texts` as a dictionary and indices into it; `RecordError` if it is gone.

    Never memory-mapped: a file that is cut short while it is read would end the process.
    """
    options: Any = {"page_checksum_verification": True, "read_dictionary": list(texts) or None}
    if is_url(file):
        with opened(file) as f:
            yield pq.ParquetFile(f, pre_buffer=True, **options)
    else:
        with opened(file):
            pass
        metadata = pq.read_metadata(file)
        buffer = 0 if all(c.total_compressed_size <= WHOLE for c in _columns(metadata)) else BUFFER
        with pq.ParquetFile(file, metadata=metadata, pre_buffer=False, buffer_size=buffer, **options) as source:
            yield source


def _columns(metadata: Any) -> Iterator[Any]:
    """Metadata of every column of every row group."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        yield from map(group.column, range(group.num_columns))


def cuts(file: str, columns: Mapping[str, str], piece_bytes: int) -> list[tuple[int, int]]:
    """Row ranges of pieces: whole row groups, or equal parts of a row group that is too large.

    A file that cannot be read is one piece, for the reader to report.
    """
    try:
        with _source(file) as source:
            groups = [source.metadata.row_group(i) for i in range(source.metadata.num_row_groups)]
            sizes = [(g.num_rows, sum(map(_decoded, _wanted(g, columns.values())))) for g in groups]
    except RecordError:
        raise
    except Broken:
        return [(0, 0)]
    ranges: list[tuple[int, int]] = []
    start, at, collected = 0, 0, 0
    for rows, size in sizes:
        if collected and collected + size > piece_bytes:
            ranges.append((start, at))
            start, collected = at, 0
        if size > piece_bytes and rows > 1:
            step = -(-rows // -(-size // piece_bytes))
            ranges += [(at + i, at + min(i + step, rows)) for i in range(0, rows, step)]
            start = at + rows
        else:
            collected += size
        at += rows
    if at > start or not ranges:
        ranges.append((start, at))
    return ranges


def _wanted(group: Any, names: Collection[str] | None) -> list[Any]:
    """Metadata of a row group's columns that have these names or lie inside one of them; None: of all."""
    columns = [group.column(i) for i in range(group.num_columns)]
    if names is None:
        return columns
    return [c for c in columns if any(c.path_in_schema == n or c.path_in_schema.startswith(f"{n}.") for n in names)]


def _decoded(column: Any) -> int:
    """Bytes that a column of a row group takes once it is decoded, at least."""
    return max(column.total_uncompressed_size, WIDTH * column.num_values)


def read_rows(
    file: str, start: int, stop: int, wanted: Callable[[pa.Schema], dict[str, str]], limit: int = LIMIT
) -> tuple[list[Columns], list[BadRow]]:
    """Rows `start` to `stop` as columns, by `wanted` of the schema; row groups that cannot be decoded are reported."""
    return _decode(file, start, stop, wanted, limit, lambda at, table: to_columns(table, at, wanted(table.schema)))


def read_objects(
    file: str, start: int, stop: int, limit: int = LIMIT
) -> tuple[list[tuple[int, list[dict[str, Any]]]], list[BadRow]]:
    """Rows `start` to `stop` as Python objects: (number of the first row, rows) of each part."""
    return _decode(file, start, stop, None, limit, lambda at, table: (at + 1, table.to_pylist()))


def _decode(
    file: str,
    start: int,
    stop: int,
    wanted: Callable[[pa.Schema], dict[str, str]] | None,
    limit: int,
    convert: Callable[[int, pa.Table], Any],
) -> tuple[list[Any], list[BadRow]]:
    """A range of rows by `convert(place of the first row, from 0, part)`, and what of it cannot be decoded."""
    parts: list[Any] = []
    bad: list[BadRow] = []

    def undecoded(first: int, last: int, error: Exception) -> BadRow:
        return BadRow(file, first + 1, f"rows {first + 1} to {last} cannot be decoded: {error}", rows=last - first)

    try:
        with _source(file) as source:
            whole = source.schema_arrow
        names = None if wanted is None else list(dict.fromkeys(wanted(whole).values()))
        # A dictionary may repeat one text many times.
        listed = whole.names if names is None else names
        texts = [n for n in listed if n in whole.names and is_text(whole.field(n).type)]
        with _source(file, texts) as source:
            last = 0
            for i in range(source.metadata.num_row_groups):
                group = source.metadata.row_group(i)
                first, last = last, last + group.num_rows
                begin, end = max(first, start), min(last, stop)
                if first >= stop or start >= last:
                    continue
                try:
                    _check_group(group, names, limit)
                    if (begin, end) == (first, last):
                        tables = iter([(begin, source.read_row_group(i, names, use_threads=False))])
                    else:
                        tables = _part(file, i, (first, last), (begin, end), names, texts)
                    for at, table in tables:
                        _check_texts(table, limit)
                        try:
                            parts.append(convert(at, table))
                        except Broken as e:
                            bad.append(undecoded(at, at + len(table), e))
                except Broken as e:
                    bad.append(undecoded(begin, end, e))
    except RecordError:
        raise
    except Broken as e:
        bad.append(BadRow(file, 0, f"no whole Parquet file: {e}", rows=0))
    return parts, bad


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


def _part(
    file: str, group: int, whole: tuple[int, int], rows: tuple[int, int], names: list[str] | None, texts: list[str]
) -> Iterator[tuple[int, pa.Table]]:
    """Some rows of a row group that has the rows `whole`."""

    def batches() -> Iterator[pa.RecordBatch]:
        with _source(file, texts) as source:
            yield from source.iter_batches(end - begin, [group], names, use_threads=False)

    (first, last), (begin, end) = whole, rows
    about = (fingerprint(file), group, tuple(names or ()))
    at = begin
    if _resume.key != (*about, begin):
        _resume.rest, at = batches(), first
    _resume.key = ()
    while at < end and (batch := next(_resume.rest, None)) is not None:
        low, high = max(begin - at, 0), min(end - at, len(batch))
        if low < high:
            yield at + low, pa.Table.from_batches([batch.slice(low, high - low)])
        at += len(batch)
    if at == last:
        _resume.rest = iter(())  # or what was read of this row group would stay while the next is decoded
    elif at == end:
        _resume.key = (*about, end)


# Arrow columns as columns of a log. List columns are flat tensors on the same memory.


def present(schema: pa.Schema, columns: Mapping[str, str]) -> dict[str, str]:
    """The columns that a schema has, and whose type can hold the field."""
    fitting = {}
    for name, column in columns.items():
        f, kind = COLUMNS[name], type_of(schema, column)
        if kind is None:
            continue
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        fits = f.per != "token" and (is_number(kind) or (bool(f.words) and is_text(kind)))
        if f.by_token and is_list(kind):
            fits = is_number(kind.value_type)
        if fits or pa.types.is_null(kind) or f.is_text or f.text_ids:
            fitting[name] = column
    return fitting


def type_of(schema: pa.Schema, column: str) -> pa.DataType | None:
    """The type of a column; dotted names lead into structs. None if there is no such column."""
    if column in schema.names:
        return schema.field(column).type
    head, _, rest = column.partition(".")
    if head in schema.names and pa.types.is_struct(schema.field(head).type):
        inner = schema.field(head).type
        return next((f.type for f in map(inner.field, range(inner.num_fields)) if f.name == rest), None)
    return None


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a list per row."""
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a text per row."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds one number per row."""
    t = pa.types
    return t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_null(kind)


def to_columns(table: pa.Table, before: int, wanted: Mapping[str, str]) -> Columns:
    """Arrow columns by field name; numbers stay where they are in memory."""
    lists: dict[str, Lists] = {}
    numbers: dict[str, Numbers] = {}
    texts: dict[str, Sequence[str | None]] = {}
    for field, name in wanted.items():
        head, _, rest = name.partition(".")
        inside = name not in table.column_names
        array = (pc.struct_field(table.column(head), rest) if inside else table.column(name)).combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        f = COLUMNS[field]
        if f.is_text or (f.text_ids and not is_number(array.type)):
            try:
                texts[field] = [text_of(t) for t in array.to_pylist()]
            except UnicodeDecodeError:
                raw = array.cast(pa.binary()).to_pylist()
                texts[field] = [None if t is None else t.decode("utf-8", "replace") for t in raw]
        elif f.by_token and is_list(array.type):
            lists[field] = _lists(array, not f.is_whole)
        elif f.per != "token":
            numbers[field] = _numbers(array, f)
    if "drawn_by" not in texts and (header := (table.schema.metadata or {}).get(ROLLOUTS_KEY)):
        # A file of rollouts says once what drew them all.
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            texts["drawn_by"] = [text_of(json.loads(header)["provenance"])] * len(table)
    row = torch.arange(before + 1, before + 1 + len(table))
    return Columns(row, lists, numbers, texts)


def _lists(array: pa.Array, floats: bool) -> Lists:
    lengths = _tensor(pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64()))
    absent = _tensor(array.is_null()) if array.null_count else None
    values = array.flatten()
    missing = None
    if floats:
        values = pc.fill_null(values.cast(pa.float32(), safe=False), float("nan"))
    else:
        if pa.types.is_floating(values.type):
            # NaN and what no integer reaches have no cast; as nulls they are counted.
            values = pc.if_else(pc.less(pc.abs(values), LARGE), values, None)
        missing = _tensor(values.is_null()) if values.null_count else None
        if not pa.types.is_integer(values.type) or values.null_count:
            values = pc.fill_null(values.cast(pa.int64(), safe=False), 0)
    return Lists(_tensor(values), cumulative(lengths), absent, missing)


def _numbers(array: pa.Array, f: LogField) -> Numbers:
    if f.words and is_text(array.type):
        codes = pa.array([*f.words.values(), f.other_word], pa.int64())
        index = pc.index_in(array, pa.array(list(f.words), array.type))
        codes = codes.take(pc.fill_null(index, len(f.words)))
        array = pc.if_else(array.is_valid(), codes, None)
    if pa.types.is_floating(array.type) or not f.is_whole:
        values = pc.fill_null(array.cast(pa.float64(), safe=False), float("nan"))
        return Numbers(_tensor(pc.if_else(pc.less(pc.abs(values), LARGE), values, float("nan"))))
    absent = _tensor(array.is_null()) if array.null_count else None
    return Numbers(_tensor(pc.fill_null(array.cast(pa.int64(), safe=False), 0)), absent)


def _tensor(array: pa.Array) -> Tensor:
    """A null-free Arrow array as a tensor on the same memory (never written to in place)."""
    if len(array) == 0:
        return torch.from_numpy(np.zeros(0, array.type.to_pandas_dtype()))
    if pa.types.is_boolean(array.type):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    if pa.types.is_unsigned_integer(array.type):
        array = array.cast(pa.int64())
    return torch.from_dlpack(array)
