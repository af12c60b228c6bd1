"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offdrift.errors import RecordError
from offdrift.texts import plain as plain


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


def remove_half_written(folder: Path) -> None:
    """Remove what processes of this machine that are gone were writing in a folder, and in those below it.

    A name whose process number is this process's own is of an earlier one: call this before writing anything.
    """
    for tmp in folder.rglob(".*.tmp"):
        number = tmp.name.split(".")[-2]
        if number.isdecimal() and (int(number) == os.getpid() or not _runs(int(number))):
            with contextlib.suppress(OSError):
                tmp.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of somebody else
        pass
    return True


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file whole. Raises: `RecordError` if it cannot be written."""
    text = json.dumps(plain(content), indent=1, allow_nan=False)
    write_atomically(path, lambda tmp: Path(tmp).write_text(text, encoding="utf-8"))
