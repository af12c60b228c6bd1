"""ECHO-2's rule: numbers by hand, and where the simulation agrees with it."""

from __future__ import annotations

import pytest

from offdrift_lab.plan.phases import EXAMPLE, phases_of
from offdrift_lab.plan.provisioning import groups_per_second, meets_rule, provisioning
from offdrift_lab.plan.simulate import simulate
from offdrift_lab.schedules import SCHEDULES


def cluster(**parts):
    """An example with other phase times."""
    return phases_of(dict(parts), where="test")


def test_the_rule_of_numbers_done_by_hand():
    """512 groups of one response in 60 s, weights that take 45 s to spread."""
    phases = cluster(
        batch={"groups": 512, "samples": 1},
        trainer={"group": 0.1, "update": 8.8},
        sync={"load": 45.0},
        rollout={"workers": 5, "slots": 4, "t0": 0.01, "t1": 0.0, "prefill": 0.0},
        lengths={"kind": "constant", "mean": 20, "cap": 20},
    )
    rule = provisioning(phases)
    assert (rule["train_seconds"], rule["needed"]) == (pytest.approx(60.0), pytest.approx(8.533333, abs=1e-6))
    # 20 steps of .01 s for four responses: 20 groups a second.
    assert groups_per_second(phases) == pytest.approx(20.0)
    assert (rule["workers"], rule["bound"], rule["capacity"]) == (1, 1, pytest.approx(100.0))
    assert [meets_rule(phases, bound) for bound in (0, 1, None)] == [False, True, True]
    slow = cluster(**phases.model_dump() | {"sync": {"load": 61.0}})
    assert (provisioning(slow)["bound"], meets_rule(slow, 1), meets_rule(slow, 2)) == (2, False, True)


def test_fewer_workers_than_the_rule_asks_for_leave_the_trainer_idle_and_more_do_not():
    """Constant lengths, which is what the rule assumes."""
    base = EXAMPLE.model_dump() | {"lengths": {"kind": "constant", "mean": 1500, "cap": 4096}}
    fewest = provisioning(cluster(**base))["workers"]
    idle = {}
    for workers in (fewest - 2, fewest + 1):
        rollout = base["rollout"] | {"workers": workers}
        idle[workers] = simulate(SCHEDULES["echo_2"], cluster(**base | {"rollout": rollout})).trainer["idle"]
    assert idle[fewest - 2] > 0.2
    assert idle[fewest + 1] < 0.02


def test_accepted_proposals_draw_faster_and_rejected_ones_cost():
    """A token takes (t0 + (1 + proposals) t1 c) / tokens_per_pass, and the simulation takes that long."""
    rollout = {"workers": 1, "slots": 8, "t0": 0.01, "t1": 0.001, "prefill": 0.0, "overhead": 0.004}
    base = {
        "rollout": rollout,
        "lengths": {"kind": "constant", "mean": 100, "cap": 100},
        "batch": {"groups": 1, "samples": 8},
        "trainer": {"group": 0.0, "update": 0.0},
        "sync": {"push": 0.0, "load": 0.0},
        "run": {"updates": 3, "warmup": 1},
    }
    drafts = {"proposals": 3.0, "tokens_per_pass": 2.0}
    cases = {"plain": {}, "drafted": drafts, "rejected": {"proposals": 3.0}}
    seconds = {}
    for name, extra in cases.items():
        outcome = simulate(SCHEDULES["sync"], cluster(**base | {"rollout": rollout | extra}))
        seconds[name] = outcome.seconds
        passes = 100 / extra.get("tokens_per_pass", 1.0)
        assert outcome.worker["idle"] == pytest.approx(0.004 * passes / outcome.seconds)
    expected = {"plain": 100 * 0.018, "drafted": 50 * 0.042, "rejected": 100 * 0.042}
    assert seconds == {name: pytest.approx(x) for name, x in expected.items()}
    with pytest.raises(Exception, match=r"tokens_per_pass = 5 with rollout.proposals = 3"):
        cluster(rollout={"proposals": 3.0, "tokens_per_pass": 5.0})
