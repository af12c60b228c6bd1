"""Parquet files: where to cut them, decoding a range of rows, and Arrow columns as columns of a log."""

from __future__ import annotations

import io
import json
import threading
from bisect import bisect, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch
from torch import Tensor

from offdrift.errors import RecordError
from offdrift.records.pages import ColumnChunk, RowGroup, decoded, row_groups
from offdrift.records.readers.columns import LARGE, Columns, Lists, Numbers, text_of
from offdrift.records.readers.files import LIMIT, PLANNED, BadRow, Bytes, Resume, fingerprint, is_url, opened, too_large
from offdrift.records.readers.files import size as size_of
from offdrift.records.schema import COLUMNS, ROLLOUTS_KEY, LogField
from offdrift.segments import cumulative

pc: Any = pyarrow.compute
"""Its functions are made at import, where no type checker sees them."""

Broken = (pa.ArrowException, OSError, ValueError, TypeError, MemoryError)
"""What a file that is not what it says raises while it is decoded."""

RATIO = 128
"""How many times its compressed size a file, or a row group that is read in parts, may decode to, once that is more
than a file may take. The lists of a real log are never all runs of equal values."""

BUFFER, WHOLE = 1 << 20, 32 << 20
"""Bytes of a column that are read at once, so that a large row group is never held whole; and the compressed bytes of a
column of a row group up to which it is, which saves a copy."""

_resume = Resume()
"""Where the last reading of a part of a row group stopped. A row group has no entrance in the middle: what is before
the wanted rows must be decoded and dropped."""


def schema(file: str) -> pa.Schema:
    """The columns of a file; `RecordError` if it is no whole Parquet file."""
    try:
        with _source(file) as (source, _):
            return source.schema_arrow
    except Broken as e:
        raise RecordError(f"{file} is no whole Parquet file: {e}") from e


@contextmanager
def _source(file: str, texts: Sequence[str] = (), metadata: Any = None) -> Iterator[tuple[pq.ParquetFile, Bytes]]:
    """A file to decode, `texts` as a dictionary and indices into it, and its bytes; `RecordError` if it is gone.

    Never memory-mapped: a file that is cut short while it is read would end the process.
    """
    options: Any = {"page_checksum_verification": True, "read_dictionary": list(texts) or None}
    with opened(file) as f:
        if is_url(file):
            held = _Held(f)
            yield pq.ParquetFile(held, metadata=metadata, pre_buffer=False, **options), held
            return
        metadata = pq.read_metadata(file) if metadata is None else metadata
        columns = (c for group in _groups(file, f, metadata) for c in group.columns)
        buffer = 0 if all(c.total_compressed_size <= WHOLE for c in columns) else BUFFER
        with pq.ParquetFile(file, metadata=metadata, pre_buffer=False, buffer_size=buffer, **options) as source:
            yield source, f


class _Held(io.RawIOBase):
    """A file behind a URL whose columns are fetched once: to look at their pages, and to decode them."""

    def __init__(self, file: Bytes) -> None:
        self.file, self.at = file, 0
        self.starts: list[int] = []
        self.parts: dict[int, bytes] = {}

    def hold(self, columns: Sequence[ColumnChunk]) -> None:
        """Fetch columns of a row group; large ones are left where they are."""
        for c in columns:
            start = min(x for x in (c.data_page_offset, c.dictionary_page_offset) if x)
            if 0 < c.total_compressed_size <= WHOLE and start not in self.parts:
                self.file.seek(start)
                self.parts[start] = self.file.read(c.total_compressed_size)
                insort(self.starts, start)

    def read(self, size: int = -1) -> bytes:
        start = self.starts[i - 1] if (i := bisect(self.starts, self.at)) else 0
        cached = self.parts.get(start, b"")
        if 0 <= size <= start + len(cached) - self.at:
            inside = cached[self.at - start : self.at - start + size]
        else:
            self.file.seek(self.at)
            inside = self.file.read(size)
        self.at += len(inside)
        return inside

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + self.at * (whence == 1) if whence < 2 else self.file.seek(offset, 2)
        return self.at

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class _Footer(threading.local):
    """The footer that was read last."""

    key = ""
    groups: Sequence[RowGroup] = ()


_footer = _Footer()


def _groups(file: str, raw: Bytes, metadata: Any) -> Sequence[RowGroup]:
    """The row groups of a file by its footer, which is read once for the pieces of one file."""
    if _footer.key != (key := fingerprint(file)):
        _footer.groups, _footer.key = row_groups(raw, metadata.num_columns), key
    return _footer.groups


