"""Records of a scheduler on responses, groups and workers, and the commands that it gives."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple


class Key(NamedTuple):
    """A response: the number of its group, its place in it, and how often the group has been drawn before."""

    group: int
    sibling: int
    attempt: int = 0


class Start(NamedTuple):
    """Draw a response on a worker, behind the `before` tokens that it already has, and at most `limit` more."""

    worker: str
    key: Key
    version: int
    before: int
    limit: int | None


class Cancel(NamedTuple):
    """Forget responses that a worker is drawing."""

    worker: str
    keys: tuple[Key, ...]


class Load(NamedTuple):
    """A worker takes weights; what it is drawing goes on with them, or, if `beside`, with the old ones."""

    worker: str
    version: int
    beside: bool


class Train(NamedTuple):
    """Train on groups; the optimizer steps after them if `last`."""

    groups: tuple[int, ...]
    last: bool


Command = Start | Cancel | Load | Train


@dataclass(slots=True)
class Response:
    """A response that is wanted."""

    key: Key
    tokens: int = 0
    """Tokens that the driver has reported."""
    oldest: int = 0
    newest: int = 0
    worker: str | None = None
    """Where it is being drawn, or, if weights and prompts are pushed, where it waits."""
    done: bool = False


@dataclass(slots=True)
class Group:
    """Responses to one prompt."""

    number: int
    version: int
    """The newest published version when it was submitted: no older weights draw it."""
    responses: list[Response]
    missing: int
    """Responses that have not finished."""
    started: bool = False
    """Whether any of its responses has been started."""

    @property
    def oldest(self) -> int | None:
        """Version of the oldest token; None if there is no token yet."""
        return min((r.oldest for r in self.responses if r.tokens), default=None)

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.responses)


@dataclass(slots=True)
class Worker:
    """Worker that draws responses."""

    name: str
    slots: int
    """Responses that it draws at once."""
    version: int | None
    """Weights for new responses; None before the first load."""
    running: dict[Key, Response] = field(default_factory=dict)
    waiting: deque[Response] = field(default_factory=deque)
    """Responses that were pushed to it and have no slot yet."""
    loading: int | None = None

    @property
    def load(self) -> int:
        """Responses that it draws or that wait for it."""
        return len(self.running) + len(self.waiting)


@dataclass(slots=True)
class Totals:
    """Totals of what has happened so far."""

    groups_trained: int = 0
    responses_trained: int = 0
    tokens_trained: int = 0
    stale: int = 0
    """Responses trained on with a lag above 0."""
    mixed: int = 0
    """Responses trained on with tokens of several versions."""
    dropped: int = 0
    """Groups discarded as too old."""
    redrawn: int = 0
    """Groups drawn again, being too old."""
    restarted: int = 0
    """Responses drawn again from their first token, because their worker was lost."""
    wasted_tokens: int = 0
    """Tokens of dropped, redrawn and restarted responses, as far as the driver has reported them."""
    lag: Counter[int] = field(default_factory=Counter)
    """Responses trained on, by the lag of their oldest token."""
