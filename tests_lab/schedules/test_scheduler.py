"""Laws of every schedule, under events in random order: nothing is lost or doubled, and lags keep their limit."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from offdrift_lab.schedules import SCHEDULES, Key, Schedule, Scheduler, Start
from offdrift_lab.schedules.rules import (
    Always,
    BoundedStaleness,
    Consumption,
    Counts,
    Dispatch,
    InFlight,
    PauseAt,
    Quota,
    TooOld,
    Weights,
)
from tests_lab.schedules.driver import Chaos, run


def composed():
    """Every combination of rules that may stand together."""
    admissions = [
        Always(),
        BoundedStaleness(0),
        BoundedStaleness(2),
        Quota(0.0),
        Quota(0.75),
        InFlight(1.5),
        PauseAt(3),
    ]
    dispatches = [Dispatch(), Dispatch("push"), Dispatch(slice_tokens=2), Dispatch(slice_tokens=2, order="longest")]
    arrivals = [Weights(a, b) for a in ("drain", "interrupt", "finish") for b in ("push", "pull")]
    olds = [TooOld(), TooOld("drop", 2), TooOld("redraw", 3)]
    takes = [Consumption(t, o) for t in ("batch", "stream") for o in ("finished", "submitted")]
    for a, d, w, o, c, t in itertools.product(admissions, dispatches, arrivals, olds, takes, (1, 3)):
        try:
            yield Schedule(a, d, w, o, c, sync_every=t)
        except ValueError:
            assert d.slice_tokens is not None


COMPOSED = list(composed())
SAMPLE = random.Random(0).sample(range(len(COMPOSED)), 500)
"""Places of the compositions that are run."""


def pairs_of_rules(schedules):
    parts = ("admission", "dispatch", "weights", "too_old", "consumption", "sync_every")
    return {
        (a, getattr(schedule, a), b, getattr(schedule, b))
        for schedule in schedules
        for a, b in itertools.combinations(parts, 2)
    }


def holds(schedule, **options):
    done = run(schedule, **options)
    s = done.s
    assert len(done.trained) == len(set(done.trained)) == s.updates * s.batch
    assert len(done.lags) == len(done.trained) * s.samples
    assert sum(s.totals.lag.values()) == len(done.lags)
    assert s.totals.lag == {lag: done.lags.count(lag) for lag in set(done.lags)}
    assert s.totals.stale == sum(lag > 0 for lag in done.lags)
    assert s.totals.mixed == done.mixed
    assert s.totals.wasted_tokens == done.wasted
    if schedule.max_lag is not None:
        assert max(done.lags) <= schedule.max_lag
    if not schedule.selects:
        assert in_order(done)
    return done


def in_order(done):
    """Whether update k took the groups k B to (k + 1) B - 1."""
    batch = done.s.batch
    return all(set(done.trained[i : i + batch]) == set(range(i, i + batch)) for i in range(0, len(done.trained), batch))


def small(schedule):
    """A row with slices that short responses notice."""
    cut = None if schedule.dispatch.slice_tokens is None else 2
    return replace(schedule, dispatch=replace(schedule.dispatch, slice_tokens=cut))


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_keep_their_promises(name):
    for seed in range(12):
        holds(small(SCHEDULES[name]), seed=seed, skew=(1.0, 12.0, 40.0)[seed % 3], crash=(0.0, 0.05)[seed % 2])


def test_compositions_keep_their_promises():
    """A sample in which every two rules meet that may stand together."""
    assert len(COMPOSED) > 1000
    assert pairs_of_rules(COMPOSED[i] for i in SAMPLE) == pairs_of_rules(COMPOSED)
    for seed in SAMPLE:
        schedule = COMPOSED[seed]
        draw = random.Random(seed)
        holds(
            schedule,
            seed=seed,
            updates=6,
            batch=draw.randint(1, 3),
            samples=draw.randint(1, 3),
            workers=draw.randint(1, 4),
            slots=draw.randint(1, 4),
            skew=draw.choice((1.0, 20.0, 50.0)),
            crash=draw.choice((0.0, 0.03, 0.1)),
        )


BOUNDED = [name for name, row in SCHEDULES.items() if row.max_lag]


@pytest.mark.parametrize("name", BOUNDED)
def test_the_limit_of_the_lag_is_reached(name):
    """A limit that no run comes near would be no bound that one would quote."""
    row, worst = small(SCHEDULES[name]), 0
    for seed in range(400):
        worst = max(worst, *run(row, seed=seed, updates=10, skew=25.0).lags)
        if worst == row.max_lag:
            return
    raise AssertionError(f"{name}: {worst} at most, {row.max_lag} allowed")


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.max_lag is None])
def test_rows_without_a_limit_have_none(name):
    """Some order of events takes a straggler further than any bounded row here goes."""
    assert max(max(run(SCHEDULES[name], seed=s, updates=30, skew=60.0, length=3).lags) for s in range(40)) > 4


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.selects])
def test_rows_that_select_by_length_do(name):
    assert not all(in_order(run(SCHEDULES[name], seed=seed, skew=25.0)) for seed in range(40))


def test_synchronous_rows_are_on_policy():
    for name in ("sync", "periodic", "seer", "distflow", "verl_on_policy"):
        assert SCHEDULES[name].max_lag == 0
        assert set(holds(small(SCHEDULES[name]), seed=3, skew=9.0).lags) == {0}


def test_the_same_events_give_the_same_commands():
    for name in ("verl_partial", "dora", "seer"):
        a, b = (run(small(SCHEDULES[name]), seed=5, crash=0.05) for _ in range(2))
        assert a.trained == b.trained
        assert a.lags == b.lags


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stored_scheduler_goes_on(name):
    """Stop after some updates, store, load into another scheduler, finish: every group is trained on once."""
    row = small(SCHEDULES[name])
    first = Chaos(Scheduler(row, batch=2, samples=2, updates=8), seed=1)
    while first.s.version < 3:
        for command in first.s.decide():
            first.obey(command)
        event = first.rng.choice(list(first.pending))
        del first.pending[event]
        first.happen(event)
    assert first.s.training is None
    state = json.loads(json.dumps(first.s.state()))
    second = Chaos(Scheduler(row, batch=2, samples=2, updates=8), seed=2, workers=0)
    second.s.load(state)
    for name in ("versions", "trained", "lags", "cancelled", "wasted", "mixed"):
        setattr(second, name, getattr(first, name))
    second.count = 3
    for i in range(3):
        second.up(f"w{i}")
    second.run()
    assert sorted(second.trained) == sorted(set(second.trained))
    assert len(second.trained) == 16
    assert sum(second.s.totals.lag.values()) == 32


def at(**changes):
    start = {"batch": 4, "sync_every": 2, "version": 7, "published": 6, "submitted": 30, "outstanding": 5}
    return Counts(**{**start, "outstanding_at_sync": 3, "started_since_sync": 4, **changes})


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (BoundedStaleness(0), (7 + 1) * 4 - 30),
        (BoundedStaleness(3), (7 + 3 + 1) * 4 - 30),
        (Quota(0.0), 4 * 2 - 3 - 4),
        (Quota(0.3), 10 - 3 - 4),  # 1.3 * 8 = 10.4
        (InFlight(0.0), 4 - 5),
        (InFlight(1.3), 9 - 5),  # 2.3 * 4 = 9.2
        (PauseAt(2), 3),  # lags of 5 // 4 + 1 = 2, 6 // 4 + 1 and 7 // 4 + 1; 8 // 4 + 1 = 3 is one too many
        (Always(), float("inf")),
    ],
)
def test_admission_by_hand(rule, allowed):
    assert rule.allowed(at()) == allowed


def test_quotas_that_are_whole_in_decimals_are_whole():
    """1.1 * 10 is 11.000000000000002 and 1.15 * 20 is 22.999999999999996."""
    assert InFlight(0.15).allowed(at(batch=20, outstanding=0)) == 23
    assert Quota(0.1).allowed(at(batch=10, sync_every=1, outstanding_at_sync=0, started_since_sync=0)) == 11


def started(scheduler):
    return [tuple(c.key[:2]) for c in scheduler.decide() if isinstance(c, Start)]


def test_responses_start_in_the_order_of_their_groups():
    s = Scheduler(SCHEDULES["sync"], batch=3, samples=3, updates=2)
    s.worker_up("a", slots=4, version=0)
    s.worker_up("b", slots=3, version=0)
    assert started(s) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    s.finished(Key(1, 1), 5, 0)
    assert started(s) == [(2, 1)]
    s.worker_lost("b")  # what it drew comes first
    s.worker_up("c", slots=3, version=0)
    assert started(s) == [(0, 1), (1, 0), (1, 2)]


def test_the_longest_groups_go_first():
    """First every group's first response; then siblings of the longest of them."""
    s = Scheduler(small(SCHEDULES["seer"]), batch=3, samples=3, updates=1)
    s.worker_up("a", slots=3, version=0)
    assert started(s) == [(0, 0), (1, 0), (2, 0)]
    for number, tokens in ((0, 5), (1, 9), (2, 7)):
        s.drawn(Key(number, 0), tokens, 0)
    for number in (0, 1, 2):
        s.finished(Key(number, 0), 1, 0)
    assert started(s) == [(1, 1), (1, 2), (2, 1)]
    s.sliced(Key(1, 1), 30, 0)  # its siblings are as long as it is, or longer
    assert started(s) == [(1, 1)]
    s.finished(Key(1, 2), 2, 0)
    assert started(s) == [(2, 2)]


