"""Files in a folder that several processes write to: no two take one name, and none is replaced."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch.distributed as dist

from offdrift.errors import RecordError
from offdrift.records.batch import Logged
from offdrift.records.log import write_log

STALE_S = 3600.0
"""Age from which on a hidden file is what a killed process left; none takes so long to write."""


def rank_here() -> int:
    """Rank of this process: of `torch.distributed` if it is initialized, else RANK, else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    stated = os.environ.get("RANK", "")
    return int(stated) if stated.isdecimal() else 0


def write_unclaimed(batch: Logged, folder: Path, stem: str, *, framework: str) -> Path:
    """Write a batch to the first `STEM-I.parquet` that nobody has; return its path.

    Raises: `RecordError` naming the file if it cannot be written.
    """
    for i in count():
        path = folder / f"{stem}-{i}.parquet"
        if path.exists():
            continue
        with _claimed(path) as mine:
            # Whoever had the claim before may have written the file since.
            if mine and not path.exists():
                return write_log(batch, path, framework=framework)
    raise AssertionError


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Hold a hidden file beside `path`, as nobody else can; False if somebody does.

    A claim of its own, because moving a file to its name replaces what is there, and linking, which
    does not, is missing on some network file systems.
    """
    claim = path.with_name(f".{path.name}.claim")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        # The folder itself may be the file that is in the way.
        if path.parent.is_dir():
            yield False
            return
        raise RecordError(f"cannot write {path}: {path.parent} is a file; choose another folder") from None  # fmt: skip
    except OSError as e:
        raise RecordError(
            f"cannot write {path}: {e.strerror or e}; free disk space or choose another folder"
        ) from e
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            claim.unlink()


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
