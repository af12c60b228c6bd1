"""Logs that can be audited, from any training loop: `record`, `Recorder`, and the writing of one file.

A step hands over a batch, which is copied and queued; a thread of the recorder's own writes it, in the plain schema of
docs/logs.md. Files appear whole or not at all, and none is ever replaced, however many processes share a folder.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import multiprocessing
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain, count
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from jaxtyping import Shaped
from numpy import ndarray
from torch import Tensor

from offdrift.errors import BadValueError, RecordError, ShapeError, check_choice
from offdrift.numerics import tensor_of
from offdrift.records.atomic import write_atomically
from offdrift.records.batch import Logged, Unpacked
from offdrift.records.outbox import LOG, OnError, Outbox, WhenFull
from offdrift.records.schema import (
    ARGUMENTS,
    BY_SEQUENCE,
    BY_TOKEN,
    FIELDS,
    LOG_KEY,
    TEXTS,
    LogField,
    describe_arguments,
)
from offdrift.segments import Segments, cumulative
from offdrift.texts import text_id

FORMAT = 1
GROUP_BYTES = 48 << 20
"""Decoded size of a row group: what a reader has to hold at least."""
REPEATING = tuple(f.column for f in FIELDS if f.repeats)
"""Columns that hold each value once, in a dictionary."""


def write_log(batch: Logged, path: str | os.PathLike[str], *, framework: str = "offdrift") -> Path:
    """Write what a batch holds to `path` (Parquet), atomically.

    Args:
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
    """Path under which Parquet stores a column's values."""
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


NAMED = re.compile(r"(.+)-\d+-(\d+)-rank(\d+)-\d+\.parquet")


def last_steps(folder: Path) -> dict[tuple[str, int], int]:
    """The last step in a folder of a recorder's files, by what their names begin with and the rank that wrote them.

    Example:
        >>> last_steps(Path("nowhere"))
        {}
    """
    last: dict[tuple[str, int], int] = {}
    with contextlib.suppress(OSError):
        for name in filter(None, (NAMED.fullmatch(entry) for entry in os.listdir(folder))):
            writer = name[1], int(name[3])
            last[writer] = max(int(name[2]), last.get(writer, 0))
    return last


def on_host(batch: Logged | Unpacked) -> tuple[Logged | Unpacked, list[torch.cuda.Event]]:
    """The batch in host memory of its own, without graph; and what to wait for before reading it.

    Nothing waits here for a CUDA device: its copies run on the current stream, into pinned memory, behind the work
    that makes the values. The copies on the device can be freed or changed at once.
    """
    events: dict[torch.device, torch.cuda.Event] = {}

    def copied(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: copied(y) for name, y in x.items()}
        if not isinstance(x, Tensor):
            return x
        x = x.detach()
        if x.device.type != "cuda":
            return x.to("cpu", copy=True, memory_format=torch.contiguous_format)
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        events[x.device] = torch.cuda.Event()
        return host.copy_(x, non_blocking=True)

    host_batch = replace(batch, **{f.name: copied(getattr(batch, f.name)) for f in fields(batch)})
    for device, event in events.items():
        event.record(torch.cuda.current_stream(device))
    return host_batch, list(events.values())


def num_bytes(batch: Logged | Unpacked) -> int:
    """Memory that a copy of the batch takes, about: texts count one byte per character."""
    values = [getattr(batch, f.name) for f in fields(batch)]
    values += [x for v in values if isinstance(v, Mapping) for x in v.values()]
    tensors = sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor))
    return tensors + sum(len(t) for v in values if isinstance(v, tuple) for t in v)


def present(batch: Logged | Unpacked) -> frozenset[str]:
    """Names of what the batch holds: batches that hold the same can share a file."""
    named = {f.name for f in fields(batch) if getattr(batch, f.name) is not None} - {"position"}
    return frozenset(named | {*batch.divergences, getattr(batch, "length_unit", "token")})


