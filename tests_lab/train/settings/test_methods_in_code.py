"""Recipes and sweeps that name methods in files: where files are looked for, what is refused, what never runs."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from offdrift.errors import CheckpointError, RecipeError
from offdrift_lab.train.settings.recipe import changed_settings, load_recipe
from offdrift_lab.train.sweep.sweep import load_sweep, stored_sweep
from offdrift_lab.train.sweep.sweep_results import results
from tests_lab.train.sweeps import BASE, fill, sweep_of

CODE = """
from pathlib import Path
import offdrift as od
(Path(__file__).parent / "ran").touch()

def mine(most: float = 2.0):
    return od.Method(objective=od.Clipped(), correction=od.Correction() & od.Weight(on="mismatch", cap=most))

other = od.method("gspo")
"""
TOP = BASE[: BASE.index("[arms.none]")]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder beside which `recipes` has a recipe and its code."""
    (tmp_path / "work").mkdir()
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "recipes"


def recipe_of(folder: Path, arms: str, code: str = CODE) -> Path:
    (folder / "mine.py").write_text(code)
    (folder / "r.toml").write_text(TOP + arms)
    return folder / "r.toml"


def cap_of(recipe, arm: str) -> float | None:
    return recipe.arms[arm].build().correction.weights[0].cap


def test_every_place_for_a_method_takes_code(folder):
    file = recipe_of(
        folder,
        '[arms.a]\nmethod = "mine.py:mine"\noverride = { most = 3, "weight.floor" = 0.5 }\n'
        '[arms.b]\nmethod = "trm_max"\ngates_of = "mine.py:other"\n'
        '[optim.length_guard]\nswitch_to = "mine.py:other"\n',
    )
    recipe = load_recipe(file)
    assert recipe.arms["a"].method == f"{folder / 'mine.py'}:mine"
    weight = recipe.arms["a"].build().correction.weights[0]
    assert (weight.cap, weight.floor) == (3.0, 0.5)
    assert recipe.arms["b"].gates_of == recipe.optim.length_guard.switch_to == f"{folder / 'mine.py'}:other"
    assert [source.attribute for source in recipe.code.values()] == ["mine", "other"]
    assert len({source.sha256 for source in recipe.code.values()}) == 1


def test_gates_are_added_beside_settings_of_the_function(folder):
    file = recipe_of(
        folder, '[arms.a]\nmethod = "mine.py:mine"\ngates_of = "trm_max"\noverride = { most = 3, "gate.high" = 0.5 }\n'
    )
    row = load_recipe(file).arms["a"].build()
    assert (row.correction.weights[0].cap, row.correction.gates[0].high) == (3.0, 0.5)


@pytest.mark.parametrize("wanted", ["method = 'mine.py:mine'\noverride = { most = 4 }\n", ""])
def test_one_method_is_an_arm_of_its_attributes_name(folder, wanted):
    file = recipe_of(folder, "[arms.x]\nmethod = 'none'\n")
    file.write_text(wanted + TOP)
    changes = [] if wanted else ["method=mine.py:mine", "override.most=4"]
    recipe = load_recipe(file, changes=changes)
    assert list(recipe.arms) == ["mine"]
    assert cap_of(recipe, "mine") == 4.0


