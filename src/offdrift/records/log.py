"""Writing logs: the plain schema in Parquet, one row per sequence, lists for what every token has.

What any framework can write and every audit reads; docs/logs.md documents each column. The same names serve as keys of
JSON lines. Several processes may write to one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from offdrift.errors import RecordError
from offdrift.records.atomic import write_atomically
from offdrift.records.batch import Logged
from offdrift.records.schema import FIELDS, LOG_KEY, TEXTS

FORMAT = 1
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
        {LOG_KEY: json.dumps({"format": FORMAT, "framework": framework}).encode()}
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

    def list_of(values: Tensor, dtype: str) -> pa.Array:
        # Elements that cannot be null have shorter levels, which halves the time to decode them.
        element = pa.field("element", pa.type_for_alias(dtype), nullable=False)
        kind = pa.large_list(element)
        return pa.LargeListArray.from_arrays(cuts, _array(values, element.type), type=kind)

    columns: dict[str, pa.Array] = {}
    for f in FIELDS:
        values: Any = getattr(batch, f.name)
        if not f.column or values is None:
            continue
        if f.is_text:
            clean = [t.encode("utf-8", "replace").decode() for t in values]
            columns[f.column] = pa.array(clean, pa.large_string())
        elif f.by_token:
            columns[f.column] = list_of(values, f.dtype)
        elif f.name != "response_lengths" or batch.length_unit == "token":
            columns[f.column] = _array(values, pa.type_for_alias(f.dtype))
    return columns | {name: list_of(x, "float32") for name, x in batch.divergences.items()}


def _array(values: Tensor, kind: pa.DataType) -> pa.Array:
    values = values.detach().cpu()
    # NumPy, and so Arrow, has no bfloat16.
    return pa.array((values.float() if values.is_floating_point() else values).numpy()).cast(kind)


def _leaf(field: pa.Field) -> str:
    """Where Parquet keeps a column's values."""
    return f"{field.name}.list.element" if pa.types.is_large_list(field.type) else field.name


# A folder that several processes write to: no two take one name, and no file is replaced.

STALE_S = 3600.0
"""Age from which on a hidden file is what a killed process left; none takes so long to write."""


def write_unclaimed(batch: Logged, folder: Path, stem: str, *, framework: str) -> Path:
    """Write a batch to the first `STEM-I.parquet` that nobody has; return its path.

    Meanwhile a hidden file beside it claims the name. Moving a file to its name replaces what is there, and linking,
    which does not, is missing on some network file systems.

    Raises: `RecordError` naming the file if it cannot be written.
    """
    for i in count():
        path = folder / f"{stem}-{i}.parquet"
        claim = path.with_name(f".{path.name}.claim")
        if path.exists():
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            if folder.is_dir():  # another writer has the name
                continue
            raise RecordError(f"cannot write {path}: {folder} is a file; choose another folder") from None
        except OSError as e:
            why = e.strerror or e
            raise RecordError(f"cannot write {path}: {why}; free disk space or choose another folder") from e
        try:
            # Whoever had the claim before may have written the file since.
            if not path.exists():
                return write_log(batch, path, framework=framework)
        finally:
            with contextlib.suppress(OSError):
                claim.unlink()
    raise AssertionError


def remove_stale(folder: Path) -> None:
    """Remove what processes that were killed while they wrote left behind."""
    now = time.time()
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            ours = entry.name.startswith(".") and entry.name.endswith((".claim", ".tmp"))
            if ours and ".parquet." in entry.name:
                with contextlib.suppress(OSError):
                    if now - entry.stat().st_mtime > STALE_S:
                        os.unlink(entry)
