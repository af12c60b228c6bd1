"""Compute the size that Parquet pages decode to from the pages' own headers; the footer is read, and not trusted.

A footer says how many values a column has. A decoder takes that many or more: it decodes each page whole, and a page
of 30 bytes may hold two billion equal values. So the headers of the pages are read before anything is decoded.

The footer is read here, too: what pyarrow shows of a column ends the process, without an exception, where the footer
contradicts itself (a histogram of levels that the schema does not have, a column that is encrypted).

Reference: the Apache Parquet format, `parquet.thrift` (PageHeader, FileMetaData), and Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

WIDTH = 16
"""Bytes that a value takes while it is decoded, with its levels, and is looked at: measured. In the file, a run of
equal ones takes none. Arrow takes as many for each text of a dictionary, beside its characters."""

FIRST_LOOK, LARGEST_HEADER = 256, 1 << 20
"""Bytes that are read for a header at first, and at most: statistics in it may hold texts."""

DATA, DICTIONARY, DATA_V2 = 0, 2, 3
"""Types of pages."""
DELTA_TEXTS = 7
"""The encoding of texts that repeats the beginning of the text before."""

HEADER = {1: "type", 2: "uncompressed", 3: "compressed"}
"""Fields of a page header that are read."""
INSIDE = {5: (DATA, {1: "values", 2: "encoding"}), 7: (DICTIONARY, {1: "values"})}
INSIDE |= {8: (DATA_V2, {1: "values", 4: "encoding"})}
"""Fields of the header that each type of page has inside."""

I32, I64, BINARY, LIST, SET, MAP, STRUCT = 5, 6, 8, 9, 10, 11, 12
FIXED = {1: 0, 2: 0, 3: 1, 7: 8}
"""Bytes of types of a fixed size; the truth values are in the type itself."""
DEEPEST = 8


LARGEST_FOOTER = 64 << 20
"""Bytes of the largest footer that is read: a thousand row groups of a hundred columns take a quarter of it."""
ENDS = 8
"""Bytes behind the footer: its length and the format's name."""
MAGIC = b"PAR1"
GROUPS, GROUP_COLUMNS, GROUP_ROWS, COLUMN_ABOUT, COLUMN_CRYPTO = 4, 1, 3, 3, 8
"""Fields of the footer, of a row group and of a column that are read."""
ABOUT = {5: "num_values", 6: "total_uncompressed_size", 7: "total_compressed_size"}
ABOUT |= {9: "data_page_offset", 11: "dictionary_page_offset"}
"""Fields of a column's metadata that are read; the third is its path."""


class BadPage(ValueError):
    """A page header or a footer that is not what a writer of Parquet writes."""


class Cut(BadPage):
    """A page header that goes on behind the bytes that were read."""


@dataclass(frozen=True)
class Decoded:
    """Decoded and stored size of one column of a row group."""

    bytes: int
    """That its values and pages take while they are decoded."""
    stored: int
    """Bytes in the file."""


class ColumnChunk(NamedTuple):
    """A column of a row group, as the footer says; names as in `pyarrow.parquet.ColumnChunkMetaData`."""

    path_in_schema: str
    num_values: int
    total_uncompressed_size: int
    total_compressed_size: int
    data_page_offset: int
    dictionary_page_offset: int | None


class RowGroup(NamedTuple):
    """A row group, as the footer says."""

    num_rows: int
    columns: list[ColumnChunk]


def row_groups(file: Any, columns: int) -> list[RowGroup]:
    """The row groups of a file, from its footer.

    Args:
        file: to read bytes from.
        columns: how many columns its schema has; every row group must have as many.

    Raises: `BadPage` if there is no whole footer, or it is not what a writer of Parquet writes.
    """
    end = file.seek(0, 2)
    file.seek(max(end - ENDS, 0))
    tail = file.read(ENDS)
    size = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or size > end - ENDS - len(MAGIC):
        raise BadPage("the file does not end with a footer")
    if size > LARGEST_FOOTER:
        raise BadPage(f"the footer has {size / 2**20:,.0f} MiB, more than {LARGEST_FOOTER >> 20}")
    file.seek(end - ENDS - size)
    reader = _Compact(file.read(size))
    groups: list[RowGroup] = []
    for field, kind in reader.fields():
        if field == GROUPS and kind == LIST:
            groups = [_group(reader) for _ in reader.structs()]
        else:
            reader.skip(kind)
    for number, group in enumerate(groups, 1):
        if len(group.columns) != columns:
            raise BadPage(f"row group {number} has {len(group.columns)} columns, the schema {columns}")
    return groups


