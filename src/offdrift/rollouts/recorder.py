"""`Recorder`: logs that can be audited, from any training loop, without making a step wait for a disk.

A step hands over a batch, which is copied and queued; a thread of the recorder's own writes it, in the
plain schema (`offdrift.rollouts.log`). Files appear whole or not at all, and none is ever replaced.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from offdrift.errors import RecordError, check_choice
from offdrift.rollouts.logged import Logged
from offdrift.rollouts.outbox import LOG, Limits, OnError, Outbox, WhenFull
from offdrift.rollouts.shared import rank_here, remove_stale, write_unclaimed
from offdrift.rollouts.transit import (
    check_shapes,
    check_values,
    joined,
    num_bytes,
    on_host,
    present,
)
from offdrift.rollouts.unpacked import Unpacked, text_ids

AT_EXIT_S = 300.0
"""How long the end of a process waits for the disk."""


class Recorder:
    """Writes batches to a folder that `offdrift audit` reads; one recorder per process and folder.

    Small batches share files: a batch waits up to `seconds` for others, or until a file is full. So
    much can be lost if the process is killed, and no more; at the end of the process everything is
    written. Files are called NAME-FIRST-LAST-rankR-I.parquet, for steps FIRST to LAST.

    Args:
        folder: is made; files that are in it stay.
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
        self._limits = Limits(
            queue=max(1, queue),
            queue_bytes=float(queue_mib * 2**20),
            file_bytes=float(file_mib * 2**20),
            seconds=float(seconds),
        )
        self._when_full: WhenFull = when_full
        self._on_error: OnError = on_error
        self._open()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            error = RecordError(f"cannot record to {self.folder}: {e.strerror}; choose a folder that can be written")  # fmt: skip
            if on_error == "raise":
                raise error from e
            LOG.warning("%s", error)
        remove_stale(self.folder)
        _RECORDERS.add(self)

    def _open(self) -> None:
        self._pid = os.getpid()
        self._box = Outbox(
            self.folder, _prepared, self._write, self._limits, self._when_full, self._on_error
        )
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
            name: that the file's name begins with, "log" unless given; batches of different names
                never share a file.

        Raises: `RecordError` if an earlier batch could not be written, and this one is then not
            taken; `ShapeError` if the batch contradicts itself.
        """
        name = "log" if name is None else name
        if not name.replace("-", "").replace("_", "").isalnum():
            raise RecordError(f"name={name!r}: letters, digits, - and _ make the name of a file")
        if isinstance(batch, Logged):
            check_shapes(batch)
        whole = batch if self.text else _without_text(batch)
        if self._rank is None:
            self._rank = rank_here()
        kind = (name, present(whole))
        self._own.put(lambda: on_host(whole), kind=kind, size=num_bytes(whole))

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
        stem = f"{kind[0]}-{first:08d}-{last:08d}-rank{self._rank}"
        write_unclaimed(batch, self.folder, stem, framework=self.framework)


def _prepared(held: tuple[Logged | Unpacked, Sequence[torch.cuda.Event]]) -> Logged:
    """Wait for the copy; leave out what is masked; raise if the batch is not what it claims to be."""
    batch, events = held
    for event in events:
        event.synchronize()
    logged = batch.logged() if isinstance(batch, Unpacked) else batch
    check_values(logged)
    return logged


def _without_text(batch: Logged | Unpacked) -> Logged | Unpacked:
    ids = batch.group_ids
    if ids is None and batch.prompts is not None:
        ids = text_ids(batch.prompts)
    return replace(batch, prompts=None, completions=None, group_ids=ids)


_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _close_all() -> None:
    for recorder in list(_RECORDERS):
        try:
            recorder.close(AT_EXIT_S)
        except RecordError as e:
            LOG.error("%s", e)


atexit.register(_close_all)
