"""Scalars of TensorBoard's event files.

A file is a row of records: length (8 bytes), its checksum (4), the event (a protobuf message), its checksum (4). An
event has a step and a summary of values, each with a tag. Records that are too large for scalars (images, graphs) are
skipped unread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from offdrift.records.readers.files import BadRow, opened, size
from offdrift.records.readers.metrics.protobuf import fields, signed
from offdrift.records.readers.metrics.rows import MetricRow

LARGEST_RECORD = 1 << 20
CASTAGNOLI = 0x82F63B78
STEP, SUMMARY = 2, 5
"""Fields of an event."""
VALUE = 1
"""Field of a summary."""
TAG, SIMPLE_VALUE, TENSOR = 1, 2, 8
"""Fields of a value."""
CONTENT, FLOATS, DOUBLES = 4, 5, 6
"""Fields of a tensor: raw bytes, and packed numbers."""


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return tuple(table)


CRC = _table()


def masked_crc(data: bytes) -> int:
    """The checksum of these files: CRC-32C, rotated by 15 bits and shifted by a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def event_rows(file: str, bad: list[BadRow]) -> Iterator[MetricRow]:
    """The scalars of an event file, a row for each summary; what is damaged ends the file."""
    left, number = size(file), 0
    with opened(file) as f:
        while header := f.read(12):
            number += 1
            left -= 12
            if len(header) < 12:
                bad.append(BadRow(file, number, "the file ends inside a record: cut off, or being written", rows=0))
                return
            length, crc = struct.unpack("<QI", header)
            if masked_crc(header[:8]) != crc:
                bad.append(BadRow(file, number, "the length of a record is damaged, and with it the rest", rows=0))
                return
            left -= length + 4
            if left < 0:
                bad.append(BadRow(file, number, "the file ends inside a record: cut off, or being written", rows=0))
                return
            if length > LARGEST_RECORD:
                f.seek(length + 4, 1)
                continue
            event, check = f.read(length), f.read(4)
            if len(check) < 4 or masked_crc(event) != struct.unpack("<I", check)[0]:
                bad.append(BadRow(file, number, "a record is damaged: its checksum differs"))
                continue
            try:
                values = _scalars(event)
            except ValueError as e:
                bad.append(BadRow(file, number, f"no event: {e}"))
                continue
            if len(values) > 1:
                yield MetricRow(number, values)


def _scalars(event: bytes) -> dict[str, float | int]:
    """The scalars of an event by tag, and its step."""
    values: dict[str, float | int] = {"step": 0}
    for number, value in fields(event):
        if number == STEP and isinstance(value, int):
            values["step"] = signed(value)
        elif number == SUMMARY and isinstance(value, bytes):
            for inner, summary_value in fields(value):
                if inner == VALUE and isinstance(summary_value, bytes):
                    values |= _scalar(summary_value)
    return values


def _scalar(summary_value: bytes) -> dict[str, float | int]:
    tag, scalar = "", None
    for number, value in fields(summary_value):
        if not isinstance(value, bytes):
            continue
        if number == TAG:
            tag = value.decode("utf-8", "replace")
        elif number == SIMPLE_VALUE and len(value) == 4:
            scalar = struct.unpack("<f", value)[0]
        elif number == TENSOR:
            scalar = _tensor(value)
    return {tag: scalar} if tag and tag != "step" and scalar is not None else {}


def _tensor(tensor: bytes) -> float | None:
    """The one number of a tensor; None if it holds none or several."""
    formats = {FLOATS: {4: "<f"}, DOUBLES: {8: "<d"}, CONTENT: {4: "<f", 8: "<d"}}
    for number, value in fields(tensor):
        if isinstance(value, bytes) and (form := formats.get(number, {}).get(len(value))):
            return struct.unpack(form, value)[0]
    return None
