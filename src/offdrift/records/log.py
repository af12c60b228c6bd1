"""The plain schema on disk: one Parquet row per sequence, lists for what every token has.

What any framework can write and every audit reads; docs/logs.md documents each column. The same names
serve as keys of JSON lines.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from offdrift.records.atomic import write_atomically
from offdrift.records.batch import Logged
from offdrift.records.schema import DIVERGENCES, FIELDS, TEXTS

FORMAT = 1
KEY = b"offdrift.log"
GROUP_BYTES = 48 << 20
"""Decoded size of a row group: what a reader has to hold at least."""
REPEATING = tuple(f.column for f in FIELDS if f.repeats)
"""Columns that hold each value once, in a dictionary."""


def write_log(batch: Logged, path: str | os.PathLike[str], *, framework: str = "offdrift") -> Path:
    """Write a batch to `path` (Parquet), atomically.

    Args:
        batch: what is None is not written; unscored tokens were dropped and stay so.
        path: of the file; its folder is made.
        framework: that the run belongs to; a diagnosis suggests fixes in its terms.

    Raises: `RecordError` naming the file if the disk is full or the folder cannot be written.
    """
    path = Path(path)
    columns = to_columns(batch)
    table = pa.table(columns).replace_schema_metadata(
        {KEY: json.dumps({"format": FORMAT, "framework": framework}).encode()}
    )
    rows = max(1, len(table) * GROUP_BYTES // max(table.nbytes, 1))

    # Log-probs hardly compress, whatever the codec; lz4 costs next to nothing to decode.
    options: dict[str, Any] = {
        "row_group_size": rows,
        "write_page_checksum": True,
        "compression": {_leaf(f): "zstd" if f.name in TEXTS else "lz4" for f in table.schema},
        "use_dictionary": [_leaf(f) for f in table.schema if f.name in REPEATING],
    }
    write_atomically(path, lambda tmp: pq.write_table(table, tmp, **options))
    return path


def to_columns(batch: Logged) -> dict[str, pa.Array]:
    """The plain schema's columns of a batch; lists share memory with its tensors."""
    cuts = _array(batch.cu_seqlens, pa.int64())
    columns: dict[str, pa.Array] = {}
    exact = [(replace(DIVERGENCES[0], column=name), x) for name, x in batch.divergences.items()]
    for f, values in (*((f, getattr(batch, f.name)) for f in FIELDS if f.column), *exact):
        if values is None or (f.name == "response_lengths" and batch.length_unit != "token"):
            continue
        if f.is_text:
            clean = [t.encode("utf-8", "replace").decode() for t in values]
            columns[f.column] = pa.array(clean, pa.large_string())
            continue
        kind = pa.type_for_alias(f.dtype)
        flat = _array(values, kind)
        if f.by_token:
            # Elements that cannot be null have shorter levels, which halves the time to decode them.
            element = pa.field("element", kind, nullable=False)
            flat = pa.LargeListArray.from_arrays(cuts, flat, type=pa.large_list(element))
        columns[f.column] = flat
    return columns


def _array(values: Tensor, kind: pa.DataType) -> pa.Array:
    values = values.detach().cpu()
    # NumPy, and so Arrow, has no bfloat16.
    return pa.array((values.float() if values.is_floating_point() else values).numpy()).cast(kind)


def _leaf(field: pa.Field) -> str:
    """Where Parquet keeps a column's values."""
    return f"{field.name}.list.element" if pa.types.is_large_list(field.type) else field.name
