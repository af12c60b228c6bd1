"""The comparison of schedules: nothing on the front is beaten, the recommendation keeps its tolerance, bounds bind."""

import random

import pytest

from offdrift.errors import RecipeError
from offdrift_lab.plan.compare import bound_of, bounded, correction, pareto, plan, recommended, splits_of
from offdrift_lab.plan.drift import DriftFit, Fit
from offdrift_lab.plan.phases import Phases
from offdrift_lab.plan.simulate import STATES
from offdrift_lab.plan.view import answer
from offdrift_lab.schedules import SCHEDULES
from tests_lab.plan.test_simulate import cluster

SMALL = cluster(
    rollout__workers=3,
    rollout__slots=4,
    lengths__kind="lognormal",
    lengths__sigma=0.8,
    lengths__cap=400,
    trainer__devices=3,
    trainer__group=0.5,
    sync__push=0.1,
)
STEEP = DriftFit(Fit("full/k3", 0.001, 0.012, 1.0, 0.0005, (0.0, 4.0)), None, "a law")
"""A KL below `kl_clean` (0.02) up to a lag of 1.58, and above `kl_large` (0.05) from 4.08."""


@pytest.fixture(scope="module")
def document():
    steps = []
    result = plan(SMALL, splits=splits_of(SMALL), bounds=(1, 4), progress=lambda *step: steps.append(step))
    return result | {"steps": steps}


@pytest.fixture(scope="module")
def drifting():
    return plan(SMALL, bounds=(1, 8), drift=STEEP)


def beaten(row, rows, drift):
    return any(
        other["groups_per_s"] >= row["groups_per_s"]
        and other[drift] <= row[drift]
        and (other["groups_per_s"] > row["groups_per_s"] or other[drift] < row[drift])
        for other in rows
    )


@pytest.mark.parametrize("drift", ["lag_mean", "kl"])
def test_the_front_is_what_nothing_beats(drift):
    draw, sizes = random.Random(0), set()
    for _ in range(300):
        # Few values, so that rows share one of them or both.
        rows = [{"groups_per_s": float(draw.randint(1, 6)), drift: draw.randint(0, 5) / 2} for _ in range(12)]
        front = {id(row) for row in pareto(rows)}
        assert front == {id(row) for row in rows if not beaten(row, rows, drift)}
        sizes.add(len(front))
    assert len(sizes) > 5
    assert pareto([]) == []


def test_rounding_beats_nobody():
    rows = [{"groups_per_s": 1.0, "lag_mean": 0.1 + 0.2}, {"groups_per_s": 1.0 + 1e-12, "lag_mean": 0.3}]
    assert pareto(rows) == rows


def test_rows_on_the_front_of_a_plan(document, drifting):
    for result, drift in ((document, "lag_mean"), (drifting, "kl")):
        rows = [*result["schedules"], *result["sweep"]]
        front = [row for row in rows if row["on_front"]]
        assert 2 < len(front) < len(rows)
        clear = [row for row in rows if not beaten(row, rows, drift)]
        assert all(row["on_front"] for row in clear)
        for row in front:  # on the front beside a row that differs by rounding alone
            assert any(
                row["groups_per_s"] == pytest.approx(other["groups_per_s"], rel=1e-8)
                and row[drift] == pytest.approx(other[drift], rel=1e-8, abs=1e-8)
                for other in clear
            )


def test_a_row_holds_what_the_simulation_says(document):
    sync = next(row for row in document["schedules"] if row["schedule"] == "sync")
    assert [row["schedule"] for row in document["schedules"]] == list(SCHEDULES)
    assert (sync["speedup_sync"], sync["lag_max"], sync["max_lag"]) == (1.0, 0, 0)
    for row in (*document["schedules"], *document["sweep"]):
        base = document["baselines"]
        assert row["speedup_sync"] == pytest.approx(row["groups_per_s"] / base["sync"]["groups_per_s"])
        assert row["speedup_colocated"] == pytest.approx(row["groups_per_s"] / base["colocated"]["groups_per_s"])
        assert sum(row[f"worker_{state}"] for state in STATES) == pytest.approx(1)
        assert sum(row[f"trainer_{state}"] for state in ("busy", "sync", "idle")) == pytest.approx(1)
        lags = {int(lag): n for lag, n in row["lag"].items()}
        assert row["lag_max"] == max(lags)
        assert row["lag_mean"] == pytest.approx(sum(lag * n for lag, n in lags.items()) / sum(lags.values()))
        assert min(lags) <= row["lag_mean"] <= row["lag_p95"] or row["lag_p95"] == row["lag_max"] or max(lags) > 0
        assert sum(n for lag, n in lags.items() if lag <= row["lag_p95"]) >= 0.95 * sum(lags.values())
        assert sum(n for lag, n in lags.items() if lag < row["lag_p95"]) < 0.95 * sum(lags.values())
        assert row["max_lag"] is None or row["lag_max"] <= row["max_lag"]
        assert row["workers"] * SMALL.rollout.devices + row["trainer_devices"] == SMALL.devices


