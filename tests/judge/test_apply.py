"""Fixes applied to recipes: every snippet for this trainer, and how each kind of change is merged."""

import tomllib

import pytest

from offdrift.errors import RecipeError
from offdrift.judge import load_rules
from offdrift.judge.apply import apply_fix
from offdrift.judge.findings import HALF
from offdrift_lab.train.settings.recipe import check_recipe

SNIPPETS = {name: fix.snippets["offdrift"] for name, fix in load_rules().fixes.items() if "offdrift" in fix.snippets}


def plain(**changes):
    content = {
        "name": "r",
        "model": "tiny-qwen3",
        "batches": 4,
        "arms": {"a": {"method": "none"}, "b": {"method": "none"}},
    }
    return check_recipe(content | changes, source="test").model_dump(by_alias=True)


@pytest.mark.parametrize("name", sorted(SNIPPETS))
def test_every_snippet_makes_a_recipe_that_has_its_values(name):
    before = plain(pipeline={}) if "[pipeline]" in SNIPPETS[name] else plain()
    after = apply_fix(before, SNIPPETS[name], "a")
    check_recipe(after, source=name)
    asked = tomllib.loads(SNIPPETS[name])
    if "method" in asked:
        assert after["arms"]["a"]["method"] == asked["method"]
    for table in ("lag", "rollout", "pipeline", "replay", "old_policy"):
        for key, value in asked.get(table, {}).items():
            assert after[table][key] == value
    assert after["arms"]["b"] == before["arms"]["b"]


def test_a_number_is_halved_where_the_snippet_says_so_and_only_there():
    before = plain(optim={"lr": 3e-3, "epochs": 4})
    after = apply_fix(before, SNIPPETS["less_pressure"], "a")
    assert HALF in SNIPPETS["less_pressure"]
    assert (after["optim"]["lr"], after["optim"]["epochs"]) == (1.5e-3, 1)


def test_a_method_comes_without_the_gates_and_overrides_of_the_one_before():
    arms = {"a": {"method": "token_tis", "gates_of": "trm_max", "override": {"gate.high": 0.1}}}
    after = apply_fix(plain(arms=arms), SNIPPETS["scale_the_learning_rate"], "a")
    assert after["arms"]["a"]["method"] == "vcpo"
    assert after["arms"]["a"]["gates_of"] is None
    assert after["arms"]["a"]["override"] == {}


def test_an_arm_with_a_part_of_its_own_is_repaired_there():
    """Else the recipe's part changes and the arm goes on as before."""
    rollout = {"top_p": 0.8}
    arms = {"a": {"method": "none", "replay": {"support": False}}, "b": {"method": "none"}}
    after = apply_fix(plain(arms=arms, rollout=rollout), SNIPPETS["no_filter"], "a")
    assert check_recipe(after, source="test").replay_of("a").support


def test_the_recipe_is_left_as_it_is_and_a_fix_that_is_there_already_changes_nothing():
    before = plain()
    kept = repr(before)
    once = apply_fix(before, SNIPPETS["reduce_lag"], "a")
    assert repr(before) == kept
    assert apply_fix(once, SNIPPETS["reduce_lag"], "a") == once


@pytest.mark.parametrize(
    ("recipe", "snippet", "arm", "says"),
    [
        ({"arms": {"a": {}}}, "", "c", "the recipe has a;"),
        ({"arms": {"a": {}}}, "= 3", "a", "not valid TOML"),
        ({"arms": {"a": {}}}, "[optim]\nlr = 1e-5  # half of yours", "a", r"optim.lr = None: the fix halves it"),
    ],
)
def test_what_cannot_be_applied_says_why(recipe, snippet, arm, says):
    with pytest.raises(RecipeError, match=says):
        apply_fix(recipe, snippet, arm)
