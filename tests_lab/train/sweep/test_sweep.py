"""Sweeps: what a file may say, which runs it makes, that nothing is lost, and what the comparison reads."""

from __future__ import annotations

import io
import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from offdrift.errors import RecipeError, RecordError
from offdrift.records.atomic import plain
from offdrift_lab.cli.sweep import Interim
from offdrift_lab.train.loop import loop
from offdrift_lab.train.loop.context import set_up
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.report import page
from offdrift_lab.train.report.page import render_sweep, write_sweep, write_sweep_chart, write_sweep_page
from offdrift_lab.train.report.view import sweep_summary
from offdrift_lab.train.sweep.sweep import Grid, Pace, Progress, load_sweep, locked, stored_sweep
from offdrift_lab.train.sweep.sweep_results import explained, results, sentence
from offdrift_lab.train.sweep.sweep_workers import run_sweep
from tests_lab.train.conftest import short_arms
from tests_lab.train.sweeps import BASE, fill, reward, sweep_of

SHIPPED = Path(__file__).parents[3] / "recipes" / "sweep.toml"

# -- files -------------------------------------------------------------------------------------------


def test_a_grid_is_every_arm_value_and_seed_with_seeds_outermost(tmp_path):
    grid = sweep_of(
        tmp_path, 'seeds = [7, 3]\n[set]\nbatches = 2\n[values]\nlag.sync_every = [1, 2]\n"optim.lr" = [1e-4]'
    )
    assert [c.seed for c in grid.cells] == [7] * 4 + [3] * 4
    assert [s.name for s in grid.settings] == [
        f"{arm} (sync_every={every}, lr=0.0001)" for arm in ("none", "trm_max") for every in (1, 2)
    ]
    cell = grid.cells[-1]
    assert (cell.recipe.seed, cell.recipe.batches, cell.recipe.lag.sync_every, list(cell.recipe.arms)) == (
        3,
        2,
        2,
        ["trm_max"],
    )
    assert cell.folder == tmp_path / "out/runs/trm_max/lag.sync_every=2,optim.lr=0.0001/seed-3"
    assert len({c.folder for c in grid.cells}) == 8


def test_seeds_share_a_start_where_the_recipe_gives_it_a_seed_of_its_own(tmp_path, monkeypatch):
    """The sweep then trains one start, and every seed begins with its weights."""
    monkeypatch.setenv("OFFDRIFT_CACHE", str(tmp_path / "cache"))
    own = sweep_of(tmp_path, "seeds = [1, 2]\n[set]\ntask = 'backwards'\nwarm_start.steps = 2")
    assert len({cell.start for cell in own.cells}) == 2
    start = "warm_start = { steps = 2, batch_size = 4, seed = 5 }"
    shared = sweep_of(tmp_path, f"seeds = [1, 2]\n[set]\ntask = 'backwards'\n{start}")
    assert len({cell.start for cell in shared.cells}) == 1
    weights = []
    for cell in (*shared.cells[::2], own.cells[0]):
        watched: list[str] = []
        run = set_up(
            cell.recipe, RunFolder(tmp_path / str(len(weights))), lambda event, w=watched: w.append(event.kind)
        )
        weights.append(torch.cat([p.flatten() for p in run.model.parameters()]))
        run.engine.close()
        assert ("warm_start" in watched) == (len(weights) != 2), "the second seed takes the first one's start"
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_value_may_be_a_list(tmp_path):
    values = '\n[values]\n"optim.betas" = [[0.9, 0.95], [0.0, 0.95]]'
    grid = sweep_of(tmp_path, f'seeds = 2\narms = ["trm_max"]\nbaseline = {{ "optim.betas" = [0.9, 0.95] }}{values}')
    with_momentum, without = grid.settings
    assert grid.baseline_of(without) == with_momentum
    assert [c.recipe.optim.betas for c in grid.cells] == [(0.9, 0.95), (0.0, 0.95)] * 2
    fill(grid, lambda setting, seed, update: 0.5 + 0.1 * (setting == without))
    assert results(grid)["settings"][1]["difference"]["mean"] == pytest.approx(0.1)


