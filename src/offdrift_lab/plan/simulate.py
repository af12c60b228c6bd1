"""`simulate`: one schedule on a virtual clock, decided by the scheduler that real runs use.

The model of a worker is continuous batching: while c responses run on it, each of them gets a token every

    t0 n + t1 c   seconds,   n versions of weights among them (1 but for schedules that keep several alive);
                             with speculative decoding as `Rollout.token_seconds` says

A worker has one clock that counts tokens. A response that starts when the clock shows k and has l tokens to come ends
when it shows k + l, so that a change of c moves one timer and no response: O(log c). Prefills and loads of weights
stop the clock. With `rollout.steps`, what a worker does is seen, and what it is told is done, after so many tokens. The
trainer is busy for so many seconds per group and per update.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import simpy

from offdrift_lab.plan.phases import Phases
from offdrift_lab.schedules import Cancel, Key, Load, Schedule, Scheduler, Start, Train
from offdrift_lab.schedules.ledger import Command

NEVER = 2**31
"""Updates of the simulated run: admission never runs out, and the simulation stops in the steady state."""
BLOCK = 256
"""Groups whose lengths are drawn together."""
EPS = 1e-6
"""Tokens by which rounding may move the end of a response."""
STATES: tuple[str, ...] = ("busy", "sync", "idle", "down")
"""What a worker or the trainer does; "sync": it waits while weights are moved."""


@dataclass(slots=True)
class Drawing:
    """A response on a worker."""

    key: Key
    version: int
    start: float
    """Clock of its worker when it had no token of this stay."""
    tokens: int
    """Tokens to come in this stay: to its end, or to the end of its slice."""
    before: int
    ends: bool
    """Whether the response ends with them."""
    reported: int = 0


@dataclass(slots=True)
class Replica:
    """A replica with continuous batching."""

    name: str
    clock: float = 0.0
    """Tokens that a response would have got that runs since the beginning."""
    at: float = 0.0
    """Time at which the clock showed that; in the future while the clock stands still."""
    step: float = math.inf
    """Seconds per token."""
    drawing: dict[Key, Drawing] = field(default_factory=dict)
    due: list[tuple[float, int, Drawing]] = field(default_factory=list)
    ended: list[Drawing] = field(default_factory=list)
    """Responses whose end has not been seen yet."""
    orders: list[Command] = field(default_factory=list)
    """Commands that wait for the end of its call."""
    call: float = 0.0
    """Clock at which one of its calls began."""
    versions: Counter[int] = field(default_factory=Counter)
    loading: bool = False
    has_weights: bool = True
    timer: int = 0
    """Number of the timer that counts; earlier ones are outdated."""
    generated: float = 0.0
    """Tokens that it has drawn."""
    state: str = "idle"
    since: float = 0.0

    def advance(self, now: float) -> None:
        """Set the clock to the present."""
        if now > self.at:
            if self.drawing:
                tokens = (now - self.at) / self.step
                self.clock += tokens
                self.generated += tokens * len(self.drawing)
            self.at = now

    def call_end(self, steps: int | None) -> float:
        """Clock at which its call of so many tokens ends; it must have been advanced."""
        if steps is None or not self.drawing:
            return self.clock
        return self.call + steps * math.ceil((self.clock - self.call - EPS) / steps)

    def pause(self, seconds: float) -> None:
        """Let the clock stand still for so long; it must have been advanced."""
        self.at += seconds


class Mark(NamedTuple):
    """Sums up to a moment; the difference of two is what happened between them."""

    time: float
    workers: dict[str, float]
    trainer: dict[str, float]
    totals: dict[str, int]
    lag: Counter[int]
    generated: float
    steps: float
    """Decoding steps of all workers."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a simulation over the updates that were measured."""

    schedule: str
    workers: int
    updates: int
    seconds: float
    """Seconds per update."""
    error: float | None
    """Standard error of it: of one run's length, from the means of consecutive updates; None of one update."""
    groups_per_s: float
    tokens_per_s: float
    """Tokens that were trained on, per second."""
    worker: dict[str, float]
    """Share of the workers' time by what they do."""
    trainer: dict[str, float]
    """The same of the trainer's."""
    lag: dict[int, int]
    """Responses trained on, by the lag of their oldest token, updates."""
    max_lag: int | None
    """The proved limit; None if nothing limits it."""
    wasted: float
    """Share of the drawn tokens that no update used."""
    mixed: float
    """Share of the responses with tokens of several versions."""

    @property
    def lag_mean(self) -> float:
        return sum(lag * n for lag, n in self.lag.items()) / sum(self.lag.values())

    def lag_quantile(self, q: float) -> int:
        """The smallest lag that at least a share q of the responses does not exceed."""
        lags = sorted(self.lag)
        counts = list(accumulate(self.lag[x] for x in lags))
        return lags[bisect_left(counts, q * counts[-1])]

    @property
    def lag_max(self) -> int:
        return max(self.lag)


