"""Many small files at once: what an audit does once for each batch costs more than reading a small file.

Neighboring files that are pieces of their own are one piece together (`bundled`), and their batches become one where
they hold the same fields (`joined`). Where the cuts are depends on the files alone, so parts that are stored are the
same whoever reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from offdrift.audit.shapes import rank_of
from offdrift.records.batch import ROW_BITS, Logged
from offdrift.records.readers import Piece
from offdrift.records.schema import FIELDS
from offdrift.segments import cumulative

BUNDLE_BYTES = 16 << 20
"""Bytes of files that are read at once."""
SMALL_BYTES = 4 << 20
"""Bytes of a small file."""
PACKED = 8
"""Times its bytes that a file of Parquet counts: it is compressed."""
APART = 0x5851F42D4C957F2D
"""Group ids of each file are shifted by a multiple of it: files may count their groups alike."""


def bundled(pieces: Sequence[Piece], sizes: Mapping[str, int]) -> list[Piece]:
    """Pieces of which neighbors that are small files are one.

    Args:
        sizes: bytes of each file.

    Example:
        >>> pieces = [Piece(f"{i}.jsonl", 0, 9, "plain") for i in range(3)]
        >>> [[p.file for p in piece.each] for piece in bundled(pieces, {"0.jsonl": 9, "1.jsonl": 9, "2.jsonl": 2**30})]
        [['0.jsonl', '1.jsonl'], ['2.jsonl']]
    """
    of_file = Counter(piece.file for piece in pieces)
    bundles: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        size = _size(piece, sizes) if of_file[piece.file] == 1 else SMALL_BYTES + 1
        if size > SMALL_BYTES or size > room:
            bundles.append([])
            room = BUNDLE_BYTES if size <= SMALL_BYTES else 0
        bundles[-1].append(piece)
        room -= size
    return [replace(first, more=tuple(rest)) for first, *rest in bundles]


def _size(piece: Piece, sizes: Mapping[str, int]) -> int:
    """Bytes of a file that is one piece, about as many as it has unpacked."""
    stored = sizes.get(piece.file, SMALL_BYTES + 1)
    if piece.file.endswith(".parquet"):
        return PACKED * stored
    return max(stored, piece.stop - piece.start)


def joined(batches: Sequence[tuple[int, Logged]], files: Sequence[str]) -> list[Logged]:
    """Batches of several files as few: those that hold the same fields are one.

    The rows of file `i` have `i << ROW_BITS` added, see `records.batch.origin`, and its groups are groups of their own.

    Args:
        batches: each with the place of its file in `files`.
    """
    alike: dict[Any, list[Logged]] = {}
    for i, batch in batches:
        ids = batch.group_ids
        placed = replace(
            batch, row=batch.row + (i << ROW_BITS), group_ids=None if ids is None else ids ^ (i * APART % 2**62)
        )
        key = (batch.length_unit, *batch.unscored, *batch.divergences, *_held(batch), bool(rank_of(files[i])))
        alike.setdefault(key, []).append(placed)
    return [batches[0] if len(batches) == 1 else _joined(batches) for batches in alike.values()]


def _held(batch: Logged) -> list[tuple[str, object]]:
    """Fields that a batch holds, and how."""
    values = ((f.name, getattr(batch, f.name)) for f in FIELDS)
    return [(name, getattr(x, "dtype", None)) for name, x in values if x is not None]


def _joined(batches: Sequence[Logged]) -> Logged:
    first, values = batches[0], {}
    for f in FIELDS:
        columns = [getattr(batch, f.name) for batch in batches]
        if isinstance(columns[0], tuple):
            values[f.name] = tuple(text for column in columns for text in column)
        else:
            values[f.name] = None if columns[0] is None else torch.cat(columns)
    return Logged(
        cu_seqlens=cumulative(torch.cat([batch.cu_seqlens.diff() for batch in batches])),
        length_unit=first.length_unit,
        divergences={name: torch.cat([b.divergences[name] for b in batches]) for name in first.divergences},
        unscored={name: torch.cat([b.unscored[name] for b in batches]) for name in first.unscored},
        **values,
    )