def cuts(file: str, columns: Mapping[str, str], piece_bytes: int) -> list[tuple[int, int]]:
    """Row ranges of pieces: whole row groups, or equal parts of a row group that is too large.

    A file that cannot be read is one piece, for the reader to report.
    """
    try:
        with _source(file) as (source, raw):
            groups = _groups(file, raw, source.metadata)
        wanted = _wanted(groups[0], columns.values()) if groups else []
        sizes = [(g.num_rows, _claimed(g, wanted)) for g in groups]
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


def _wanted(group: RowGroup, names: Collection[str] | None) -> list[int]:
    """Places of a row group's columns that have these names or lie inside one of them; None: of all."""
    if names is None:
        return list(range(len(group.columns)))
    paths = ((i, column.path_in_schema) for i, column in enumerate(group.columns))
    return [i for i, path in paths if any(path == n or path.startswith(f"{n}.") for n in names)]


def _claimed(group: RowGroup, wanted: Sequence[int]) -> int:
    """Bytes that columns of a row group take once they are decoded, as the footer says: to plan by, not to believe."""
    columns = (group.columns[i] for i in wanted)
    return sum(max(c.total_uncompressed_size, PLANNED * c.num_values) for c in columns)


def read_rows(
    file: str, start: int, stop: int, wanted: Callable[[pa.Schema], dict[str, str]], limit: int = LIMIT
) -> tuple[list[Columns], list[BadRow]]:
    """Rows `start` to `stop` as columns, by `wanted` of the schema; row groups that cannot be decoded are reported."""
    return _decode(
        file,
        start,
        stop,
        wanted=wanted,
        limit=limit,
        convert=lambda at, table: to_columns(table, at, wanted(table.schema)),
    )


def read_objects(
    file: str, start: int, stop: int, limit: int = LIMIT
) -> tuple[list[tuple[int, list[dict[str, Any]]]], list[BadRow]]:
    """Rows `start` to `stop` as Python objects: (number of the first row, rows) of each part."""
    return _decode(file, start, stop, wanted=None, limit=limit, convert=lambda at, table: (at + 1, table.to_pylist()))


class _Group(NamedTuple):
    """Rows of a row group that are wanted."""

    place: int
    whole: tuple[int, int]
    """First row, and the one behind the last, of the row group."""
    rows: tuple[int, int]
    """Of what is wanted."""


def _decode(
    file: str,
    start: int,
    stop: int,
    wanted: Callable[[pa.Schema], dict[str, str]] | None,
    limit: int,
    convert: Callable[[int, pa.Table], Any],
) -> tuple[list[Any], list[BadRow]]:
    """A range of rows by `convert(place of the first row, from 0, part)`, and what of it cannot be decoded."""
    decoding = _Decoding(file, limit, convert)
    try:
        with _source(file) as (source, raw):
            schema, metadata = source.schema_arrow, source.metadata
            row_groups = _groups(file, raw, metadata)
            texts = _texts(source.schema)
        names = None if wanted is None else list(dict.fromkeys(wanted(schema).values()))
        with _source(file, texts, metadata) as (source, raw):
            last = _last_affordable(file, row_groups, names, limit)
            budget = _PageBudget(source.schema, row_groups, raw, names=names, limit=limit, last=last)
            for run in _runs(row_groups, start, stop):
                for groups in budget.affordable(run, decoding.undecoded):
                    group = groups[0]
                    if group.whole == group.rows:
                        decoding.whole_groups(source, groups, names)
                        continue
                    some = {"rows": group.rows, "names": names, "texts": texts, "metadata": metadata}
                    try:
                        decoding.take(_part(file, group.place, group.whole, **some))
                    except Broken as e:
                        decoding.undecoded(*group.rows, e)
    except RecordError:
        raise
    except Broken as e:
        decoding.bad.append(BadRow(file, 0, f"no whole Parquet file: {e}", rows=0))
    return decoding.parts, decoding.bad


@dataclass
class _Decoding:
    """Converted parts of a file, and rows that cannot be decoded."""

    file: str
    limit: int
    convert: Callable[[int, pa.Table], Any]
    parts: list[Any] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)

    def undecoded(self, first: int, last: int, error: Exception) -> None:
        """Note rows from `first` to before `last`, from 0, as bad."""
        reason = f"rows {first + 1} to {last} cannot be decoded: {error}"
        self.bad.append(BadRow(self.file, first + 1, reason, rows=last - first))

    def take(self, tables: Iterable[tuple[int, pa.Table]]) -> None:
        """Convert tables, each with the place of its first row."""
        for at, table in tables:
            _check_texts(table, self.limit)
            try:
                self.parts.append(self.convert(at, table))
            except Broken as e:
                self.undecoded(at, at + len(table), e)

    def whole_groups(self, source: pq.ParquetFile, groups: list[_Group], names: list[str] | None) -> None:
        """Read neighbors at once; where one of them is broken, each half by itself.

        In a loop: a function that calls itself would keep what was read until Python's collector runs.
        """
        waiting = [groups]
        while waiting:
            now = waiting.pop()
            first, last = now[0].rows[0], now[-1].rows[1]
            try:
                self.take([(first, source.read_row_groups([g.place for g in now], names, use_threads=False))])
            except Broken as e:
                if len(now) == 1:
                    self.undecoded(first, last, e)
                else:
                    middle = len(now) // 2
                    waiting += [now[middle:], now[:middle]]


