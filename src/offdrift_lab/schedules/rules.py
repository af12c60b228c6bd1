"""Rules of a schedule: when prompts start, where they run, how weights arrive, what is too old, what an update takes.

A schedule of an asynchronous run is a composition of one rule of each kind, as a method is a composition of gates,
weights and an objective. Every rule is a pure function of counts: it knows no clock, no engine and no network, so the
same rule decides in a real run and in a simulated one.

    B    groups per update
    T    updates between two publications of weights (`sync_every`)
    v    the trainer's version: updates taken
    p    the newest published version, p <= v
    lag  v - (version of the weights that drew a token), at the update that trains on it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts that admission rules see, of groups unless said otherwise."""

    batch: int
    """B, groups per update."""
    sync_every: int
    """T, updates between publications."""
    version: int
    """v, updates taken."""
    published: int
    """p, the newest version that workers can have."""
    submitted: int
    """Groups started so far, less those that were dropped."""
    outstanding: int
    """Groups started and neither trained on nor dropped: in flight, or in the store."""
    outstanding_at_sync: int
    """The same, when version p was published."""
    started_since_sync: int
    """Groups started since then, less those of them that were dropped."""


@runtime_checkable
class Admission(Protocol):
    """Rule for whether another prompt may start now."""

    def allowed(self, counts: Counts) -> int | float:
        """Number of further groups that may start; infinite if the rule sets no limit. Negative counts as 0."""
        ...

    def ahead(self, sync_every: int) -> int | float:
        """The number a for which at most B (v + 1 + a) groups have been submitted by the last version v before a
        publication; infinite if the rule sets no such limit."""
        ...


@dataclass(frozen=True, slots=True)
class Always:
    """Prompts start whenever a worker has room; only the store's capacity holds them back."""

    def allowed(self, counts: Counts) -> float:
        return math.inf

    def ahead(self, sync_every: int) -> int | float:
        return math.inf


@dataclass(frozen=True, slots=True)
class BoundedStaleness:
    """A group may start if the update that takes it is at most `eta` updates away.

        floor((n - 1) / B) <= v + eta,   n = groups submitted, this one included

    eta = 0 is synchronous training, eta = 1 one step of overlap.

    Example:
        >>> start = Counts(batch=4, sync_every=1, version=2, published=2, submitted=12, outstanding=4,
        ...                outstanding_at_sync=4, started_since_sync=0)
        >>> [BoundedStaleness(eta).allowed(start) for eta in (0, 1)]
        [0, 4]

    Source: AReaL, arXiv:2505.24298, eq. 3.
    """

    eta: int

    def allowed(self, counts: Counts) -> int:
        return (counts.version + self.eta + 1) * counts.batch - counts.submitted

    def ahead(self, sync_every: int) -> int | float:
        return self.eta


@dataclass(frozen=True, slots=True)
class Quota:
    """Between two publications at most `(1 + staleness) B T` groups, those that were outstanding at the first included.

    `staleness` is the share of an interval's groups that may wait for the next one.

    Source: verl, fully asynchronous policy: `required_samples * (1 + staleness_threshold) *
    trigger_parameter_sync_step`.
    """

    staleness: float

    def allowed(self, counts: Counts) -> int:
        most = math.floor((1 + self.staleness) * counts.batch * counts.sync_every + 1e-9)
        return most - counts.outstanding_at_sync - counts.started_since_sync

    def ahead(self, sync_every: int) -> int | float:
        return self.staleness * sync_every


@dataclass(frozen=True, slots=True)
class InFlight:
    """At most `(1 + alpha) B` groups are outstanding.

    Source: ROLL Flash's asynchronous ratio, arXiv:2510.11345.
    """

    alpha: float

    def allowed(self, counts: Counts) -> int:
        return math.floor((1 + self.alpha) * counts.batch + 1e-9) - counts.outstanding

    def ahead(self, sync_every: int) -> int | float:
        return self.alpha