def simulate(schedule: Schedule, phases: Phases, *, name: str = "") -> Outcome:
    """Run a schedule until the measured updates are over.

    Args:
        name: of the outcome.

    Example:
        >>> from offdrift_lab.plan.phases import EXAMPLE
        >>> from offdrift_lab.schedules import SCHEDULES
        >>> outcome = simulate(SCHEDULES["sync"], EXAMPLE)
        >>> outcome.lag_max, outcome.max_lag, round(sum(outcome.worker.values()), 9)
        (0, 0, 1.0)
    """
    run = Simulation(schedule, phases)
    begin = run.until(phases.run.warmup)
    first = len(run.ends)
    end = run.until(phases.run.warmup + phases.run.updates)
    return outcome_of(schedule, phases, begin, end, [begin.time, *run.ends[first:]], name=name)


def outcome_of(schedule: Schedule, phases: Phases, begin: Mark, end: Mark, ends: list[float], *, name: str) -> Outcome:
    """Summarize what happened between two moments, `ends` being the times at which updates ended."""
    seconds, steps = end.time - begin.time, np.diff(ends)
    updates, workers = len(steps), phases.rollout.workers
    shares = {k: (end.workers[k] - begin.workers[k]) / (seconds * workers) for k in STATES}
    passes = (end.steps - begin.steps) / phases.rollout.tokens_per_pass
    beside = phases.rollout.overhead * passes / (seconds * workers)
    shares |= {"busy": shares["busy"] - beside, "idle": shares["idle"] + beside}
    trainer = {k: (end.trainer[k] - begin.trainer[k]) / seconds for k in STATES if k != "down"}
    totals = {k: end.totals[k] - begin.totals[k] for k in end.totals}
    blocks = [block.mean() for block in np.array_split(steps, min(8, updates))]
    return Outcome(
        name,
        workers,
        updates,
        seconds=seconds / updates,
        error=float(np.std(blocks, ddof=1) / math.sqrt(len(blocks))) if updates > 1 else None,
        groups_per_s=totals["groups_trained"] / seconds,
        tokens_per_s=totals["tokens_trained"] / seconds,
        worker=shares,
        trainer=trainer,
        lag=dict(sorted((end.lag - begin.lag).items())),
        max_lag=schedule.max_lag,
        wasted=totals["wasted_tokens"] / max(1.0, end.generated - begin.generated),
        mixed=totals["mixed"] / max(1, totals["responses_trained"]),
    )


