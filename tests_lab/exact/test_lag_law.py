"""The lag law: planted laws are recovered, wrong ones refused, and a run's numbers are those of its first stretch."""

import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest

from offdrift.errors import BadValueError, RecordError
from offdrift_lab.exact.lag_law import LagRun, as_law, fit, judge, published, read_runs, verdict


def world(family: str, *, c: float, alpha: float, by: str = "law", noise: float = 0.3, n: int = 300, seed: int = 0):
    """Runs whose lag and ESS are drawn independently, stable on one side of a planted boundary with logistic noise."""
    rng = np.random.default_rng(seed)
    runs = []
    for i in range(n):
        lag, ess = float(np.exp(rng.uniform(0, 5))), float(np.exp(rng.uniform(-3, 0)))
        margin = math.log(c) + alpha * math.log(ess) - (math.log(lag) if by == "law" else 2.5)
        stable = margin + noise * rng.logistic() > 0
        runs.append(LagRun(family, f"s{i}", "a", 0, lag, ess, 0.6, 0.6 if stable else 0.1))
    return runs


def test_a_planted_law_is_recovered():
    law = as_law(fit(world("f", c=30, alpha=1.2)))
    assert law.alpha == pytest.approx(1.2, abs=0.15)
    assert math.log(law.c) == pytest.approx(math.log(30), abs=0.2)
    assert law.sharpness > 1
    assert law.inverse_alpha == 1 / law.alpha


def test_rules_that_look_at_one_of_the_two_ignore_the_other():
    runs = world("f", c=30, alpha=1.0)
    assert fit(runs, rule="ess")[2] == 0
    assert fit(runs, rule="lag")[1] == 0


def test_the_lags_weight_over_that_of_ess_is_found_where_alpha_has_none():
    """1/alpha has an interval where the lag has no weight: around 0, without the 1 of the conjecture."""
    rows = [judge(world("f", c=30, alpha=1, by=by, n=150), draws=60)["families"][0] for by in ("ess", "law")]
    (low, high), (least, most) = (row["inverse_alpha_interval"] for row in rows)
    assert rows[0]["alpha_interval"] is None
    assert low < 0 < high < 0.5
    assert 0.5 < least < 1 < most < 1.5
    assert rows[1]["inverse_alpha"] == 1 / rows[1]["alpha"]
    assert math.isnan(as_law(np.array([0.0, 0.0, 1.0])).inverse_alpha)
    alone = [replace(run, lag=8.0) for run in world("f", c=30, alpha=1)]
    one_lag = judge(alone, draws=20)["families"][0]
    assert one_lag["inverse_alpha"] is one_lag["inverse_alpha_interval"] is None


def test_one_law_in_two_families_holds_out_of_sample():
    result = judge([*world("f", c=30, alpha=1, seed=1), *world("g", c=30, alpha=1, seed=2)], draws=60)
    assert verdict(result) == "holds here"
    for row in result["across"]:
        assert row["law"]["auroc"] > max(row["ess"]["auroc"], row["lag"]["auroc"], 0.9)
        assert row["law_less_ess"][0] > 0


def test_alphas_that_differ_by_more_than_a_half_refute_it():
    result = judge([*world("f", c=30, alpha=0.2, seed=1), *world("g", c=60, alpha=2, seed=2)], draws=60)
    assert verdict(result).startswith("fails here: alpha differs by more than 0.5")


def test_where_ess_alone_decides_the_law_is_not_confirmed():
    result = judge(
        [*world("f", c=30, alpha=1, by="ess", seed=1), *world("g", c=30, alpha=1, by="ess", seed=2)], draws=60
    )
    assert not verdict(result).startswith("holds")
    assert all(row["law_less_ess"][0] < 0.02 for row in result["across"])
    assert [row["alpha_interval"] for row in result["families"]] == [None, None]
    assert verdict(result) == "undecided: beside ESS the lag may have no weight in f, g, and alpha no value"
    assert all(row["lag"]["auroc"] < 0.6 for row in result["across"])


def test_seeds_of_a_setting_are_drawn_together():
    """Ten copies of every run make no interval narrower."""
    runs = world("f", c=30, alpha=1, n=60)
    copies = [LagRun(r.family, r.setting, r.arm, k, r.lag, r.ess, r.before, r.after) for k in range(10) for r in runs]
    once, often = (judge(x, draws=100)["families"][0]["alpha_interval"] for x in (runs, copies))
    assert often[1] - often[0] == pytest.approx(once[1] - once[0], rel=0.25)


def test_all_seeds_of_a_drawn_setting_count():
    """Where the first seed of every setting is stable and only others are not, first seeds alone have no boundary."""
    firsts = [LagRun("f", f"s{i}", "a", 0, 2.0**i, 0.5, 0.6, 0.6) for i in range(6)]
    others = [LagRun("f", f"s{i}", "a", 1, 2.0**i, 0.5, 0.6, 0.1 if i > 2 else 0.6) for i in range(6)]
    assert judge([*firsts, *others], draws=20)["families"][0]["sharpness_interval"] is not None


PAIR = {
    "fitted_on": "f",
    "tested_on": "g",
    "law": {"auroc_interval": [0.8, 0.9]},
    "law_less_ess": [0.01, 0.2],
    "law_less_lag": [0.01, 0.2],
    "alpha_difference": [-0.3, 0.4],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "holds here"),
        ({"law": {"auroc_interval": [0.5, 0.9]}}, "undecided"),
        ({"law": {"auroc_interval": None}}, "undecided"),
        ({"law_less_ess": [-0.01, 0.2]}, "undecided"),
        ({"law_less_lag": [-0.01, 0.2]}, "undecided"),
        ({"law_less_ess": None}, "undecided"),
        ({"law_less_ess": [-0.2, -0.01]}, "fails here: ESS alone tells more (fitted on f, tested on g)"),
        ({"law_less_lag": [-0.2, -0.01]}, "fails here: lag alone tells more"),
        ({"alpha_difference": [-0.6, 0.4]}, "undecided"),
        ({"alpha_difference": [0.4, 2.0]}, "undecided"),
        ({"alpha_difference": [-2.0, -0.6]}, "fails here: alpha differs by more than 0.5"),
        ({"alpha_difference": None}, "undecided"),
    ],
)
def test_the_verdict_asks_for_everything_that_the_conjecture_says(changes, words):
    assert verdict({"across": [PAIR, PAIR | changes]}).startswith(words)


