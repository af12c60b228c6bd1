"""Files of a log, on disk or behind any URL that fsspec knows, and what is passed between their readers."""

from __future__ import annotations

import glob as local_glob
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offdrift import texts
from offdrift.errors import RecordError
from offdrift.records.batch import Logged

LIMIT = 4 << 30
"""Bytes that one file may take in memory, or decompress to, unless the user sets another limit."""

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".pt", ".pkl")
"""What may be a log; other files of a folder are not looked at."""

TABLE = ".csv"
"""Looked at where a folder holds no other log: most are metrics."""

Problem = (OSError, ValueError, ImportError)
"""What reading a file raises where it, its store or the store's client library is missing."""

Bytes = Any
"""A file to read bytes from. What fsspec opens is no `BinaryIO`, though it has all of its methods."""


class BadRow(NamedTuple):
    """A place that could not be read, and why."""

    file: str
    row: int
    """Line of a JSONL file, row of any other, from 1; 0: the whole file."""
    reason: str
    rows: int = 1
    """How many rows were lost there; 0: unknown, the rest of the file or all of it."""


@dataclass(frozen=True)
class Piece:
    """A part of one file that is read at once: the unit of parallel work and of resuming."""

    file: str
    start: int
    stop: int
    """Parquet: rows `start` to `stop`. JSONL: lines that begin at byte `start` or later, and before `stop`, of the
    decompressed file where it is compressed. Else the whole file."""
    format: str
    first_row: int = 1
    """Number of the first line or row."""
    more: tuple[Piece, ...] = ()
    """Small files that are read with it, one after the other."""

    @property
    def each(self) -> tuple[Piece, ...]:
        """The piece, and those that are read with it."""
        return (self, *self.more)


class Read(NamedTuple):
    """Batches and bad rows of one piece."""

    batches: tuple[Logged, ...]
    """The good rows. Those that lack a field have a batch of their own, so that every field of a batch covers all of
    its tokens."""
    bad: tuple[BadRow, ...]


@dataclass(frozen=True)
class Detected:
    """Log files that were found, their format, and the columns to read."""

    format: str
    framework: str
    files: tuple[str, ...]
    description: str
    """One sentence: what was detected, and from what."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of the log that each field comes from."""
    sizes: tuple[int, ...] = ()
    """Bytes of each file."""
    skipped: tuple[BadRow, ...] = ()
    """Files that cannot be opened at all, and why."""
    repeats: tuple[str, ...] = ()
    """Files of ranks whose samples stand in the files of other ranks; they are not read."""
    limit: int = LIMIT
    """Bytes that one file may take in memory, or decompress to."""
    without: tuple[str, ...] = ()
    """Fields that are not read, whatever the log calls by their name."""
    proposed: tuple[str, str] | None = None
    """A field and a column that is not read and may hold it, where the log-probs of one policy are missing."""

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


class Resume(threading.local):
    """Position in a file where the last read stopped. Pieces are mostly read in order, so the next read starts here.

    Pieces are mostly read in order, so that the next one goes on where the last one ended.
    """

    key: tuple[object, ...] = ()
    """The file as it was, and the place."""
    rest: Iterator[Any] = iter(())


class NotRead(RecordError):
    """A file whose format is known and whose content is not to be read."""


LINES = 64
"""One line, and one piece, may have this part of the bytes that a file may take: decoded, JSON takes up to 25 times
its bytes."""
PLANNED = 8
"""Bytes that a value takes at least once it is decoded, to plan pieces by."""


class Budget:
    """The bytes that one file may still take."""

    def __init__(self, limit: int) -> None:
        self.limit, self.left = limit, limit

    def spend(self, count: int) -> None:
        """Raises: `RecordError` where the file takes more than it may."""
        self.left -= count
        if self.left < 0:
            raise RecordError(too_large("what the file holds takes", self.limit))


def too_large(what: str, limit: int) -> str:
    """The sentence about a file that takes more than it may."""
    return (
        f"{what} more than {limit / 2**20:,.0f} MiB, the most that it may; allow more with "
        "--max-file-mib if you trust the file"
    )


def missing(path: str, error: Exception) -> RecordError:
    """The error of a file that cannot be read; one that says so already is itself."""
    if isinstance(error, RecordError):
        return error
    reason = getattr(error, "strerror", None) or error
    return RecordError(f"cannot read {path}: {reason}; check the path and its permissions")


def is_url(path: str) -> bool:
    """Whether a path has a scheme; a Windows drive is none."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path))


SECRET = re.compile(r"(?i)(^|[-_])(sig|signature|token|key|secret|password|credential)$")
"""Names of a query's parts that give whoever has the address a right."""


