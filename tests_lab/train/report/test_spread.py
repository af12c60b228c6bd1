"""A run of a shipped recipe stands beside what other seeds ended at, and no other run does."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.first_run import LEFT_OUT, RESULTS, summary
from tests.show.screens import flat, printed

from offdrift_lab.train.report.page import render
from offdrift_lab.train.report.spread import ONE_SEED, spread
from offdrift_lab.train.report.stored import Run, StoredArm
from offdrift_lab.train.report.view import run_summary

RECIPES = Path(__file__).parents[3] / "recipes"
STORED = json.loads((RECIPES / "backwards.spread.json").read_text("utf-8"))


@pytest.fixture
def run() -> Run:
    recipe = tomllib.loads((RECIPES / "backwards.toml").read_text("utf-8"))
    arms = tuple(StoredArm(name, True, {"arm": name, "reward_after": 0.5}) for name in recipe["arms"])
    return Run("backwards", recipe, "", None, {}, {}, arms)


def test_each_arm_says_what_other_seeds_ended_at_on_the_page_and_in_the_terminal(run: Run) -> None:
    words = spread(run)
    assert [*words] == ["none", "token_tis", "trm_max", "ppo_clip"]
    assert "over 8 seeds (AVX-512): median 0.133, from 0.004 to 0.570" in words["none"]
    page, terminal = render(run), flat(printed(run_summary(run)))
    for arm, text in words.items():
        assert f"<li><b>{arm}</b> {text}</li>" in page
        assert f"{arm} {text}" in terminal
    assert ONE_SEED in terminal


def test_other_settings_methods_and_recipes_have_none(run: Run) -> None:
    rollout = {**run.recipe["rollout"], "max_tokens": 9}
    assert spread(replace(run, recipe={**run.recipe, "rollout": rollout})) == {}
    assert spread(replace(run, name="tiny")) == {}
    assert spread(replace(run, name="../recipes/backwards")) == {}
    arms = {**run.recipe["arms"], "none": {"method": "gspo"}}
    assert "none" not in spread(replace(run, recipe={**run.recipe, "arms": arms}))


def test_what_is_stored_is_of_the_shipped_recipe_and_of_the_same_numbers() -> None:
    recipe = tomllib.loads((RECIPES / "backwards.toml").read_text("utf-8"))
    assert STORED["settings"] == {key: value for key, value in recipe.items() if key not in LEFT_OUT}
    results = json.loads(RESULTS.read_text("utf-8"))
    assert results == {m["vectors"]: summary(m["arms"]) for m in STORED["measured"]}