def test_a_recipe_looks_beside_itself_first_and_the_command_line_in_the_working_folder(folder):
    file = recipe_of(folder, '[arms.a]\nmethod = "mine.py:mine"\n', CODE.replace("2.0", "5.0"))
    Path("mine.py").write_text(CODE.replace("2.0", "7.0"))
    assert cap_of(load_recipe(file), "a") == 5.0
    assert cap_of(load_recipe(file, changes=["arms.a.method=mine.py:mine"]), "a") == 7.0
    Path("mine.py").unlink()
    assert cap_of(load_recipe(file, changes=["arms.a.method=mine.py:mine"]), "a") == 5.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("arms.a.method=gone.py:mine", r"r\.toml: gone\.py:mine: there is no file .*gone\.py or .*gone\.py"),
        ("arms.a.method=mine.py:gone", r"arms\.a: .*mine\.py has no 'gone'; its methods are mine, other"),
        ("arms.a.override.most=x", r"arms\.a: .*mine most = 'x': must be a number"),
        ("arms.a.override.least=1", r"arms\.a: 'least' is not a part of this method .*; paths are most, aggregate"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(folder, change, message):
    file = recipe_of(folder, '[arms.a]\nmethod = "mine.py:mine"\n')
    with pytest.raises(RecipeError, match=message):
        load_recipe(file, changes=[change])


def test_a_worker_builds_the_method_from_its_own_working_folder(folder, tmp_path):
    recipe = load_recipe(recipe_of(folder, '[arms.a]\nmethod = "mine.py:mine"\n'))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).row('a').describe())"
    (tmp_path / "sent").write_bytes(pickle.dumps(recipe))
    words = [sys.executable, "-c", code, str(tmp_path / "sent")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == recipe.row("a").describe()


def test_a_stored_recipe_is_compared_and_its_code_does_not_run(folder):
    recipe = load_recipe(recipe_of(folder, '[arms.a]\nmethod = "none"\n'))
    stored = recipe.model_dump(mode="json", by_alias=True)
    stored["arms"]["a"]["method"] = f"{folder / 'mine.py'}:mine"
    assert changed_settings(recipe, stored) == ["arms"]
    assert not (folder / "ran").exists()


SWEEP = 'seeds = 2\narms = ["gspo", "mine.py:mine"]\nbaseline = "gspo"\n[set]\narms.mine.override.most = 6\n'


def test_a_sweep_compares_code_with_rows_of_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    grid = sweep_of(tmp_path, SWEEP)
    assert [s.name for s in grid.settings] == ["gspo", "mine"]
    mine = grid.cells[1].recipe
    assert mine.arms["mine"].method == f"{tmp_path / 'mine.py'}:mine"
    assert cap_of(mine, "mine") == 6.0
    assert grid.baseline_of(grid.settings[1]) == grid.settings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('arms = ["gone.py:mine"]', r"s\.toml: gone\.py:mine: there is no file"),
        ('arms = ["mine.py:mine", "a/mine.py:mine"]', "each once and under a name of its own"),
        ('arms = ["mine.py:trm_max"]', r"has an arm 'trm_max', which is another than .*mine\.py:trm_max"),
        ('arms = ["mine.py:"]', "arms.0"),
    ],
)
def test_arms_that_cannot_be_told_apart_or_found_are_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE + "trm_max = other\n")
    with pytest.raises(RecipeError, match=message):
        sweep_of(tmp_path, text)


def test_a_stored_sweep_is_shown_without_running_its_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    grid = sweep_of(tmp_path, SWEEP)
    fill(grid, lambda setting, seed, update: 0.1 * update + seed)
    (tmp_path / "out" / "sweep.json").write_text(json.dumps({"source": "../s.toml", "changes": []}))
    (tmp_path / "ran").unlink()
    code = (
        "import sys, json; from pathlib import Path\n"
        "from offdrift_lab.train.sweep.sweep import stored_sweep\n"
        "grid = stored_sweep(Path(sys.argv[1]))\n"
        "print([s.name for s in grid.settings], {c.status for c in grid.cells})"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['gspo', 'mine'] {'finished'}"
    assert not (tmp_path / "ran").exists()
    assert len(results(stored_sweep(tmp_path / "out"))["settings"]) == 2


def test_a_sweep_of_other_code_is_refused_before_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    grid = sweep_of(tmp_path, SWEEP)
    fill(grid, lambda setting, seed, update: 0.1 * update + seed)
    for cell in grid.cells:
        head = json.loads((cell.folder / "run.json").read_text())
        head["code"] = {name: source.as_dict() for name, source in cell.recipe.code.items()}
        (cell.folder / "run.json").write_text(json.dumps(head))
    load_sweep(tmp_path / "s.toml", tmp_path / "out")
    (tmp_path / "mine.py").write_text(CODE + "\n")
    with pytest.raises(CheckpointError, match=r"mine\.py:mine: .*mine\.py has changed \(SHA-256 \w{12}, then \w{12}\)"):
        load_sweep(tmp_path / "s.toml", tmp_path / "out")
