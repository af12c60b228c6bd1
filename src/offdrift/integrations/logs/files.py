"""Files of a log, on disk or behind any URL that fsspec knows; disk never goes through fsspec."""

from __future__ import annotations

import glob as local_glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from offdrift.errors import RecordError

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".pt", ".pkl")
"""What may be a log; other files of a folder are not looked at."""

Problem = (OSError, ValueError, ImportError)
"""What reading a file raises where it, its store or the store's client library is missing."""

Bytes = Any
"""A file to read bytes from. What fsspec opens is no `BinaryIO`, though it has all of its methods."""


def is_url(path: str) -> bool:
    """Whether a path has a scheme; a Windows drive is none."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path))


def find(paths: Sequence[str]) -> list[str]:
    """Every file that the paths name: files as they are, folders and globs with what is in them.

    A file that several paths name stands there several times (see `unrepeated`). Files of a folder stand in the order of the numbers in their names. A folder is searched to
    any depth for the suffixes of logs, without hidden files.

    Raises: `RecordError` naming the path that leads nowhere.
    """
    found: list[str] = []
    for path in paths:
        files = _remote(path) if is_url(path) else _local(path)
        if not files:
            raise RecordError(
                f"no log at {path}: it does not exist, or holds no file ending in "
                f"{', '.join(SUFFIXES)}"
            )
        found += files
    return found


def unrepeated(files: Sequence[str]) -> tuple[list[str], int]:
    """The files without those that another name leads to, and how many those are.

    Paths are compared as the disk resolves them: `a/../b`, links to files and hard links are
    one file. Its first name is kept, one that is no link where there is one: a name may tell the
    step, and the name of a link tells nothing.
    """
    names: dict[object, str] = {}
    for file in files:
        key = _identity(file)
        if key not in names or (os.path.islink(names[key]) and not os.path.islink(file)):
            names[key] = file
    kept = set(names.values())
    return [f for f in dict.fromkeys(files) if f in kept], len(files) - len(kept)


def _identity(file: str) -> object:
    """What is equal for two names of one file."""
    if is_url(file):
        try:
            fs, inside = _store(file)
        except Problem as e:
            raise missing(file, e) from e
        protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        if protocol != "file":
            return protocol, str(fs.storage_options), inside
        file = inside
    try:
        seen = os.stat(file)
    except OSError:
        return os.path.realpath(file)
    # Some file systems number no files.
    return (seen.st_dev, seen.st_ino) if seen.st_ino else os.path.realpath(file)


def size(path: str) -> int:
    """Bytes of a file; `RecordError` if it is not there."""
    try:
        if not is_url(path):
            return os.path.getsize(path)
        fs, inside = _store(path)
        return int(fs.size(inside) or 0)
    except Problem as e:
        raise missing(path, e) from e


def fingerprint(file: str) -> str:
    """What changes when a file's content does: its name, size and date.

    Raises: `RecordError` if the file is gone.
    """
    try:
        if is_url(file):
            fs, inside = _store(file)
            return f"{file}:{fs.ukey(inside)}"
        seen = os.stat(file)
    except Problem as e:
        raise missing(file, e) from e
    return f"{os.path.abspath(file)}:{seen.st_size}:{seen.st_mtime_ns}"


@contextmanager
def opened(path: str) -> Iterator[Bytes]:
    """A file to read bytes from; `RecordError` if it cannot be opened."""
    try:
        if is_url(path):
            fs, inside = _store(path)
            file = fs.open(inside, "rb")
        else:
            file = open(path, "rb")  # noqa: SIM115
    except Problem as e:
        raise missing(path, e) from e
    with file:
        yield file


def missing(path: str, error: Exception) -> RecordError:
    """The error of a file that cannot be read."""
    reason = getattr(error, "strerror", None) or error
    return RecordError(f"cannot read {path}: {reason}; check the path and its permissions")


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that puts step_2 before step_10."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.findall(r"\d+|\D+", name)]


def _local(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        listed = [os.path.join(d, name) for d, _, names in os.walk(path) for name in names]
        return _logs(listed, path)
    named = local_glob.glob(path, recursive=True)
    return sorted((p for p in named if os.path.isfile(p)), key=natural)


def _remote(path: str) -> list[str]:
    try:
        fs, inside = _store(path)
        if "*" in path or "?" in path or "[" in path:
            listed = [p for p in fs.glob(inside) if not fs.isdir(p)]
            return sorted((fs.unstrip_protocol(p) for p in listed), key=natural)
        if fs.isdir(inside):
            return _logs(
                [fs.unstrip_protocol(p) for p in fs.find(inside)], fs.unstrip_protocol(inside)
            )
        return [path] if fs.exists(inside) else []
    except Problem as e:
        raise missing(path, e) from e


def _logs(files: list[str], folder: str) -> list[str]:
    inside = len(folder.rstrip("/"))
    kept = [
        f
        for f in files
        if f.endswith(SUFFIXES) and not any(p.startswith(".") for p in f[inside:].split("/"))
    ]
    return sorted(kept, key=natural)


def _store(path: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as e:
        raise RecordError(
            f"{path} is a URL, which needs fsspec (and the client of its store, such as s3fs): "
            "pip install fsspec, or copy the files to disk"
        ) from e
    return url_to_fs(path)