def _group(reader: _Compact) -> RowGroup:
    columns: list[ColumnChunk] = []
    rows = 0
    for field, kind in reader.fields():
        if field == GROUP_COLUMNS and kind == LIST:
            columns = [_column(reader) for _ in reader.structs()]
        elif field == GROUP_ROWS and kind == I64:
            rows = reader.number(64)
        else:
            reader.skip(kind)
    return RowGroup(rows, columns)


def _column(reader: _Compact) -> ColumnChunk:
    about: dict[str, Any] = {}
    for field, kind in reader.fields():
        if field == COLUMN_ABOUT and kind == STRUCT:
            for part, part_kind in reader.fields():
                if part == COLUMN_ABOUT and part_kind == LIST:
                    about["path_in_schema"] = ".".join(reader.texts())
                elif part in ABOUT and part_kind == I64:
                    about[ABOUT[part]] = reader.number(64)
                else:
                    reader.skip(part_kind)
        elif field == COLUMN_CRYPTO:
            raise BadPage("a column is encrypted")
        else:
            reader.skip(kind)
    about.setdefault("dictionary_page_offset", None)
    if missing := [name for name in ColumnChunk._fields if name not in about]:
        raise BadPage(f"the footer says nothing about the {' and the '.join(missing)} of a column")
    return ColumnChunk(**about)


class _Page(NamedTuple):
    type: int
    uncompressed: int
    compressed: int
    values: int
    encoding: int
    header: int
    """Bytes of the header."""


def decoded(file: Any, column: ColumnChunk, about: Any) -> Decoded:
    """Return the decoded size of a column of a row group.

    Args:
        file: to read bytes from.
        column: what the footer says of it.
        about: the column of the schema (`pyarrow.parquet.ColumnSchema`).

    Raises: `BadPage` if a page header is damaged, lies outside of the column, or the pages hold other values than the
        footer says.
    """
    width = max(WIDTH, about.length)
    claimed, seen, size, stored = column.num_values, 0, 0, 0
    if claimed == 0 and column.data_page_offset == 0:  # of a file without a row: no data page is there, none is read
        return Decoded(0, 0)
    for page in _pages(file, column):
        stored += page.header + page.compressed
        size += page.uncompressed
        if page.type in (DATA, DICTIONARY, DATA_V2):
            size += page.values * width
        if page.type in (DATA, DATA_V2):
            if page.encoding == DELTA_TEXTS:
                raise BadPage(
                    f"{column.path_in_schema} is encoded as DELTA_BYTE_ARRAY, whose size nobody knows before it is "
                    "decoded; write it with another encoding"
                )
            seen += page.values
        if seen >= claimed:
            break
    if seen != claimed:
        raise BadPage(f"{column.path_in_schema} has {seen} values in its pages and {claimed} in the footer")
    return Decoded(size, stored)


def _pages(file: Any, column: ColumnChunk) -> Iterator[_Page]:
    """The pages of a column, in order."""
    at, left = column.data_page_offset, column.total_compressed_size
    if column.dictionary_page_offset is not None and column.dictionary_page_offset > 0:
        at = min(at, column.dictionary_page_offset)
    while left > 0:
        look = FIRST_LOOK
        while True:
            file.seek(at)
            data = file.read(min(look, left))
            try:
                page = _page(data)
                break
            except Cut:
                if len(data) < min(look, left) or look >= min(left, LARGEST_HEADER):
                    raise BadPage(f"{column.path_in_schema} has a page whose header is cut off") from None
                look *= 16
        size = page.header + page.compressed
        if size > left or min(page.compressed, page.uncompressed, page.values) < 0:
            raise BadPage(f"{column.path_in_schema} has a page of {page.compressed} bytes, {left} are left")
        yield page
        at, left = at + size, left - size


