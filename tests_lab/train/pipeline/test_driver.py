"""The driver's bookkeeping and a worker's, event by event: no process is started."""

import time
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError
from tests.engines.models import tiny

from offdrift.engines.stream import DrawJob
from offdrift.errors import EngineError, RewardError, SyncError
from offdrift.records.provenance import Sampling
from offdrift_lab.schedules import Key, Schedule
from offdrift_lab.schedules.rules import Always, InFlight, TooOld, Weights
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.rewards import Rewards
from offdrift_lab.train.pipeline import driver as module
from offdrift_lab.train.pipeline import worker as worker_module
from offdrift_lab.train.pipeline.driver import Driver, News, name_of
from offdrift_lab.train.pipeline.scoring import RewardSpec, Score, Scored
from offdrift_lab.train.pipeline.source import load_drawn, save_drawn
from offdrift_lab.train.pipeline.worker import (
    Draw,
    EngineSpec,
    Forget,
    Published,
    Report,
    RolloutWorker,
    TakeWeights,
    fingerprint,
    packed,
)
from offdrift_lab.train.pipeline.workers import Workers
from offdrift_lab.train.settings.sections import PipelineSettings

SETTINGS = PipelineSettings(workers=2, slots=8, steps=3)
OLD = Published("old", 1, 10)
NEW = Published("new", 2, 10)


def job(key):
    return DrawJob(name_of(key), (1, 2 + key.group), seed=hash(key) % 2**63)


class Pool(Workers):
    """Workers that exist by name alone."""

    def __init__(self):
        self.settings, self.actors, self.ended = SETTINGS, {"a": None, "b": None}, []

    def end(self, name):
        self.actors.pop(name, None)
        self.ended.append(name)


def driver_of(row, *, names=("a",), steps=1, settings=SETTINGS, batch=1, samples=2, updates=8):
    driver = Driver(row, Pool(), batch=batch, samples=samples, updates=updates, settings=settings, job=job, steps=steps)
    driver._weights = {0: OLD}
    for name in names:
        driver._up(name)
    driver._decide()
    for name in names:
        driver._report(name, report(loaded=(0,)))
        driver._orders[name] = []
    driver._decide()
    return driver


def report(*drawn, version=0, loaded=(), generation=0.0, load=0.0):
    """A report of responses, each a key, its number of tokens and its end; tokens count from 10."""
    counts = tuple(count for _, count, _ in drawn)
    tokens = torch.cat([10 + torch.arange(n) for n in counts]) if drawn else None
    logp = None if tokens is None else -tokens.float()
    keys, ends = tuple(name_of(key) for key, _, _ in drawn), tuple(end for _, _, end in drawn)
    return Report(keys, counts, (version,) * len(keys), ends, tokens, logp, None, None, loaded, generation, load)


def orders(driver, kind, name="a"):
    return [order for order in driver._orders[name] if isinstance(order, kind)]


def lengths(driver, group):
    return {place: sum(len(d.tokens) for d in drawn.deltas) for place, drawn in driver.groups[group].items()}


FREE = Schedule(InFlight(1.0), weights=Weights("interrupt", "pull"))
REDRAW = Schedule(InFlight(1.0), weights=Weights("interrupt", "pull"), too_old=TooOld("redraw", 0))


def test_tokens_are_kept_and_go_along_when_a_response_moves():
    driver = driver_of(FREE, names=("a", "b"))
    on = {draw.job.key: name for name in ("a", "b") for draw in orders(driver, Draw, name)}
    key = Key(0, 0)
    driver._report(on["0.0.0"], report((key, 3, None)))
    driver._report(on["0.0.0"], report((key, 2, None)))
    assert lengths(driver, 0)[0] == 5
    lost = on["0.0.0"]
    left = "b" if lost == "a" else "a"
    driver._orders[left] = []
    driver._lose(lost, "it was killed")
    driver._decide()
    moved = {draw.job.key: draw.job for draw in orders(driver, Draw, left)}
    assert moved["0.0.0"].before == (10, 11, 12, 10, 11)
    assert moved["0.0.0"].seed == job(key).seed
    assert driver.workers.ended == [lost]
    assert driver.sums()["lost"] == 1