def check_shapes(batch: Logged) -> None:
    """Raise `ShapeError` unless all fields describe the same tokens and sequences."""
    b = len(batch.cu_seqlens) - 1
    lengths = {name: len(x) for name, x in _by_token(batch).items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(f"token fields of different lengths: {lengths}")
    for f in BY_SEQUENCE:
        x = getattr(batch, f.name)
        if x is not None and len(x) != b:
            raise ShapeError(f"{f.name} has {len(x)} entries for {b} sequences")


def check_values(batch: Logged) -> None:
    """Raise unless `cu_seqlens` cuts the tokens, and integers fit where they are stored."""
    Segments(batch.cu_seqlens).check()
    for name in (f.name for f in FIELDS if f.dtype == "int32"):
        x = getattr(batch, name)
        if x is not None and len(x) and not -(2**31) <= int(x.min()) <= int(x.max()) < 2**31:
            raise BadValueError(f"{name} reaches from {int(x.min())} to {int(x.max())}, beyond 32 bits")
    for name, x in _by_token(batch).items():
        if len(x) != batch.num_tokens:
            raise ShapeError(f"{name} has {len(x)} tokens, cu_seqlens ends at {batch.num_tokens}")


def _by_token(batch: Logged) -> dict[str, Tensor]:
    values = {f.name: getattr(batch, f.name) for f in BY_TOKEN}
    return {name: x for name, x in values.items() if x is not None} | dict(batch.divergences)


def joined(batches: Sequence[Logged]) -> Logged:
    """Batches that hold the same fields (`present`, `position` aside) as one, in order."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    values: dict[str, Any] = {}
    for f in FIELDS:
        parts = [getattr(b, f.name) for b in batches]
        if f.name == "position":
            counted = all(x is None for x in parts)
            values[f.name] = None if counted else torch.cat([b.in_response for b in batches])
        elif parts[0] is not None:
            values[f.name] = tuple(chain(*parts)) if f.is_text else torch.cat(parts)
    return Logged(
        cu_seqlens=cumulative(torch.cat([b.cu_seqlens.diff() for b in batches])),
        length_unit=first.length_unit,
        divergences={k: torch.cat([b.divergences[k] for b in batches]) for k in first.divergences},
        **values,
    )


REPEATED = (
    "%s holds an earlier run up to step %d, and this one writes step %d there: an audit reads both as one run. Give "
    "each run a folder of its own; after a resume from a checkpoint, remove the files of the steps that are repeated"
)
AT_EXIT_S = 300.0
"""How long the end of a process waits for the disk."""
TERMINATED_S = 25.0
"""How long a process that receives SIGTERM waits for the disk: Slurm and Kubernetes kill it after 30 seconds."""


class Recorder:
    """Writes batches to a folder that `offdrift audit` reads; one recorder per process and folder.

    Small batches share files: a batch waits up to `seconds` for others, or until a file is full. So
    much can be lost if the process is killed (SIGKILL), and no more; at the end of the process everything
    is written. SIGTERM, by which schedulers end a job, counts as such an end: where nobody handles it yet
    when the main thread makes its first recorder, everything is written, and then the process ends by that
    signal. Files are called NAME-FIRST-LAST-rankR-I.parquet, for steps FIRST to LAST.

    Args:
        folder: is made; files that are in it stay, and a run that repeats their steps warns that two are mixed.
        framework: that the run belongs to; a diagnosis suggests fixes in its terms.
        when_full: "wait" until there is room in the queue, which loses nothing; or "drop" the batch,
            which never makes a step wait. Drops are counted, and logged once and at the end.
        on_error: "raise" what stops the writer at the next `add`, `flush` or `close`; batches are kept
            and tried again after that. "warn" logs it, drops the batches and counts them.
        queue: batches that may wait, those that are being written included.
        queue_mib: memory that they may take; a batch that is larger is let in alone.
        file_mib: size from which on batches are written at once.
        seconds: longest time for which a batch waits for others.
        text: whether prompts and completions are written. Without, equal prompts stay groups.
        rank: of this process; None: of `torch.distributed` if it is initialized, else RANK, else 0.

    Raises: `RecordError` if the folder cannot be made; `MethodError` for an unknown choice.

    Example:
        >>> with Recorder("run/log") as recorder:                           # doctest: +SKIP
        ...     recorder.add(batch)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        framework: str = "offdrift",
        when_full: WhenFull = "wait",
        on_error: OnError = "raise",
        queue: int = 64,
        queue_mib: float | int = 1024,
        file_mib: float | int = 32,
        seconds: float | int = 10,
        text: bool = True,
        rank: int | None = None,
    ) -> None:
        check_choice("when_full", when_full, ("wait", "drop"))
        check_choice("on_error", on_error, ("raise", "warn"))
        # Some launchers change the working directory while a batch waits.
        self.folder = Path(os.path.abspath(folder))
        self.framework, self.text = framework, text
        self._rank = rank
        self._new_box = partial(
            Outbox,
            self.folder,
            _prepared,
            self._write,
            queue=max(1, queue),
            queue_bytes=float(queue_mib * 2**20),
            file_bytes=float(file_mib * 2**20),
            seconds=float(seconds),
            when_full=when_full,
            on_error=on_error,
        )
        self._open()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            error = RecordError(f"cannot record to {self.folder}: {e.strerror}; choose a folder that can be written")
            if on_error == "raise":
                raise error from e
            LOG.warning("%s", error)
        remove_stale(self.folder)
        self._earlier = last_steps(self.folder)
        _RECORDERS.add(self)
        _handle_sigterm()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._box = self._new_box()
        if multiprocessing.parent_process() is not None:
            # Such a process ends without `atexit`, unless it was spawned.
            Finalize(None, _close_all, exitpriority=0)

    @property
    def _own(self) -> Outbox:
        # After a fork, what waits is the parent's to write, and its thread does not run here.
        if self._pid != os.getpid():
            self._open()
        return self._box

    @property
    def written(self) -> int:
        """Batches that are on disk."""
        return self._own.written

    @property
    def dropped(self) -> int:
        """Batches that were given up: the queue was full, or they could not be written."""
        return self._own.dropped

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._own.closed

    def add(self, batch: Logged | Unpacked, *, name: str | None = None) -> None:
        """Queue a batch; it may be changed or freed as soon as this returns.

        Args:
            batch: on any device. Its `group_ids` mean the same in all batches of a step. NaN and
                infinite values are written as they are; readers leave such tokens out and count them.
            name: that the file's name begins with, "log" unless given; batches of different names never share a file.

        Raises: `RecordError` if an earlier batch could not be written, and this one is then not taken; `ShapeError` if
            the batch contradicts itself.
        """
        name = "log" if name is None else name
        if not name.replace("-", "").replace("_", "").isalnum():
            raise RecordError(f"name={name!r}: letters, digits, - and _ make the name of a file")
        if isinstance(batch, Logged):
            check_shapes(batch)
        if not self.text:
            ids = batch.group_ids
            if ids is None and batch.prompts is not None:
                ids = torch.tensor([text_id(t) for t in batch.prompts], dtype=torch.int64)
            batch = replace(batch, prompts=None, completions=None, group_ids=ids)
        if self._rank is None:
            self._rank = rank_here()
        self._own.put(lambda: on_host(batch), kind=(name, present(batch)), size=num_bytes(batch))

    def flush(self, timeout: float | int | None = None) -> bool:
        """Wait until every batch so far is on disk; False if that takes longer than `timeout` seconds.

        Raises: `RecordError` if one cannot be written.
        """
        return self._own.flush(timeout)

    def close(self, timeout: float | int | None = None) -> None:
        """Write what waits, and stop; batches that cannot be written within `timeout` seconds are dropped.

        Raises: `RecordError` if batches could not be written, and `on_error` is "raise".
        """
        self._own.close(timeout)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except RecordError as e:
            if kind is None:
                raise
            LOG.error("%s", e)  # what ended the loop comes first

    def _write(self, batches: Sequence[Logged], kind: tuple[str, Any]) -> None:
        batch = joined(batches)
        if batch.num_sequences == 0:
            return
        first, last = (int(x) for x in batch.step.aminmax())
        earlier = self._earlier.pop((kind[0], int(self._rank or 0)), None)
        if earlier is not None and first <= earlier:
            LOG.warning(REPEATED, self.folder, earlier, first)
        stem = f"{kind[0]}-{first:08d}-{last:08d}-rank{self._rank}"
        write_unclaimed(batch, self.folder, stem, framework=self.framework)


