"""History of W&B's run files, `run-ID.wandb`: what a run logs before, or without, a server.

A file has a header of 7 bytes, then blocks of 32 KiB with records: checksum (4 bytes), length (2), kind (1: whole; 2 to
4: first, middle and last part), and data. Put together, data is a protobuf message; that of `wandb.log` holds pairs of
a name and a value in JSON.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

from offdrift import texts
from offdrift.errors import RecordError
from offdrift.records.readers.files import BadRow, opened
from offdrift.records.readers.metrics.protobuf import fields
from offdrift.records.readers.metrics.rows import MetricRow

IDENTITY = b":W&B"
HEADER = 7
BLOCK = 32768
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
LARGEST_MESSAGE = 16 << 20
HISTORY = 2
"""Field of a record."""
ITEM, HISTORY_STEP = 1, 2
"""Fields of a history."""
KEY, NESTED_KEY, VALUE_JSON = 1, 2, 16
"""Fields of an item."""


def wandb_rows(file: str, bad: list[BadRow]) -> Iterator[MetricRow]:
    """A row for each call of `wandb.log`; a record that is damaged ends the file.

    Raises: `RecordError` if it is no such file.
    """
    for number, message in enumerate(_messages(file, bad), 1):
        try:
            values = _history(message)
        except ValueError as e:
            bad.append(BadRow(file, number, f"no record of W&B: {e}"))
            continue
        if values:
            yield MetricRow(number, values)


def _messages(file: str, bad: list[BadRow]) -> Iterator[bytes]:
    """The messages of a file, put together from their parts; an empty one stands for one that is too large."""
    with opened(file) as f:
        if not f.read(HEADER).startswith(IDENTITY):
            raise RecordError(
                f"{file} is no run file of W&B: it does not begin as one; export the run's history "
                "(run.scan_history of its API) as JSON lines or CSV"
            )
        parts, length_so_far, place, number = list[bytes](), 0, HEADER, 0
        while True:
            room = BLOCK - place % BLOCK
            if room < HEADER:
                f.read(room)
                place += room
            header = f.read(HEADER)
            if not header:
                return
            number += 1
            if len(header) < HEADER:
                bad.append(BadRow(file, number, "the file ends inside a record: cut off, or being written", rows=0))
                return
            crc, length, kind = struct.unpack("<IHB", header)
            data = f.read(length)
            place += HEADER + length
            if len(data) < length:
                bad.append(BadRow(file, number, "the file ends inside a record: cut off, or being written", rows=0))
                return
            if kind not in (WHOLE, FIRST, MIDDLE, LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
                bad.append(BadRow(file, number, "a record is damaged, and with it the rest of the file", rows=0))
                return
            if kind in (WHOLE, FIRST):
                parts, length_so_far = [], 0
            length_so_far += length
            if length_so_far <= LARGEST_MESSAGE:
                parts.append(data)
            if kind in (WHOLE, LAST):
                yield b"".join(parts) if length_so_far <= LARGEST_MESSAGE else b""


def _history(message: bytes) -> dict[str, Any]:
    """Values by name of a record of history; empty for every other record."""
    for number, value in fields(message):
        if number == HISTORY and isinstance(value, bytes):
            return _items(value)
    return {}


def _items(history: bytes) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number, value in fields(history):
        if not isinstance(value, bytes):
            continue
        if number == ITEM:
            name, content = _item(value)
            values[name] = content
        elif number == HISTORY_STEP:
            values.setdefault("_step", next((v for n, v in fields(value) if n == 1), 0))
    return values


def _item(item: bytes) -> tuple[str, Any]:
    key, nested, content = "", list[str](), None
    for number, value in fields(item):
        if not isinstance(value, bytes):
            continue
        if number == KEY:
            key = value.decode("utf-8", "replace")
        elif number == NESTED_KEY:
            nested.append(value.decode("utf-8", "replace"))
        elif number == VALUE_JSON and len(value) < 100:  # a number is shorter; media and tables are not read
            content = texts.parse_json(value)
    return key or ".".join(nested), content
