"""Arrow columns as columns of a log: list columns are flat tensors on the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch
from torch import Tensor

from offdrift.records.readers.columns import LARGE, Columns, Lists, Numbers, cumulative, text_of
from offdrift.records.schema import COLUMNS, LogField

pc: Any = pyarrow.compute
"""Its functions are made at import, where no type checker sees them."""


def present(found: pa.Schema, columns: Mapping[str, str]) -> dict[str, str]:
    """The columns that a schema has, and whose type can hold the field."""
    kinds = {name: (column, type_of(found, column)) for name, column in columns.items()}
    return {n: column for n, (column, kind) in kinds.items() if kind is not None and fits(n, kind)}


def type_of(found: pa.Schema, column: str) -> pa.DataType | None:
    """The type of a column; dotted names lead into structs. None if there is no such column."""
    if column in found.names:
        return found.field(column).type
    head, _, rest = column.partition(".")
    if head in found.names and pa.types.is_struct(found.field(head).type):
        inner = found.field(head).type
        return next((f.type for f in map(inner.field, range(inner.num_fields)) if f.name == rest), None)
    return None


def fits(field: str, kind: pa.DataType) -> bool:
    """Whether a column of this type can hold a field."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    f = COLUMNS[field]
    if pa.types.is_null(kind) or f.is_text or f.text_ids:
        return True
    if f.by_token and is_list(kind):
        return is_number(kind.value_type)
    return f.per != "token" and (is_number(kind) or (bool(f.words) and is_text(kind)))


def to_columns(table: pa.Table, before: int, wanted: Mapping[str, str]) -> Columns:
    """Arrow columns by field name; numbers stay where they are in memory."""
    lists: dict[str, Lists] = {}
    numbers: dict[str, Numbers] = {}
    texts: dict[str, Sequence[str | None]] = {}
    for field, name in wanted.items():
        array = _column(table, name)
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        f = COLUMNS[field]
        if f.is_text or (f.text_ids and not is_number(array.type)):
            texts[field] = _texts(array)
        elif f.by_token and is_list(array.type):
            lists[field] = _lists(array, not f.is_whole)
        elif f.per != "token":
            numbers[field] = _numbers(array, f)
    row = torch.arange(before + 1, before + 1 + len(table))
    return Columns(row, lists, numbers, texts)


def _column(table: pa.Table, name: str) -> pa.Array:
    if name in table.column_names:
        column = table.column(name)
    else:
        head, _, rest = name.partition(".")
        column = pc.struct_field(table.column(head), rest)
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a list per row."""
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a text per row."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds one number per row."""
    t = pa.types
    return t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_null(kind)


def _lists(array: pa.Array, floats: bool) -> Lists:
    lengths = tensor(pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64()))
    absent = tensor(array.is_null()) if array.null_count else None
    values = array.flatten()
    missing = None
    if floats:
        values = pc.fill_null(values.cast(pa.float32(), safe=False), float("nan"))
    else:
        if pa.types.is_floating(values.type):
            # NaN and what no integer reaches have no cast; as nulls they are counted.
            values = pc.if_else(pc.less(pc.abs(values), LARGE), values, None)
        missing = tensor(values.is_null()) if values.null_count else None
        if not pa.types.is_integer(values.type) or values.null_count:
            values = pc.fill_null(values.cast(pa.int64(), safe=False), 0)
    return Lists(tensor(values), cumulative(lengths), absent, missing)


def _numbers(array: pa.Array, f: LogField) -> Numbers:
    if f.words and is_text(array.type):
        codes = pa.array([*f.words.values(), f.other_word], pa.int64())
        index = pc.index_in(array, pa.array(list(f.words), array.type))
        codes = codes.take(pc.fill_null(index, len(f.words)))
        array = pc.if_else(array.is_valid(), codes, None)
    if pa.types.is_floating(array.type) or not f.is_whole:
        values = pc.fill_null(array.cast(pa.float64(), safe=False), float("nan"))
        return Numbers(tensor(pc.if_else(pc.less(pc.abs(values), LARGE), values, float("nan"))))
    absent = tensor(array.is_null()) if array.null_count else None
    return Numbers(tensor(pc.fill_null(array.cast(pa.int64(), safe=False), 0)), absent)


def _texts(array: pa.Array) -> list[str | None]:
    try:
        return [text_of(t) for t in array.to_pylist()]
    except UnicodeDecodeError:
        raw = array.cast(pa.binary()).to_pylist()
        return [None if t is None else t.decode("utf-8", "replace") for t in raw]


def tensor(array: pa.Array) -> Tensor:
    """A null-free Arrow array as a tensor on the same memory (never written to in place)."""
    if len(array) == 0:
        return torch.from_numpy(np.zeros(0, array.type.to_pandas_dtype()))
    if pa.types.is_boolean(array.type):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    if pa.types.is_unsigned_integer(array.type):
        array = array.cast(pa.int64())
    return torch.from_dlpack(array)
