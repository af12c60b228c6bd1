"""The plain schema on disk: one Parquet row per sequence, lists for what every token has.

What any framework can write and every audit reads; docs/logs.md documents each column. The same names
serve as keys of JSON lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from offdrift.records.atomic import write_atomically
from offdrift.records.batch import Logged

FORMAT = 1
KEY = b"offdrift.log"
GROUP_BYTES = 48 << 20
"""Decoded size of a row group: what a reader has to hold at least."""

TOKEN_COLUMNS = {
    "tokens": pa.int32(),
    "logp_rollout": pa.float32(),
    "logp_old": pa.float32(),
    "logp": pa.float32(),
    "logp_ref": pa.float32(),
    "advantages": pa.float32(),
    "rollout_version": pa.int32(),
    "entropy": pa.float32(),
    "position": pa.int32(),
}
ROW_COLUMNS = {
    "step": ("step", pa.int64()),
    "response_length": ("response_lengths", pa.int64()),
    "reward": ("rewards", pa.float32()),
    "group_id": ("group_ids", pa.int64()),
    "version": ("version", pa.int64()),
    "old_status": ("old_status", pa.int8()),
    "truncated": ("truncated", pa.int8()),
}
"""Column: (attribute of `Logged`, type)."""
TEXTS = ("prompt", "completion")
REPEATING = ("step", "version", "rollout_version", "prompt")
"""Columns whose values repeat: a dictionary holds each once."""


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
    for name, (attribute, kind) in ROW_COLUMNS.items():
        values: Tensor | None = getattr(batch, attribute)
        if values is not None and not (name == "response_length" and batch.length_unit != "token"):
            columns[name] = _array(values, kind)
    by_token = {name: (getattr(batch, name), kind) for name, kind in TOKEN_COLUMNS.items()}
    by_token |= {name: (x, pa.float32()) for name, x in batch.divergences.items()}
    for name, (values, kind) in by_token.items():
        if values is not None:
            flat = _array(values, kind)
            # Elements that cannot be null have shorter levels, which halves the time to decode them.
            element = pa.field("element", kind, nullable=False)
            columns[name] = pa.LargeListArray.from_arrays(cuts, flat, type=pa.large_list(element))
    for name, texts in zip(TEXTS, (batch.prompts, batch.completions), strict=True):
        if texts is not None:
            clean = [t.encode("utf-8", "replace").decode() for t in texts]
            columns[name] = pa.array(clean, pa.large_string())
    return columns


def _array(values: Tensor, kind: pa.DataType) -> pa.Array:
    values = values.detach().cpu()
    # NumPy, and so Arrow, has no bfloat16.
    return pa.array((values.float() if values.is_floating_point() else values).numpy()).cast(kind)


def _leaf(field: pa.Field) -> str:
    """Where Parquet keeps a column's values."""
    return f"{field.name}.list.element" if pa.types.is_large_list(field.type) else field.name