class Simulation:
    """A run on a virtual clock; `until` takes it to the end of an update.

    The environment's events are ends of responses, loads, steps of the trainer, crashes and restarts. All events of
    one moment are reported before the scheduler decides.
    """

    def __init__(self, schedule: Schedule, phases: Phases) -> None:
        self.schedule, self.phases = schedule, phases
        batch = phases.batch
        self.scheduler = Scheduler(
            schedule, batch=batch.groups, samples=batch.samples, updates=NEVER, store=batch.store
        )
        self.env = simpy.Environment(initial_time=0.0)
        self.ends: list[float] = []
        """Times at which updates ended."""
        self.seconds: dict[str, dict[str, float]] = {
            "workers": dict.fromkeys(STATES, 0.0),
            "trainer": dict.fromkeys(STATES, 0.0),
        }
        self._trainer, self._trainer_since = "idle", 0.0
        self._pushed = 0  # workers that take pushed weights now
        self._touched: dict[str, Replica] = {}
        self._lengths: dict[tuple[int, int], list[list[int]]] = {}
        self._gone = self._gone_steps = 0.0  # tokens drawn by workers that are lost, and their steps
        self._down: dict[str, float] = {}  # lost workers, and until when their time is booked
        self._crashes = np.random.default_rng([phases.run.seed, 1])
        self._count = 0
        self.workers: dict[str, Replica] = {}
        for i in range(phases.rollout.workers):
            self._up(f"worker-{i}", version=0)

    def until(self, update: int) -> Mark:
        """Go on until so many updates have ended; what has happened so far."""
        env, scheduler = self.env, self.scheduler
        while scheduler.version < update:
            for command in scheduler.decide():
                self._carry_out(command)
            self._set_timers()
            now = env.peek()
            if math.isinf(now):
                raise RuntimeError(f"update {scheduler.version + 1} never ends: nothing happens any more")
            while scheduler.version < update and env.peek() == now:
                env.step()
        return self._mark()

    def _mark(self) -> Mark:
        """Sums up to now."""
        for worker in self.workers.values():
            worker.advance(self.env.now)
            self._enter(worker, worker.state)
        for name in self._down:
            self._book_down(name)
        self._trainer_enters(self._trainer)
        totals = self.scheduler.totals
        names = ("groups_trained", "tokens_trained", "responses_trained", "mixed", "wasted_tokens")
        return Mark(
            self.env.now,
            dict(self.seconds["workers"]),
            dict(self.seconds["trainer"]),
            totals={name: getattr(totals, name) for name in names},
            lag=Counter(totals.lag),
            generated=self._gone + sum(w.generated for w in self.workers.values()),
            steps=self._gone_steps + sum(w.clock for w in self.workers.values()),
        )

    # -- commands

    def _carry_out(self, command: Command) -> None:
        if not isinstance(command, Train):
            worker = self._touch(command.worker)
            if worker.call_end(self.phases.rollout.steps) > worker.clock + EPS:
                worker.orders.append(command)
                return
        if isinstance(command, Start):
            self._begin(command)
        elif isinstance(command, Load):
            self._load(command)
        elif isinstance(command, Cancel):
            worker = self._touch(command.worker)
            for key in command.keys:
                if key in worker.drawing:  # else it has ended, which nobody has seen
                    self._leave(worker, key)
        else:
            trainer = self.phases.trainer
            seconds = trainer.group * len(command.groups) + (trainer.update if command.last else 0.0)
            self._trainer_enters("busy")
            self._after(seconds, self._trained, command.last)

    def _begin(self, start: Start) -> None:
        worker, phases = self._touch(start.worker), self.phases
        tokens, ends = self._length(start.key) - start.before, True
        if start.limit is not None and tokens > start.limit:
            tokens, ends = start.limit, False
        worker.pause(phases.rollout.prefill * (phases.lengths.prompt + start.before))
        if not worker.drawing:
            worker.call = worker.clock
        drawing = Drawing(start.key, start.version, worker.clock, tokens=tokens, before=start.before, ends=ends)
        worker.drawing[start.key] = drawing
        worker.versions[start.version] += 1
        self._count += 1
        heappush(worker.due, (worker.clock + tokens, self._count, drawing))

    def _load(self, load: Load) -> None:
        worker, sync = self._touch(load.worker), self.phases.sync
        pushed = worker.has_weights and self.schedule.weights.delivery == "push"
        seconds = sync.push if pushed else sync.load
        worker.loading = True
        self._pushed += pushed
        if not load.beside:
            self._report(worker)
            worker.pause(seconds)
        if pushed:
            self._trainer_enters("sync")
        self._after(seconds, self._loaded, (worker, load, pushed))

    # -- events

    def _after(self, seconds: float, callback: Callable[[Any], None], value: Any) -> None:
        self._when(seconds, lambda event: callback(event.value), value)

    def _when(self, seconds: float, callback: Callable[[simpy.Event], None], value: Any) -> None:
        event = self.env.timeout(seconds, value)
        assert event.callbacks is not None  # as they are only after the event
        event.callbacks.append(callback)

    def _due(self, event: simpy.Event) -> None:
        """Responses on a worker end, or have drawn as many tokens as their slice allowed."""
        value: Any = event.value
        worker, timer = value
        if timer != worker.timer:
            return
        self._touch(worker.name)
        while worker.due and worker.due[0][0] <= worker.clock + EPS:
            drawing = heappop(worker.due)[2]
            if worker.drawing.get(drawing.key) is not drawing:
                continue
            self._leave(worker, drawing.key)
            worker.ended.append(drawing)
        if worker.call_end(self.phases.rollout.steps) <= worker.clock + EPS:
            self._call_over(worker)

    def _call_over(self, worker: Replica) -> None:
        """Report the responses that have ended, and carry out the worker's orders."""
        ended, worker.ended = worker.ended, []
        for drawing in ended:
            event_of = self.scheduler.finished if drawing.ends else self.scheduler.sliced
            event_of(drawing.key, drawing.tokens - drawing.reported, drawing.version)
        orders, worker.orders = worker.orders, []
        for order in orders:
            self._carry_out(order)

    def _loaded(self, value: tuple[Replica, Load, bool]) -> None:
        worker, load, pushed = value
        self._pushed -= pushed
        if pushed and not self._pushed:
            self._trainer_enters("idle")
        if self.workers.get(worker.name) is not worker:
            return
        self._touch(worker.name)
        worker.loading, worker.has_weights = False, True
        self.scheduler.loaded(worker.name, load.version)
        if load.beside or not worker.drawing:
            return
        for drawing in worker.drawing.values():
            drawing.version = load.version
        worker.versions = Counter({load.version: len(worker.drawing)})
        if self.schedule.weights.cache == "recompute":
            prefixes = sum(d.before + d.reported for d in worker.drawing.values())
            prompts = self.phases.lengths.prompt * len(worker.drawing)
            worker.pause(self.phases.rollout.prefill * (prefixes + prompts))

    def _trained(self, last: bool) -> None:
        self._trainer_enters("idle")
        if not last:
            self.scheduler.accumulated()
            return
        if self.schedule.too_old.limit is not None:  # what is too old is known of responses in progress, too
            for worker in self.workers.values():
                worker.advance(self.env.now)
                self._report(worker)
        self.scheduler.trained()
        self.ends.append(self.env.now)

    def _up(self, name: str, version: int | None) -> None:
        rollout = self.phases.rollout
        worker = self.workers[name] = Replica(name, at=self.env.now, has_weights=version is not None)
        worker.since = self.env.now
        self.scheduler.worker_up(name, slots=rollout.slots, version=version)
        if rollout.crashes_per_hour:
            self._after(self._crashes.exponential(3600 / rollout.crashes_per_hour), self._crash, name)

    def _crash(self, name: str) -> None:
        """A worker is lost. Tokens have reached the driver as they were drawn: responses go on behind them."""
        worker = self.workers.pop(name)
        worker.advance(self.env.now)
        self._report(worker)
        self._enter(worker, "down")
        worker.timer += 1
        self._touched.pop(name, None)
        self._gone += worker.generated
        self._gone_steps += worker.clock
        self.scheduler.worker_lost(name)
        self._down[name] = self.env.now
        self._after(self.phases.rollout.restart, self._restarted, name)

    def _restarted(self, name: str) -> None:
        self._book_down(name)
        del self._down[name]
        self._up(name, version=None)

    # -- workers

    def _touch(self, name: str) -> Replica:
        """A worker that something happens to: its clock shows the present, its timer is set again afterwards."""
        worker = self.workers[name]
        if name not in self._touched:
            worker.advance(self.env.now)
            self._touched[name] = worker
        return worker

    def _leave(self, worker: Replica, key: Key) -> None:
        """A response ends on a worker."""
        version = worker.drawing.pop(key).version
        worker.versions[version] -= 1
        if not worker.versions[version]:
            del worker.versions[version]

    def _set_timers(self) -> None:
        """Set the timers of workers to which something has happened."""
        env, rollout = self.env, self.phases.rollout
        for worker in self._touched.values():
            drawing = len(worker.drawing)
            self._enter(worker, "busy" if drawing and worker.at <= env.now else self._resting(worker))
            worker.timer += 1
            if not drawing:
                worker.due.clear()
                continue
            worker.step = rollout.token_seconds(drawing, len(worker.versions))
            while worker.drawing.get(worker.due[0][2].key) is not worker.due[0][2]:
                heappop(worker.due)
            due = worker.due[0][0]
            if worker.ended or worker.orders:
                due = min(due, worker.call_end(rollout.steps))
            seconds = worker.at - env.now + (due - worker.clock) * worker.step
            self._when(max(0.0, seconds), self._due, (worker, worker.timer))
        self._touched.clear()

    def _resting(self, worker: Replica) -> str:
        return "sync" if worker.loading else "busy" if worker.drawing else "idle"

    def _enter(self, worker: Replica, state: str) -> None:
        """Book the time since the last change, and change."""
        self.seconds["workers"][worker.state] += self.env.now - worker.since
        worker.state, worker.since = state, self.env.now

    def _book_down(self, name: str) -> None:
        self.seconds["workers"]["down"] += self.env.now - self._down[name]
        self._down[name] = self.env.now

    def _trainer_enters(self, state: str) -> None:
        self.seconds["trainer"][self._trainer] += self.env.now - self._trainer_since
        self._trainer, self._trainer_since = state, self.env.now

    def _report(self, worker: Replica) -> None:
        """Tell the scheduler which tokens a worker has drawn so far; its clock must show the present."""
        for drawing in (*worker.drawing.values(), *worker.ended):
            tokens = min(drawing.tokens - 1, int(worker.clock - drawing.start + EPS)) - drawing.reported
            if tokens > 0:
                drawing.reported += tokens
                self.scheduler.drawn(drawing.key, tokens, drawing.version)

    def _length(self, key: Key) -> int:
        """Tokens of a response: a function of the seed and its key alone, so that schedules see the same responses."""
        block, row = divmod(key.group, BLOCK)
        lengths = self._lengths.get((block, key.attempt))
        if lengths is None:
            rng = np.random.default_rng([self.phases.run.seed, 0, block, key.attempt])
            lengths = self.phases.lengths.draw(rng, BLOCK, self.phases.batch.samples).tolist()
            self._lengths[block, key.attempt] = lengths
        return lengths[row][key.sibling]
