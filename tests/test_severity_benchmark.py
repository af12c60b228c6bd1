"""`benchmarks/severity.py`: what counts as a loss, what is stored, and that its tables are those of its numbers."""

import importlib
import json
from collections import Counter

import pytest
from benchmarks import severity, severity_tables
from benchmarks.severity_cells import FAMILIES, GRID, start_of
from benchmarks.severity_tables import base_rates, halves, levels_of, of_level, of_rule, outcome, seen, supported

from offdrift.judge import load_rules
from offdrift.judge.track_record import FILE, tracks

STORED = json.loads(severity_tables.RESULTS.read_text(encoding="utf-8"))["runs"]


def run(*rewards, every=4, start=0, **findings):
    """A run with a held-out reward every few updates."""
    return {"held_out": [[every * i, x] for i, x in enumerate(rewards)], "findings": findings, "start": start}


@pytest.mark.parametrize(
    ("rewards", "update", "within", "expected"),
    [
        ((0.5, 0.5, 0.5, 0.5), 4, 8, "held"),
        ((0.5, 0.5, 0.34, 0.5), 4, 8, "fell"),
        ((0.5, 0.5, 0.36, 0.5), 4, 8, "held"),
        ((0.5, 0.5, 0.5, 0.34), 4, 4, "held"),  # it falls after the horizon
        ((0.5, 0.5, 0.34, 0.5), 8, 4, "back"),  # the finding is told at the update that shows the loss
        ((0.5, 0.5, 0.34, 0.3), 8, 4, "still"),
        ((0.5, 0.5, 0.34, 0.3), 7, 4, "fell"),  # and here one update before
        ((0.3, 0.5, 0.33, 0.33), 1, 8, "held"),  # the best of later is not known then
        ((0.5, 0.5, 0.3, 0.3), 6, 8, ""),  # too few updates are left, whatever they show
    ],
)
def test_a_loss_is_a_fall_from_the_best_up_to_then(rewards, update, within, expected):
    assert outcome(run(*rewards), update, within) == expected


def test_forecasts_late_findings_and_the_base_rate_are_counted_apart():
    fell, held = (0.5, 0.5, 0.3, 0.3), (0.5, 0.5, 0.5, 0.5)
    runs = [run(*fell, x=4), run(*held, x=4), run(*fell, x=8), run(*fell), run(*held), run(*held)]
    found = seen(runs, of_rule("x"), 4, base_rates(runs, 4))
    assert (found.told, found.fell, found.late, found.still) == (2, 1, 1, 1)
    assert found.base == pytest.approx(3 / 6), "of all runs at that update, those with the finding too"


def test_a_level_is_told_when_the_first_of_its_rules_is():
    told = of_level({"a": "stop", "b": "act", "c": "stop"}, "stop")
    assert [told(run(1, a=9, b=1, c=4)), told(run(1, b=1))] == [4, None]


@pytest.mark.parametrize(("fell", "level"), [(80, "stop"), (79, "act"), (50, "act"), (49, "watch")])
def test_levels_are_what_the_shares_support(fell, level):
    assert supported(severity_tables.Seen(told=100, fell=fell), "act")[0] == level


def test_a_share_that_few_runs_show_has_to_be_larger():
    assert [supported(severity_tables.Seen(told=10, fell=n), "act")[0] for n in (10, 9, 6)] == ["stop", "act", "watch"]


@pytest.mark.parametrize(("base", "level"), [(0.3, "act"), (0.6, "watch")])
def test_no_level_is_raised_by_what_other_runs_show_as_well(base, level):
    assert supported(severity_tables.Seen(told=100, fell=60, base=base), "watch")[0] == level


def test_few_findings_change_no_level_and_late_ones_count_by_what_stays_lost():
    few, late = severity_tables.Seen(told=9, fell=9), severity_tables.Seen(told=5, fell=0, late=100, still=85)
    assert [supported(x, "act")[0] for x in (few, late)] == ["act", "stop"]
    assert supported(few, "stop")[0] == "act", "no stop without numbers"


