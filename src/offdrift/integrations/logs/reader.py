"""Reading one piece of a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from offdrift.errors import RecordError
from offdrift.integrations.logs import lines, parquet, skyrl, slime
from offdrift.integrations.logs.arrow import present
from offdrift.integrations.logs.assemble import assemble
from offdrift.integrations.logs.columns import Columns, joined
from offdrift.integrations.logs.files import opened
from offdrift.integrations.logs.look import loaded
from offdrift.integrations.logs.rows import Row, pack
from offdrift.integrations.logs.source import PER_ROW, Source, look_up, translate
from offdrift.integrations.logs.sources import source
from offdrift.integrations.logs.types import BadRow, Detected, Piece, Read

Malformed = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What translating a row raises that is not what its source writes."""


def read(piece: Piece, found: Detected) -> Read:
    """The good rows of a piece as one batch, and the others with what is wrong with them.

    Raises: `RecordError` naming a file that is gone; nothing in a file is an error.
    """
    kind = source(found.format)
    if piece.file.endswith(".parquet"):
        columns, bad = _parquet(piece, kind, found)
    elif piece.file.endswith((".pt", ".pkl")):
        columns, bad = _payload(piece, kind, found)
    else:
        columns, bad = _lines(piece, kind, found)
    if columns is None:
        return Read(None, tuple(bad))
    batch, unusable = assemble(columns, file=piece.file, step=kind.step(piece.file))
    return Read(batch, (*bad, *unusable))


def _parquet(piece: Piece, kind: Source, found: Detected) -> tuple[Columns | None, list[BadRow]]:
    if kind.adapt is None:

        def wanted(schema: pa.Schema) -> dict[str, str]:
            return present(schema, kind.resolve(schema.names, found.columns))

        parts, bad = parquet.read_rows(piece.file, piece.start, piece.stop, wanted)
        return joined(parts), bad
    tables, bad = parquet.read_objects(piece.file, piece.start, piece.stop)
    rows = [row for _, part in tables for row in part]
    numbers = [first + i for first, part in tables for i in range(len(part))]
    return _packed(rows, numbers, piece.file, kind, found, bad)


def _lines(piece: Piece, kind: Source, found: Detected) -> tuple[Columns | None, list[BadRow]]:
    stop = lines.LARGEST if lines.compression(piece.file) else piece.stop
    data, stopped = lines.read_lines(piece.file, piece.start, stop)
    rows, numbers, bad = lines.decode(data, piece.first_row, piece.file)
    if stopped is None and lines.compression(piece.file) and len(data) >= stop:
        stopped = f"the file decompresses to {stop >> 30} GiB or more; decompress it on disk"
    if stopped is not None:
        bad.append(BadRow(piece.file, piece.first_row + data.count(b"\n"), stopped))
    return _packed(rows, numbers, piece.file, kind, found, bad)


def _payload(piece: Piece, kind: Source, found: Detected) -> tuple[Columns | None, list[BadRow]]:
    load = slime.load if piece.file.endswith(".pt") else skyrl.load
    rows: list[Row] = []
    with opened(piece.file) as f:
        try:
            rows += loaded(f, lambda f: list(load(f)[1]), piece.file)
        except RecordError as e:
            return None, [BadRow(piece.file, 0, str(e).removeprefix(f"{piece.file}: "))]
    columns, bad = pack(rows, range(1, len(rows) + 1), piece.file)
    return columns, bad


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
        columns = kind.resolve(_names(rows), found.columns)
        translated, kept = [translate(row, columns) for row in rows], list(numbers)
    else:
        own = {n: c for n, c in found.columns.items() if n in PER_ROW and kind.columns.get(n) != c}
        for row, number in zip(rows, numbers, strict=True):
            try:
                mapped = {name: look_up(row, column) for name, column in own.items()}
                translated.append({**kind.adapt(row), **mapped})
                kept.append(number)
            except Malformed as e:
                bad.append(BadRow(file, number, f"no row of {kind.what}: {e!r}"))
    columns, wrong = pack(translated, kept, file)
    return columns, sorted([*bad, *wrong], key=lambda b: b.row)


def _names(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    return set().union(*rows)
