"""Laws of the simulation: closed forms where lengths are constant, and what holds for every schedule."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from offdrift_lab.plan.phases import Phases
from offdrift_lab.plan.simulate import STATES, Simulation, outcome_of, simulate
from offdrift_lab.schedules import SCHEDULES, Key, Schedule, Start, Train
from offdrift_lab.schedules.rules import BoundedStaleness, Consumption, Dispatch, Weights

GROUPS, SAMPLES, TOKENS = 4, 2, 50
T0, T1, GROUP, UPDATE = 0.01, 0.002, 0.2, 0.1
TRAIN = GROUPS * GROUP + UPDATE
"""Seconds of an update."""


def step(running: int) -> float:
    return T0 + T1 * running


ALL = TOKENS * step(GROUPS * SAMPLES)
"""Seconds in which one worker draws a batch, all responses at once."""


def cluster(**changes) -> Phases:
    """One worker, constant lengths, nothing else takes time; `rollout__slots=3` changes one field of a part."""
    values = {
        "rollout": {"workers": 1, "slots": 2 * GROUPS * SAMPLES, "t0": T0, "t1": T1, "prefill": 0.0},
        "lengths": {"kind": "constant", "mean": TOKENS, "prompt": 10},
        "trainer": {"devices": 1, "group": GROUP, "update": UPDATE},
        "sync": {"push": 0.0, "load": 0.0},
        "batch": {"groups": GROUPS, "samples": SAMPLES},
        "run": {"updates": 12, "warmup": 6},
    }
    for path, value in changes.items():
        part, key = path.split("__")
        values.setdefault(part, {})[key] = value
    return Phases(**values)


RAGGED = cluster(
    rollout__workers=3,
    rollout__slots=3,
    rollout__prefill=1e-4,
    rollout__crashes_per_hour=150.0,
    rollout__restart=4.0,
    lengths__kind="lognormal",
    lengths__sigma=1.0,
    lengths__cap=400,
    sync__push=0.3,
    sync__load=0.2,
)
"""Three workers, long tails, and a crash every eight seconds."""


def small(schedule: Schedule) -> Schedule:
    """A row with slices that short responses notice."""
    cut = None if schedule.dispatch.slice_tokens is None else 20
    return replace(schedule, dispatch=replace(schedule.dispatch, slice_tokens=cut))


class Watched(Simulation):
    """A simulation that remembers what it was told to do, and what happened."""

    def __init__(self, *args) -> None:
        self.started, self.ended, self.trained = [], Counter(), []
        self.lengths: dict[Key, int] = {}
        self.lost = 0
        super().__init__(*args)
        inner = self.scheduler.finished

        def finished(key, tokens, version) -> None:
            self.ended[key] += 1
            inner(key, tokens, version)

        self.scheduler.finished = finished  # type: ignore[method-assign]

    def _carry_out(self, command) -> None:
        if isinstance(command, Start):
            assert command.key not in self.ended, "a response that had ended was drawn again"
            self.started.append(command.key)
            self.lengths[command.key] = self._length(command.key)
        if isinstance(command, Train):
            self.trained += command.groups
        super()._carry_out(command)

    def _crash(self, name: str) -> None:
        self.lost += 1
        super()._crash(name)

    def length(self, group: int) -> int:
        """Tokens of a group as it was drawn last."""
        last = max(key.attempt for key in self.ended if key.group == group)
        keys = [key for key in self.ended if key.group == group and key.attempt == last]
        assert len(keys) == self.phases.batch.samples
        return sum(self._length(key) for key in keys)


# -- closed forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "waves"), [(8, 1), (100, 1), (4, 2), (2, 4)])
def test_a_synchronous_update_draws_then_trains(slots, waves):
    """Waves of c responses, each TOKENS (t0 + t1 c); a prefill for every response; then the push."""
    prefill, push = 1e-3, 0.7
    phases = cluster(rollout__slots=slots, rollout__prefill=prefill, sync__push=push)
    draws = waves * TOKENS * step(8 // waves) + 8 * prefill * 10
    out = simulate(SCHEDULES["sync"], phases, name="sync")
    whole = draws + TRAIN + push
    assert out.seconds == pytest.approx(whole, rel=1e-9)
    assert out.error == pytest.approx(0, abs=1e-9)
    assert out.groups_per_s == pytest.approx(GROUPS / whole, rel=1e-9)
    assert out.tokens_per_s == pytest.approx(GROUPS * SAMPLES * TOKENS / whole, rel=1e-9)
    expected = {"busy": draws / whole, "sync": push / whole, "idle": TRAIN / whole, "down": 0.0}
    assert out.worker == pytest.approx(expected, abs=1e-9)
    assert out.trainer == pytest.approx({"busy": TRAIN / whole, "sync": push / whole, "idle": draws / whole}, abs=1e-9)
    assert out.lag == {0: 12 * 8}
    assert (out.wasted, out.mixed, out.lag_mean, out.lag_max) == (pytest.approx(0, abs=1e-9), 0, 0, 0)


def test_workers_share_a_batch():
    """Four workers of two slots draw what one worker of eight slots does, each at the speed of two responses."""
    out = simulate(SCHEDULES["sync"], cluster(rollout__workers=4, rollout__slots=2))
    assert out.seconds == pytest.approx(TOKENS * step(2) + TRAIN, rel=1e-9)
    lone = simulate(SCHEDULES["distflow"], cluster(rollout__workers=4, rollout__slots=2))
    assert lone.seconds == pytest.approx(out.seconds, rel=1e-9)


@pytest.mark.parametrize("group", [0.02, GROUP, 1.0])
def test_one_step_off_takes_as_long_as_the_slower_side(group):
    train = GROUPS * group + UPDATE
    out = simulate(SCHEDULES["one_step_off"], cluster(trainer__group=group, rollout__slots=8, sync__push=0.25))
    longer = max(ALL, train)
    assert out.seconds == pytest.approx(longer + 0.25, rel=1e-9)
    assert out.trainer["busy"] == pytest.approx(train / (longer + 0.25), rel=1e-9)
    assert out.worker["busy"] == pytest.approx(ALL / (longer + 0.25), rel=1e-9)
    assert out.lag == {1: 12 * 8}


@pytest.mark.parametrize("name", ["periodic", "verl_on_policy"])
@pytest.mark.parametrize("group", [0.05, 3.0])
def test_a_stream_hides_training_behind_the_draws(name, group):
    """One group at a time: they end every d seconds, and the trainer takes each as it ends."""
    d = TOKENS * step(SAMPLES)
    out = simulate(SCHEDULES[name], cluster(rollout__slots=SAMPLES, trainer__group=group))
    assert out.seconds == pytest.approx(d + (GROUPS - 1) * max(d, group) + group + UPDATE, rel=1e-9)
    assert out.lag == {0: 12 * 8}


def test_several_updates_between_publications_save_the_tails():
    """verl_stream draws T B groups with one version; only the last group of T updates is waited for."""
    d, every = TOKENS * step(SAMPLES), SCHEDULES["verl_stream"].sync_every
    phases = cluster(rollout__slots=SAMPLES, trainer__group=0.05, sync__push=0.5, run__updates=12, run__warmup=8)
    out = simulate(SCHEDULES["verl_stream"], phases)
    assert out.seconds == pytest.approx((every * GROUPS * d + 0.05 + UPDATE + 0.5) / every, rel=1e-9)
    assert out.lag == dict.fromkeys(range(every), 12 * 8 // every)


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_an_interrupted_batch_pays_for_its_prefixes(cache):
    """K tokens of each response have been drawn when weights arrive: K + prompt of each go through prefill again."""
    prefill, push, drawn = 1e-4, 0.4, 30
    start = 8 * prefill * 10
    update = start + (drawn + 0.5) * step(8)  # in the middle of a token
    changes = {"trainer__group": 0.0, "trainer__update": update}
    phases = cluster(rollout__slots=8, rollout__prefill=prefill, sync__push=push, **changes)
    schedule = Schedule(
        BoundedStaleness(1), weights=Weights("interrupt", cache=cache), consumption=Consumption(order="submitted")
    )
    again = 8 * prefill * (drawn + 10) if cache == "recompute" else 0.0
    out = simulate(schedule, phases)
    assert out.seconds == pytest.approx(start + ALL + push + again, rel=1e-9)
    assert (out.mixed, out.lag) == (1.0, {1: 12 * 8})
    assert out.worker["sync"] == pytest.approx(push / out.seconds, rel=1e-9)


@pytest.mark.parametrize("load", [0.0, 0.2])
def test_two_versions_on_a_worker_read_two_sets_of_weights(load):
    """T seconds of training, L tokens, D = T / (t0 + t1 c) of them drawn in T: two updates at a time.

    A batch is drawn alone until the update before it and the load that follows are over, D tokens; the L - D to come
    stand beside the next batch, at 2 t0 + 2 t1 c. That batch has D to come when it is alone again, which is when the
    update ends: nothing runs while these weights are loaded.
    """
    schedule = Schedule(
        BoundedStaleness(1), weights=Weights("finish", "pull"), consumption=Consumption(order="submitted")
    )
    assert TRAIN < ALL
    shared = TOKENS - TRAIN / step(8)
    out = simulate(schedule, cluster(sync__load=load))
    assert out.seconds == pytest.approx((2 * TRAIN + load + shared * 2 * step(8)) / 2, rel=1e-6)
    assert out.mixed == 0
    assert out.worker["sync"] == pytest.approx(load / 2 / out.seconds, rel=1e-6)


def test_a_slice_is_one_more_prefill_of_what_was_drawn():
    prefill = 1e-3
    schedule = Schedule(BoundedStaleness(0), dispatch=Dispatch(slice_tokens=20))
    out = simulate(schedule, cluster(rollout__prefill=prefill))
    prefills = sum(8 * prefill * (10 + before) for before in (0, 20, 40))
    assert out.seconds == pytest.approx(prefills + ALL + TRAIN, rel=1e-9)


def test_a_pull_costs_the_worker_and_not_the_trainer():
    """Pulled weights: training and loading overlap, and the trainer never waits for weights."""
    phases = cluster(rollout__slots=8, sync__load=0.3, trainer__group=2.0)
    schedule = replace(SCHEDULES["one_step_off"], weights=Weights("drain", "pull"))
    out = simulate(schedule, phases)
    assert out.trainer == pytest.approx({"busy": 1.0, "sync": 0.0, "idle": 0.0}, abs=1e-9)
    assert out.seconds == pytest.approx(GROUPS * 2.0 + UPDATE, rel=1e-9)
    assert out.worker["sync"] == pytest.approx(0.3 / out.seconds, rel=1e-9)


# -- calls of several tokens


@pytest.fixture
def uneven(monkeypatch):
    """Groups of one response, of 9 and 11 tokens in turn."""
    monkeypatch.setattr(Simulation, "_length", lambda self, key: 9 + 2 * (key.group % 2))
    pair = {
        "batch__groups": 2,
        "batch__samples": 1,
        "rollout__slots": 2,
        "trainer__group": 0.5,
        "trainer__update": 0.25,
    }
    return lambda **more: cluster(**pair, **more)


@pytest.mark.parametrize(("steps", "first"), [(None, 9), (1, 9), (3, 9), (4, 11), (5, 10), (100, 11)])
def test_ends_are_seen_after_whole_calls(uneven, steps, first):
    """The stream trains on the first group once it is seen: at a call's end, or when nothing runs any more."""

    def drawn(tokens):  # the second response runs alone behind the ninth token
        return min(tokens, 9) * step(2) + max(0, tokens - 9) * step(1)

    out = simulate(SCHEDULES["periodic"], uneven(rollout__steps=steps))
    assert out.seconds == pytest.approx(max(drawn(first) + 0.5, drawn(11)) + 0.5 + 0.25, rel=1e-9)
    assert out.lag == {0: 12 * 2}


