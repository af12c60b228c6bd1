"""Cutting logs into pieces that fit memory."""

from __future__ import annotations

from collections.abc import Iterator

from offdrift.integrations.logs import lines, parquet
from offdrift.integrations.logs.files import size
from offdrift.integrations.logs.sources import source
from offdrift.integrations.logs.types import Detected, Piece

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