def test_arms_may_be_methods_of_the_table_and_values_of_one_arm_vary_it_alone(tmp_path):
    grid = sweep_of(
        tmp_path, 'seeds = 1\narms = ["none", "gspo"]\n[values]\narms.gspo.override.objective.eps_high = [0.1, 0.2]'
    )
    assert [(c.setting.arm, c.recipe.arms[c.setting.arm].method) for c in grid.cells] == [
        ("none", "none"),
        ("gspo", "gspo"),
        ("gspo", "gspo"),
    ]
    assert [c.recipe.row("gspo").objective.eps_high for c in grid.cells[1:]] == [0.1, 0.2]
    none, low, high = grid.settings
    assert [grid.baseline_of(s) for s in (none, low, high)] == [None, none, none]


def test_baselines_are_an_arm_or_values_at_otherwise_equal_settings(tmp_path):
    values = "\n[values]\nlag.sync_every = [1, 2]\noptim.lr = [1e-4, 1e-3]"
    arms = sweep_of(tmp_path, f"seeds = 1{values}")
    for setting in arms.settings:
        base = arms.baseline_of(setting)
        assert (base is None) == (setting.arm == "none")
        assert base is None or (base.arm, base.values) == ("none", setting.values)
    alone = sweep_of(tmp_path, f'seeds = 1\narms = ["trm_max"]{values}')
    first = alone.settings[0]
    assert [alone.baseline_of(s) for s in alone.settings] == [None, first, first, first]
    lags = sweep_of(tmp_path, f'seeds = 1\nbaseline = {{ "lag.sync_every" = 2 }}{values}')
    pairs = {s.name: b.name for s in lags.settings if (b := lags.baseline_of(s))}
    assert pairs == {
        f"{arm} (sync_every=1, lr={lr})": f"{arm} (sync_every=2, lr={lr})"
        for arm in ("none", "trm_max")
        for lr in (0.0001, 0.001)
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seedz = 3", "unknown key 'seedz'; a sweep has name, recipe, seeds"),
        ("seeds = 0", "give a number of at least 1"),
        ("seeds = [1, 1]", "a list of different seeds"),
        ("[set]\nseed = 3", "seed cannot be varied as a setting: use seeds"),
        ('[values]\nmethod = ["gspo"]', "list methods as arms"),
        ("[values]\nlag.sync_every = 3", "values.lag.sync_every = 3: give the list"),
        ("[values]\nlag.sync_every = [2, 2]", "has a value twice"),
        ("[set]\nbatches = 2\n[values]\nbatches = [2]", "batches stands in [set] and in [values]"),
        ("[values]\nlag.sink_every = [2]", "the run none (sink_every=2), seed 0: "),
        ('arms = ["none", "trm_mx"]', "arms.trm_mx: no method 'trm_mx'; did you mean trm_max"),
        ('arms = ["none", "none"]', "each once"),
        ('arms = ["none"]\nbaseline = "trm_max"', 'baseline = "trm_max" is none of the arms, none'),
        (
            "baseline = { batches = 3 }\n[values]\nbatches = [2, 4]",
            "baseline.batches = 3 is none of values.batches = [2, 4]",
        ),
        ("[values]\narms.gspo.method = ['gspo']", "values.arms.gspo.method is of an arm that is not run"),
        ('[compare]\nmetric = "reward/men"', "is no metric that every run logs"),
        ('[compare]\nmetric = "response/length_mean"', "has no direction by itself"),
        ('[compare]\nlarger_is = "worse"', "a larger held_out is better; leave it out"),
        ("[compare]\nat = 3", "compare.at = 3 is not the update of an evaluation of none, which has 0, 2, 4 of 4"),
        ('[compare]\nmetric = "reward/mean"\nat = 5', "has 1, 2, 3, 4 of 4"),
        ("[compare]\nsmooth = 4", "more than the 3 evaluations of none up to 4"),
        ("[compare]\ncollapse_after = 4", "would never be over in the 4 updates"),
        ("[compare]\nconfidence = 1.0", "compare.confidence = 1.0"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(tmp_path, text, words):
    with pytest.raises(RecipeError) as raised:
        sweep_of(tmp_path, text)
    assert words in str(raised.value)
    assert "s.toml" in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_recipe_is_looked_for_and_another_ones_folder_is_kept(tmp_path):
    (tmp_path / "s.toml").write_text('name = "s"\nrecipe = "nowhere"')
    with pytest.raises(RecipeError, match=r"looked for nowhere\.toml"):
        load_sweep(tmp_path / "s.toml")
    grid = sweep_of(tmp_path, "seeds = 1")
    fill(grid, lambda *_: 0.5)
    more = sweep_of(tmp_path, "seeds = 2\n[values]\n")
    assert [c.status for c in more.cells] == ["finished"] * 2 + ["waiting"] * 2
    with pytest.raises(RecipeError, match=r"is of another recipe \(batches differ\): delete it"):
        sweep_of(tmp_path, "seeds = 1\n[set]\nbatches = 6")


def test_the_shipped_sweep_is_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its reward stands beside it
    grid = load_sweep(SHIPPED)
    assert len(grid.cells) == 12
    assert {cell.recipe.reward for cell in grid.cells} == {f"{SHIPPED.parent / 'digits.py'}:digits"}


SWEEPS = sorted(p for p in SHIPPED.parent.glob("*.toml") if "recipe" in tomllib.loads(p.read_text()))
assert {p.stem for p in SWEEPS} >= {"sweep", "staleness", "staleness-sums", "lag-law", "mismatch-lr"}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_every_shipped_sweep_can_run_and_compares_something(path):
    grid = load_sweep(path)
    assert grid.sweep.name == path.stem
    assert len(grid.sweep.seeds) >= 4
    assert any(grid.baseline_of(setting) is not None for setting in grid.settings)


@pytest.mark.parametrize("name", ["staleness", "staleness-sums"])
def test_the_staleness_sweeps_compare_at_equal_lag_with_the_clips_that_they_say(name):
    grid = load_sweep(SHIPPED.with_name(f"{name}.toml"))
    for setting in grid.settings:
        baseline = grid.baseline_of(setting)
        assert baseline is None or dict(baseline.values) == dict(setting.values)
    arms = {cell.setting.arm: cell.recipe for cell in grid.cells}
    assert arms["ppo_bypass"].row("ppo_bypass").objective.on == "full"
    assert arms["ppo_decoupled"].old_policy_of("ppo_decoupled").source == "batch_start"
    assert arms["oapl"].row("oapl").objective.beta == 1e-3
    assert arms["oapl_1"].row("oapl_1").objective.beta == 1


def test_the_mismatch_sweep_has_no_lag_and_compares_with_equal_engines_at_the_same_rate():
    grid = load_sweep(SHIPPED.with_name("mismatch-lr.toml"))
    assert {cell.recipe.lag.sync_every for cell in grid.cells} == {1}
    for setting in grid.settings:
        values, baseline = dict(setting.values), grid.baseline_of(setting)
        if values["rollout.quantization"] == "none":
            assert baseline is None
        else:
            assert baseline.arm == setting.arm
            assert dict(baseline.values) == values | {"rollout.quantization": "none"}


def test_the_noise_of_the_mismatch_sweep_is_the_engines_alone_and_constant():
    grid = load_sweep(SHIPPED.with_name("mismatch-noise.toml"))
    noise = {cell.setting.arm: cell.recipe.quantized_of(cell.setting.arm).noise for cell in grid.cells}
    assert noise["equal"] is None
    assert {arm: (n.start, n.end) for arm, n in noise.items() if n} == {
        "mild": (0.2, 0.2), "strong": (0.4, 0.4), "strong_tis": (0.4, 0.4), "strong_trm": (0.4, 0.4),
    }  # fmt: skip
    assert {(cell.recipe.lag.sync_every, cell.recipe.updates) for cell in grid.cells} == {(1, 24)}


def test_a_reward_may_stand_beside_the_sweep_or_the_recipe(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completion): return 1.0")
    recipe = tmp_path / "elsewhere"
    recipe.mkdir()
    (recipe / "base.toml").write_text(BASE)
    text = 'name = "s"\nrecipe = "elsewhere/base"\nseeds = 1\n[set]\nreward = "mine.py:score"'
    (tmp_path / "s.toml").write_text(text)
    for place in (tmp_path, recipe):
        assert load_sweep(tmp_path / "s.toml").cells[0].recipe.reward == f"{place / 'mine.py'}:score"
        if place is tmp_path:
            (tmp_path / "mine.py").rename(recipe / "mine.py")


# -- what the numbers say ----------------------------------------------------------------------------


def test_differences_are_paired_by_seed_and_means_are_not(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 4")
    fill(grid, reward)
    document = results(grid)
    none, trm = document["settings"]
    assert (none["baseline"], none["verdict"], none["mean"]) == (None, None, pytest.approx(0.4))
    assert (trm["baseline"], trm["verdict"], trm["n"]) == ("none", "better", 4)
    assert trm["difference"]["mean"] == pytest.approx(0.04 + 0.003)
    assert none["low"] < 0.1 < none["high"]
    assert [run["value"] for run in document["runs"] if run["arm"] == "none"] == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert sentence(document).startswith("trm_max is better than none: +0.043")
    json.dumps(plain(document), allow_nan=False)


def test_the_number_is_taken_at_its_update_and_averaged(tmp_path):
    grid = sweep_of(tmp_path, 'seeds = 2\n[compare]\nmetric = "reward/mean"\nat = 3\nsmooth = 2')
    fill(grid, lambda setting, seed, update: float(update**2))
    assert {run["value"] for run in results(grid)["runs"]} == {(4 + 9) / 2}


def test_what_failed_or_is_not_finished_is_left_out_and_named(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 4")
    fill(grid, reward)
    failed, begun = grid.cells[1], grid.cells[2]  # trm_max of seed 0, none of seed 1
    for cell in (failed, begun):
        (cell.files.path / "summary.json").unlink()
    (failed.folder / "error.json").write_text(json.dumps({"error": "RuntimeError: out of memory\nat line 3"}))
    document = results(grid)
    none, trm = document["settings"]
    assert (none["n"], trm["n"], trm["failed"], trm["difference"]["n"]) == (3, 3, 1, 2)
    notes = "\n".join(explained(document))
    assert "1 of 8 runs are not" in notes
    assert "Failed: runs/trm_max/recipe/seed-0: RuntimeError: out of memory\n" in notes + "\n"
    assert "flatters a setting" in notes


def test_runs_on_several_nodes_of_a_cluster_are_counted_by_node(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 2")
    fill(grid, reward)
    assert {tuple(run["nodes"]) for run in results(grid)["runs"]} == {()}
    for cell, names in zip(grid.cells, (["a"], ["b"], ["a", "b", "b"], ["b"]), strict=True):  # the third went on twice
        (cell.folder / "nodes.json").write_text(json.dumps({"nodes": [{"name": name} for name in names]}))
    document = results(grid)
    assert [run["nodes"] for run in document["runs"]] == [["a"], ["b"], ["a", "b"], ["b"]]
    assert "of the cluster: b (3), a (2)." in "\n".join(explained(document))


def test_collapses_are_counted(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 3\n[set]\nbatches = 40\n[compare]\ncollapse_after = 10", BASE)

    # trm_max of seeds 1 and 2 falls for good; none of seed 0 recovers.
    def falls(setting, seed, update):
        low = update > 20 if setting.arm == "trm_max" and seed else 15 < update < 20 and seed == 0
        return 0.1 if low else 0.8

    fill(grid, falls)
    assert [row["collapsed"] for row in results(grid)["settings"]] == [0, 2]


def test_a_collapse_is_one_of_the_held_out_reward(tmp_path):
    grid = sweep_of(
        tmp_path, "seeds = 3\n[set]\nbatches = 40\nlog.eval_every = 4\n[compare]\ncollapse_after = 10", BASE
    )
    fill(grid, lambda setting, seed, update: 0.8)
    # Seed 0: the weights that drew lag behind, and the training reward does not show it. Seed 1: the other way round.
    # Seed 2: the last evaluation alone is low.
    held_out = {0: lambda u: 0.1 if u >= 20 else 0.8, 1: lambda u: 0.8, 2: lambda u: 0.1 if u == 40 else 0.8}
    for cell in grid.cells:
        rows = cell.files.rows("eval")
        assert len(rows) == 11
        text = "".join(json.dumps(row | {"reward": held_out[cell.seed](row["update"])}) + "\n" for row in rows)
        (cell.files.path / "eval.jsonl").write_text(text)
        rows = [
            row | {"reward/mean": 0.1 if cell.seed == 1 and row["update"] > 20 else 0.8}
            for row in cell.files.rows("metrics")
        ]
        (cell.files.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {run["seed"]: run["collapsed"] for run in results(grid)["runs"]} == {0: True, 1: False, 2: True}
    for cell in grid.cells:  # with one evaluation, by the training reward
        file = cell.files.path / "eval.jsonl"
        file.write_text(file.read_text().splitlines()[0] + "\n")
    assert {run["seed"]: run["collapsed"] for run in results(grid)["runs"]} == {0: False, 1: True, 2: False}


@pytest.mark.parametrize("width", [80, 132])
def test_the_table_fits_and_the_page_has_every_setting(tmp_path, width):
    grid = sweep_of(tmp_path, "seeds = 3\n[values]\nlag.sync_every = [1, 2]")
    fill(grid, reward)
    document = results(grid)
    console = Console(width=width, no_color=True, record=True, file=io.StringIO())
    console.print(sweep_summary(document, width=width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    assert "3 of 3" in text
    assert "Holm" in text
    text = write_sweep_page(grid, document).read_text()
    assert text == render_sweep(grid, document)
    for row in document["settings"]:
        assert row["name"] in text
    data = json.loads(text.split('id="report-data">')[1].split("</script>")[0])
    assert [chart["id"] for chart in data["charts"]][:2] == ["difference", "curve-0"]
    bands = [s for s in data["charts"][1]["series"] if "low" in s]
    assert len(bands) == 4


def test_the_picture_has_every_setting_and_the_bands_of_the_page(tmp_path, monkeypatch):
    grid = sweep_of(tmp_path, "seeds = 3\n[set]\nlag.sync_every = 2")
    fill(grid, reward)
    drawn = []
    monkeypatch.setattr(page, "write_chart", lambda path, charts, **words: drawn.append((charts, words)) or path)
    document = results(grid)
    write_sweep_chart(tmp_path / "a.svg", grid, document)
    ((chart,), words) = drawn.pop()
    assert [s.name for s in chart.series] == ["none", "trm_max"]
    assert words["title"].startswith("trm_max is better than none")
    assert "Mean over 3 seeds of held-out reward; bands are 95 % intervals, cut at" in words["caption"]
    assert chart.y_range == (0, 1)
    trm = chart.series[1]
    means = [row["mean"] for row in document["settings"]]
    assert (trm.x, trm.y[-1]) == ([0, 2, 4], pytest.approx(means[1]))
    assert trm.low[-1] == pytest.approx(document["settings"][1]["low"])
    monkeypatch.undo()
    picture = write_sweep_chart(tmp_path / "a.svg", grid, document).read_text()
    assert "Held-out reward" in picture
    assert "trm_max" in picture


# -- running -----------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch):
    short_arms(monkeypatch)


METRIC = '[compare]\nmetric = "reward/mean"\n'


def numbers(grid: Grid) -> list[float | None]:
    return [run["value"] for run in results(grid)["runs"]]


def test_a_sweep_that_is_cut_ends_as_if_it_had_not_been(tmp_path, short):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = sweep_of(tmp_path / "a", f"seeds = 1\n{METRIC}")
    run_sweep(whole)
    grid = sweep_of(tmp_path / "b", f"seeds = 1\n{METRIC}")

    def cut(progress: Progress) -> None:
        if progress.cell.setting.arm == "trm_max" and progress.update == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(grid, report=cut)
    assert [c.status for c in grid.cells] == ["finished", "begun"]
    updates: list[tuple[str, int]] = []
    run_sweep(grid, report=lambda p: updates.append((p.cell.setting.arm, p.update)) if p.update else None)
    assert {arm for arm, _ in updates} == {"trm_max"}
    assert min(update for _, update in updates) > 1  # from its checkpoint
    assert numbers(grid) == numbers(whole)
    assert None not in numbers(whole)
    run_sweep(grid, report=pytest.fail)  # nothing is left to do


def test_a_run_that_fails_is_recorded_the_others_go_on_and_it_is_tried_again(tmp_path, short, monkeypatch):
    grid = sweep_of(tmp_path, f"seeds = 2\n{METRIC}")
    step = loop.train_step

    def breaks(arm, *args, **options):
        if arm.name == "none" and arm.run.recipe.seed == 1 and arm.version == 2:
            raise RuntimeError("out of memory")
        return step(arm, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", breaks)
        run_sweep(grid)
    assert [c.status for c in grid.cells] == ["finished", "finished", "failed", "finished"]
    assert grid.cells[2].error == "RuntimeError: out of memory"
    assert "take_steps" in json.loads((grid.cells[2].folder / "error.json").read_text())["traceback"]
    before = numbers(grid)
    run_sweep(grid)
    assert [c.status for c in grid.cells] == ["finished"] * 4
    assert [a for a, b in zip(numbers(grid), before, strict=True) if b is not None] == [
        b for b in before if b is not None
    ]
    assert not (grid.cells[2].folder / "error.json").exists()


def test_the_pace_lies_between_the_fastest_and_the_slowest_run(tmp_path, monkeypatch):
    grid, clock = sweep_of(tmp_path, "seeds = 2"), [0.0]
    monkeypatch.setattr("offdrift_lab.train.sweep.sweep.time.monotonic", lambda: clock[0])
    pace = Pace(grid, jobs=2)
    assert pace.left == "time left is known after the first run"
    fill(Grid(grid.sweep, grid.source, grid.folder, grid.cells[:2]), reward)
    for cell, seconds in zip(grid.cells, (40.0, 80.0)):
        pace.follow(Progress(cell))
        clock[0] += seconds
        pace.follow(Progress(cell, done=True))
    # 8 updates are left, at 10 to 20 seconds each, two at a time.
    assert pace.updates == (8, 16)
    assert pace.left == "40 s to 1 min 20 s left"


def test_half_a_sweep_is_reported_with_where_its_runs_stand(tmp_path, monkeypatch):
    grid = sweep_of(tmp_path, "seeds = 3\n[set]\nlag.sync_every = 2", changes=["optim.lr=0.5"])
    document, page = write_sweep(grid)  # before anything has run
    assert [run["status"] for run in document["runs"]] == ["waiting"] * 6
    assert page.name == "sweep.html"
    fill(Grid(grid.sweep, grid.source, grid.folder, grid.cells[:5]), reward)
    (grid.cells[4].files.path / "summary.json").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    again = stored_sweep(tmp_path / "out")
    assert [c.recipe for c in again.cells] == [c.recipe for c in grid.cells]
    assert again.cells[0].recipe.optim.lr == 0.5
    document, _ = write_sweep(again)
    stood = [(run["status"], run["updates"]) for run in document["runs"]]
    assert stood == [("finished", 4)] * 4 + [("begun", 4), ("waiting", 0)]
    assert [row["n"] for row in document["settings"]] == [2, 2]
    text = " ".join(explained(document))
    assert "2 of 6 runs are not" in text
    assert "runs/none/recipe/seed-2 is at update 4" in text
    (tmp_path / "s.toml").unlink()
    with pytest.raises(
        RecipeError, match=r"was made from \.\./s\.toml, which is gone; use `offdrift sweep FILE --report"
    ):
        stored_sweep(tmp_path / "out")


def test_results_are_written_as_runs_end_but_for_a_tenth_of_the_time(monkeypatch):
    clock, writes = [0.0], []
    monkeypatch.setattr("offdrift_lab.cli.sweep.time.monotonic", lambda: clock[0])

    def write() -> None:
        writes.append(clock[0])
        clock[0] += 2.0

    interim = Interim(write)
    for end in (0.0, 5.0, 19.0, 20.5, 100.0):
        clock[0] = max(clock[0], end)
        interim.again()
    assert writes == [0.0, 20.5, 100.0]


def test_one_sweep_at_a_time_in_a_folder(tmp_path):
    with (
        locked(tmp_path / "out"),
        pytest.raises(RecordError, match="another sweep is running"),
        locked(tmp_path / "out"),
    ):
        pass
    with locked(tmp_path / "out"):
        pass


def test_equal_runs_leave_nothing_to_find(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 8")
    fill(grid, lambda setting, seed, update: math.sin(seed))
    (row,) = [row for row in results(grid)["settings"] if row["baseline"]]
    assert (row["verdict"], row["difference"]["mean"]) == ("undecided", 0.0)


def test_values_are_shown_as_the_file_has_them(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 2\n[values]\noptim.skip_empty = [false, true]\noptim.betas = [[0.0, 0.95]]")
    fill(grid, reward)
    document = results(grid)
    shown = io.StringIO()
    Console(file=shown, width=160).print(sweep_summary(document, width=160))
    for text in (shown.getvalue(), render_sweep(grid, document).replace("<wbr>", "")):
        assert "optim.skip_empty=true" in text
        assert "optim.betas=[0.0, 0.95]" in text
        assert "=True" not in text


def test_a_sweep_without_a_finished_run_says_so_and_has_no_verdict(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 2")
    document = results(grid)
    assert sentence(document) == "Nothing to compare yet: 0 of 4 runs are finished."
    assert document["settings"][1]["verdict"] == "no data"
    out = io.StringIO()
    Console(file=out, width=140).print(sweep_summary(document, width=140))
    assert "undecided" not in out.getvalue()
    assert "p 1" not in out.getvalue()


def test_a_setting_without_a_finished_run_is_named(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 2\narms = ['none', 'gspo', 'trm_max']")
    done = replace(grid, cells=tuple(cell for cell in grid.cells if cell.setting.arm != "gspo"))
    fill(done, reward)
    document = results(grid)
    assert [row["verdict"] for row in document["settings"]] == [None, "no data", "better"]
    assert sentence(document).endswith("; no seed to compare yet: gspo.")


@pytest.mark.parametrize("metric", ["held_out", "reward/mean"])
def test_an_interval_stays_inside_of_the_range_of_rewards(tmp_path, metric):
    grid = sweep_of(tmp_path, f'seeds = 2\n[compare]\nmetric = "{metric}"')
    fill(grid, lambda setting, seed, update: 0.8 * seed + (0.2 - 0.3 * seed) * (setting.arm == "trm_max"))
    none, trm = results(grid)["settings"]
    assert (none["low"], none["high"]) == (0.0, 1.0)
    assert (trm["difference"]["low"], trm["difference"]["high"]) == (-1.0, 1.0)
    assert "two are too few" in " ".join(explained(results(grid)))


def test_an_interval_is_whole_where_a_value_leaves_the_range_that_the_recipe_states(tmp_path):
    grid = sweep_of(tmp_path, "seeds = 2")
    fill(grid, lambda setting, seed, update: 4.0 * seed)
    row = results(grid)["settings"][0]
    assert row["low"] < 0 < 4 < row["high"]
