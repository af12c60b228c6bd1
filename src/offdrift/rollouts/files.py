"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from offdrift.errors import RecordError


def write_atomically(path: Path, write_to: Callable[[str], object]) -> None:
    """Let `write_to` fill a temporary file beside `path`, then move it there in one step."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to(str(tmp))
        with open(tmp, "rb") as f:
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        raise RecordError(
            f"cannot write {path}: {e.strerror or e}; free disk space or choose another run folder"
        ) from e
    finally:
        with contextlib.suppress(OSError):
            tmp.unlink()
