"""Parquet files that say of themselves what is not so, byte by byte: no library writes them.

One column `logp_rollout` (and others) of lists; every page is a run of one value, so that it takes no space.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
FLOAT, REQUIRED, REPEATED = 4, 0, 2


def varint(x: int) -> bytes:
    out = bytearray()
    while x > 0x7F:
        out.append(x & 0x7F | 0x80)
        x >>= 7
    return bytes([*out, x])


def zigzag(x: int) -> bytes:
    return varint(x << 1 if x >= 0 else (-x << 1) - 1)


def struct_of(*fields: tuple[int, int, object]) -> bytes:
    """A Thrift struct in the compact protocol: number, type and value of each field."""
    out, last = b"", 0
    for number, kind, value in fields:
        out += bytes([(number - last) << 4 | kind]) + encoded(kind, value)
        last = number
    return out + b"\0"


def encoded(kind: int, value: object) -> bytes:
    if kind in (I32, I64):
        return zigzag(value)
    if kind == BINARY:
        return varint(len(value)) + value
    if kind == LIST:
        element, items = value
        head = bytes([min(len(items), 15) << 4 | element]) + (varint(len(items)) if len(items) > 14 else b"")
        return head + b"".join(encoded(element, x) for x in items)
    return value  # a struct


def page_of(values: int, rows: int = 1) -> bytes:
    """A data page with so many zeros in `rows` lists, the last of which has all but one of each other."""
    first = varint(rows << 1) + b"\0" + varint((values - rows) << 1) + b"\1"
    inside = varint(values << 1) + b"\1"
    levels = b"".join(struct.pack("<I", len(x)) + x for x in (first, inside))
    body = levels + b"\1" + varint(values << 1) + b"\0"
    data = struct_of((1, I32, values), (2, I32, 8), (3, I32, 3), (4, I32, 3))
    return struct_of((1, I32, 0), (2, I32, len(body)), (3, I32, len(body)), (5, STRUCT, data)) + body


def dictionary_page() -> bytes:
    body = struct.pack("<f", -1.0)
    inside = struct_of((1, I32, 1), (2, I32, 0))
    return struct_of((1, I32, 2), (2, I32, 4), (3, I32, 4), (7, STRUCT, inside)) + body


def write(
    path: Path,
    pages: Sequence[int],
    *,
    claimed: int | None = None,
    groups: int = 1,
    columns: Sequence[str] = ("logp_rollout", "logp"),
) -> None:
    """A file whose row groups share the same pages, of one row each.

    Args:
        pages: values of each data page.
        claimed: values that the footer says; None: as many as there are.
    """
    chunk = dictionary_page() + b"".join(page_of(n, rows=int(i == 0)) for i, n in enumerate(pages))
    first = len(dictionary_page())
    at, told = 4, sum(pages) if claimed is None else claimed
    schema = [struct_of((4, BINARY, b"schema"), (5, I32, len(columns)))]
    for name in columns:
        schema += [
            struct_of((3, I32, REQUIRED), (4, BINARY, name.encode()), (5, I32, 1), (6, I32, 3)),
            struct_of((3, I32, REPEATED), (4, BINARY, b"list"), (5, I32, 1)),
            struct_of((1, I32, FLOAT), (3, I32, REQUIRED), (4, BINARY, b"element")),
        ]

    def column(i: int, name: str) -> bytes:
        start = at + i * len(chunk)
        about = struct_of(
            (1, I32, FLOAT), (2, LIST, (I32, [8, 3])), (3, LIST, (BINARY, [name.encode(), b"list", b"element"])),
            (4, I32, 0), (5, I64, told), (6, I64, len(chunk)), (7, I64, len(chunk)),
            (9, I64, start + first), (11, I64, start),
        )  # fmt: skip
        return struct_of((2, I64, start), (3, STRUCT, about))

    listed = [column(i, name) for i, name in enumerate(columns)]
    group = struct_of((1, LIST, (STRUCT, listed)), (2, I64, len(chunk) * len(columns)), (3, I64, 1))
    footer = struct_of(
        (1, I32, 1), (2, LIST, (STRUCT, schema)), (3, I64, groups), (4, LIST, (STRUCT, [group] * groups))
    )
    path.write_bytes(b"PAR1" + chunk * len(columns) + footer + struct.pack("<I", len(footer)) + b"PAR1")
