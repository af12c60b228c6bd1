"""`Driver`: the schedule at work. A thread of the trainer's process that carries out what the scheduler decides.

It sends orders to the workers, keeps what they have drawn until the trainer takes it, and replaces workers that die or
hang. One call per worker is under way at a time and lasts a few tokens, so that new weights never wait for a response
to end. The trainer is told of groups by `take`, and tells of its updates by `accumulated` and `trained`.

Two clocks order events: the real one, or, with `pipeline.update_rounds`, a virtual one on which every worker draws
`steps` tokens per round and an update lasts a fixed number of rounds. Then the same recipe gives the same run, bit for
bit, and so does one that was resumed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from offdrift.engines.stream import Delta, DrawJob
from offdrift.errors import EngineError
from offdrift_lab.schedules import Cancel, Key, Load, Schedule, Scheduler, Start
from offdrift_lab.train.data.rewards import Rewards
from offdrift_lab.train.pipeline.scoring import RewardLedger, Scorer
from offdrift_lab.train.pipeline.worker import Draw, Forget, Order, Published, Report, TakeWeights
from offdrift_lab.train.pipeline.workers import Workers, reason
from offdrift_lab.train.settings.sections import PipelineSettings

T = TypeVar("T")
TRIES = 3
"""Workers in a row that may die without having drawn a token."""


@dataclass
class Drawn:
    """A response as it has been drawn so far."""

    job: DrawJob
    """From its first token on."""
    attempt: int = 0
    deltas: list[Delta] = field(default_factory=list)
    worker: str = ""
    """The one that drew the last token."""
    queue_seconds: float = 0.0
    """From the submission of its group to its first start."""
    started: float = 0.0
    """Seconds of the driver's clock."""
    generation_seconds: float = 0.0
    """From its start to its end."""


class Ready(NamedTuple):
    """Groups for the trainer."""

    groups: tuple[tuple[int, tuple[Drawn, ...]], ...]
    """By number, the responses of each."""
    last: bool
    """Whether the update ends with them."""
    rewards: tuple[Future[Rewards | None] | None, ...] = ()
    """Those of each group, if workers compute them; where a worker was not asked, or is gone, it is None."""


class News(NamedTuple):
    """The trainer has done something."""

    stepped: bool
    """Whether the optimizer has; else groups are in the gradient."""
    weights: Published | None = None
    """New weights, if they are published."""
    snapshot: Future[Snapshot] | None = None
    """Where to put a checkpoint, if one is wanted."""


class Snapshot(NamedTuple):
    """State of the pipeline that a checkpoint stores."""

    scheduler: dict[str, Any]
    groups: dict[int, dict[int, Drawn]]
    """By number of the group and place in it."""