def rank_here() -> int:
    """Rank of this process: of `torch.distributed` if it is initialized, else RANK, else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    stated = os.environ.get("RANK", "")
    return int(stated) if stated.isdecimal() else 0


def _prepared(copied: tuple[Logged | Unpacked, Sequence[torch.cuda.Event]]) -> Logged:
    """Wait for the copy; leave out what is masked; raise if the batch is not what it claims to be."""
    batch, events = copied
    for event in events:
        event.synchronize()
    logged = batch.logged() if isinstance(batch, Unpacked) else batch
    check_values(logged)
    return logged


_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _close_all(timeout: float = AT_EXIT_S) -> None:
    for recorder in list(_RECORDERS):
        try:
            recorder.close(timeout)
        except RecordError as e:
            LOG.error("%s", e)


atexit.register(_close_all)


def _handle_sigterm() -> None:
    """Have SIGTERM write what waits before it ends the process, unless somebody handles it already."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # only there Python takes handlers
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, _: object) -> None:
    _close_all(TERMINATED_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # so that the parent sees what ended this process


Values: TypeAlias = Shaped[Tensor, "..."] | Shaped[ndarray, "..."] | Sequence[Any] | float | int

_OPEN: dict[str, Recorder] = {}
_LOCK = threading.Lock()


def record(
    folder: str | os.PathLike[str] | Recorder,
    *,
    step: Values,
    cu_seqlens: Values | None = None,
    divergences: Mapping[str, Values] | None = None,
    **fields: Values | Sequence[str] | None,
) -> Recorder:
    """Record what a step knew of its tokens; returns at once, a thread writes.

    Token values are padded `[b, time]` with `mask`, or packed `[n]` with `cu_seqlens` (and `mask`, if
    some tokens do not train). Value `[i, t]` describes token `[i, t]`: log-probs are those *of* the
    token that stands there. What a loop does not have it leaves out.

    Args:
        folder: of the log, made at the first call; or a `Recorder` with settings of your own. The
            recorder of a folder is closed when the process ends.
        cu_seqlens: starts of the sequences in the packed tokens, first 0, last `n`.
        divergences: exact ones by name (`kl_rollout_current`, ...), nats per token.
        fields: those of `offdrift.records.schema`.

    NaN and infinite values are written as they are: readers leave such tokens out and count them by
    field, so that an audit shows them. A sequence without a token keeps its row.

    Raises: `ShapeError` if a field has the shape of neither tokens nor sequences; `BadValueError` for
        a prompt or completion that is no text; `RecordError` if an earlier batch could not be written.

    Example:
        >>> from tempfile import mkdtemp
        >>> logp = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
        >>> log = record(mkdtemp(), step=1, logp_rollout=logp - 0.1, logp=logp,
        ...              mask=torch.tensor([[1, 1], [1, 0]]), rewards=[1.0, 0.0])
        >>> log.close()
        >>> log.written, log.dropped
        (1, 0)
    """
    arguments = {f.name: f for f in ARGUMENTS}
    for name in fields:
        if name not in arguments:
            close = get_close_matches(name, arguments, 1)
            raise TypeError(
                f"record() takes no field {name!r}; "
                + (f"did you mean {close[0]!r}? " if close else "")
                + f"There are {', '.join(arguments)}"
            )
    batch = Unpacked(
        cu_seqlens=None if cu_seqlens is None else tensor_of("cu_seqlens", cu_seqlens),
        divergences={name: tensor_of(name, x) for name, x in (divergences or {}).items()},
        **{name: _value(arguments[name], x) for name, x in {"step": step, **fields}.items()},
    )
    if not isinstance(folder, Recorder):
        key = os.path.abspath(folder)
        with _LOCK:
            if key not in _OPEN or _OPEN[key].closed:
                _OPEN[key] = Recorder(folder)
            folder = _OPEN[key]
    folder.add(batch)
    return folder


# `help` shows every field, in the signature and in the docstring.
_signature = inspect.signature(record)
record.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[p for p in _signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    + [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None) for f in ARGUMENTS if f.name != "step"]
)
record.__doc__ = (record.__doc__ or "").replace(
    "        fields: those of `offdrift.records.schema`.", describe_arguments()
)


def _value(f: LogField, x: Any) -> Tensor | tuple[str, ...] | None:
    """Convert the value given for a field to a tensor, or to a tuple of texts."""
    if x is None:
        return None
    texts = isinstance(x, Sequence) and any(isinstance(t, str) for t in x)
    if not f.is_text and not (f.text_ids and texts):
        return tensor_of(f.name, x)
    for i, text in enumerate(x):
        if not isinstance(text, str):
            raise BadValueError(
                f"{f.name}[{i}] is of type {type(text).__name__}; give one text per sequence, such as "
                "the rendered chat template"
            )
    return tuple(x) if f.is_text else torch.tensor([text_id(t) for t in x])