@pytest.mark.parametrize(("steps", "behind"), [(None, 5.5), (4, 8), (6, 6), (100, 50)])
def test_weights_wait_for_the_end_of_a_call(steps, behind):
    """New weights come 5.5 tokens into a batch of 50, and are loaded behind the call."""
    push, update = 0.4, 5.5 * step(8)
    schedule = Schedule(
        BoundedStaleness(1), weights=Weights("interrupt", cache="keep"), consumption=Consumption(order="submitted")
    )
    phases = cluster(
        rollout__slots=8, rollout__steps=steps, sync__push=push, trainer__group=0.0, trainer__update=update,
        lengths__mean=50,
    )  # fmt: skip
    out = simulate(schedule, phases)
    assert out.seconds == pytest.approx(50 * step(8) + push, rel=1e-9)
    assert out.mixed == (1.0 if behind < 50 else 0.0)
    trainer = out.trainer["idle"] * out.seconds
    # Until the load, and from it to the batch's end, the trainer has nothing to do.
    assert trainer == pytest.approx(50 * step(8) - update, rel=1e-9)


def test_what_nobody_computes_counts_as_idle():
    quiet = simulate(SCHEDULES["sync"], cluster())
    out = simulate(SCHEDULES["sync"], cluster(rollout__overhead=T0 / 2))
    assert out.seconds == quiet.seconds
    moved = quiet.worker["busy"] - out.worker["busy"]
    assert moved == pytest.approx(out.worker["idle"] - quiet.worker["idle"], rel=1e-9)
    steps = TOKENS * math.ceil(GROUPS * SAMPLES / cluster().rollout.slots)
    assert moved * out.seconds == pytest.approx(steps * T0 / 2, rel=1e-9)


