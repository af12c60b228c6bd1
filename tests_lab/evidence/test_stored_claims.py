"""Stored numbers of claims are those of the code, and what counts as foreseen is early, and no false alarm."""

import json
from pathlib import Path

import pytest
from benchmarks import foreseen, plan_claims, stable_runs

from offdrift_lab.exact.arithmetic import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def stored(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_arithmetic_is_stored_as_it_is_computed():
    assert stored("arithmetic") == json.loads(json.dumps(table()))


def test_decisions_of_the_stored_runs_are_those_of_the_page():
    runs, found = stored("severity")["runs"], stored("foreseen")
    rule = "low_acceptance"
    again = foreseen.judged(runs, lambda others: lambda run, at: foreseen.told(run, rule, at))
    assert json.loads(json.dumps(again)) == found[f"rule {rule}"]
    assert json.loads(json.dumps(foreseen.decisions(runs, "systems_fix"))) == found["decisions"]["systems_fix"]
    sweeps = stored("foreseen_sweeps")["runs"]
    again = foreseen.judged(sweeps, lambda _: lambda run, at: foreseen.told(run, rule, at), runs)
    assert json.loads(json.dumps(again)) == found["sweeps"][f"rule {rule}"]
    assert json.loads(json.dumps(foreseen.as_told(sweeps, "grad_spike"))) == found["sweeps"]["as told"]["grad_spike"]
    of_pretrained = list(stored("pretrained")["runs"].values())
    assert json.loads(json.dumps(foreseen.pretrained(of_pretrained))) == found["pretrained"]


def run(cell, rewards, told=None):
    """A run with an evaluation every four updates, and the update at which the finding was told."""
    held_out = [[4 * i, reward] for i, reward in enumerate(rewards)]
    return {"family": "f", "cell": cell, "held_out": held_out, "findings": {} if told is None else {"grad_spike": told}}


@pytest.mark.parametrize(
    ("told", "expected"),
    [(8, (3, 0)), (20, (0, 3)), (None, (0, 0)), (40, (0, 0))],
)
def test_foreseen_is_twenty_updates_before_the_loss(told, expected):
    lost, kept = [1.0] * 8 + [0.5] * 4, [1.0] * 12
    runs = [run(c, lost, told) for c in "abc"] + [run(c, kept) for c in "abcdefgh"]
    assert foreseen.lost_at(runs[0]) == 32
    assert foreseen.lost_at(runs[-1]) is None
    found = foreseen.judged(runs, lambda others: lambda r, at: foreseen.told(r, "grad_spike", at))
    assert (found["foreseen"][0], found["told late"]) == expected
    assert found["foreseen"][1] == 3
    assert found["false"][:2] == [0, 8]


def test_a_finding_of_healthy_runs_is_no_foresight():
    lost, kept = [1.0] * 8 + [0.5] * 4, [1.0] * 12
    runs = [run(c, lost, 4) for c in "abc"] + [run(c, kept, 4) for c in "abcdefgh"]
    found = foreseen.judged(runs, lambda others: lambda r, at: foreseen.told(r, "grad_spike", at))
    # The threshold that the other recipes allow lets no alarm through; as told it is one, everywhere.
    assert found["foreseen"][0] == found["false"][0] == 0
    told = foreseen.as_told(runs, "grad_spike")
    assert (told["foreseen"][0], told["false"][0]) == (3, 8)


def test_what_other_runs_teach_judges_these():
    kept, lost = [1.0] * 12, [1.0] * 8 + [0.5] * 4
    teachers = [run(c, kept, 4 if c == "a" else None) for c in "abcdefghijklmnopqrstuvwxyz"]
    found = foreseen.judged(
        [run("z", lost, 8), run("y", kept)], lambda _: lambda r, at: foreseen.told(r, "grad_spike", at), teachers
    )
    assert (found["foreseen"][0], found["false"][0]) == (1, 0)  # one false alarm of 26 is within 5 %
    teachers = [run(c, kept, 4) for c in "abc"]
    found = foreseen.judged([run("z", lost, 8)], lambda _: lambda r, at: foreseen.told(r, "grad_spike", at), teachers)
    assert found["foreseen"][0] == 0


def test_rates_are_read_from_settings():
    assert stable_runs.rate_of({"setting": "none, lag.sync_every=4, optim.lr=0.0001"}) == 1e-4
    assert stable_runs.rate_of({"setting": "none, lag.sync_every=64"}) == stable_runs.SUMS_RATE


def test_no_schedule_passes_the_bound_of_the_stored_plan():
    for name in ("example", "verl, 128 devices"):
        found = stored("plan_claims")[name]
        bound = found["bound of drawing beside training"]
        assert bound <= 2
        assert max(found["one step off"], found["periodic"]) <= bound
        assert found["rollouts twice as fast, old policy scored"] < found["rollouts twice as fast"] < 2
    assert pytest.approx(50.7, abs=0.1) == plan_claims.WEIGHTS / plan_claims.TRANSFER / 1e9
