"""`Place`, where alarms go, and `Delivery`, the result of sending one there."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from offdrift.alarms.alarm import Alarm


@dataclass(frozen=True)
class Delivery:
    """Result of sending one alarm to a place."""

    problem: str = ""
    """Why it did not arrive; "" if it did."""
    printed: str = ""
    """What a command printed."""


@runtime_checkable
class Place(Protocol):
    """A command, a webhook, or any other place that alarms are sent to."""

    name: str
    """As messages call it, without a secret."""
    key: str
    """A text that tells it from other places; only its digest is stored."""
    level: str
    """The least severe finding that is sent here."""

    def send(self, alarm: Alarm, stop: threading.Event) -> Delivery:
        """Send one alarm; returns soon after `stop` is set. Raises nothing."""
        ...