def test_what_an_attempt_that_is_over_still_sends_is_ignored():
    driver = driver_of(REDRAW)
    driver._report("a", report((Key(0, 0), 4, "stop"), (Key(0, 1), 4, "stop"), (Key(1, 0), 2, None)))
    driver._decide()
    assert driver.take().groups[0][0] == 0
    driver._orders["a"] = []
    driver._take_in(News(True, NEW))  # group 1 has a token of version 0 and may have none
    driver._decide()
    assert [order.keys for order in orders(driver, Forget)] == [("1.0.0", "1.1.0")]
    driver._report("a", report((Key(1, 0), 3, "stop")))
    driver._report("a", report(loaded=(1,)))
    driver._decide()
    again = {draw.job.key: draw.job for draw in orders(driver, Draw)}
    assert again["1.0.1"].before == ()
    assert again["1.0.1"].seed != job(Key(1, 0)).seed
    driver._report("a", report((Key(1, 0), 9, None)))
    assert lengths(driver, 1)[0] == 0
    sums = driver.sums()
    assert (sums["redrawn"], sums["dropped"], sums["wasted_tokens"]) == (1, 0, 2)


def test_what_a_schedule_drops_leaves_the_driver():
    driver = driver_of(Schedule(InFlight(1.0), weights=Weights("interrupt", "pull"), too_old=TooOld("drop", 0)))
    driver._report("a", report((Key(0, 0), 4, "stop"), (Key(0, 1), 4, "stop"), (Key(1, 0), 2, None)))
    driver._decide()
    driver._take_in(News(True, NEW))
    driver._decide()
    assert driver.sums()["dropped"] == 1
    assert 1 not in driver.groups
    assert driver._submitted.keys() == driver.scheduler.groups.keys()


def test_versions_are_those_of_tokens_here_and_of_weights_that_draw():
    driver = driver_of(FREE, names=("a", "b"), steps=3)
    on = {draw.job.key: name for name in ("a", "b") for draw in orders(driver, Draw, name)}
    driver._report(on["0.0.0"], report((Key(0, 0), 2, "stop")))
    driver._report(on["0.1.0"], report((Key(0, 1), 2, "stop")))
    driver._decide()
    driver._take_in(News(True, NEW))
    driver._decide()
    assert driver.versions() == {0, 3}  # published, and what both workers still have
    assert [order[:2] for order in orders(driver, TakeWeights)] == [(3, NEW)]
    for name in ("a", "b"):
        driver._report(name, report(loaded=(3,)))
    assert {worker.version for worker in driver.scheduler.workers.values()} == {1}
    assert driver.versions() == {0, 3}  # the group that was handed over still waits for the trainer
    driver.take()
    assert driver.versions() == {3}
    on = next(name for name in ("a", "b") if any(d.job.key == "1.0.0" for d in orders(driver, Draw, name)))
    driver._report(on, report((Key(1, 0), 2, None), version=3))
    assert driver.groups[1][0].deltas[0].version == 3
    driver._report(on, report((Key(1, 0), 2, "stop"), (Key(1, 1), 1, "stop"), version=3))
    driver._decide()
    driver.take()
    driver._take_in(News(True, OLD))
    driver._lose("a", "killed")
    driver._lose("b", "killed")
    assert driver.versions() == {6}


def test_a_replacement_gets_the_weights_that_are_published():
    driver = driver_of(FREE)
    driver._report("a", report((Key(0, 0), 4, "stop"), (Key(0, 1), 4, "stop")))
    driver._decide()
    driver._take_in(News(True, NEW))
    driver._lose("a", "killed")
    driver._up("c")
    driver._decide()
    assert orders(driver, TakeWeights, "c") == [TakeWeights(1, NEW, False, "recompute")]


def test_a_checkpoint_does_not_change_with_the_run(tmp_path):
    driver = driver_of(FREE)
    driver._report("a", report((Key(0, 0), 4, "stop"), (Key(0, 1), 4, "stop"), (Key(1, 0), 2, None)))
    driver._decide()
    future = driver.trained(weights=NEW, snapshot=True)
    driver._take_in(driver._news.popleft())
    snapshot = future.result(timeout=0)
    driver.groups[1][0].queue_seconds, driver.groups[1][0].generation_seconds = 7.0, 5.0
    driver._report("a", report((Key(1, 0), 2, "stop")))
    assert sum(len(d.tokens) for d in snapshot.groups[1][0].deltas) == 2
    assert snapshot.groups[1][0].queue_seconds < 1
    save_drawn(tmp_path, driver.groups)
    again = load_drawn(tmp_path, job)
    for place, drawn in driver.groups[1].items():
        other = again[1][place]
        assert (other.job, other.attempt, other.worker) == (drawn.job, drawn.attempt, drawn.worker)
        assert other.queue_seconds == drawn.queue_seconds
        assert other.generation_seconds == drawn.generation_seconds
        assert [(d.key, d.version, d.finish) for d in other.deltas] == [
            (d.key, d.version, d.finish) for d in drawn.deltas
        ]
        for a, b in zip(other.deltas, drawn.deltas, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.logp, b.logp)