def test_no_warm_start_sets_levels_and_tests_them():
    runs = [run(1, start=start_of(seed)) for seed in range(8)]
    setting, testing = ({r["start"] for r in half} for half in halves(runs))
    assert setting | testing == {0, 1, 2, 3}
    assert not setting & testing


def test_a_part_of_a_seeds_runs_is_a_sample_of_all_families():
    counts = Counter(cell.family for cell in GRID)
    for i in range(8, len(GRID)):
        part = Counter(cell.family for cell in GRID[:i])
        assert all(abs(part[f] - i * counts[f] / len(GRID)) <= 2 for f in FAMILIES)


def test_every_run_comes_after_its_warm_start_and_seed_by_seed():
    order = list(severity.units(range(100, 106)))
    places = {(kind, number, start_of(seed)): i for i, (kind, number, seed) in reversed(list(enumerate(order)))}
    names = list(FAMILIES)
    runs = [(i, cell, seed) for i, (kind, cell, seed) in enumerate(order) if kind == "run"]
    assert len(runs) == 6 * len(GRID)
    assert all(places["start", names.index(GRID[cell].family), start_of(seed)] < i for i, cell, seed in runs)
    assert [seed for _, _, seed in runs] == sorted(seed for _, _, seed in runs)


def test_levels_and_tables_are_those_of_the_stored_runs():
    rules = load_rules()
    page = severity_tables.PAGE.read_text(encoding="utf-8")
    assert FILE.read_text(encoding="utf-8") == severity_tables.record(STORED, rules)
    assert severity_tables.render(STORED, rules) in page


def test_levels_forecast_what_they_say_on_runs_that_did_not_set_them():
    rules, (setting, testing) = load_rules(), halves(STORED)
    levels = {name: level for name, (level, _) in levels_of(setting, rules).items()}
    assert levels == {name: track.level for name, track in tracks().items()}
    forecasts = {name: level for name, level in levels.items() if not rules.rules[name].fact}
    for level, share in (("stop", 0.8), ("act", 0.5)):
        found = seen(testing, of_level(forecasts, level), severity_tables.WITHIN, base_rates(testing, 20))
        assert found.told == 0 or found.share >= share


@pytest.mark.slow
def test_a_run_is_trained_stored_and_packed(tmp_path, monkeypatch):
    """One real run, short: what is stored judges again to the findings that were told while it trained."""
    cells = importlib.import_module("benchmarks.severity_cells")
    short = {"warm_start": {"steps": 3, "batch_size": 16}, "batches": 8}
    log = {**FAMILIES["codes"]["log"], "eval_prompts": 4, "eval_samples": 1}
    monkeypatch.setitem(cells.FAMILIES, "codes", {**FAMILIES["codes"], **short, "log": log})
    monkeypatch.setenv("OFFDRIFT_CACHE", str(tmp_path / "cache"))
    for name in ("runs", "locks"):
        (tmp_path / name).mkdir()
    number = next(i for i, cell in enumerate(GRID) if cell.name == "no weights arrive, none")
    assert severity.run(tmp_path, number, 100, deadline=1e12).startswith("run codes-no_weights")
    assert severity.run(tmp_path, number, 100, deadline=1e12) == "", "what is there is not trained again"
    severity.pack(tmp_path, tmp_path / "runs.json.gz")
    packed = json.loads(severity_tables.gzip.decompress((tmp_path / "runs.json.gz").read_bytes()))
    (stored,) = packed["runs"]
    assert [at for at, _ in stored["held_out"]] == [0, 4, 8]
    assert severity_tables.compact(packed)["runs"][0]["findings"] == {
        f["rule"]: f["update"] for f in stored["findings"]
    }
    assert len(stored["metrics"]["full/k3"]) == 8