def _page(data: bytes) -> _Page:
    """The page header that some bytes begin with."""
    reader = _Compact(data)
    found = {"type": -1, "uncompressed": -1, "compressed": -1, "values": 0, "encoding": -1}
    inside = -1
    for field, kind in reader.fields():
        if field in HEADER and kind == I32:
            found[HEADER[field]] = reader.number()
        elif field in INSIDE and kind == STRUCT:
            if inside != -1:
                raise BadPage("a page has two kinds of headers")
            inside, names = INSIDE[field]
            for own, own_kind in reader.fields():
                if own in names and own_kind == I32:
                    found[names[own]] = reader.number()
                else:
                    reader.skip(own_kind)
        else:
            reader.skip(kind)
    if found["type"] in (DATA, DICTIONARY, DATA_V2) and inside != found["type"]:
        raise BadPage("a page has no header of its type")
    return _Page(**found, header=reader.at)


class _Compact:
    """Thrift's compact protocol, as strict as its writers are."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        if self.at >= len(self.data):
            raise Cut("the header is cut off")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value, at, data = 0, self.at, self.data  # one call for all bytes: a footer has hundreds of thousands of numbers
        for shift in range(0, 64, 7):
            if at >= len(data):
                raise Cut("the header is cut off")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.at = at
                return value
        raise BadPage("a number has more than 64 bits")

    def number(self, bits: int = 32) -> int:
        """An integer of so many bits."""
        value = self.varint()
        if value >= 1 << bits:
            raise BadPage(f"a number has more than {bits} bits")
        return (value >> 1) ^ -(value & 1)

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a struct, which the caller reads before the next; each once."""
        last, seen, data = 0, set(), self.data
        while True:
            if self.at >= len(data):
                raise Cut("the header is cut off")
            head = data[self.at]
            self.at += 1
            if head == 0:
                return
            step, kind = head >> 4, head & 0xF
            last = last + step if step else self.number()
            if last in seen:
                raise BadPage("a field is there twice")
            seen.add(last)
            yield last, kind

    def items(self) -> tuple[int, int]:
        """Number and type of the items of a list, which the caller reads next."""
        head = self.byte()
        count = head >> 4 if head >> 4 < 15 else self.varint()
        if count > len(self.data):
            raise Cut("the header is cut off")
        return count, head & 0xF

    def structs(self) -> range:
        """Places of the items of a list of structs."""
        count, kind = self.items()
        if count and kind != STRUCT:
            raise BadPage(f"a list has items of type {kind}, no structs")
        return range(count)

    def texts(self) -> list[str]:
        """A list of texts."""
        count, kind = self.items()
        if count and kind != BINARY:
            raise BadPage(f"a list has items of type {kind}, no texts")
        texts = []
        for _ in range(count):
            length = self.varint()
            self.at += length
            if self.at > len(self.data):
                raise Cut("the header is cut off")
            texts.append(self.data[self.at - length : self.at].decode("utf-8", "replace"))
        return texts

    def skip(self, kind: int, depth: int = 0) -> None:
        """A value that nobody reads."""
        if depth > DEEPEST:
            raise BadPage("the header is nested too deeply")
        if kind in FIXED:
            self.at += FIXED[kind]
        elif kind in (4, I32, I64):
            self.varint()
        elif kind == BINARY:
            length = self.varint()
            self.at += length
        elif kind in (LIST, SET):
            count, item = self.items()
            for _ in range(count):
                self.skip(3 if item in (1, 2) else item, depth + 1)  # a truth value in a list takes a byte
        elif kind == STRUCT:
            for _, own in self.fields():
                self.skip(own, depth + 1)
        else:
            raise BadPage(f"the header has a field of type {kind}")
        if self.at > len(self.data):
            raise Cut("the header is cut off")