def test_a_later_attempt_is_stored_as_such(tmp_path):
    driver = driver_of(FREE)
    drawn = driver.groups[0][0]
    driver.groups[0][0] = module.Drawn(job(Key(0, 0, 2)), 2, drawn.deltas, "b", 1.0, 0.0, 2.0)
    save_drawn(tmp_path, driver.groups)
    assert load_drawn(tmp_path, job)[0][0].job.key == "0.0.2"


def test_seconds_are_those_of_workers_and_of_the_wait():
    driver = driver_of(FREE)
    driver._report("a", report((Key(0, 0), 1, None), generation=2.0, load=0.5))
    driver._report("a", report((Key(0, 0), 1, "stop"), (Key(0, 1), 2, "stop"), generation=1.0))
    sums = driver.sums()
    assert (sums["generation"], sums["load"], sums["waited"]) == (3.0, 0.5, 0.0)
    drawn = driver.groups[0][0]
    assert 0 <= drawn.queue_seconds <= sums["seconds"]
    assert 0 < drawn.generation_seconds <= sums["seconds"]
    driver._decide()
    begin = time.monotonic()
    driver.take()
    assert driver.seconds["waited"] <= time.monotonic() - begin


def test_workers_that_draw_nothing_end_the_run_and_others_do_not():
    driver, most = driver_of(FREE), module.TRIES * SETTINGS.workers
    for _ in range(2):
        for _ in range(most):
            driver._up("x")
            driver._lose("x", "killed")
        driver._report("a", report((Key(0, 0), 1, None)))
    for _ in range(most):
        driver._lose("x", "killed")
    with pytest.raises(EngineError, match=r"7 rollout workers in a row .* because: no memory\. Look at"):
        driver._lose("a", "no memory")


def test_an_admitted_group_fits_the_store():
    settings = SETTINGS.model_copy(update={"store": 3})
    driver = driver_of(Schedule(Always(), weights=Weights("interrupt", "pull")), settings=settings)
    assert len(driver.groups) == 3


def test_whoever_waits_for_a_driver_that_has_ended_hears_why(monkeypatch):
    driver = Driver(FREE, Pool(), batch=1, samples=1, updates=1, settings=SETTINGS, job=job)

    def fails():
        raise EngineError("no more")

    monkeypatch.setattr(driver, "_real", fails)
    driver.start(OLD)
    future = driver.trained(snapshot=True)  # too late: nobody takes it in
    driver._thread.join()
    for wait in (driver.take, lambda: driver.snapshot(future)):
        with pytest.raises(EngineError, match="no more"):
            wait()


def test_a_worker_that_died_before_a_checkpoint_is_lost_and_no_more(monkeypatch):
    settings = SETTINGS.model_copy(update={"update_rounds": 2})
    driver = driver_of(FREE, names=("a", "b"), settings=settings)
    for name in ("a", "b"):
        over = SimpleNamespace(remote=lambda name=name: name)
        driver.workers.actors[name] = SimpleNamespace(start_over=over)

    def get(reference, timeout=None):
        if reference == "a":
            raise ActorDiedError()

    monkeypatch.setattr(ray, "get", get)
    on = {draw.job.key: name for name in ("a", "b") for draw in orders(driver, Draw, name)}
    for key in (Key(0, 0), Key(0, 1)):
        driver._report(on[name_of(key)], report((key, 2, "stop")))
    driver._decide()
    future = driver.trained(weights=NEW, snapshot=True)
    driver._take_in(driver._news.popleft())
    assert future.done()
    assert list(driver.scheduler.workers) == list(driver.workers.actors) == ["b"]
    assert driver.lost == 1


# -- a worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("engine")
    tiny("dense").save_pretrained(path)
    return path


SCORE = "def score(completion, answer):\n    return len(completion) / len(answer)\n"


@pytest.fixture
def rollout_worker(folder, monkeypatch):
    monkeypatch.setattr(worker_module.ray, "get", lambda reference: reference)
    sampling = Sampling(max_tokens=8, stop_token_ids=())
    (folder / "reward.py").write_text(SCORE)
    rewards = RewardSpec("arithmetic", "reward.py:score", str(folder))
    spec = EngineSpec("transformers", str(folder), {"dtype": "float32"}, sampling, "sampled", rewards=rewards)
    worker = RolloutWorker(spec, threads=1)
    yield worker
    worker.start_over()
    worker.engine.close()


def take(version, scale=1.0, *, beside=False):
    arrays = packed((name, scale * weight) for name, weight in tiny("dense").named_parameters())
    return TakeWeights(version, Published(arrays, fingerprint(arrays, version), 0), beside, "recompute")