def _check_secrets(path: str) -> None:
    """Raise `RecordError` for a URL with a password or a signature: an audit stores which files it has read."""
    if not is_url(path):
        return
    scheme, _, rest = path.partition("://")
    place, _, query = rest.partition("?")
    authority, slash, inside = place.partition("/")
    user, at, host = authority.rpartition("@")
    names = [name for pair in query.split("&") if SECRET.search(name := pair.partition("=")[0])]
    if (at and ":" in user) or names:
        what = f"{', '.join(names)} in its query" if names else "a password"
        raise RecordError(
            f"{scheme}://{host}{slash}{inside} was given with {what}, which an audit would store with the address; put "
            "it into the settings of the store (environment variables, fsspec's configuration), or copy the files"
        )


ARTIFACT = re.compile(r"wandb-artifact://|wandb://[^/]+/[^/]+/[^/]*:")
"""Addresses of W&B artifacts: their own scheme, or a name with a version where a run's would be."""


def _store(path: str) -> tuple[Any, str]:
    """The file system of a URL, and the path inside it."""
    if ARTIFACT.match(path):
        name = "/".join(path.partition("://")[2].split("/")[:3])
        raise RecordError(
            f"{path} is a W&B artifact, which no client of fsspec reads: fetch it by `wandb artifact get {name} --root "
            "FOLDER`, and give FOLDER"
        )
    try:
        from fsspec.core import url_to_fs
    except ImportError as e:
        raise RecordError(
            f"{path} is a URL, which needs fsspec (and the client of its store, such as s3fs): "
            "pip install fsspec, or copy the files to disk"
        ) from e
    with _client(path):
        return url_to_fs(path)


@contextmanager
def _client(path: str) -> Iterator[None]:
    """A `RecordError` for whatever the client of a store raises: each has classes of its own, some only `Exception`."""
    try:
        yield
    except RecordError:
        raise
    except Exception as e:
        scheme = path.partition("://")[0]
        first = next(iter(str(e).strip().splitlines()), "")
        reason = f"{type(e).__name__}: {first[:200]}"
        if isinstance(e, ImportError):
            way = f"install the client of {scheme}://"
        elif "credential" in reason.lower() or "401" in reason or "403" in reason:
            way = f"give the client of {scheme}:// its credentials (environment variables or fsspec's configuration)"
        else:
            way = "check the address, the network and your rights"
        raise RecordError(f"cannot read {path}: {reason}; {way}, or copy the files to disk") from e


class _Remote:
    """A file of a store, whose client's errors name the file while it is read, too."""

    def __init__(self, path: str, file: Bytes) -> None:
        self._path, self._file = path, file

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        if name not in ("read", "read1", "readinto", "readline", "readlines", "seek"):
            return found

        def guarded(*arguments: Any) -> Any:
            with _client(self._path):
                return found(*arguments)

        return guarded


@contextmanager
def opened(path: str) -> Iterator[Bytes]:
    """A file to read bytes from; `RecordError` if it cannot be opened."""
    try:
        if is_url(path):
            fs, inside = _store(path)
            with _client(path):
                file = _Remote(path, fs.open(inside, "rb"))
        else:
            file = texts.open_file(path)
    except Problem as e:
        raise missing(path, e) from e
    with file:
        yield file


def _unreadable(path: str) -> str | None:
    """Why something cannot be read as a file, as far as its name tells; None if it can."""
    try:
        return texts.not_a_file(os.stat(path).st_mode)
    except ValueError as e:
        return f"it has a name that no file can have: {e}"
    except OSError as e:
        what = "a link that leads nowhere" if os.path.islink(path) else "not there"
        return f"it is {what}: {e.strerror}"


def size(path: str) -> int:
    """Bytes of a file; `RecordError` if it is not there."""
    try:
        if not is_url(path):
            return os.path.getsize(path)
        fs, inside = _store(path)
        with _client(path):
            return int(fs.size(inside) or 0)
    except Problem as e:
        raise missing(path, e) from e


def fingerprint(file: str) -> str:
    """String that changes when the file changes: from name, size and modification time.

    Raises: `RecordError` if the file is gone.
    """
    try:
        if is_url(file):
            fs, inside = _store(file)
            with _client(file):
                return f"{file}:{fs.ukey(inside)}"
        status = os.stat(file)
    except Problem as e:
        raise missing(file, e) from e
    return f"{os.path.abspath(file)}:{status.st_size}:{status.st_mtime_ns}"


def find(paths: Sequence[str]) -> tuple[list[str], list[BadRow]]:
    """Every file that the paths name: files as they are, folders and globs with what is in them.

    A file that several paths name is listed several times (see `unrepeated`). Files of a folder are in the order of
    the numbers in their names. A folder is searched to any depth for the suffixes of logs, without hidden files.

    Returns: the files; and entries of folders and globs that have the name of a log and cannot be read (a link that
        leads nowhere, a pipe, a folder without permission), with the reason.

    Raises: `RecordError` naming the path that leads nowhere, or to no file.
    """
    files: list[str] = []
    skipped: list[BadRow] = []
    for path in paths:
        _check_secrets(path)
        before = len(skipped)
        named = _remote(path) if is_url(path) else _local(path, skipped)
        if not named and len(skipped) == before:
            raise RecordError(f"no log at {path}: {_nothing_at(path)}")
        files += named
    return files, skipped


