"""A run with a method in a file: what its record says, that it resumes, and that changed code is refused unrun."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tests.command import command
from tests.forked import pair

from offdrift.errors import CheckpointError
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import Stop, rows, stop_at

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CODE = """
from pathlib import Path
import offdrift as od
(Path(__file__).parent / "ran").touch()

@od.statistic
def {statistic}(log_ratio):
    return log_ratio.abs()

def mine(most: float = 2.0):
    return od.Method(
        objective=od.Clipped(),
        correction=od.Correction()
        & od.Weight(on="mismatch", cap=most)
        & od.Gate(statistic="{statistic}", on="full", unit="seq_max", high=0.5),
        aggregate="token_mean",
    )
"""


@pytest.fixture
def code(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(CODE.format(statistic=f"largest_{abs(hash(tmp_path))}"))
    return path


def recipe_of(method: str, **override: float):
    return small_recipe(batches=4, arms={"mine": {"method": method, "override": override}})


def test_the_record_names_the_code_and_the_numbers_are_those_of_the_same_row_of_the_table(code, tmp_path, monkeypatch):
    short_arms(monkeypatch)
    train(recipe_of(f"{code}:mine", most=3.0), tmp_path / "run")
    head = json.loads((tmp_path / "run" / "run.json").read_text())
    digest = hashlib.sha256(code.read_bytes()).hexdigest()
    assert head["code"] == {f"{code}:mine": {"file": str(code), "attribute": "mine", "sha256": digest}}
    assert head["table"][0]["method"] == "mine.py:mine"
    assert "largest_" in head["table"][0]["description"]
    twin = {"method": "decoupled_ppo", "gates_of": "trm_ratio"}
    values = {"weight.cap": 3.0, "gate.high": 0.5, "objective.dual_clip": "none"}
    train(small_recipe(batches=4, arms={"mine": {**twin, "override": values}}), tmp_path / "twin")
    ours, library = rows(tmp_path / "run", "mine"), rows(tmp_path / "twin", "mine")
    assert [row["optim/loss"] for row in ours] == [row["optim/loss"] for row in library]
    assert len(ours) == 4


def test_it_resumes_and_changed_code_is_refused_without_being_run(code, tmp_path, monkeypatch, capsys):
    short_arms(monkeypatch)
    recipe = Path("r.toml")
    recipe.write_text(
        'name = "r"\nmodel = "tiny-qwen3"\ntask = "digits"\nbatches = 4\nmethod = "mine.py:mine"\n'
        "rollout = { prompts = 4, samples = 4, max_tokens = 6 }\nlag = { sync_every = 2 }\n"
        "log = { eval_every = 4, eval_prompts = 2, checkpoint_every = 1, samples_every = 4, trackers = [] }\n"
        "warm_start = { steps = 0 }\n"
    )
    with pytest.raises(Stop):
        train(load_recipe(recipe), Path("runs/r"), watch=stop_at("mine", 2))
    content = code.read_text()
    code.write_text(content + "\n")
    (tmp_path / "ran").unlink()
    done = command(monkeypatch, capsys, "train", "r.toml", "--resume")
    assert done.code == 1
    assert f"mine.py:mine: {code} has changed (SHA-256" in done.stderr
    assert "--resume" in done.stderr
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=r"mine\.py has changed"):
        train(load_recipe(recipe), Path("runs/r"), resume=True)
    code.write_text(content)
    done = command(monkeypatch, capsys, "train", "r.toml", "--resume")
    assert done.code == 0, done.stderr
    assert len(rows(Path("runs/r"), "mine")) == 4


def test_a_report_of_a_stored_run_runs_nothing(code, tmp_path, monkeypatch, capsys):
    short_arms(monkeypatch)
    train(recipe_of(f"{code}:mine"), Path("run"))
    head = json.loads(Path("run/run.json").read_text())
    trap = tmp_path / "trap.py"
    trap.write_text("from pathlib import Path\nPath('trapped').touch()\nmine = None\n")
    head["recipe"]["arms"]["mine"]["method"] = f"{trap}:mine"
    Path("run/run.json").write_text(json.dumps(head))
    for words in (["report", "run"], ["audit", "run/arms/mine"]):
        done = command(monkeypatch, capsys, *words)
        assert done.code == 0, done.stderr
    assert not Path("trapped").exists()


@pytest.mark.slow
def test_two_processes_find_the_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE.format(statistic="largest_of_two"))
    arms = json.dumps({"mine": {"method": f"{path}:mine"}})
    pair(["tests_lab.train.worker", str(tmp_path / "two"), "--short", f"arms={arms}"], tmp_path / "out")
    head = json.loads((tmp_path / "two" / "run.json").read_text())
    assert head["table"][0]["method"] == "mine.py:mine"