def test_a_slice_is_as_long_as_it_was_ordered(rollout_worker):
    job = DrawJob("0.0.0", (1, 2), seed=5)
    first = rollout_worker.advance([take(1), Draw(job, 3)], 2)
    second = rollout_worker.advance([], 2)
    assert (first.counts, first.ends, first.loaded) == ((2,), (None,), (1,))
    assert (second.counts, second.ends) == ((1,), ("slice",))
    assert rollout_worker.advance([], 2).keys == ()
    tokens = (*first.tokens.tolist(), *second.tokens.tolist())
    rest = rollout_worker.advance([Draw(DrawJob("0.0.0", (1, 2), 5, tokens), 9)], 9)
    assert (rest.counts, rest.ends) == ((5,), ("length",))
    whole = rollout_worker.advance([Draw(DrawJob("0.0.0", (1, 2), 5), None)], 9)
    assert whole.tokens.tolist() == [*tokens, *rest.tokens.tolist()]


def test_old_weights_finish_what_they_began_and_go(rollout_worker):
    rollout_worker.advance([take(1), Draw(DrawJob("0.0.0", (1, 2), seed=5))], 2)
    both = rollout_worker.advance([take(2, 1.5, beside=True), Draw(DrawJob("1.0.0", (1, 2), seed=5))], 2)
    assert dict(zip(both.keys, both.versions, strict=True)) == {"0.0.0": 1, "1.0.0": 2}
    assert len(rollout_worker._streams) == 2
    last = rollout_worker.advance([], 4)
    assert dict(zip(last.keys, last.ends, strict=True)) == {"0.0.0": "length", "1.0.0": None}
    assert [stream.version for stream in rollout_worker._streams] == [2]


def test_a_worker_that_starts_over_has_forgotten(rollout_worker):
    rollout_worker.advance([take(1), Draw(DrawJob("0.0.0", (1, 2), seed=5), 3)], 2)
    rollout_worker.start_over()
    assert rollout_worker.advance([take(1)], 2).keys == ()
    again = rollout_worker.advance([Draw(DrawJob("0.0.0", (1, 2), seed=5))], 9)
    assert (again.counts, again.ends) == ((8,), ("length",))


def test_a_cancelled_response_is_not_drawn_on(rollout_worker):
    rollout_worker.advance([take(1), Draw(DrawJob("0.0.0", (1, 2), 5), 4), Draw(DrawJob("0.1.0", (1, 2), 6), 4)], 2)
    assert rollout_worker.advance([Forget(("0.0.0",))], 1).keys == ("0.1.0",)
    assert rollout_worker._left.keys() == {"0.1.0"}


def test_a_worker_scores_what_it_is_asked_for_after_it_has_drawn(rollout_worker):
    asked = [Score(4, 1, ("ab", "abc"), (Problem("1=", "12"),) * 2), Draw(DrawJob("0.0.0", (1, 2), seed=5))]
    report = rollout_worker.advance([take(1), *asked], 2)
    assert report.rewards == (Scored(4, 1, Rewards((1.0, 1.5), {})),)
    assert report.counts == (2,)
    assert report.reward_seconds > 0
    assert rollout_worker.advance([], 2).rewards == ()


def test_an_error_of_a_reward_names_the_function_and_the_text(rollout_worker):
    with pytest.raises(RewardError, match=r"reward\.py:score(.|\n)*ZeroDivisionError"):
        rollout_worker.advance([Score(0, 0, ("ab",), (Problem("1=", ""),))], 2)


@pytest.mark.parametrize("damage", ["torn", "older", "missing"])
def test_weights_that_are_not_the_published_ones_are_refused(rollout_worker, damage):
    order = take(2)
    arrays = dict(order.weights.reference)
    name = next(iter(arrays))
    if damage == "torn":
        arrays[name] = arrays[name].copy()
        arrays[name].reshape(-1)[:7] = 0
    elif damage == "missing":
        del arrays[name]
    version = 1 if damage == "older" else 2
    damaged = order._replace(version=version, weights=order.weights._replace(reference=arrays))
    with pytest.raises(SyncError, match=f"the weights of version {version} is not what the trainer"):
        rollout_worker.advance([damaged], 1)


def test_fingerprints_read_every_byte():
    weights = {"x": torch.arange(13, dtype=torch.bfloat16), "y": torch.ones(3)}
    whole = fingerprint(packed(weights.items()), 3)
    assert whole == fingerprint(packed(weights.items()), 3)
    for name, weight in weights.items():
        for i in range(len(weight)):
            changed = weight.clone()
            changed[i] += 1
            assert fingerprint(packed((weights | {name: changed}).items()), 3) != whole