@dataclass(frozen=True, slots=True)
class PauseAt:
    """Generation pauses while a group that starts now would be trained on more than `limit` versions late.

        floor(outstanding / B) + v - p <= limit

    The first term is how many updates come before the one that takes it, if groups are taken as submitted.

    Source: bounded staleness as a user's setting, ECHO-2, arXiv:2602.02192; the formula is ours.
    """

    limit: int

    def allowed(self, counts: Counts) -> int:
        return (self.limit + 1 - (counts.version - counts.published)) * counts.batch - counts.outstanding

    def ahead(self, sync_every: int) -> int | float:
        return self.limit - (sync_every - 1)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Rule for which worker draws a response, and which response is next."""

    to: Literal["pull", "push"] = "pull"
    """pull: responses wait in one queue, and a worker takes one when it has room; push: each goes to the worker with
    the fewest responses when its group starts, and waits there."""
    slice_tokens: int | None = None
    """A response goes back to the queue after so many tokens, and continues from its prefix wherever there is room
    (divided rollout). None: it stays on its worker."""
    order: Literal["submitted", "longest"] = "submitted"
    """submitted: first come, first served; longest: the first response of every group first, then the siblings of
    those whose first responses are longest so far (context-aware scheduling)."""

    def __post_init__(self) -> None:
        if self.slice_tokens is not None and self.slice_tokens < 1:
            raise ValueError(f"slice_tokens = {self.slice_tokens}: a slice has at least one token; use None for none")
        if self.to == "push" and (self.slice_tokens is not None or self.order == "longest"):
            raise ValueError(
                'dispatch to = "push" gives a response to a worker for good: slices and the order "longest" need '
                'one queue; set to = "pull"'
            )


@dataclass(frozen=True, slots=True)
class Weights:
    """Rule for responses in progress when new weights are published, and for who moves the weights."""

    on_new: Literal["drain", "interrupt", "finish"] = "drain"
    """drain: nothing starts until what a worker runs has ended, then it loads; interrupt: workers load at once and
    responses go on behind their prefixes, so that one response has several versions; finish: a worker keeps the old
    weights for what it runs and starts new responses with the new ones, so that several versions are alive and every
    response has one."""
    delivery: Literal["push", "pull"] = "push"
    """push: all workers load together and the trainer waits for them; pull: each worker takes the newest weights from a
    store when it can, and the trainer goes on."""
    cache: Literal["recompute", "keep"] = "recompute"
    """interrupt: keys and values of a prefix are computed again with the new weights, or kept from the old ones; with
    kept ones, what draws the rest of a response is no policy that any weights have."""
    versions: int = 2
    """finish: versions that one worker holds at most; it costs that many copies of the weights."""

    def __post_init__(self) -> None:
        if self.versions < 2:
            raise ValueError(f"weights.versions = {self.versions}: the old one and the new one are 2 at least")

    @property
    def mixes(self) -> bool:
        """Whether one response can have tokens of several versions."""
        return self.on_new == "interrupt"


@dataclass(frozen=True, slots=True)
class TooOld:
    """Rule for a group whose oldest token has a lag above `limit`."""

    action: Literal["train", "drop", "redraw", "correct"] = "train"
    """train: it is trained on as it is; drop: it is discarded, another prompt takes its place; redraw: the same prompt
    is drawn again with the newest weights; correct: it is trained on by a method that corrects for its drift, and an
    arm without one is refused. drop and redraw also end responses in progress that are already too old."""
    limit: int | None = None
    """Largest lag, updates."""

    def __post_init__(self) -> None:
        if (self.action in ("drop", "redraw")) != (self.limit is not None):
            raise ValueError(
                f'too_old.action = "{self.action}" and too_old.limit = {self.limit}: "drop" and "redraw" need a '
                "limit, in updates, and no other action has one"
            )


@dataclass(frozen=True, slots=True)
class Consumption:
    """Rule for which groups an update takes, and when."""

    take: Literal["batch", "stream"] = "batch"
    """batch: an update starts when its B groups are there; stream: every group goes into the update's gradient as soon
    as it is there, and the optimizer steps after the last one. Both give the same gradient."""
    order: Literal["finished", "submitted"] = "finished"
    """finished: first finished, first taken; submitted: update k takes the groups k B to (k + 1) B - 1 in the order in
    which they started, and waits for stragglers."""