def _nothing_at(path: str) -> str:
    """Why a path names no file of a log: it is not there, or what is there is none."""
    holds = f"holds no file ending in {', '.join((*SUFFIXES, TABLE))}"
    if is_url(path):
        return f"it does not exist, or {holds}, or its client was given no right to see it"
    if os.path.isdir(path):
        what = f"the folder {holds}" if os.listdir(path) else "the folder is empty"
    elif os.path.lexists(path):
        what = "it is no log"
    else:
        what = "no file has a name like this" if local_glob.has_magic(path) else "it does not exist; check the path"
    return f"{what}{_unread(path)}"


STRAW = ".straw.json"


def _unread(path: str) -> str:
    """Name the way out where only archives are found whose records need their framework; "" elsewhere."""
    inside = [name for _, _, names in os.walk(path) for name in names]
    archives = [name for name in (inside or [path]) if name.endswith(STRAW)]
    if not archives:
        return ""
    return (
        f". {len(archives)} of vime's straw archives are there: RolloutArchive(FILE).export_pt(NAME) makes dumps of "
        "them, as --save-debug-rollout-data does with a path that ends in .pt"
    )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that puts step_2 before step_10."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.findall(r"\d+|\D+", name)]


def _logs(files: list[str], folder: str) -> list[str]:
    """Files of a folder that may be logs, in order."""
    inside = len(folder.rstrip("/"))
    seen = [f for f in files if not any(p.startswith(".") for p in f[inside:].split("/"))]
    logs = [f for f in seen if f.endswith(SUFFIXES)] or [f for f in seen if f.endswith(TABLE)]
    return sorted(logs, key=_natural)


def _local(path: str, skipped: list[BadRow]) -> list[str]:
    if os.path.isdir(path):
        unread: list[OSError] = []
        walk = os.walk(path, onerror=unread.append)
        listed = _logs([os.path.join(d, name) for d, _, names in walk for name in names], path)
        skipped += [BadRow(e.filename, 0, f"the folder cannot be read: {e.strerror}", rows=0) for e in unread]
    elif path.endswith(STRAW):
        return []
    elif os.path.lexists(path):
        if (reason := _unreadable(path)) is not None:
            raise RecordError(f"cannot read {path}: {reason}; name the file itself")
        return [path]
    else:
        listed = sorted((p for p in _globbed(path) if not os.path.isdir(p)), key=_natural)
    why = {file: _unreadable(file) for file in listed}
    skipped += [BadRow(file, 0, reason, rows=0) for file, reason in why.items() if reason is not None]
    return [file for file, reason in why.items() if reason is None]


def _globbed(pattern: str) -> list[str]:
    """Expand a glob. `**` enters folders but follows no links, which may lead back."""
    head, deep, tail = f"/{pattern}".partition("/**/")
    if not deep:
        return local_glob.glob(pattern)
    matches: dict[str, None] = {}
    for base in local_glob.glob(head[1:]) if head else ["/" if pattern[0] == "/" else "."]:
        for folder, inner, _ in os.walk(base):
            inner[:] = [name for name in inner if not name.startswith(".")]
            below = os.path.join(local_glob.escape(folder), tail)
            matches |= dict.fromkeys(_globbed(os.path.normpath(below)))
    return list(matches)


def _remote(path: str) -> list[str]:
    fs, inside = _store(path)
    with _client(path):
        if "*" in path or "?" in path or "[" in path:
            listed = [p for p in fs.glob(inside) if not fs.isdir(p)]
            return sorted((fs.unstrip_protocol(p) for p in listed), key=_natural)
        if fs.isdir(inside):
            return _logs([fs.unstrip_protocol(p) for p in fs.find(inside)], fs.unstrip_protocol(inside))
        return [path] if fs.exists(inside) else []


def unrepeated(files: Sequence[str]) -> tuple[list[str], int]:
    """The files without those that another name leads to, and how many those are.

    Paths are compared as the disk resolves them: `a/../b`, links to files and hard links are one file. Its first
    name is kept, one that is no link where there is one: a name may tell the step, and the name of a link does not.
    """
    names: dict[object, str] = {}
    for file in files:
        key = _identity(file)
        if key not in names or (os.path.islink(names[key]) and not os.path.islink(file)):
            names[key] = file
    names_once = set(names.values())
    return [f for f in dict.fromkeys(files) if f in names_once], len(files) - len(names_once)


def _identity(file: str) -> object:
    """Key that is equal for two names of the same file."""
    if is_url(file):
        fs, inside = _store(file)
        protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        if protocol != "file":
            return protocol, str(fs.storage_options), inside
        file = inside
    try:
        status = os.stat(file)
    except OSError:
        return os.path.realpath(file)
    # Some file systems number no files.
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(file)
