"""JSON, TOML and arrays of unknown origin: a file is read or refused; it is never waited for, run or read without end.

The parsers of the standard library raise more than they document: `RecursionError` for brackets in brackets, and a bare
`ValueError` for a number of thousands of digits. Here every text that cannot be read is a `ValueError`, and every file
that cannot be opened, is no file (a pipe, a device) or is larger than it may be is an `OSError`, so that a reader
catches these two and names the file.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import tomllib
import unicodedata
import zipfile
import zlib
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

LARGEST = 256 << 20
"""Bytes that a file of settings or results may have: those that this library writes have a hundredth."""

LARGEST_DATA = 4 << 30
"""Bytes that a file of data may have: problems, prompts, the lines of a run, a head."""

BLOCK = 4 << 20


def open_regular_file(path: str, flags: int) -> int:
    """An `opener` of `open` for files alone: opening a pipe waits until somebody writes to it, and a device has no end.

    Raises: `OSError` saying what the path is instead.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if (why := not_a_file(os.fstat(descriptor).st_mode)) is not None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, why, path)
    return descriptor


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read its bytes, as `open_regular_file` does.

    Names come from files of unknown origin, too: Python refuses one with a null byte, or with half a pair of
    surrogates, by a bare `ValueError`.

    Raises: `OSError` if it is no file; `FileNotFoundError` if it is not there, or has a name that no file can have.

    Example:
        >>> open_file("arms/\\0/metrics.jsonl")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] no file can have this name (embedded null byte): 'arms/\\x00/metrics.jsonl'
    """
    try:
        return open(path, "rb", opener=open_regular_file)
    except ValueError as e:
        raise FileNotFoundError(errno.ENOENT, f"no file can have this name ({e})", os.fspath(path)) from e


def not_a_file(mode: int) -> str | None:
    """Name the kind of what cannot be read as a file, by its `st_mode`; None if it can.

    Example:
        >>> not_a_file(0o100644), not_a_file(0o010644)
        (None, 'it is a pipe, no file')
    """
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, no file"


def read_bytes(path: str | os.PathLike[str], *, limit: int = LARGEST) -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises: `OSError` if it is not there, no file, or larger.
    """
    blocks, left = [], limit
    with open_file(path) as file:
        while block := file.read(BLOCK):  # `read(limit)` would ask for all of it at once
            blocks.append(block)
            left -= len(block)
            if left < 0:
                size = f"it has more than {limit / 2**20:,.0f} MiB, which no such file needs"
                raise OSError(errno.EFBIG, size, str(path))
    return b"".join(blocks)


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` unless there is a file to read: for libraries that open paths themselves, and wait at a pipe."""
    with open_file(path):
        pass


def read_text(path: str | os.PathLike[str], *, limit: int = LARGEST) -> str:
    """The UTF-8 text of a file, as `read_bytes`. Raises: as that, and `ValueError` if it is no UTF-8."""
    return read_bytes(path, limit=limit).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parse a text of JSON; Python's NaN and Infinity are allowed. Raises: `ValueError` for whatever is wrong.

    Example:
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a text of TOML. Raises: `ValueError` for whatever is wrong."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a file of JSON. Raises: `OSError` and `ValueError`, as `read_text` and `parse_json`."""
    return parse_json(read_text(Path(path)))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of TOML. Raises: `OSError` and `ValueError`, as `read_text` and `parse_toml`."""
    return parse_toml(read_text(Path(path)))


def read_arrays(content: bytes, *, limit: int = LARGEST) -> dict[str, np.ndarray]:
    """The arrays of an .npz archive, by name; they take at most `limit` bytes.

    Raises: `ValueError` for whatever is wrong, a pickle in it and a bomb included.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            records = archive.infolist()
            if (size := sum(record.file_size for record in records)) > limit:
                raise ValueError(f"the archive unpacks to {size:,} bytes, more than {limit:,}")
            arrays = {}
            for record in records:
                with archive.open(record) as file:
                    arrays[record.filename.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
            return arrays
    # Raised by zipfile, zlib and numpy for damaged or hostile bytes.
    except (zipfile.BadZipFile, zlib.error, EOFError, LookupError, TypeError, RuntimeError, MemoryError) as e:
        raise ValueError(f"no whole archive of arrays: {e or type(e).__name__}") from e


HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories without a look: control, format, surrogate, line and paragraph separator."""

KEPT = frozenset("\n\t\u200c\u200d")
"""Of those, what layout, scripts and emoji need."""


def visible(text: str) -> str:
    """The text with characters that have no look, or reorder others, written as their code.

    Example:
        >>> visible("a\\u202eb")
        'a\\\\u202eb'
    """
    if text.isascii() and text.isprintable():  # nearly every text of a page
        return text
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in HIDDEN and c not in KEPT else c for c in text)


def plain(value: Any) -> Any:
    """The value with NaN and infinity as None, tuples as lists: what JSON can say."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON that every parser reads: null for what is not finite, text as it is.

    Example:
        >>> as_json({"kl": float("nan"), "of": ("µ", "π")})
        '{"kl": null, "of": ["µ", "π"]}'
    """
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def text_id(text: str | bytes) -> int:
    """A number that equal texts share, in every process."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