# -- laws of every schedule ------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(name, steps) for name in SCHEDULES for steps in (None, 7)], ids=str)
def ragged(request):
    """A run of each schedule with long tails and crashes, after 40 updates; looked at all the time, or now and then."""
    name, steps = request.param
    rollout = RAGGED.rollout.model_copy(update={"steps": steps})
    run = Watched(small(SCHEDULES[name]), RAGGED.model_copy(update={"rollout": rollout}))
    begin = run.until(10)
    first = len(run.ends)
    end = run.until(40)
    return name, run, begin, end, [begin.time, *run.ends[first:]]


def test_what_was_trained_is_what_was_drawn(ragged):
    """Every group once, whole, with exactly the tokens of its responses, although workers crash."""
    _, run, *_ = ragged
    totals = run.scheduler.totals
    assert run.lost > 0
    assert len(run.trained) == len(set(run.trained)) == totals.groups_trained >= 40 * GROUPS
    assert totals.tokens_trained == sum(map(run.length, run.trained))
    assert set(run.ended.values()) == {1}


def test_tokens_are_conserved(ragged):
    """Drawn = trained + wasted + in progress, but for the token, or the call, that a response is at when it is cut off."""
    name, run, _, end, ends = ragged
    for worker in run.workers.values():
        run._report(worker)
    totals = run.scheduler.totals
    progress = sum(group.tokens for group in run.scheduler.groups.values())
    nothing = Simulation(SCHEDULES[name], RAGGED).until(0)
    wasted = outcome_of(SCHEDULES[name], RAGGED, nothing, end, ends, name="").wasted
    cut = (run.phases.rollout.steps or 1) * (len(run.started) - len(run.ended))
    missing = end.generated * (1 - wasted) - totals.tokens_trained - progress
    assert -1e-3 <= missing <= cut + 1e-3
    assert (wasted > 0.05) == (name in ("roll_flash", "dora"))  # crashes alone cost less
    assert end.generated > 10_000