def _runs(row_groups: Sequence[RowGroup], start: int, stop: int) -> Iterator[list[_Group]]:
    """The row groups with rows from `start` to `stop`: neighbors that are wanted whole together, others alone."""
    run: list[_Group] = []
    last = 0
    for i, rows in enumerate(group.num_rows for group in row_groups):
        first, last = last, last + rows
        if first >= stop or start >= last:
            continue
        group = _Group(i, (first, last), (max(first, start), min(last, stop)))
        if group.rows == group.whole:
            run.append(group)
            continue
        yield from (x for x in (run, [group]) if x)
        run = []
    if run:
        yield run


class _PageBudget:
    """Memory budget for the row groups of a piece, counted from the headers of their pages."""

    def __init__(
        self,
        schema: Any,
        row_groups: Sequence[RowGroup],
        raw: Bytes,
        *,
        names: Collection[str] | None,
        limit: int,
        last: int,
    ) -> None:
        self.schema, self.row_groups, self.raw = schema, row_groups, raw
        self.names, self.limit, self.last = names, limit, last
        self.left = limit

    def affordable(
        self, run: Sequence[_Group], refuse: Callable[[int, int, Exception], None]
    ) -> Iterator[list[_Group]]:
        """The groups of a run that may be decoded, neighbors together; the others are refused."""
        groups: list[_Group] = []
        for group in run:
            try:
                self._spend(group)
                groups.append(group)
            except Broken as e:
                if groups:
                    yield groups
                groups = []
                refuse(*group.rows, e)
        if groups:
            yield groups

    def _spend(self, group: _Group) -> None:
        """Raises: `ValueError` where a group, or its part, takes more than is left for the piece, or for the file."""
        columns = self.row_groups[group.place].columns
        whole, key = group.rows == group.whole, (*_afforded.key, group.place)
        if _afforded.group[0] != key:  # the parts of a row group are read one after another
            wanted = _wanted(self.row_groups[group.place], self.names)
            if whole and isinstance(self.raw, _Held):
                self.raw.hold([columns[i] for i in wanted])
            pages = [decoded(self.raw, columns[i], self.schema.column(i)) for i in wanted]
            _afforded.group = key, sum(p.bytes for p in pages), sum(p.stored for p in pages)
        _, size, stored = _afforded.group
        if size > self.limit and (whole or size > RATIO * stored):
            raise ValueError(too_large(f"the row group decodes to {size / 2**20:,.0f} MiB,", self.limit))
        if group.place > self.last:
            raise ValueError(too_large("with the row groups before, the file decodes to", self.limit))
        (first, last), (begin, end) = group.whole, group.rows
        size = size * (end - begin) // max(last - first, 1)
        if size > self.left:
            raise ValueError(too_large("with the row groups before, it decodes to", self.limit))
        self.left -= size


class _Afforded(threading.local):
    """Results of the size checks that the pieces of one file share."""

    key: tuple[object, ...] = ()
    """The file as it was, its columns and the limit."""
    last = -1
    """The last row group up to which it decodes to no more than it may."""
    group: tuple[tuple[object, ...], int, int] = ((), 0, 0)
    """The row group that was looked at last: what it decodes to, and its bytes in the file."""


_afforded = _Afforded()


def _last_affordable(file: str, row_groups: Sequence[RowGroup], names: Sequence[str] | None, limit: int) -> int:
    """The last row group up to which a file decodes to no more than it may, as its footer says.

    A footer that says too little is found out by the pages of the row group.
    """
    key = (fingerprint(file), tuple(names or ()), limit)
    if _afforded.key != key:
        left, last = max(limit, RATIO * size_of(file)), -1
        wanted = _wanted(row_groups[0], names) if row_groups else []
        for group in row_groups:
            left -= _claimed(group, wanted)
            if left < 0:
                break
            last += 1
        _afforded.key, _afforded.last = key, last
    return _afforded.last


def _check_texts(table: pa.Table, limit: int) -> None:
    """Raises: `ValueError` where few texts that are repeated make more than the file may take."""
    size = sum(_repeated(chunk) for column in table.columns for chunk in column.chunks)
    if size > limit:
        raise ValueError(too_large(f"the texts decode to {size / 2**20:,.0f} MiB,", limit))


