"""`Outbox`: a bounded queue of batches that one thread writes, so that training does not wait for the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from offdrift.errors import RecordError

LOG = logging.getLogger("offdrift.recorder")

WhenFull = Literal["wait", "drop"]
OnError = Literal["raise", "warn"]
NEVER = float("inf")
ENDS_S = 1.0
"""How long a closed box waits for its thread, which has nothing to do but to end."""


@dataclass(eq=False, frozen=True)
class _Item:
    content: Any
    kind: Hashable
    """Items of one kind are written together."""
    bytes: int
    number: int
    since: float


class Outbox:
    """Items of one process on their way to the disk, with one thread that writes them.

    An item leaves the queue when it is on disk or given up, so that the limits hold for all the memory that is taken.
    (`queue.Queue` would count neither bytes nor what is being written.) When a write is refused (`RecordError`) and
    `on_error` is "raise", the thread rests until a caller has received the error, and then tries again.

    Args:
        place: where things go, for messages.
        prepare: makes what `write` takes from an item; what it raises concerns this item alone.
        write: writes prepared items of one kind; `RecordError` if the disk does not take them.
        queue, queue_bytes: what may wait, items that are being written included.
        file_bytes: from so much on, what waits is written at once.
        seconds: longest time for which an item waits for others to be written with it.
        when_full, on_error: see `Recorder`.
    """

    def __init__(
        self,
        place: object,
        prepare: Callable[[Any], Any],
        write: Callable[[Sequence[Any], Any], object],
        *,
        queue: int,
        queue_bytes: float,
        file_bytes: float,
        seconds: float,
        when_full: WhenFull,
        on_error: OnError,
    ) -> None:
        self._place, self._prepare, self._write = place, prepare, write
        self._queue, self._queue_bytes, self._file_bytes, self._seconds = queue, queue_bytes, file_bytes, seconds
        self._when_full, self._on_error = when_full, on_error
        self._changed = threading.Condition()
        self._waiting: deque[_Item] = deque()
        self._bytes = 0
        self._added = self._flush_to = 0
        self.written = self.dropped = 0
        self._error: RecordError | None = None
        self._stuck = False
        """The disk refused what waits, and no caller has received the error yet."""
        self._warned: set[str] = set()
        self._state: Literal["open", "closing", "closed"] = "open"
        self._thread: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._state != "open"

    def put(self, make: Callable[[], Any], *, kind: Hashable, size: int) -> None:
        """Queue what `make` returns, which is called once there is room for its `size` bytes."""
        with self._changed:
            self._ready()
            if not self._room(size) and self._when_full == "drop":
                self.dropped += 1
                self._warn_once("full", "the disk is slower than training: batches are dropped, and counted")
                return
            if not self._room(size):
                self._warn_once("full", "the disk is slower than training: steps wait for it")
                self._changed.wait_for(lambda: self._room(size) or self._error or self.closed)
                self._ready()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="offdrift-recorder", daemon=True)
                thread.start()
                self._thread = thread
            content = make()
            self._added += 1
            self._bytes += size
            self._waiting.append(_Item(content, kind, size, self._added, time.monotonic()))
            self._changed.notify_all()

    def flush(self, timeout: float | int | None = None) -> bool:
        """Wait until all items so far have left; False if that takes longer than `timeout` seconds."""
        with self._changed:
            self._raise_error()
            self._flush_to = last = self._added
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._oldest > last or self._error, timeout)
            self._raise_error()
            return bool(done)

    def close(self, timeout: float | int | None = None) -> None:
        """Write what waits, and stop; what cannot be written within `timeout` seconds is given up.

        When this is interrupted, the thread goes on, and another call waits for it again.
        """
        with self._changed:
            if self._state != "closed":
                self._state = "closing"
                if self._stuck:  # one last try
                    self._error, self._stuck = None, False
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._waiting or self._stuck, timeout)
            if self._state != "closed":  # by another thread, or because the writer is gone
                if left := len(self._waiting):
                    reason = self._error or f"{self._place} took more than {timeout} s"
                    self._error = RecordError(f"{reason} ({left} batches are lost)")
                    self.dropped += left
                    self._waiting.clear()
                self._state = "closed"
                self._changed.notify_all()
                if self.dropped:
                    LOG.warning("%s: %d batches were not recorded, %d were", self._place, self.dropped, self.written)
        if self._thread is not None:
            # One that the end of the interpreter overtakes in compiled code would abort the process.
            self._thread.join(ENDS_S)
        with self._changed:
            self._raise_error()

    @property
    def _oldest(self) -> float | int:
        """Number of the oldest item that waits."""
        return self._waiting[0].number if self._waiting else NEVER

    def _room(self, size: int) -> bool:
        fits = self._bytes + size <= self._queue_bytes or not self._waiting
        return fits and len(self._waiting) < self._queue

    def _ready(self) -> None:
        self._raise_error()
        if self.closed:
            raise RecordError(f"the recorder of {self._place} is closed; make a new one")

    def _raise_error(self) -> None:
        """Raise what went wrong, once, and have the thread go on."""
        error, self._error, self._stuck = self._error, None, False
        if error is None:
            return
        self._changed.notify_all()
        if self._on_error == "raise":
            raise RecordError(str(error)) from error
        LOG.warning("%s", error)

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            LOG.warning("%s: %s", self._place, message)

    def _remove(self, items: Sequence[_Item]) -> None:
        gone = set(items)
        self._waiting = deque(i for i in self._waiting if i not in gone)
        self._bytes = sum(i.bytes for i in self._waiting)
        self._changed.notify_all()

    def _run(self) -> None:
        """Writes items until the box is closed."""
        try:
            while items := self._next():
                prepared, good = [], []
                for item in items:
                    # Whatever is wrong with one item must not end the thread.
                    try:
                        prepared.append(self._prepare(item.content))
                        good.append(item)
                    except Exception as e:
                        self._lose([item], e)
                try:
                    if good:
                        self._write(prepared, good[0].kind)
                except Exception as e:
                    if isinstance(e, RecordError) and self._on_error == "raise":
                        with self._changed:
                            self._error, self._stuck = e, True
                            self._changed.notify_all()
                    else:
                        self._lose(good, e)
                else:
                    with self._changed:
                        self.written += len(good)
                        self._warned.discard("error")
                        self._remove(good)
        except BaseException as e:  # nobody may wait for a thread that is gone
            with self._changed:
                self._state = "closed"
                self._lose(list(self._waiting), e)
            raise

    def _next(self) -> list[_Item]:
        """Items to be written together, when it is time; none when the box is closed."""
        with self._changed:
            while True:
                left = NEVER
                if self._waiting and not self._stuck:
                    now = (
                        self._state == "closing"
                        or self._oldest <= self._flush_to
                        or self._bytes >= min(self._file_bytes, self._queue_bytes / 2)
                        or 2 * len(self._waiting) >= self._queue
                    )
                    left = 0.0 if now else self._waiting[0].since + self._seconds - time.monotonic()
                if left <= 0:
                    break
                if self._state == "closed":
                    return []
                self._changed.wait(None if left == NEVER else left)
            taken, size = [], 0
            for item in self._waiting:
                if item.kind == self._waiting[0].kind and (not taken or size < self._file_bytes):
                    taken.append(item)
                    size += item.bytes
            return taken

    def _lose(self, items: Sequence[_Item], error: BaseException) -> None:
        """Give items up, and report the error."""
        message = f"{len(items)} batches are lost: {str(error) or type(error).__name__}"
        with self._changed:
            self.dropped += len(items)
            if self._on_error == "warn":
                self._warn_once("error", message)
            else:
                self._error = RecordError(f"{self._place}: {message}")
            self._remove(items)