def test_time_is_booked_once(ragged):
    _, _run, begin, end, _ = ragged
    assert begin.time < end.time
    for mark in (begin, end):
        assert sum(mark.workers.values()) == pytest.approx(RAGGED.rollout.workers * mark.time, rel=1e-9)
        assert sum(mark.trainer.values()) == pytest.approx(mark.time, rel=1e-9)
        assert min(mark.workers.values()) >= 0
    assert end.workers["down"] > 0


def test_the_lag_keeps_its_limit(ragged):
    name, _, _, end, ends = ragged
    limit = SCHEDULES[name].max_lag
    assert sum(end.lag.values()) >= 40 * GROUPS * SAMPLES
    assert limit is None or max(end.lag) <= limit
    assert ends == sorted(ends)
    assert len(ends) == 31


@pytest.mark.parametrize("name", SCHEDULES)
def test_outcomes(name):
    """Shares sum to 1, an outcome is a function of its seed, and twice the seconds are twice the seconds."""
    schedule = small(SCHEDULES[name])
    out = simulate(schedule, RAGGED, name=name)
    assert (out.schedule, out.workers, out.updates) == (name, 3, 12)
    assert set(out.worker) == set(STATES)
    assert sum(out.worker.values()) == pytest.approx(1, rel=1e-9)
    assert sum(out.trainer.values()) == pytest.approx(1, rel=1e-9)
    assert sum(out.lag.values()) == pytest.approx(12 * GROUPS * SAMPLES, abs=GROUPS * SAMPLES)  # a stream is under way
    assert 0 <= out.wasted < 1
    assert out.lag_quantile(0.0) == min(out.lag)
    assert out.lag_quantile(1.0) == out.lag_max
    assert simulate(schedule, RAGGED, name=name) == out
    other = RAGGED.model_copy(update={"run": RAGGED.run.model_copy(update={"seed": 1})})
    assert simulate(schedule, other, name=name).seconds != out.seconds
    slow = simulate(schedule, scaled(RAGGED, 2.0), name=name)
    assert slow.seconds == 2 * out.seconds  # exactly: a power of two
    assert (slow.lag, slow.worker, slow.wasted) == (out.lag, out.worker, out.wasted)


