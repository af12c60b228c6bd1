"""Fields of a protobuf message, without its schema: every length is checked before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

LONGEST_VARINT = 10
FIXED = {1: 8, 5: 4}
"""Bytes of the wire types of fixed length."""


class WireField(NamedTuple):
    """One field: its number and its value, a number for varints and bytes for everything else."""

    number: int
    value: int | bytes


def fields(message: bytes) -> Iterator[WireField]:
    """The fields of a message in order.

    Raises: `ValueError` if a field reaches beyond the message, or has a wire type that no message of today has.

    Example:
        >>> [*fields(bytes([0x10, 0x96, 0x01, 0x1A, 0x02, 0x68, 0x69]))]
        [WireField(number=2, value=150), WireField(number=3, value=b'hi')]
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        wire = key & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield WireField(key >> 3, value)
            continue
        if wire == 2:
            length, place = _varint(message, place)
        elif wire in FIXED:
            length = FIXED[wire]
        else:
            raise ValueError(f"a field of wire type {wire}")
        if place + length > len(message):
            raise ValueError(f"a field of {length} bytes where {len(message) - place} are left")
        yield WireField(key >> 3, message[place : place + length])
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for i in range(LONGEST_VARINT):
        if place + i >= len(message):
            raise ValueError("a number that is cut off")
        byte = message[place + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, place + i + 1
    raise ValueError("a number of more than ten bytes")


def signed(value: int) -> int:
    """A varint as the signed 64-bit number that it stands for."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