def test_progress_counts_every_simulation(document):
    done = [step[1] for step in document["steps"]]
    assert done == list(range(len(done)))
    assert {step[2] for step in document["steps"]} == {len(done) - 1}
    assert document["steps"][-1][0] == "done"
    for names in (("verl_stale",), ("unbounded",)):  # no bound to vary, and none to recommend
        steps = []
        plan(SMALL, names=names, progress=lambda *step: steps.append(step))  # noqa: B023
        assert steps[-1] == ("done", len(steps) - 1, len(steps) - 1)


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3, 1.0])
def test_the_recommendation_is_the_least_lag_within_the_tolerance(document, tolerance):
    rows = [*document["schedules"], *document["sweep"]]
    bounded_rows = [row for row in rows if row["max_lag"] is not None]
    fastest = max(row["groups_per_s"] for row in bounded_rows)
    near = [row for row in bounded_rows if row["groups_per_s"] >= (1 - tolerance) * fastest]
    best = recommended(rows, tolerance)
    assert any(row is best for row in near)
    assert best["lag_mean"] == pytest.approx(min(row["lag_mean"] for row in near), abs=1e-8)
    if tolerance == 0:
        assert best["groups_per_s"] == fastest
    if tolerance == 1:
        assert best["lag_mean"] == 0


def test_a_schedule_without_a_limit_is_never_recommended():
    result = plan(SMALL, names=("laminar", "unbounded"))
    assert result["recommended"] is None
    assert result["sweep"] == []
    assert "none is recommended" in answer(result)[0]
    assert [row["schedule"] for row in result["schedules"]] == ["laminar", "unbounded"]


def test_drift_narrows_what_is_recommended(document, drifting):
    """Clean rows first, then those below "large", and only then the rest."""
    best = drifting["recommended"]
    assert best["kl"] < 0.02
    assert any(row["kl"] > 0.02 and row["groups_per_s"] > best["groups_per_s"] for row in drifting["schedules"])
    assert drifting["recommended"]["groups_per_s"] < document["recommended"]["groups_per_s"]

    def rows(*kls):
        return [{"max_lag": 1, "kl": kl, "groups_per_s": 10 * kl, "lag_mean": kl} for kl in kls]

    assert recommended(rows(0.01, 0.03, 0.1), 0.0)["kl"] == 0.01
    assert recommended(rows(0.03, 0.045, 0.1), 0.0)["kl"] == 0.045
    assert recommended(rows(0.06, 0.1), 0.0)["kl"] == 0.1


def test_predicted_drift_is_the_law_over_the_lags(drifting):
    for row in drifting["schedules"]:
        assert row["kl"] == pytest.approx(0.001 + 0.012 * row["lag_mean"])  # the law is a line
        assert row["kl_p95"] == pytest.approx(0.001 + 0.012 * row["lag_p95"])
    stored = drifting["drift"]
    assert (stored["source"], stored["kl"]["a"], stored["kl"]["b"], stored["kl"]["c"]) == ("a law", 0.001, 0.012, 1.0)


def test_the_correction_is_what_the_diagnosis_asks_for():
    """No finding where the KL is that of rounding; a method where it is large; extrapolation is said."""
    clean = correction(STEEP, {"lag": {"0": 100}})
    assert (clean["method"], clean["findings"], clean["extrapolated"]) == ("none", [], False)
    stale = correction(STEEP, {"lag": {"3": 50, "8": 50}})
    assert stale["extrapolated"]
    assert stale["findings"]
    assert stale["method"] in {f["method"] for f in stale["findings"]} | {"none"}
    assert not correction(STEEP, {"lag": {"4": 1}})["extrapolated"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_bounds_bind(name):
    row = SCHEDULES[name]
    before = bound_of(row.admission)
    if before is None:
        with pytest.raises(RecipeError, match="has no staleness bound"):
            bounded(row, 2)
        return
    for bound in (1, 2, 5):
        own = bounded(row, bound)
        assert bound_of(own.admission) == bound
        assert (own.max_lag is None) == (row.max_lag is None)
        assert own.max_lag is None or own.max_lag == bound
        assert (own.weights, own.consumption, own.dispatch) == (row.weights, row.consumption, row.dispatch)


def test_splits_are_possible_and_hold_the_stated_one():
    for workers, devices, trainer in ((3, 1, 3), (1, 1, 1), (4, 4, 16), (10, 2, 1)):
        phases = Phases(rollout={"workers": workers, "devices": devices}, trainer={"devices": trainer})
        splits = splits_of(phases)
        assert workers in splits
        assert splits == sorted(set(splits))
        for n in splits:
            assert phases.split(n).trainer.devices >= 1


def test_the_sweep_has_every_split_and_bound(document):
    assert document["recommended"]["bound"] is not None
    table = {(row["workers"], row["bound"]) for row in document["sweep"]}
    assert table == {(w, b) for w in splits_of(SMALL) for b in (1, 4)}
    for row in document["sweep"]:
        assert row["max_lag"] == row["bound"]


def test_an_unknown_schedule_is_named():
    with pytest.raises(RecipeError, match="unknown schedule 'arael'; did you mean areal"):
        plan(SMALL, names=("arael",))