def scaled(phases: Phases, by: float) -> Phases:
    """Everything takes so many times as long."""
    times = {
        "rollout": ("t0", "t1", "prefill", "restart"),
        "trainer": ("group", "update"),
        "sync": ("push", "load"),
        "colocated": ("switch",),
    }
    parts = {
        part: getattr(phases, part).model_copy(update={k: by * getattr(getattr(phases, part), k) for k in keys})
        for part, keys in times.items()
    }
    crashes = phases.rollout.crashes_per_hour / by
    parts["rollout"] = parts["rollout"].model_copy(update={"crashes_per_hour": crashes})
    return phases.model_copy(update=parts)


def test_schedules_see_the_same_responses(monkeypatch):
    """A response has one length, whoever draws it, when, and in which order."""
    monkeypatch.setattr(
        "offdrift_lab.plan.simulate.BLOCK", 3
    )  # lengths are drawn in blocks, when one of them is needed
    seen: dict[Key, set[int]] = {}
    for schedule in SCHEDULES.values():
        run = Watched(small(schedule), RAGGED)
        run.until(6)
        for key in run.started:
            seen.setdefault(key, set()).add(run.lengths[key])
    assert {len(lengths) for lengths in seen.values()} == {1}
    assert len(seen) > 60
    assert len({min(lengths) for lengths in seen.values()}) > 40


def test_in_order_schedules_train_on_the_same_tokens():
    quiet = cluster(lengths__kind="lognormal", lengths__sigma=1.0, lengths__cap=400, rollout__workers=3)
    names = [name for name, row in SCHEDULES.items() if not row.selects]
    tokens = {
        name: round((o := simulate(SCHEDULES[name], quiet)).tokens_per_s * o.seconds * o.updates) for name in names
    }
    assert len(tokens) > 5
    streams = {name for name in names if SCHEDULES[name].consumption.take == "stream"}
    assert len({tokens[name] for name in names if name not in streams}) == 1


def test_crashes_cost_time_and_the_down_share_is_the_expected_one():
    """A replica is up 1/rate seconds and down `restart`: down = restart / (restart + 1/rate), over many crashes."""
    rate, restart = 0.05, 5.0
    phases = cluster(
        rollout__workers=4, rollout__slots=2, rollout__crashes_per_hour=3600 * rate, rollout__restart=restart,
        run__updates=1500,
    )  # fmt: skip
    calm = simulate(SCHEDULES["sync"], cluster(rollout__workers=4, rollout__slots=2))
    out = simulate(SCHEDULES["sync"], phases)
    assert out.seconds > calm.seconds
    # About 4 x 1500 x 2.6 s / 25 s = 600 crashes: the share is known to 4 %.
    assert out.worker["down"] == pytest.approx(restart / (restart + 1 / rate), rel=0.12)


def test_a_faster_side_is_faster_where_the_other_waits_for_it():
    """Halving what training takes, or adding workers, is faster if nothing overlaps a publication."""
    base = cluster(lengths__kind="lognormal", lengths__sigma=1.0, lengths__cap=400, rollout__slots=4)
    for name in ("sync", "periodic"):
        seconds = simulate(SCHEDULES[name], base).seconds
        faster = base.model_copy(update={"trainer": base.trainer.model_copy(update={"group": GROUP / 2})})
        assert simulate(SCHEDULES[name], faster).seconds < seconds
        assert simulate(SCHEDULES[name], cluster(**WIDER)).seconds < seconds


WIDER = {
    "lengths__kind": "lognormal",
    "lengths__sigma": 1.0,
    "lengths__cap": 400,
    "rollout__slots": 4,
    "rollout__workers": 2,
}