def test_the_published_law_is_the_conjectures_golden_values():
    runs = [LagRun("f", "s", "a", 0, lag, ess, 1.0, 1.0) for lag, ess in ((45.0, 0.9), (25.0, 0.5), (5.0, 0.1))]
    assert published(runs) == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fit([]), "no runs: a boundary needs both kinds"),
        (lambda: fit([LagRun("f", "s", "a", 0, 4.0, 0.5, 1.0, 1.0)]), "only stable runs"),
        (lambda: fit(world("f", c=30, alpha=1), keep=0.0), "keep = 0.0: the share"),
        (lambda: judge([]), "no run with a lag"),
    ],
)
def test_what_has_no_boundary_is_refused(make, words):
    with pytest.raises(BadValueError, match=words):
        make()


def test_a_family_without_both_kinds_is_judged_and_not_fitted():
    calm = [LagRun("calm", f"s{i}", "a", 0, 4.0, 0.9, 0.6, 0.6) for i in range(4)]
    result = judge([*world("f", c=30, alpha=1), *calm], draws=20)
    assert "alpha" not in result["families"][1]
    assert [row["tested_on"] for row in result["across"]] == ["calm"]
    assert result["across"][0]["law"]["auroc"] is None
    assert verdict(result).startswith("undecided")
    assert json.loads(json.dumps(result, allow_nan=False)) == result


# -- reading -----------------------------------------------------------------------------------------


def sweep_folder(path, *, lags, ess, rewards, status="finished"):
    files = path / "runs" / "oapl" / "v" / "seed-3" / "arms" / "oapl"
    files.mkdir(parents=True)
    updates = [{"version_lag/max": lag, "full/ess_seq_frac": e} for lag, e in zip(lags, ess, strict=True)]
    for name, rows in (("metrics", updates), ("eval", [{"reward": r} for r in rewards])):
        (files / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {"arm": "oapl", "values": {"lag.sync_every": 5}, "seed": 3, "folder": "runs/oapl/v/seed-3", "status": status}
    (path / "sweep.json").write_text(json.dumps({"name": "sums", "runs": [run]}))
    return path


def test_a_runs_ess_is_that_of_its_first_stretch_when_weights_are_oldest(tmp_path):
    lags, ess = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [1, 0.9, 0.8, 0.4, 0.1, 1, 1, 1, 1, 1]
    (run,) = read_runs(sweep_folder(tmp_path, lags=lags, ess=ess, rewards=[0.6, 0.5, 0.3, 0.1]))
    assert run.ess == pytest.approx(math.sqrt(0.4 * 0.1))
    assert (run.family, run.setting, run.seed, run.lag) == ("sums", "oapl, lag.sync_every=5", 3, 5)
    assert (run.before, run.after) == (0.6, pytest.approx(0.2))


def test_what_was_written_is_read_back(tmp_path):
    runs = world("f", c=30, alpha=1, n=20)
    (tmp_path / "law.json").write_text(json.dumps(judge(runs, draws=20)))
    assert read_runs(tmp_path / "law.json") == runs


@pytest.mark.parametrize("status", ["failed", "begun"])
def test_runs_that_are_not_finished_are_left_out(tmp_path, status):
    folder = sweep_folder(tmp_path, lags=[0, 1], ess=[1, 1], rewards=[0.5, 0.5], status=status)
    with pytest.raises(RecordError, match="has no finished run"):
        read_runs(folder)


@pytest.mark.parametrize("field", ["arm", "folder"])
@pytest.mark.parametrize("name", ["\0", "\ud800", "x/\0/y"])
def test_a_name_that_no_file_can_have_is_a_run_that_is_not_there(tmp_path, field, name):
    folder = sweep_folder(tmp_path, lags=[0, 1], ess=[1, 0.5], rewards=[0.5, 0.5])
    sweep = json.loads((folder / "sweep.json").read_text())
    (run,) = sweep["runs"]
    (folder / "sweep.json").write_text(json.dumps({**sweep, "runs": [run, {**run, field: name}]}))
    assert len(read_runs(folder)) == 1


def test_a_run_whose_metrics_are_no_file_is_named(tmp_path):
    folder = sweep_folder(tmp_path, lags=[0, 1], ess=[1, 0.5], rewards=[0.5, 0.5])
    metrics = next(folder.rglob("metrics.jsonl"))
    metrics.unlink()
    os.mkfifo(metrics)
    with pytest.raises(RecordError, match=r"sweep.json names cannot be read: .*pipe"):
        read_runs(folder)


def test_arms_are_chosen_and_a_missing_one_is_named(tmp_path):
    folder = sweep_folder(tmp_path, lags=[0, 1], ess=[1, 0.5], rewards=[0.5, 0.5])
    assert [run.arm for run in read_runs(folder, arms=["oapl", "none"])] == ["oapl"]
    with pytest.raises(RecordError, match="no finished run of none"):
        read_runs(folder, arms=["none"])
    with pytest.raises(RecordError, match=r"nowhere cannot be read .* give the folder of a finished"):
        read_runs(tmp_path / "nowhere")
