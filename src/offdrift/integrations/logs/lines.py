"""JSON lines: where to cut a file, and decoding lines that may each fail alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from offdrift.integrations.logs.files import opened
from offdrift.integrations.logs.types import BadRow

try:
    import orjson
except ImportError:
    orjson = None

BLOCK = 8 << 20
INFLATED = 64 << 10
"""Bytes that are decompressed at once: of a damaged stream, this much before the damage is lost."""
LARGEST = 4 << 30
"""Bytes that a compressed file may grow to: it is read whole."""

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


def compression(file: str) -> str | None:
    """The compression that a file's name tells."""
    return next((kind for suffix, kind in COMPRESSED.items() if file.endswith(suffix)), None)


def cuts(file: str, piece_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, number of the first line) of consecutive pieces that end where a line ends."""
    start, at, first, line, last = 0, 0, 1, 1, True
    with opened(file) as f:
        while block := f.read(BLOCK):
            begin = 0
            while (end := _cut(block, begin, start + piece_bytes - at)) >= 0:
                line += block.count(b"\n", begin, end)
                yield start, at + end, first
                start, first, begin = at + end, line, end
            line += block.count(b"\n", begin)
            at += len(block)
            last = False
    if start < at or last:
        yield start, at, first


def _cut(block: bytes, begin: int, wanted: int) -> int:
    """Where the first line ends that reaches `wanted`, or -1."""
    if wanted > len(block):
        return -1
    end = block.find(b"\n", max(begin, wanted - 1))
    return -1 if end < 0 else end + 1


def read_lines(file: str, start: int, stop: int) -> tuple[bytes, str | None]:
    """The bytes of a piece, and what stopped reading early, if anything did.

    Args:
        start, stop: range of bytes; of a compressed file, the first `stop` decompressed bytes.
    """
    kind = compression(file)
    with opened(file) as f:
        if kind is None:
            f.seek(start)
            return f.read(stop - start), None
        parts: list[bytes] = []
        held = 0
        try:
            with pa.input_stream(f, compression=kind) as stream:
                while held < stop and (block := stream.read(INFLATED)):
                    parts.append(block)
                    held += len(block)
        except (OSError, ValueError) as e:
            return b"".join(parts), f"the compressed stream is damaged or cut off: {e}"
        return b"".join(parts), None


def decode(
    data: bytes, first: int, file: str
) -> tuple[list[dict[str, Any]], list[int], list[BadRow]]:
    """The objects in the lines, the numbers of their lines, and the lines that hold none."""
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    bad: list[BadRow] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), first):
        if not line.strip():
            continue
        try:
            row = loads(line)
        except (ValueError, RecursionError) as e:
            bad.append(BadRow(file, number, f"not JSON: {e}"))
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
