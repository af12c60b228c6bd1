"""JSON lines: where to cut a file, and decoding lines that may each fail alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from offdrift.errors import RecordError
from offdrift.records.readers.files import LIMIT, LINES, BadRow, Resume, fingerprint, opened, too_large

try:
    import orjson
except ImportError:
    orjson = None

BLOCK = 8 << 20
INFLATED = 64 << 10
"""Bytes that are decompressed at once: of a damaged stream, this much before the damage is lost."""

Stopped = (OSError, ValueError, MemoryError)
"""What ends a file early: a disk that fails, a compressed stream that is damaged."""

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


def compression(file: str) -> str | None:
    """The compression that a file's name tells."""
    return next((kind for suffix, kind in COMPRESSED.items() if file.endswith(suffix)), None)


def cuts(file: str, piece_bytes: int, limit: int = LIMIT) -> Iterator[tuple[int, int, int]]:
    """(start, stop, number of the first line) of consecutive pieces that end where a line ends.

    A file that cannot be read to its end, or is compressed and larger than `limit`, has one byte more in its last
    piece, where its reader will find what stops it.
    """
    start, at, first, line, last = 0, 0, 1, 1, True
    packed = compression(file) is not None
    try:
        for block in _blocks(file, 0):
            if packed and at + len(block) > limit:
                at = max(at, limit)
                raise EOFError
            begin = 0
            # The first line that reaches the size of a piece ends the piece.
            while (wanted := start + piece_bytes - at) <= len(block):
                if (end := block.find(b"\n", max(begin, wanted - 1)) + 1) == 0:
                    break
                line += block.count(b"\n", begin, end)
                yield start, at + end, first
                start, first, begin = at + end, line, end
            line += block.count(b"\n", begin)
            at += len(block)
            last = False
    except RecordError:
        raise
    except (*Stopped, EOFError):
        yield start, at + 1, first
        return
    if start < at or last:
        yield start, at, first


_resume = Resume()
"""Where the last reading of a compressed file stopped. Such a file has no entrance in the middle."""


def _blocks(file: str, start: int) -> Iterator[bytes]:
    """A file from a byte on; of a compressed file, from a decompressed byte on."""
    kind = compression(file)
    with opened(file) as f:
        if kind is None:
            f.seek(start)
            while block := f.read(BLOCK):
                yield block
            return
        import pyarrow as pa

        with pa.input_stream(f, compression=kind) as stream:
            at = 0
            while block := stream.read(INFLATED):
                at += len(block)
                if at > start:
                    yield block[max(len(block) - (at - start), 0) :]


def read_lines(file: str, start: int, stop: int, limit: int = LIMIT) -> tuple[bytes, dict[int, str], str | None]:
    """The lines of a piece, those that are left out, and what stopped reading early.

    Args:
        start, stop: range of bytes, decompressed ones of a compressed file.
        limit: what a compressed file may decompress to; a line may have `1 / LINES` of it.

    Returns: the bytes, an empty line for each that is left out; by number in the piece, from 0, why lines are left
        out; and why there is no more, if there should be.
    """
    kept = _Kept(limit // LINES)
    packed = compression(file) is not None
    end = min(stop, limit) if packed else stop
    stopped = None
    try:
        if not packed and end - start <= 2 * kept.most:  # `decode` leaves out what is too long
            with opened(file) as f:
                f.seek(start)
                return f.read(end - start), {}, None
        key = (fingerprint(file), start) if packed else ()
        blocks = _resume.rest if key and _resume.key == key else _blocks(file, start)
        _resume.key = ()
        at = start
        while at < end and (block := next(blocks, b"")):
            inside, rest = block[: end - at], block[end - at :]
            at += len(inside)
            if key and at == end:
                _resume.key, _resume.rest = (key[0], end), chain([rest] if rest else [], blocks)
            kept.add(inside)
    except RecordError:
        raise
    except Stopped as e:
        what = "the compressed stream is damaged or cut off" if packed else "the rest cannot be read"
        stopped = f"{what}: {e or type(e).__name__}"
    if end < stop and stopped is None:
        kept.drop_unfinished()
        stopped = too_large("the file decompresses to", limit)
    return b"".join(kept.parts), kept.long, stopped


class _Kept:
    """Lines that come in blocks, without those that are too long."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.parts: list[memoryview] = []
        self.long: dict[int, str] = {}
        """Why a line is left out, by its number from 0."""
        self.number = self.length = self.begun = 0

    def add(self, block: bytes) -> None:
        """The next block. Only a line that spans blocks is looked at: one block is no burden."""
        first, last = block.find(b"\n") + 1, block.rfind(b"\n") + 1
        view = memoryview(block)
        self._go_on(view[:first] if first else view, ends=first > 0)
        if first:
            self.parts.append(view[first:last])
            self.number += block.count(b"\n")
            self.length, self.begun = 0, len(self.parts)
            self._go_on(view[last:], ends=False)

    def _go_on(self, part: memoryview, *, ends: bool) -> None:
        self.length += len(part)
        if self.length <= self.most:
            self.parts.append(part)
            return
        self.drop_unfinished()
        self.long[self.number] = too_large("the line has", self.most)
        if ends:
            self.parts.append(memoryview(b"\n"))

    def drop_unfinished(self) -> None:
        """Without what is there of the last line."""
        del self.parts[self.begun :]


def decode(
    data: bytes, first: int, file: str, limit: int = LIMIT
) -> tuple[list[dict[str, Any]], list[int], list[BadRow]]:
    """The objects in the lines, the numbers of their lines, and the lines that hold none."""
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    bad: list[BadRow] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), first):
        if not line.strip():
            continue
        if len(line) > limit // LINES:
            bad.append(BadRow(file, number, too_large("the line has", limit // LINES)))
            continue
        try:
            row = loads(line)
        except (ValueError, RecursionError, MemoryError) as e:
            bad.append(BadRow(file, number, f"not JSON: {e or type(e).__name__}"))
            continue
        if isinstance(row, dict):
            rows.append(row)
            numbers.append(number)
        else:
            bad.append(BadRow(file, number, f"a JSON {type(row).__name__}, expected an object"))
    return rows, numbers, bad


def loads(line: bytes) -> Any:
    """A line of JSON; NaN and Infinity, which Python writes and JSON does not know, are allowed."""
    if orjson is not None:
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            pass
    return json.loads(line.decode())
