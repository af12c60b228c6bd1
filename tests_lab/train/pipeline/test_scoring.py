"""The ledger of rewards that workers compute: who is asked, and that nobody waits for what will not come."""

import pytest
import torch

from offdrift.errors import RewardError
from offdrift_lab.schedules import Key
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.rewards import Rewards
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.pipeline.driver import Driver, News
from offdrift_lab.train.pipeline.scoring import RewardLedger, RewardSpec, Score, Scored, joined
from tests_lab.train.pipeline.test_driver import FREE, NEW, OLD, REDRAW, SETTINGS, Pool, job, orders, report

PROBLEM = Problem("1=", "1")
HALF = Rewards((0.5,), {})


def order(group, attempt=0):
    return Score(group, attempt, ("1",), (PROBLEM,))


def test_the_least_busy_worker_is_asked_and_then_the_next():
    ledger = RewardLedger()
    for group in range(4):
        ledger.want(order(group))
    assigned = ledger.assign({"a": 2, "b": 0, "c": 0})
    assert [name for name, _ in assigned] == ["b", "c", "b", "c"]
    assert [score.group for _, score in assigned] == [0, 1, 2, 3]
    assert ledger.assign({"a": 0}) == []


def test_rewards_reach_the_trainer_before_and_after_it_takes_the_group():
    ledger = RewardLedger()
    for group in (0, 1):
        ledger.want(order(group))
    ledger.assign({"a": 0})
    ledger.arrived(Scored(0, 0, HALF))
    first, second = ledger.take(0), ledger.take(1)
    assert first.result(timeout=0) == HALF
    assert not second.done()
    ledger.arrived(Scored(1, 0, HALF))
    assert second.result(timeout=0) == HALF
    assert ledger.take(0) is None


@pytest.mark.parametrize(
    ("end", "taken"),
    [
        (lambda ledger: ledger.lost("a"), True),
        (lambda ledger: ledger.lost("a"), False),
        (lambda ledger: ledger.clear(), True),
        (lambda ledger: ledger.clear(), False),
        (lambda ledger: ledger.forget(0), False),
        (lambda ledger: ledger.want(order(0, 1)), False),
    ],
)
def test_what_will_not_come_is_left_to_the_trainer(end, taken):
    ledger = RewardLedger()
    ledger.want(order(0))
    ledger.assign({"a": 0})
    asked = ledger.take(0) if taken else ledger._asked[0].future
    end(ledger)
    assert asked.result(timeout=0) is None
    ledger.arrived(Scored(0, 0, HALF))  # late: nobody waits for it


def test_without_a_worker_the_trainer_computes():
    ledger = RewardLedger()
    ledger.want(order(0))
    assert ledger.assign({}) == []
    assert ledger.take(0).result(timeout=0) is None


def test_another_workers_end_changes_nothing():
    ledger = RewardLedger()
    ledger.want(order(0))
    ledger.assign({"a": 0, "b": 0})
    ledger.lost("b")
    ledger.arrived(Scored(0, 1, HALF))  # of an attempt that there is not
    asked = ledger.take(0)
    assert not asked.done()
    ledger.arrived(Scored(0, 0, HALF))
    assert asked.result(timeout=0) == HALF


def driver_of(row):
    """A driver of workers a and b that have weights, and of groups of two responses."""
    scorer = lambda group, attempt, tokens: Score(group, attempt, tuple(map(str, tokens)), (PROBLEM,) * len(tokens))  # noqa: E731
    driver = Driver(row, Pool(), batch=1, samples=2, updates=8, settings=SETTINGS, job=job, scorer=scorer)
    driver._weights = {0: OLD}
    for name in "ab":
        driver._up(name)
    driver._decide()
    for name in "ab":
        driver._report(name, report(loaded=(0,)))
        driver._orders[name] = []
    driver._decide()
    for name in "ab":
        driver._orders[name] = []
    return driver


def test_the_rewards_of_a_group_are_ordered_when_its_last_response_ends():
    driver = driver_of(FREE)
    driver._report("a", report((Key(0, 1), 2, "stop")))
    driver._decide()
    assert not orders(driver, Score, "a") + orders(driver, Score, "b")
    driver._report("b", report((Key(0, 0), 3, "stop")))
    driver._decide()
    asked = orders(driver, Score, "a") + orders(driver, Score, "b")
    assert asked == [Score(0, 0, ("[10, 11, 12]", "[10, 11]"), (PROBLEM,) * 2)]
    ready = driver.take()
    driver._report("a", report()._replace(rewards=(Scored(0, 0, HALF),), reward_seconds=0.25))
    assert driver.rewards(ready) == [HALF]
    assert driver.sums()["reward"] == 0.25


def test_a_lost_workers_rewards_are_left_to_the_trainer():
    driver = driver_of(FREE)
    driver._report("a", report((Key(0, 0), 3, "stop"), (Key(0, 1), 2, "stop")))
    driver._decide()
    (name,) = [name for name in "ab" if orders(driver, Score, name)]
    ready = driver.take()
    driver._lose(name, "it was killed")
    assert driver.rewards(ready) == [None]


def test_a_group_that_is_drawn_again_is_scored_again():
    driver = driver_of(REDRAW)
    for group in (0, 1):
        driver._report("a", report((Key(group, 0), 4, "stop"), (Key(group, 1), 4, "stop")))
    driver._decide()
    driver.take()
    driver._take_in(News(True, NEW))  # group 1 waits, has tokens of version 0 and may have none
    for name in "ab":
        driver._orders[name] = []
    driver._decide()
    for name in "ab":
        driver._report(name, report(loaded=(1,), version=1))
    driver._report("a", report(version=1)._replace(rewards=(Scored(1, 0, Rewards((0.0, 0.0), {})),)))
    driver._decide()
    driver._report("a", report((Key(1, 0, 1), 2, "stop"), (Key(1, 1, 1), 2, "stop"), version=1))
    driver._decide()
    ready = driver.take()
    driver._report("a", report()._replace(rewards=(Scored(1, 1, HALF),)))
    assert driver.rewards(ready) == [HALF]


def test_rewards_of_groups_are_those_of_a_batch():
    parts = [Rewards((1.0, 2.0), {"a": (0.0, 1.0), "b": (2.0, 3.0)}), Rewards((3.0,), {"b": (5.0,), "a": (4.0,)})]
    assert joined(parts) == Rewards((1.0, 2.0, 3.0), {"a": (0.0, 1.0, 4.0), "b": (2.0, 3.0, 5.0)})
    with pytest.raises(RewardError, match="'a', 'b' for one group and 'b' for another"):
        joined([parts[0], Rewards((3.0,), {"b": (5.0,)})])


def test_a_worker_finds_the_tasks_reward_or_the_recipes(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completion):\n    return len(completion)\n")
    problem = find_task("backwards").sample(1, seed=0)[0]
    given = ([problem.answer, "no"], [problem] * 2)
    assert RewardSpec("backwards", None, str(tmp_path)).find()(*given).total == (1.0, 0.0)
    assert RewardSpec("backwards", "mine.py:score", str(tmp_path)).find()(*given).total == (6.0, 2.0)
    assert torch.tensor(RewardSpec("absent", "exact", "/").find()(*given).total).tolist() == [1.0, 0.0]