def test_the_least_busy_worker_is_next():
    for to in ("pull", "push"):
        s = Scheduler(Schedule(BoundedStaleness(0), Dispatch(to)), batch=4, samples=1, updates=1)
        s.worker_up("a", slots=9, version=0)
        s.worker_up("b", slots=9, version=0)
        assert sorted(c.worker for c in s.decide()) == ["a", "a", "b", "b"]


DROPS = Schedule(BoundedStaleness(2), weights=Weights("finish", "pull"), too_old=TooOld("drop", 0))
REDRAWS = [
    Schedule(InFlight(4.0), Dispatch(slice_tokens=1, order="longest"), weights, TooOld("redraw", limit))
    for weights, limit in ((Weights("interrupt"), 1), (Weights("drain"), 0))
]


def test_what_is_too_old_makes_room_for_another():
    dropped = redrawn = 0
    for seed in range(60):
        dropped += holds(DROPS, seed=seed, skew=30.0, slots=8).s.totals.dropped
        redrawn += holds(REDRAWS[seed % 2], seed=seed, skew=30.0, slots=8, samples=3).s.totals.redrawn
    assert dropped > 40
    assert redrawn > 40


def test_workers_may_come_and_go_while_others_drain():
    restarted = 0
    for seed in range(120):
        for to in ("pull", "push"):
            row = Schedule(InFlight(1.5), Dispatch(to), consumption=Consumption(order="submitted"))
            restarted += holds(row, seed=seed, skew=20.0, crash=0.15, updates=6).s.totals.restarted
    assert restarted > 10


def test_a_full_store_blocks():
    schedule = Schedule(Always(), weights=Weights("interrupt", "pull"))
    s = Scheduler(schedule, batch=2, samples=1, updates=50, store=5)
    s.worker_up("w", slots=64, version=0)
    assert len(s.decide()) == 5
    for number in range(5):
        s.finished(Key(number, 0), 1, 0)
    assert [type(c).__name__ for c in s.decide()] == ["Train"]
    assert [type(c).__name__ for c in s.decide()] == ["Start", "Start"]  # what the trainer took makes room
    assert s.decide() == []


def test_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match="store = 1: at least 2"):
        Scheduler(SCHEDULES["sync"], batch=2, samples=1, updates=1, store=1)
    with pytest.raises(ValueError, match="training would never go on"):
        Schedule(BoundedStaleness(0), too_old=TooOld("drop", 1), sync_every=3)
    with pytest.raises(ValueError, match="need a limit"):
        TooOld("drop")
    with pytest.raises(ValueError, match="one version"):
        Schedule(Always(), Dispatch(slice_tokens=3), Weights("finish"))