def _repeated(array: pa.Array) -> int:
    """Bytes of the texts that an array repeats by a dictionary, at any depth."""
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        return pc.sum(lengths.cast(pa.int64())).as_py() or 0
    if pa.types.is_struct(array.type):
        return sum(map(_repeated, array.flatten()))
    if is_list(array.type) or pa.types.is_map(array.type):
        return _repeated(array.values if is_list(array.type) else array.items)
    return 0


def _texts(schema: Any) -> list[str]:
    """Paths of the columns of texts and bytes, which are read as a dictionary and indices: one may repeat a text many
    times."""
    columns = map(schema.column, range(len(schema)))
    return [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and c.logical_type.type in TEXTUAL]


TEXTUAL = ("NONE", "STRING", "JSON", "ENUM")
"""Logical types of columns of bytes that are texts; decimals are bytes as well."""


def _part(
    file: str,
    group: int,
    whole: tuple[int, int],
    rows: tuple[int, int],
    names: list[str] | None,
    texts: list[str],
    metadata: Any,
) -> Iterator[tuple[int, pa.Table]]:
    """Some rows of a row group that has the rows `whole`."""

    def batches() -> Iterator[pa.RecordBatch]:
        with _source(file, texts, metadata) as (source, _):
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
    for ours, name in wanted.items():
        head, _, rest = name.partition(".")
        inside = name not in table.column_names
        array = (pc.struct_field(table.column(head), rest) if inside else table.column(name)).combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        f = COLUMNS[ours]
        if f.is_text or (f.text_ids and not is_number(array.type)):
            try:
                texts[ours] = [text_of(t) for t in array.to_pylist()]
            except UnicodeDecodeError:
                raw = array.cast(pa.binary()).to_pylist()
                texts[ours] = [None if t is None else t.decode("utf-8", "replace") for t in raw]
        elif f.by_token and is_list(array.type):
            lists[ours] = _lists(array, not f.is_whole)
        elif f.per != "token":
            numbers[ours] = _numbers(array, f)
    if "drawn_by" not in texts and (header := (table.schema.metadata or {}).get(ROLLOUTS_KEY)):
        # A file of rollouts says once what drew them all.
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            texts["drawn_by"] = [text_of(json.loads(header)["provenance"])] * len(table)
    row = torch.arange(before + 1, before + 1 + len(table))
    return Columns(row, lists, numbers, texts)


def _lists(array: pa.Array, floats: bool) -> Lists:
    lengths = _tensor(_filled(pc.list_value_length(array), 0).cast(pa.int64()))
    absent = _tensor(array.is_null()) if array.null_count else None
    values = array.flatten()
    missing = None
    if floats:
        values = _filled(values.cast(pa.float32(), safe=False), float("nan"))
    else:
        if pa.types.is_floating(values.type):
            # NaN and what no integer reaches have no cast; as nulls they are counted.
            values = pc.if_else(pc.less(pc.abs(values), LARGE), values, None)
        missing = _tensor(values.is_null()) if values.null_count else None
        if not pa.types.is_integer(values.type) or values.null_count:
            values = _filled(values.cast(pa.int64(), safe=False), 0)
    return Lists(_tensor(values), cumulative(lengths), absent, missing)


def _numbers(array: pa.Array, f: LogField) -> Numbers:
    if f.words and is_text(array.type):
        codes = pa.array([*f.words.values(), f.other_word], pa.int64())
        index = pc.index_in(array, pa.array(list(f.words), array.type))
        codes = codes.take(_filled(index, len(f.words)))
        array = pc.if_else(array.is_valid(), codes, None)
    if pa.types.is_floating(array.type) or not f.is_whole:
        values = _tensor(_filled(array.cast(pa.float64(), safe=False), float("nan")))
        return Numbers(values.where(values.abs() < LARGE, float("nan")))
    absent = _tensor(array.is_null()) if array.null_count else None
    return Numbers(_tensor(_filled(array.cast(pa.int64(), safe=False), 0)), absent)


def _filled(array: pa.Array, value: float) -> pa.Array:
    """An array of numbers with `value` for its nulls.

    Not by `pa.scalar`, nor by `pa.array`: either imports pandas where it is installed, for a third of a second.
    """
    if not array.null_count:
        return array
    raw = np.array([value], array.type.to_pandas_dtype())
    return pc.fill_null(array, pa.Array.from_buffers(array.type, 1, [None, pa.py_buffer(raw)])[0])


def _tensor(array: pa.Array) -> Tensor:
    """A null-free Arrow array as a tensor on the same memory (never written to in place)."""
    if len(array) == 0:
        return torch.from_numpy(np.zeros(0, array.type.to_pandas_dtype()))
    if pa.types.is_boolean(array.type):
        return torch.from_dlpack(array.cast(pa.uint8())).bool()
    if pa.types.is_unsigned_integer(array.type):
        array = array.cast(pa.int64())
    return torch.from_dlpack(array)
