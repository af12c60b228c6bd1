"""`Scheduler`: the ledger of an asynchronous run, and what to do next. It knows no clock: events in, commands out.

    scheduler = Scheduler(schedule("areal"), batch=32, samples=8, updates=100)
    scheduler.worker_up("worker-0", slots=64, version=0)
    while not scheduler.done:
        for command in scheduler.decide():   # Start, Cancel, Load, Train
            ...                              # the driver carries it out
        ...                                  # wait for the next event and report it: finished, loaded, trained, ...

Two drivers call it: `offdrift_lab.train.pipeline` with real workers, `offdrift_lab.plan` with a simulated clock. The
same events in the same order give the same commands. Tokens, log-probs and rewards stay with the driver; the ledger has
counts and versions. Time: amortized O(log workers) per response, and O(workers + outstanding groups) per update.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from offdrift_lab.schedules.ledger import Cancel, Command, Group, Key, Load, Response, Start, Totals, Train, Worker
from offdrift_lab.schedules.rules import Counts
from offdrift_lab.schedules.table import Schedule


class Scheduler:
    """Decides by a schedule's rules; see the module.

    Args:
        batch: B, groups per update.
        samples: responses per group.
        updates: updates of the run; no more groups are started than they need.
        store: groups that may be outstanding, in flight or waiting for the trainer; absent: 16 B.

    Raises: `ValueError` if a number is too small to ever finish an update.
    """

    def __init__(self, schedule: Schedule, *, batch: int, samples: int, updates: int, store: int | None = None) -> None:
        self.store = 16 * batch if store is None else store
        for name, value, least in (("batch", batch, 1), ("samples", samples, 1), ("store", self.store, batch)):
            if value < least:
                raise ValueError(f"{name} = {value}: at least {least}, or no update would ever have its groups")
        self.schedule, self.batch, self.samples, self.updates = schedule, batch, samples, updates
        self.version = self.published = 0
        self.totals = Totals()
        self.groups: dict[int, Group] = {}
        """Outstanding ones, in the order of their submission."""
        self.ready: deque[int] = deque()
        """Finished ones that the trainer may take, in its order."""
        self.workers: dict[str, Worker] = {}
        self.next_group = 0
        self.training: tuple[int, ...] | None = None
        """Groups that the trainer is busy with."""
        self.taken = 0
        """Groups that the current update has taken."""
        self._submitted = self._since_sync = self._at_sync = 0
        self._in_progress = 0  # groups that are started and not finished
        self._draining = False  # whether some of them have to end before weights are pushed
        self._line: deque[int] = deque()  # groups in the order of submission behind the first unfinished one
        self._fresh: deque[int] = deque()  # groups without a started response
        self._ongoing: deque[Response] = deque()  # responses of started groups that have no worker
        self._longest: list[tuple[int, int, int]] = []  # heap of ongoing responses by their group's longest sibling
        self._free: dict[int | None, list[tuple[int, str]]] = {}  # version -> heap of (load, worker), partly outdated
        self._shortest: list[tuple[int, str]] = []  # the same of all workers, if responses are pushed
        self._versions: Counter[int | None] = Counter()  # workers by version
        self._changed: set[str] = set()  # workers that may be able to load or to start something
        self._admits = True  # whether anything that admission depends on may have changed
        self._commands: list[Command] = []
        weights = schedule.weights
        self._together = weights.on_new == "drain" and weights.delivery == "push"
        self._pushes = schedule.dispatch.to == "push"
        self._by_length = schedule.dispatch.order == "longest"
        self._in_order = schedule.consumption.order == "submitted"

    # -- what is known

    @property
    def done(self) -> bool:
        return self.version >= self.updates

    @property
    def outstanding(self) -> int:
        """Groups started and neither trained on nor dropped; those that the trainer is busy with are trained on."""
        return len(self.groups)

    def counts(self) -> Counts:
        return Counts(
            self.batch,
            self.schedule.sync_every,
            self.version,
            published=self.published,
            submitted=self._submitted,
            outstanding=self.outstanding + self.taken,
            outstanding_at_sync=self._at_sync,
            started_since_sync=self._since_sync,
        )

    # -- events

    def worker_up(self, name: str, *, slots: int, version: int | None) -> None:
        """A worker can draw `slots` responses at once, with the weights of `version` if it has any."""
        if slots < 1:
            raise ValueError(f"worker {name!r} has {slots} slots; at least 1 response has to fit")
        worker = self.workers[name] = Worker(name, slots, version)
        self._versions[version] += 1
        self._admits = True
        self._offer(worker)
        if self._pushes:
            waiting, self._ongoing = self._ongoing, deque()
            for response in waiting:
                self._push(response)

    def worker_lost(self, name: str) -> None:
        """A worker is gone; what it was drawing is drawn by others, behind what has been reported of it if it can."""
        worker = self.workers.pop(name)
        self._versions[worker.version] -= 1
        self._admits = True
        for response in reversed([*worker.running.values(), *worker.waiting]):
            self._release(response)
            self._again(response)
        self._changed.update(self.workers)

    def drawn(self, key: Key, tokens: int, version: int) -> None:
        """A response got tokens, all drawn by one version."""
        response = self._response(key)
        if response is not None and tokens:
            if not response.tokens:
                response.oldest = version
            response.newest = version
            response.tokens += tokens

    def finished(self, key: Key, tokens: int, version: int) -> None:
        """A response has ended, with so many tokens since the last report."""
        self.drawn(key, tokens, version)
        response = self._response(key)
        if response is None:
            return
        self._release(response)
        response.done = True
        group = self.groups[key.group]
        group.missing -= 1
        if self._by_length:
            for sibling in group.responses:
                if not sibling.done and sibling.worker is None:
                    heapq.heappush(self._longest, (-response.tokens, *sibling.key[:2]))
        if not group.missing:
            self._ended()
            if self._in_order:
                self._line_up()
            else:
                self.ready.append(group.number)
            self._expire([group])

    def sliced(self, key: Key, tokens: int, version: int) -> None:
        """A response has drawn as many tokens as its slice allowed and has not ended."""
        self.drawn(key, tokens, version)
        response = self._response(key)
        if response is not None:
            self._release(response)
            self._queue(response)

    def loaded(self, name: str, version: int) -> None:
        """A worker has taken weights."""
        worker = self.workers.get(name)
        if worker is None:
            return
        self._versions[worker.version] -= 1
        self._versions[version] += 1
        self._admits = True
        worker.version, worker.loading = version, None
        for response in worker.running.values():
            if not response.tokens and self.schedule.weights.mixes:
                response.oldest = response.newest = version
        self._offer(worker)

    def accumulated(self) -> None:
        """The trainer has put groups into the gradient, and the update goes on."""
        assert self.training is not None
        self.training = None

    def trained(self) -> None:
        """The optimizer has stepped."""
        assert self.training is not None
        self.training, self.taken = None, 0
        self.version += 1
        self._admits = True
        if self.version % self.schedule.sync_every == 0 and not self.done:
            self.published = self.version
            self._at_sync, self._since_sync = self.outstanding, 0
            self._draining = self._together and self._in_progress > 0
            self._changed.update(self.workers)
        self._expire(list(self.groups.values()))

    # -- decisions

    def decide(self) -> list[Command]:
        """Commands to be carried out now; each is given once."""
        if self.done:
            return []
        self._loads()
        if self._admits:
            self._admits = False
            self._admit()
        self._start()
        self._train()
        commands, self._commands = self._commands, []
        return commands

    def _loads(self) -> None:
        """Give the newest weights to the workers that can take them."""
        weights, newest = self.schedule.weights, self.published
        for name in sorted(self._changed):
            worker = self.workers.get(name)
            if worker is None or worker.version == newest or worker.loading is not None:
                continue
            if worker.version is not None:  # one without weights has nothing to wait for
                if self._draining and worker.version >= self.published - self.schedule.sync_every:
                    continue
                if weights.on_new == "drain" and worker.running:
                    continue
                if weights.on_new == "finish" and len({r.newest for r in worker.running.values()}) >= weights.versions:
                    continue
            worker.loading = newest
            self._commands.append(Load(name, newest, beside=weights.on_new == "finish" and bool(worker.running)))
        if not self._pushes:
            self._changed.clear()

    def _admit(self) -> None:
        """Submit as many groups as the admission rule, the store and the rest of the run allow."""
        if self._pushes and self._together and self._waits_for_weights:
            return  # what is pushed now would be drawn by the weights that are on their way out
        needed = self.updates * self.batch - self.totals.groups_trained - self.outstanding
        room = min(self.store - self.outstanding, needed)
        room = int(min(room, self.schedule.admission.allowed(self.counts())))
        for _ in range(room):
            number = self.next_group
            self.next_group += 1
            self._submitted += 1
            self._since_sync += 1
            responses = [Response(Key(number, i)) for i in range(self.samples)]
            group = self.groups[number] = Group(number, self.published, responses, missing=self.samples)
            if self._in_order:
                self._line.append(number)
            self._enter(group)

    def _enter(self, group: Group) -> None:
        """Put a group without tokens where its responses will be started from."""
        if self._pushes:
            group.started = True
            self._in_progress += 1
            for response in group.responses:
                self._push(response)
        else:
            self._fresh.append(group.number)

    def _start(self) -> None:
        """Start responses where there is room."""
        if self._pushes:
            changed, self._changed = sorted(self._changed), set()
            for worker in (self.workers[name] for name in changed if name in self.workers):
                version = -1 if worker.version is None or worker.loading is not None else worker.version
                while worker.waiting and len(worker.running) < worker.slots:
                    group = self.groups[worker.waiting[0].key.group]
                    if version < (group.version if self._together else self.published):
                        break
                    self._begin(worker, worker.waiting.popleft())
            self._changed.clear()
            return
        while (response := self._next()) is not None:
            worker = self._room(self._wanted(response))
            if worker is None:
                return
            self._take(response)
            self._begin(worker, response)

    def _next(self) -> Response | None:
        """The response that is next, still in its queue."""
        fresh = self._fresh and not (self._together and self._waits_for_weights)
        if self._by_length and fresh:
            return self.groups[self._fresh[0]].responses[0]
        while self._longest:
            _, number, index = self._longest[0]
            group = self.groups.get(number)
            if group is not None and group.started:
                response = group.responses[index]
                if not response.done and response.worker is None:
                    return response
            heapq.heappop(self._longest)
        while self._ongoing:
            response = self._ongoing[0]
            if self._response(response.key) is response and response.worker is None and not response.done:
                return response
            self._ongoing.popleft()
        return self.groups[self._fresh[0]].responses[0] if fresh else None

    def _wanted(self, response: Response) -> int:
        """The version that has to draw a response; one whose version is gone starts from its first token again."""
        weights = self.schedule.weights
        group = self.groups[response.key.group]
        if weights.mixes or not group.started:
            return self.published
        version = self.published - (self.schedule.sync_every if self._draining else 0)
        if response.tokens:
            version = response.newest
        elif self._together:
            version = max((r.newest for r in group.responses if r.tokens or r.worker), default=version)
        if not (self._together and self._versions[version]):
            version = self.published
        if response.tokens and version != response.newest:
            self.totals.wasted_tokens += response.tokens
            self.totals.restarted += 1
            response.tokens = 0
        return version

    def _take(self, response: Response) -> None:
        """Take a response out of the queue that `_next` saw it in."""
        group = self.groups[response.key.group]
        if not group.started:
            self._fresh.popleft()
            group.started = True
            self._in_progress += 1
            self._ongoing.extend(group.responses[1:])
        elif self._longest and self._longest[0][1:] == response.key[:2]:
            heapq.heappop(self._longest)
        else:
            self._ongoing.popleft()

    def _begin(self, worker: Worker, response: Response) -> None:
        version = worker.version
        assert version is not None
        if not response.tokens:
            response.oldest = response.newest = version
        elif response.newest != version and not self.schedule.weights.mixes:
            self.totals.wasted_tokens += response.tokens
            self.totals.restarted += 1
            response.tokens, response.oldest, response.newest = 0, version, version
        response.worker = worker.name
        worker.running[response.key] = response
        self._offer(worker)
        limit = self.schedule.dispatch.slice_tokens
        self._commands.append(Start(worker.name, response.key, version, response.tokens, limit))

    def _train(self) -> None:
        """Hand groups to the trainer, if it is idle and its weights have arrived where it waits for them."""
        if self.training is not None or (self.schedule.weights.delivery == "push" and self._waits_for_weights):
            return
        missing = self.batch - self.taken
        if len(self.ready) < (missing if self.schedule.consumption.take == "batch" else 1):
            return
        numbers = tuple(self.ready.popleft() for _ in range(min(missing, len(self.ready))))
        for number in numbers:
            self._count(self.groups.pop(number))
        self.taken += len(numbers)
        self.training = numbers
        self._admits = True
        self._commands.append(Train(numbers, last=self.taken == self.batch))

    @property
    def _waits_for_weights(self) -> bool:
        """Whether workers drain for the newest weights or have older ones; one without any is not waited for."""
        return self._draining or len(self.workers) > self._versions[self.published] + self._versions[None]

    # -- the ledger

    def _count(self, group: Group) -> None:
        """Add a group that the trainer takes to the totals."""
        totals = self.totals
        totals.groups_trained += 1
        for response in group.responses:
            lag = self.version - response.oldest
            totals.lag[lag] += 1
            totals.responses_trained += 1
            totals.tokens_trained += response.tokens
            totals.stale += lag > 0
            totals.mixed += response.newest != response.oldest

    def _expire(self, groups: list[Group]) -> None:
        """Drop or draw again those of the groups whose oldest token has become too old."""
        rule = self.schedule.too_old
        if rule.limit is None:
            return
        expired = False
        for group in groups:
            oldest = group.oldest
            if oldest is None or self.version - oldest <= rule.limit:
                continue
            cancelled: dict[str, list[Key]] = {}
            for response in group.responses:
                if response.worker is not None:
                    if response.key in self.workers[response.worker].running:
                        cancelled.setdefault(response.worker, []).append(response.key)
                    self._release(response)
            self._commands += [Cancel(worker, tuple(keys)) for worker, keys in cancelled.items()]
            self.totals.wasted_tokens += group.tokens
            if group.missing:
                self._ended()
            elif not self._in_order:
                self.ready.remove(group.number)
            expired = self._admits = True
            if rule.action == "drop":
                self.totals.dropped += 1
                self._submitted -= 1
                self._since_sync = max(0, self._since_sync - 1)
                del self.groups[group.number]
            else:
                self.totals.redrawn += 1
                attempt = group.responses[0].key.attempt + 1
                group.responses = [Response(Key(group.number, i, attempt)) for i in range(self.samples)]
                group.missing, group.started, group.version = self.samples, False, self.published
                self._enter(group)
        if expired and self._in_order:
            self.ready, self._line = deque(), deque(self.groups)
            self._line_up()

    def _line_up(self) -> None:
        """Let the trainer take what is finished at the head of the line."""
        while self._line and not self.groups[self._line[0]].missing:
            self.ready.append(self._line.popleft())

    def _response(self, key: Key) -> Response | None:
        """The response of a key, if it is still wanted."""
        group = self.groups.get(key.group)
        response = None if group is None else group.responses[key.sibling]
        return response if response is not None and response.key == key and not response.done else None

    def _release(self, response: Response) -> None:
        """A response leaves its worker."""
        worker = self.workers.get(response.worker or "")
        response.worker = None
        if worker is None:
            return
        if worker.running.pop(response.key, None) is None:
            worker.waiting = deque(r for r in worker.waiting if r is not response)
        self._offer(worker)

    def _ended(self) -> None:
        """A group that was in progress is not any more."""
        self._in_progress -= 1
        if self._draining and not self._in_progress:
            self._draining, self._admits = False, True
            self._changed.update(self.workers)

    def _again(self, response: Response) -> None:
        """Put a response that lost its worker first in line."""
        if self._pushes:
            self._push(response)
        elif self._by_length:
            self._queue(response)
        else:
            self._ongoing.appendleft(response)

    def _queue(self, response: Response) -> None:
        """Put a response that has no worker in line."""
        if self._by_length:
            group = self.groups[response.key.group]
            heapq.heappush(self._longest, (-max(r.tokens for r in group.responses), *response.key[:2]))
        else:
            self._ongoing.append(response)

    def _push(self, response: Response) -> None:
        """Give a response to the worker with the fewest; it waits for a worker if there is none."""
        if not self.workers:
            self._ongoing.append(response)
            return
        while True:
            load, name = self._shortest[0]
            worker = self.workers.get(name)
            if worker is not None and worker.load == load:
                break
            heapq.heappop(self._shortest)
        response.worker = name
        worker.waiting.append(response)
        self._offer(worker)

    def _offer(self, worker: Worker) -> None:
        """Note that a worker's load or version has changed."""
        self._changed.add(worker.name)
        if self._pushes:
            heapq.heappush(self._shortest, (worker.load, worker.name))
        elif worker.version is not None and len(worker.running) < worker.slots:
            heapq.heappush(self._free.setdefault(worker.version, []), (len(worker.running), worker.name))

    def _room(self, version: int) -> Worker | None:
        """The least busy worker of a version that can start a response."""
        heap = self._free.get(version, [])
        while heap:
            load, name = heapq.heappop(heap)
            worker = self.workers.get(name)
            if worker is not None and worker.version == version and load == len(worker.running):
                return worker  # none that loads: its version is neither the newest nor the one that drains
        return None

    # -- storing and resuming

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON; responses in progress start again, behind what was reported of them."""
        return {
            "version": self.version,
            "published": self.published,
            "next_group": self.next_group,
            "submitted": self._submitted,
            "since_sync": self._since_sync,
            "at_sync": self._at_sync,
            "ready": list(self.ready),
            "groups": [
                [
                    g.number,
                    g.version,
                    g.responses[0].key.attempt,
                    [[r.tokens, r.oldest, r.newest, r.done] for r in g.responses],
                ]
                for g in self.groups.values()
            ],
            "totals": {name: getattr(self.totals, name) for name in Totals.__slots__ if name != "lag"},
            "lag": sorted(self.totals.lag.items()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint's `state` stands; workers are to be reported again."""
        self._admits = True
        self.version, self.published, self.next_group = (state[k] for k in ("version", "published", "next_group"))
        self._submitted, self._since_sync, self._at_sync = (state[k] for k in ("submitted", "since_sync", "at_sync"))
        self.totals = Totals(**state["totals"], lag=Counter({int(k): n for k, n in state["lag"]}))
        self.ready = deque(state["ready"])
        for number, version, attempt, responses in state["groups"]:
            stored = [
                Response(Key(number, i, attempt), tokens, oldest, newest, done=done)
                for i, (tokens, oldest, newest, done) in enumerate(responses)
            ]
            missing = sum(not r.done for r in stored)
            group = self.groups[number] = Group(number, version, stored, missing, started=any(r.tokens for r in stored))
            if group.started and missing:
                self._in_progress += 1
                for response in stored:
                    if not response.done:
                        self._again(response)
            elif missing:
                self._enter(group)
        if self._in_order:
            self.ready, self._line = deque(), deque(self.groups)
            self._line_up()
