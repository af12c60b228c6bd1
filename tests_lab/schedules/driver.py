"""A driver without a clock: what is possible next happens in random order, workers crash and come back."""

import random

from offdrift_lab.schedules import Cancel, Load, Scheduler, Start, Train


class Chaos:
    """Carries out commands in random order and checks what must hold at every step.

    Args:
        crash: probability, per event, that a worker is lost.
        skew: how much likelier some events are than others; large: extreme stragglers.
    """

    def __init__(self, scheduler, *, seed, workers=3, slots=4, crash=0.0, skew=1.0, length=6):
        self.s, self.rng, self.crash, self.skew, self.length = scheduler, random.Random(seed), crash, skew, length
        self.slots, self.count = slots, workers
        self.pending = {}  # what can happen next -> its weight in the draw
        self.running = {}  # (worker, key) -> tokens still to come in this slice, tokens until the end
        self.versions = {}  # response -> versions of its tokens
        self.weights = {}  # (worker, key) -> version that draws it
        self.worker_version = {}
        self.trained, self.lags = [], []
        self.cancelled, self.wasted, self.mixed = set(), 0, 0
        for i in range(workers):
            self.up(f"w{i}")

    def up(self, name):
        self.worker_version[name] = None
        self.s.worker_up(name, slots=self.slots, version=None)

    def add(self, event):
        self.pending[event] = self.rng.random() ** self.skew + 1e-9

    def drop(self, worker, key):
        self.running.pop((worker, key))
        self.weights.pop((worker, key))
        for event in [e for e in self.pending if e[:3] == ("token", worker, key)]:
            del self.pending[event]

    def obey(self, command):
        s = self.s
        if isinstance(command, Start):
            worker, key, version, before, limit = command
            assert self.worker_version[worker] == version
            assert not any(event[:2] == ("load", worker) for event in self.pending)
            assert not any(k[:2] == key[:2] and k.attempt >= key.attempt for k in self.cancelled)
            drawn = self.versions.setdefault(key, [])
            self.wasted += len(drawn) - before
            del drawn[before:]
            assert len(drawn) == before
            assert (worker, key) not in self.running
            assert sum(w == worker for w, _ in self.running) < self.slots
            # A response's length is a property of the response.
            length = max(before + 1, random.Random(str(key)).randint(1, self.length))
            todo = length - before
            self.running[worker, key] = [min(todo, limit or todo), todo]
            self.weights[worker, key] = version
            alive = {v for (w, _), v in self.weights.items() if w == worker}
            assert len(alive) <= (s.schedule.weights.versions if s.schedule.weights.on_new == "finish" else 1)
            self.add(("token", worker, key))
        elif isinstance(command, Cancel):
            for key in command.keys:
                self.drop(command.worker, key)
                self.cancelled.add(key)
        elif isinstance(command, Load):
            self.add(("load", command.worker, command.version, command.beside))
        elif isinstance(command, Train):
            if s.schedule.consumption.take == "batch":
                assert len(command.groups) == s.batch
            for number in command.groups:
                assert number not in self.trained
                self.trained.append(number)
                keys = [k for k in self.versions if k.group == number]
                last = max(k.attempt for k in keys)
                self.discard(k for k in keys if k.attempt < last)
                keys = [k for k in keys if k.attempt == last]
                assert len(keys) == s.samples
                for key in keys:
                    drawn = self.versions.pop(key)
                    assert drawn == sorted(drawn)
                    if not s.schedule.weights.mixes:
                        assert len(set(drawn)) == 1
                    assert len(drawn) == random.Random(str(key)).randint(1, self.length)
                    self.lags.append(s.version - drawn[0])
                    self.mixed += len(set(drawn)) > 1
            self.add(("train", command.last))

    def discard(self, keys):
        """Forget responses that are not trained on."""
        for key in list(keys):
            self.wasted += len(self.versions.pop(key))

    def happen(self, event):
        s = self.s
        if event[0] == "token":
            _, worker, key = event
            version = self.weights[worker, key]
            self.versions[key].append(version)
            left = self.running[worker, key]
            left[0] -= 1
            left[1] -= 1
            if left[1] == 0:
                self.drop(worker, key)
                s.finished(key, 1, version)
            elif left[0] == 0:
                self.drop(worker, key)
                s.sliced(key, 1, version)
            else:
                s.drawn(key, 1, version)
                self.add(event)
        elif event[0] == "load":
            _, worker, version, beside = event
            self.worker_version[worker] = version
            if not beside:
                for at in self.weights:
                    if at[0] == worker:
                        assert s.schedule.weights.mixes
                        self.weights[at] = version
            s.loaded(worker, version)
        elif event[1]:
            s.trained()
        else:
            s.accumulated()

    def lose(self, name):
        for worker, key in list(self.running):
            if worker == name:
                self.drop(worker, key)
        for event in [e for e in self.pending if e[0] == "load" and e[1] == name]:
            del self.pending[event]
        self.s.worker_lost(name)
        self.up(name)

    def run(self, most=1_000_000):
        for _ in range(most):
            for command in self.s.decide():
                self.obey(command)
            assert self.s.outstanding <= self.s.store
            counts = self.s.counts()
            assert counts.submitted == self.s.version * self.s.batch + counts.outstanding
            if self.s.done:
                self.discard(k for k in self.versions if k.group not in self.s.groups)
                self.discard(k for k in self.versions if k.attempt < self.s.groups[k.group].responses[0].key.attempt)
                return self
            assert self.pending, "nothing can happen, and the run is not over"
            if self.rng.random() < self.crash:
                self.lose(f"w{self.rng.randrange(self.count)}")
                continue
            events = list(self.pending)
            event = self.rng.choices(events, [self.pending[e] for e in events])[0]
            del self.pending[event]
            self.happen(event)
        raise AssertionError("the run does not end")


def run(schedule, *, seed, batch=2, samples=2, updates=8, store=None, **options):
    scheduler = Scheduler(schedule, batch=batch, samples=samples, updates=updates, store=store)
    return Chaos(scheduler, seed=seed, **options).run()
