"""Cutting logs into pieces that fit memory, and reading one piece."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from offdrift.errors import RecordError
from offdrift.records.readers import jsonl, parquet
from offdrift.records.readers.assemble import assemble
from offdrift.records.readers.columns import Columns, Row, joined, pack
from offdrift.records.readers.files import BadRow, Budget, Bytes, Detected, Piece, Read, opened, size
from offdrift.records.readers.formats.table import PAYLOADS, PER_ROW, Source, function, source

PIECE_BYTES = 64 << 20

Malformed = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What translating a row raises that is not what its source writes."""


def pieces(detected: Detected, *, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Every piece of the logs, in order; the files alone decide where the cuts are.

    Args:
        detected: what `detect` returned.
        piece_bytes: how large a piece may be, decoded columns of Parquet or bytes of JSON lines; a single row may be
            larger. `torch.save` files and pickles stay whole. At most a 64th of what a file may take: decoded, JSON
            takes up to 25 times its bytes.

    Raises: `RecordError` naming the file that is gone.
    """
    most = max(1, min(piece_bytes, detected.limit // jsonl.LINES))
    listed: list[Piece] = []
    for file in detected.files:
        if file.endswith(".parquet"):
            ranges = parquet.cuts(file, detected.columns or source(detected.format).columns, most)
            listed += [Piece(file, start, stop, detected.format, start + 1) for start, stop in ranges]
        elif os.path.splitext(file)[1] in PAYLOADS:
            listed.append(Piece(file, 0, size(file), detected.format))
        else:
            cuts = jsonl.cuts(file, most, detected.limit)
            listed += [Piece(file, start, stop, detected.format, first) for start, stop, first in cuts]
    return listed


def read(piece: Piece, detected: Detected) -> Read:
    """The good rows of a piece as batches, and the others with what is wrong with them.

    Raises: `RecordError` naming a file that is gone; nothing in a file is an error.
    """
    kind = source(detected.format)
    try:
        columns, bad = _decoded(piece, kind, detected)
        if columns is None:
            return Read((), tuple(bad))
        batches, unusable = assemble(columns, file=piece.file, step=kind.step(piece.file))
    except (OSError, MemoryError) as e:  # a disk that fails, too little memory for what is there
        reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
        first = 0 if piece.first_row == 1 else piece.first_row
        return Read((), (BadRow(piece.file, first, f"cannot be read: {reason}", rows=0),))
    return Read(batches, (*bad, *unusable))


def _decoded(piece: Piece, kind: Source, detected: Detected) -> tuple[Columns | None, list[BadRow]]:
    """A piece as columns of the plain schema, None if there is nothing to decode, and what cannot be decoded."""
    file, start, stop, limit = piece.file, piece.start, piece.stop, detected.limit
    mapped = {**detected.columns, **dict.fromkeys(detected.without, "")}
    if file.endswith(".parquet") and not kind.adapt:

        def wanted(schema: pa.Schema) -> dict[str, str]:
            return parquet.present(schema, kind.resolve(schema.names, mapped))

        parts, bad = parquet.read_rows(file, start, stop, wanted, limit)
        return joined(parts), bad
    if os.path.splitext(file)[1] in PAYLOADS:
        with opened(file) as f:
            try:
                samples = payload(f, file, limit)[1]
            except RecordError as e:
                return None, [BadRow(file, 0, str(e).removeprefix(f"{file}: "), rows=0)]
        return pack([_wanted(row, detected) for row in samples], range(1, len(samples) + 1), file)
    if file.endswith(".parquet"):
        tables, bad = parquet.read_objects(file, start, stop, limit)
        rows = [row for _, part in tables for row in part]
        numbers = [first + i for first, part in tables for i in range(len(part))]
    else:
        data, long, stopped = jsonl.read_lines(file, start, stop, limit)
        rows, numbers, bad = jsonl.decode(data, piece.first_row, file, limit)
        bad += [BadRow(file, piece.first_row + i, why) for i, why in long.items()]
        if stopped is not None:
            bad.append(BadRow(file, piece.first_row + data.count(b"\n"), stopped, rows=0))
    if kind.adapt:
        adapt, translated, kept = function(kind.adapt), [], []
        own = {n: c for n, c in detected.columns.items() if n in PER_ROW and kind.columns.get(n) != c}
        for row, number in zip(rows, numbers, strict=True):
            try:
                per_row = {name: look_up(row, column) for name, column in own.items()}
                inside = adapt(row)
                inside = inside if isinstance(inside, list) else [inside]
                translated += [_wanted({**r, **per_row}, detected) for r in inside]
                kept += [number] * len(inside)
            except Malformed as e:
                bad.append(BadRow(file, number, f"no row of {kind.what}: {repr(e)[:200]}"))
        numbers = kept
    else:
        names = kind.resolve(set().union(*rows), mapped)
        translated = [{name: look_up(row, column) for name, column in names.items()} for row in rows]
        if kind.amend:
            translated = [_wanted(row, detected) for row in map(function(kind.amend), rows, translated)]
    columns, wrong = pack(translated, numbers, file)
    return columns, sorted([*bad, *wrong], key=lambda b: b.row)


def payload(file: Bytes, name: str, limit: int, *, rows: bool = True) -> tuple[Source, list[Row]]:
    """The kind of log that a file of `torch.save` or a pickle is, and its rows.

    Args:
        file: opened for reading.
        name: of the file; its suffix tells how it is read.
        limit: bytes that it may take in memory, one list that is repeated in many rows counted in each of them.
        rows: whether the rows are wanted.

    Raises: `RecordError` naming the file, whatever is wrong with it.
    """
    load = function(PAYLOADS[os.path.splitext(name)[1]])
    budget = Budget(limit)
    kept: list[Row] = []
    try:
        kind, samples = load(file, limit)
        for row in samples if rows else ():
            budget.spend(parquet.WIDTH * sum(len(x) for x in row.values() if hasattr(x, "__len__")))
            kept.append(row)
    except RecordError as e:
        raise type(e)(f"{name}: {e}") from e
    # Hostile or damaged bytes make an unpickler raise anything.
    except Exception as e:
        raise RecordError(f"{name} is damaged, or no log: {repr(e)[:200]}") from e
    return kind, kept


def look_up(row: Mapping[str, Any], name: str) -> Any:
    """A value by its key, or by dotted keys into objects; None if it is not there."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _wanted(row: Row, detected: Detected) -> Row:
    """A row without the fields that are not to be read."""
    return {name: x for name, x in row.items() if name not in detected.without} if detected.without else row
