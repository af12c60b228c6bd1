"""Cutting logs into pieces that fit memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from offdrift.errors import RecordError
from offdrift.records.readers import jsonl as lines
from offdrift.records.readers import parquet
from offdrift.records.readers.arrow import present
from offdrift.records.readers.assemble import assemble
from offdrift.records.readers.columns import Columns, Row, joined, pack
from offdrift.records.readers.files import opened, size
from offdrift.records.readers.formats import skyrl, slime
from offdrift.records.readers.formats.base import PER_ROW, Source, look_up, translate
from offdrift.records.readers.formats.table import source
from offdrift.records.readers.look import loaded
from offdrift.records.readers.parquet import WIDTH
from offdrift.records.readers.pickles import Budget
from offdrift.records.readers.types import BadRow, Detected, Piece, Read

PIECE_BYTES = 64 << 20


def pieces(found: Detected, *, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Every piece of the logs, in order; the files alone decide where the cuts are.

    Args:
        found: what `detect` returned.
        piece_bytes: how large a piece may be, decoded columns of Parquet or bytes of JSON lines; a
            single row may be larger. `torch.save` files and pickles stay whole. At most a 64th of
            what a file may take: decoded, JSON takes up to 25 times its bytes.

    Raises: `RecordError` naming the file that is gone.
    """
    most = max(1, min(piece_bytes, found.limit // lines.LINES))
    return [piece for file in found.files for piece in _of(file, found, most)]


def _of(file: str, found: Detected, piece_bytes: int) -> Iterator[Piece]:
    if file.endswith(".parquet"):
        wanted = found.columns or source(found.format).columns
        for start, stop in parquet.cuts(file, wanted, piece_bytes):
            yield Piece(file, start, stop, found.format, start + 1)
    elif file.endswith((".pt", ".pkl")):
        yield Piece(file, 0, size(file), found.format)
    else:
        for start, stop, first in lines.cuts(file, piece_bytes, found.limit):
            yield Piece(file, start, stop, found.format, first)


# Reading one piece of a log.


Malformed = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
"""What translating a row raises that is not what its source writes."""


def read(piece: Piece, found: Detected) -> Read:
    """The good rows of a piece as batches, and the others with what is wrong with them.

    Raises: `RecordError` naming a file that is gone; nothing in a file is an error.
    """
    kind = source(found.format)
    try:
        if piece.file.endswith(".parquet"):
            columns, bad = _parquet(piece, kind, found)
        elif piece.file.endswith((".pt", ".pkl")):
            columns, bad = _payload(piece, kind, found)
        else:
            columns, bad = _lines(piece, kind, found)
        if columns is None:
            return Read((), tuple(bad))
        batches, unusable = assemble(columns, file=piece.file, step=kind.step(piece.file))
    except (OSError, MemoryError) as e:  # a disk that fails, too little memory for what is there
        reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
        first = 0 if piece.first_row == 1 else piece.first_row
        return Read((), (BadRow(piece.file, first, f"cannot be read: {reason}", rows=0),))
    return Read(batches, (*bad, *unusable))


def _parquet(piece: Piece, kind: Source, found: Detected) -> tuple[Columns | None, list[BadRow]]:
    if kind.adapt is None:

        def wanted(schema: pa.Schema) -> dict[str, str]:
            return present(schema, kind.resolve(schema.names, _mapped(found)))

        parts, bad = parquet.read_rows(piece.file, piece.start, piece.stop, wanted, found.limit)
        return joined(parts), bad
    tables, bad = parquet.read_objects(piece.file, piece.start, piece.stop, found.limit)
    rows = [row for _, part in tables for row in part]
    numbers = [first + i for first, part in tables for i in range(len(part))]
    return _packed(rows, numbers, piece.file, kind, found, bad)


def _lines(piece: Piece, kind: Source, found: Detected) -> tuple[Columns | None, list[BadRow]]:
    data, long, stopped = lines.read_lines(piece.file, piece.start, piece.stop, found.limit)
    rows, numbers, bad = lines.decode(data, piece.first_row, piece.file, found.limit)
    bad += [BadRow(piece.file, piece.first_row + i, why) for i, why in long.items()]
    if stopped is not None:
        bad.append(BadRow(piece.file, piece.first_row + data.count(b"\n"), stopped, rows=0))
    return _packed(rows, numbers, piece.file, kind, found, bad)


def _payload(piece: Piece, kind: Source, found: Detected) -> tuple[Columns | None, list[BadRow]]:
    load = slime.load if piece.file.endswith(".pt") else skyrl.load
    rows: list[Row] = []
    with opened(piece.file) as f:
        try:
            rows += loaded(f, lambda f: _within(load(f, found.limit)[1], found.limit), piece.file)
        except RecordError as e:
            return None, [BadRow(piece.file, 0, str(e).removeprefix(f"{piece.file}: "), rows=0)]
    rows = [_wanted(row, found) for row in rows]
    columns, bad = pack(rows, range(1, len(rows) + 1), piece.file)
    return columns, bad


def _within(rows: Iterable[Row], limit: int) -> list[Row]:
    """All rows; `RecordError` where one list in many of them makes more than the file may take."""
    budget, kept = Budget(limit), []
    for row in rows:
        budget.spend(WIDTH * sum(len(x) for x in row.values() if hasattr(x, "__len__")))
        kept.append(row)
    return kept


def _packed(
    rows: Sequence[Mapping[str, Any]],
    numbers: Sequence[int],
    file: str,
    kind: Source,
    found: Detected,
    bad: list[BadRow],
) -> tuple[Columns | None, list[BadRow]]:
    translated: list[Row] = []
    kept: list[int] = []
    if kind.adapt is None:
        columns = kind.resolve(_names(rows), _mapped(found))
        translated, kept = [translate(row, columns) for row in rows], list(numbers)
        if kind.amend is not None:
            amended = map(kind.amend, rows, translated)
            translated = [_wanted(row, found) for row in amended]
    else:
        own = {n: c for n, c in found.columns.items() if n in PER_ROW and kind.columns.get(n) != c}
        for row, number in zip(rows, numbers, strict=True):
            try:
                mapped = {name: look_up(row, column) for name, column in own.items()}
                inside = kind.adapt(row)
                inside = inside if isinstance(inside, list) else [inside]
                translated += [_wanted({**r, **mapped}, found) for r in inside]
                kept += [number] * len(inside)
            except Malformed as e:
                bad.append(BadRow(file, number, f"no row of {kind.what}: {repr(e)[:200]}"))
    columns, wrong = pack(translated, kept, file)
    return columns, sorted([*bad, *wrong], key=lambda b: b.row)


def _mapped(found: Detected) -> dict[str, str]:
    """Column by field as detected; nothing for fields that are not to be read."""
    return {**found.columns, **dict.fromkeys(found.without, "")}


def _wanted(row: Row, found: Detected) -> Row:
    """A row without the fields that are not to be read."""
    if not found.without:
        return row
    return {name: x for name, x in row.items() if name not in found.without}


def _names(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    return set().union(*rows)
