"""`Sender`: alarms on their way to one place, in a thread, so that a watch never waits for them.

A thread takes one alarm after the other, in their order. It prints nothing: `news` hands over what there is to say to
whoever shows the watch.
"""

from __future__ import annotations

import queue
import threading
import time

from offdrift.alarms.alarm import Alarm
from offdrift.alarms.place import Place
from offdrift.alarms.sent import SentAlarms
from offdrift.judge.findings import URGENCY

LAST_S = 1.0
"""Seconds that a place has to stop once it is told to."""


class Sender:
    """Sends alarms to one place, each once.

    Args:
        place: where they go.
        sent: alarms that arrived already, also in an earlier watch.

    A failure is said once; how many alarms did not arrive is said at the end, and the next watch tries them again.
    """

    def __init__(self, place: Place, sent: SentAlarms) -> None:
        self.place, self.sent = place, sent
        self.arrived = self.failed = self.before = 0
        """Alarms that arrived, that did not, and that an earlier watch had sent."""
        self._todo: queue.SimpleQueue[Alarm | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._waiting = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=place.name, daemon=True)
        self._thread.start()

    def add(self, alarm: Alarm) -> None:
        """Send an alarm, unless it is less severe than the place asks for, or has arrived before."""
        if URGENCY.index(alarm.level) > URGENCY.index(self.place.level):  # type: ignore[arg-type]
            return
        if self.sent.has(self.place.key, alarm.id):
            self.before += 1
            return
        self._waiting += 1
        self._todo.put(alarm)

    def news(self) -> list[tuple[str, str]]:
        """Return what there is to say since the last call: ("note", text) or ("warning", text)."""
        lines = []
        while not self._news.empty():
            lines.append(self._news.get())
        return lines

    def close(self, seconds: float | int) -> list[tuple[str, str]]:
        """Give what is under way so many seconds, then end; returns the last news."""
        self._todo.put(None)
        end = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(0.05)
        self._stop.set()
        self._thread.join(LAST_S)
        lines = self.news()
        if lost := self._waiting - self.arrived:
            words = f"{lost} of {self._waiting} alarms did not arrive; the next watch of the same run sends them again"
            lines.append(("warning", f"{self.place.name}: {words}"))
        if self.before:
            words = f"{self.before} alarms were sent by an earlier watch; remove {self.sent.file} to have them again"
            lines.append(("note", f"{self.place.name}: {words}"))
        if self.sent.problem:
            words = f"{self.sent.problem}, so that a watch that starts again will send the same alarms again"
            lines.append(("warning", f"{self.place.name}: {words}"))
        return lines

    def _work(self) -> None:
        while (alarm := self._todo.get()) is not None and not self._stop.is_set():
            try:
                delivery = self.place.send(alarm, self._stop)
                problem, printed = delivery.problem, delivery.printed
            except Exception as e:  # a fault of ours must not end the alarms that follow
                problem, printed = f"{type(e).__name__}: {e}", ""
            if printed:
                self._news.put(("output", printed))
            if not problem:
                self.arrived += 1
                self.sent.add(self.place.key, alarm.id)
                continue
            self.failed += 1
            if self.failed == 1:
                words = f"{problem}. The watch goes on; further failures are counted, not told"
                self._news.put(("warning", f"{self.place.name}: {words}"))
