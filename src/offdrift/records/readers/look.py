"""A first look at a file: the names in it, and what gives it away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import pyarrow as pa

from offdrift.errors import RecordError
from offdrift.records.readers import parquet
from offdrift.records.readers.arrow import is_list, is_number, type_of
from offdrift.records.readers.files import Bytes, missing, opened
from offdrift.records.readers.formats import skyrl, slime
from offdrift.records.readers.formats.base import Source, look_up
from offdrift.records.readers.formats.table import OWN, OWN_ROLLOUTS, STORED, header
from offdrift.records.readers.jsonl import LINES, decode, read_lines
from offdrift.records.readers.types import LIMIT

Loaded = TypeVar("Loaded")

HEAD = 1 << 20
"""Bytes that a first look reads of a JSONL file; more if its first line is longer."""


class Look(NamedTuple):
    """What a file seems to hold."""

    names: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    """Dotted names inside objects."""
    numeric: tuple[str, ...] = ()
    """Of both, those that hold numbers or lists of numbers."""
    single: tuple[str, ...] = ()
    """Of all, those that hold no list in any row; of JSON, where no schema says so."""
    source: Source | None = None
    """Known without looking at the names."""
    framework: str | None = None
    """As a header states it."""
    schema: pa.Schema | None = None
    """Of Parquet."""


def look(file: str, limit: int = LIMIT) -> Look:
    """A first look at a file; `RecordError` if it cannot be read as what its name says.

    Args:
        file: its path.
        limit: bytes that it may take in memory.
    """
    try:
        if file.endswith(".parquet"):
            return _parquet(file)
        if file.endswith((".pt", ".pkl")):
            load = slime.load if file.endswith(".pt") else skyrl.load
            with opened(file) as f:
                return Look(source=loaded(f, lambda f: load(f, limit), file)[0])
        return _lines(file, limit)
    except (OSError, MemoryError) as e:
        raise missing(file, e) from e


def _parquet(file: str) -> Look:
    schema = parquet.schema(file)
    names, inner = tuple(schema.names), tuple(_inner(schema))
    numeric = tuple(n for n in (*names, *inner) if _of_numbers(type_of(schema, n)))
    if (stated := header(schema.metadata)) is not None:
        framework = stated.get("framework")
        framework = framework if isinstance(framework, str) else None
        return Look(names, inner, numeric, source=OWN, framework=framework, schema=schema)
    if schema.metadata and STORED in schema.metadata:
        return Look(names, inner, numeric, source=OWN_ROLLOUTS, schema=schema)
    return Look(names, inner, numeric, schema=schema)


def _of_numbers(kind: pa.DataType | None) -> bool:
    if kind is None or pa.types.is_null(kind):
        return False
    return is_number(kind.value_type if is_list(kind) else kind)


def _inner(schema: pa.Schema) -> list[str]:
    structs = [f for f in schema if pa.types.is_struct(f.type)]
    return [f"{f.name}.{f.type.field(i).name}" for f in structs for i in range(f.type.num_fields)]


def loaded(file: Bytes, load: Callable[[Bytes], Loaded], name: str) -> Loaded:
    """What a payload holds; `RecordError` naming the file, whatever is wrong with it."""
    try:
        return load(file)
    except RecordError as e:
        raise type(e)(f"{name}: {e}") from e
    # Hostile or damaged bytes make an unpickler raise anything.
    except Exception as e:
        raise RecordError(f"{name} is damaged, or no log: {repr(e)[:200]}") from e


def _lines(file: str, limit: int) -> Look:
    size = HEAD
    while True:
        data, long, stopped = read_lines(file, 0, size, limit)
        end = len(data) if len(data) < size else data.rfind(b"\n") + 1
        rows, _, bad = decode(data[:end], 1, file, limit)
        if rows or (len(data) < size and not long) or size > 8 * limit // LINES:
            break
        size *= 8
    stopped = stopped or next(iter(long.values()), None)
    if not rows and (bad or stopped):
        why = stopped or f"line {bad[0].row}, {bad[0].reason}"
        raise RecordError(f"{file} holds no row that can be read: {why}")
    names = dict.fromkeys(name for row in rows for name in row)
    inner = dict.fromkeys(
        f"{name}.{key}" for row in rows for name, value in row.items() if isinstance(value, Mapping) for key in value
    )
    numeric = [n for n in (*names, *inner) if any(_numeric(look_up(row, n)) for row in rows)]
    single = [n for n in (*names, *inner) if not any(_is_list(look_up(row, n)) for row in rows)]
    return Look(tuple(names), tuple(inner), tuple(numeric), tuple(single))


def _is_list(value: object) -> bool:
    return value is None or isinstance(value, list)


def _numeric(value: object) -> bool:
    if isinstance(value, list):
        return len(value) > 0 and all(isinstance(x, int | float) for x in value)
    return isinstance(value, int | float)