class Driver:
    """See the module.

    Args:
        batch: groups per update.
        job: prompt and seed of a response.
        steps: optimizer steps per update of the schedule: versions of weights count them.
        scorer: makes orders for rewards, if workers compute them.
    """

    def __init__(
        self,
        schedule: Schedule,
        workers: Workers,
        *,
        batch: int,
        samples: int,
        updates: int,
        settings: PipelineSettings,
        job: Callable[[Key], DrawJob],
        steps: int = 1,
        scorer: Scorer | None = None,
    ) -> None:
        self.schedule, self.workers, self.settings = schedule, workers, settings
        self._job, self._steps, self._scorer = job, steps, scorer
        self._rewards = RewardLedger()
        self._sizes = {"batch": batch, "samples": samples, "updates": updates, "store": settings.store}
        self.scheduler = Scheduler(schedule, **self._sizes)
        self.groups: dict[int, dict[int, Drawn]] = {}
        """What has been drawn and not been handed over, by number of the group and place in it."""
        self._handed_over: dict[int, tuple[Drawn, ...]] = {}  # what waits in `_ready`, by number of the group
        self.lock = threading.Lock()
        """Held while events are taken in and decisions carried out."""
        self.seconds = {"generation": 0.0, "load": 0.0, "reward": 0.0, "waited": 0.0}
        """What workers have spent drawing, loading weights and on rewards, and what the trainer has waited for."""
        self.lost = 0
        self._ready: queue.SimpleQueue[Ready] = queue.SimpleQueue()
        self._news: deque[News] = deque()
        self._wake = threading.Event()
        self._stop = False
        self._error: BaseException | None = None  # that has ended the thread
        self._weights: dict[int, Published] = {}  # by version of the schedule
        self._orders: dict[str, list[Order]] = {}
        self._calls: dict[Any, tuple[str, float]] = {}  # under way: worker and time
        self._starting: dict[Any, tuple[str, float]] = {}
        self._submitted: dict[int, float] = {}
        self._fruitless = 0
        self._round, self._due = 0, 0
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="offdrift-driver", daemon=True)

    # -- the trainer's side

    def load(self, snapshot: Snapshot) -> None:
        """Take back what a checkpoint stores, before `start`."""
        self.scheduler.load(snapshot.scheduler)
        self.groups = snapshot.groups
        for drawn in (drawn for group in self.groups.values() for drawn in group.values()):
            drawn.started = time.monotonic()

    def start(self, weights: Published) -> dict[str, float]:
        """Begin, or go on from what `load` has taken back, with the newest published weights; `sums` before that."""
        self._weights = {self.scheduler.published: weights}
        for name in self.workers.actors:
            self._up(name)
        before = self.sums()
        self._thread.start()
        return before

    def take(self) -> Ready:
        """The next groups to train on; waits for them. Raises what has ended the driver, if something has."""
        begin = time.monotonic()
        ready = self._wait(self._ready.get)
        self.seconds["waited"] += time.monotonic() - begin
        with self.lock:
            for number, _ in ready.groups:
                del self._handed_over[number]
        return ready

    def rewards(self, ready: Ready) -> list[Rewards | None]:
        """The rewards of groups that `take` has given, by group; waits for them. None: the trainer computes them."""
        begin = time.monotonic()
        result = [None if future is None else self._wait(future.result) for future in ready.rewards]
        self.seconds["waited"] += time.monotonic() - begin
        return result

    def accumulated(self) -> None:
        """Groups that did not end an update are in the gradient."""
        self._tell(News(stepped=False))

    def trained(self, *, weights: Published | None = None, snapshot: bool = False) -> Future[Snapshot] | None:
        """The optimizer has stepped.

        Args:
            weights: the new ones, if they are published now.
            snapshot: whether a checkpoint is wanted of this moment; its future is returned, for `snapshot`.
        """
        future: Future[Snapshot] | None = Future() if snapshot else None
        self._tell(News(True, weights, future))
        return future

    def snapshot(self, future: Future[Snapshot]) -> Snapshot:
        """Wait for the snapshot of a checkpoint and return it. Raises the error that ended the driver, if one did."""
        return self._wait(future.result)

    def versions(self) -> set[int]:
        """Versions of the trainer's weights that groups which it has not taken have tokens of, or will have."""
        with self.lock:
            waiting = [drawn for group in self._handed_over.values() for drawn in group]
            waiting += [drawn for group in self.groups.values() for drawn in group.values()]
            alive = {w.version for w in self.scheduler.workers.values() if w.version is not None}
            to_draw = {v * self._steps for v in alive | {self.scheduler.published}}
            return {delta.version for drawn in waiting for delta in drawn.deltas} | to_draw

    def sums(self) -> dict[str, float]:
        """Running sums of seconds and counts, with the groups that are stored now; the lock is held."""
        totals, seconds = self.scheduler.totals, self.seconds
        names = ("wasted_tokens", "dropped", "redrawn", "restarted")
        return {
            "seconds": time.monotonic() - self._since,
            **seconds,
            **{name: float(getattr(totals, name)) for name in names},
            "lost": float(self.lost),
            "stored": float(len(self.scheduler.groups)),
        }

    def stop(self) -> None:
        """End the thread; workers forget what they draw. Idempotent."""
        self._stop = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        for name in [name for name, _ in self._starting.values()]:
            self.workers.end(name)
        for name, actor in list(self.workers.actors.items()):
            try:
                ray.get(actor.start_over.remote(), timeout=self.settings.hang_seconds)
            except RayError:
                self.workers.end(name)

    def _tell(self, news: News) -> None:
        self._news.append(news)
        self._wake.set()

    def _wait(self, get: Callable[..., T]) -> T:
        """Return the result of `get`. It polls, so that Ctrl-C and the end of the thread are noticed."""
        while True:
            alive = self._thread.is_alive()  # before the call: a thread that has ended has nothing to add to it
            try:
                return get(timeout=1.0)
            except (queue.Empty, TimeoutError):
                if not alive:
                    ended = EngineError("the thread that drives the rollout workers has ended")
                    raise self._error or ended from None

    # -- the thread

    def _run(self) -> None:
        try:
            step = self._real if self.settings.update_rounds is None else self._virtual
            while not self._stop and not self.scheduler.done:
                step()
        except BaseException as error:
            self._error = error

    def _real(self) -> None:
        """Events as they come."""
        with self.lock:
            while self._news:
                self._take_in(self._news.popleft())
            self._decide()
        self._replace()
        self._send()
        waiting = [*self._calls, *self._starting]
        if not waiting:
            self._wake.wait(timeout=1.0)
            self._wake.clear()
            return
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0.0)
        if not done:
            # Short, since the trainer's news cannot end this wait.
            done, _ = ray.wait(waiting, num_returns=1, timeout=0.02)
        with self.lock:
            for reference in done:
                self._collect(reference)
            self._end_hanging()

    def _virtual(self) -> None:
        """One round: all workers draw, and are heard in the order of their names."""
        with self.lock:
            self._decide()
        self._replace()
        for reference in list(self._starting):
            self._await(reference, self._starting, self.settings.start_seconds)
        self._send()
        if not self._calls and self.scheduler.training is None:
            raise EngineError("nothing is being drawn and nothing is being trained on; this is a defect of the driver")
        if not self._calls:
            self._round = max(self._round, self._due)
        else:
            self._round += 1
        calls = sorted(self._calls.items(), key=lambda item: item[1][0])
        for reference, _ in calls:
            self._await(reference, self._calls, self.settings.hang_seconds)
        if self.scheduler.training is not None and self._round >= self._due:
            while not self._news:
                if self._stop:
                    return
                self._wake.wait(timeout=1.0)
                self._wake.clear()
            with self.lock:
                self._take_in(self._news.popleft())

    def _await(self, reference: Any, calls: dict[Any, tuple[str, float]], limit: float) -> None:
        """Wait for a call, or until its worker counts as hanging, and take in what came of it."""
        while not ray.wait([reference], timeout=0.5)[0]:
            if self._stop:
                return
            if time.monotonic() - calls[reference][1] > limit:
                break
        with self.lock:
            self._end_hanging()
            if reference in calls:
                self._collect(reference)

    # -- events

    def _take_in(self, news: News) -> None:
        """The trainer's news; the lock is held."""
        scheduler = self.scheduler
        if not news.stepped:
            scheduler.accumulated()
            return
        scheduler.trained()
        if news.weights is not None:
            self._weights = {scheduler.published: news.weights}
        if news.snapshot is not None:
            groups = {n: {i: replace(d, deltas=[*d.deltas]) for i, d in g.items()} for n, g in self.groups.items()}
            taken = Snapshot(scheduler.state(), groups)
            if self.settings.update_rounds is not None:
                self._start_over(taken)
            news.snapshot.set_result(taken)

    def _start_over(self, snapshot: Snapshot) -> None:
        """Go on from a checkpoint as a resumed run will, so that both do the same."""
        self.scheduler = Scheduler(self.schedule, **self._sizes)
        self.scheduler.load(snapshot.scheduler)
        self._orders = {}
        self._rewards.clear()
        calls = {name: actor.start_over.remote() for name, actor in self.workers.actors.items()}
        for name, reference in calls.items():
            try:
                ray.get(reference, timeout=self.settings.hang_seconds)
                self._up(name)
            except (RayActorError, GetTimeoutError) as error:
                self._lose(name, reason(error))

    def _collect(self, reference: Any) -> None:
        """Process the result of a finished call. The caller holds the lock."""
        name, _ = self._calls.pop(reference, None) or self._starting.pop(reference)
        try:
            result: Any = ray.get(reference)
        except RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except RayActorError as error:
            self._lose(name, reason(error))
            return
        if isinstance(result, Report):
            self._report(name, result)
        else:
            self.workers.started(name, result)
            self._up(name)

    def _report(self, name: str, report: Report) -> None:
        now, scheduler = time.monotonic(), self.scheduler
        self.seconds["generation"] += report.generation_seconds
        self.seconds["load"] += report.load_seconds
        self.seconds["reward"] += report.reward_seconds
        for scored in report.rewards:
            self._rewards.arrived(scored)
        for version in report.loaded:
            scheduler.loaded(name, version // self._steps)
        for delta, end, count in zip(report.deltas(), report.ends, report.counts, strict=True):
            self._fruitless = 0
            key = Key(*map(int, delta.key.split(".")))
            drawn = self.groups.get(key.group, {}).get(key.sibling)
            if drawn is None or drawn.attempt != key.attempt:  # dropped, or drawn again, in the meantime
                continue
            drawn.deltas.append(delta)
            drawn.worker = name
            version = delta.version // self._steps
            if end is None:
                scheduler.drawn(key, count, version)
            elif end == "slice":
                scheduler.sliced(key, count, version)
            else:
                drawn.generation_seconds = now - drawn.started
                scheduler.finished(key, count, version)
                self._want_rewards(key)

    def _up(self, name: str) -> None:
        """A worker can be given orders; it has the weights of a checkpoint, which nothing is drawn by."""
        self._orders[name] = []
        self.scheduler.worker_up(name, slots=self.settings.slots, version=None)

    def _lose(self, name: str, why: str) -> None:
        """A worker is gone: what it was drawing goes on elsewhere, behind what has arrived of it."""
        self.lost += 1
        self._fruitless += 1
        self.workers.end(name)
        self._orders.pop(name, None)
        self._rewards.lost(name)
        if name in self.scheduler.workers:
            self.scheduler.worker_lost(name)
        if self._fruitless > TRIES * self.settings.workers:
            raise EngineError(
                f"{self._fruitless} rollout workers in a row were lost before they had drawn anything, the last "
                f"because: {why}. Look at Ray's logs, give workers more memory, or lower pipeline.workers"
            )

    def _end_hanging(self) -> None:
        now = time.monotonic()
        limits = ((self._calls, self.settings.hang_seconds), (self._starting, self.settings.start_seconds))
        for calls, limit in limits:
            for reference, (name, since) in list(calls.items()):
                if now - since > limit:
                    del calls[reference]
                    self._lose(name, f"it has not answered for {limit:g} s")

    # -- orders

    def _decide(self) -> None:
        """Let the scheduler decide, and write down the orders; the lock is held."""
        scheduler, now = self.scheduler, time.monotonic()
        first = scheduler.next_group
        commands = scheduler.decide()
        self._submitted |= dict.fromkeys(range(first, scheduler.next_group), now)
        for command in commands:
            if isinstance(command, Start):
                self._orders[command.worker].append(self._draw(command, now))
            elif isinstance(command, Load):
                version, weights = command.version * self._steps, self._weights[command.version]
                order = TakeWeights(version, weights, command.beside, self.schedule.weights.cache)
                self._orders[command.worker].append(order)
            elif isinstance(command, Cancel):
                self._cancel(command)
            else:
                self._due = self._round + (self.settings.update_rounds or 0)
                groups = tuple((number, self._hand_over(number)) for number in command.groups)
                scored = () if self._scorer is None else tuple(map(self._rewards.take, command.groups))
                self._ready.put(Ready(groups, command.last, scored))
        for number in (self.groups.keys() | self._submitted.keys()) - scheduler.groups.keys():
            self.groups.pop(number, None)
            self._submitted.pop(number, None)
            self._rewards.forget(number)
        for name, order in self._rewards.assign({name: len(scheduler.workers[name].running) for name in self._orders}):
            self._orders[name].append(order)

    def _want_rewards(self, key: Key) -> None:
        """Order the rewards of a group, if the response of this key was the last and workers compute them."""
        group = self.scheduler.groups.get(key.group)
        if self._scorer is None or group is None or group.missing:
            return
        responses = [drawn for _, drawn in sorted(self.groups[key.group].items())]
        tokens = [[t for delta in drawn.deltas for t in delta.tokens.tolist()] for drawn in responses]
        self._rewards.want(self._scorer(key.group, key.attempt, tokens))

    def _draw(self, start: Start, now: float) -> Draw:
        key = start.key
        responses = self.groups.setdefault(key.group, {})
        response = responses.get(key.sibling)
        if response is None or response.attempt != key.attempt:
            job = self._job(key)
            waited = now - self._submitted.get(key.group, now)
            response = responses[key.sibling] = Drawn(job, key.attempt, started=now, queue_seconds=waited)
        if not start.before:
            response.deltas = []
        before = tuple(t for d in response.deltas for t in d.tokens.tolist())
        assert len(before) == start.before, f"{key}: {len(before)} tokens are here, {start.before} were reported"
        return Draw(DrawJob(response.job.key, response.job.prompt, response.job.seed, before), start.limit)

    def _cancel(self, cancel: Cancel) -> None:
        """Forget responses, also those whose orders have not been sent yet."""
        names = {name_of(key) for key in cancel.keys}
        orders = self._orders[cancel.worker]
        orders[:] = [o for o in orders if not (isinstance(o, Draw) and o.job.key in names)]
        orders.append(Forget(tuple(sorted(names))))

    def _hand_over(self, number: int) -> tuple[Drawn, ...]:
        """The responses of a group, which leave the driver once the trainer takes them."""
        group = tuple(response for _, response in sorted(self.groups.pop(number).items()))
        self._handed_over[number] = group
        return group

    def _send(self) -> None:
        """Call the workers that have orders, or responses in progress, and are not busy with a call."""
        busy = {name for name, _ in self._calls.values()}
        for name in sorted(self._orders.keys() - busy):
            orders, worker = self._orders[name], self.scheduler.workers[name]
            if orders or worker.running:
                self._orders[name] = []
                reference = self.workers.actors[name].advance.remote(orders, self.settings.steps)
                self._calls[reference] = (name, time.monotonic())

    def _replace(self) -> None:
        """Make workers in the place of lost ones."""
        for name in self.workers.make():
            self._starting[self.workers.actors[name].ready.remote()] = (name, time.monotonic())


def name_of(key: Key) -> str:
    """A key as the workers know it."""
    return ".".join(map(str, key))
