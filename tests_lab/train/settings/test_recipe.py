"""Recipes: every shipped one loads, and every mistake is refused with key, file and what was expected."""

import math
import tomllib
from pathlib import Path

import pytest

from offdrift.errors import RecipeError
from offdrift_lab.train.settings.recipe import Recipe, check_recipe, load_recipe
from tests_lab.train.conftest import small_recipe

FILES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
RECIPES = [p for p in FILES if "recipe" not in tomllib.loads(p.read_text())]  # sweeps: test_sweep
assert {p.stem for p in RECIPES} >= {"tiny", "tiny-moe", "smollm2", "stale", "turns"}
TINY = next(p for p in RECIPES if p.name == "tiny.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_loads_and_its_arms_build(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert all(arm.build().describe() for arm in recipe.arms.values())
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_the_tiny_recipe_compares_the_four_arms_under_drift():
    recipe = load_recipe(TINY)
    rows = {name: arm.build() for name, arm in recipe.arms.items()}
    assert recipe.lag.sync_every == 8
    assert (recipe.rollout.dtype, recipe.rollout.quantization) == ("float32", "int8")
    assert not rows["none"].correction.gates
    assert rows["none"].correction.weights == ()
    assert rows["trm_max"].needs_divergences
    both = rows["trm_tis"].correction
    assert both.gates == rows["trm_max"].correction.gates
    assert both.weights == rows["token_tis"].correction.weights


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rollout.dtypo=float16", "unknown key 'rollout.dtypo'; rollout has engine, dtype"),
        ("arms.none.x=1", "unknown key 'arms.none.x'; arms.none has method"),
        ("foo=1", "unknown key 'foo'; a recipe has name, model"),
        ("batches=many", "batches = 'many': input should be a valid integer"),
        ("batches=0", "batches = 0: input should be greater than or equal to 1"),
        ("rollout.dtype=int4", "rollout.dtype = 'int4': input should be 'float32', 'bfloat16'"),
        ("optim.lr=-1", "optim.lr = -1: input should be greater than 0"),
        ("arms.none.method=nope", "arms.none: no method 'nope'; did you mean"),
        ('arms.none.override={"gate.high" = 1}', "arms.none: 'gate.high' is not a part"),
        ("rollout.evidence=sampled", 'records none; set rollout.evidence = "full"'),
        ("rollout.evidence=all", "rollout.evidence"),
        ("certificate.alphas=true", "no arm's method has an old policy"),
        (
            'arms={a = {method = "ppo_clip", old_policy = {from = "batch_start"}}}||certificate.alphas=true',
            'old_policy.from = "batch_start" keeps no weights to take them from',
        ),
        (
            'arms={a = {method = "ppo_clip"}}||certificate.alphas=true||rollout.evidence=sampled',
            'certificate.alphas = true, but rollout.evidence = "sampled" records no distributions',
        ),
        ("rollout.tail_log_ratio_cap=-1", "rollout.tail_log_ratio_cap = -1: input should be greater"),
        ("rollout.tail_log_ratio_cap=inf", "input should be a finite number"),
        (
            "rollout.tail_log_ratio_cap=0.5",
            'cap = 0.5 is about the tail of top-k evidence, but rollout.evidence = "full"',
        ),
        ("rollout.top_p=0", "rollout.top_p = 0: input should be greater than 0"),
        ("rollout.min_p=1", "rollout.min_p = 1: input should be less than 1"),
        ("rollout.top_k=-1", "rollout.top_k = -1: input should be greater than or equal to 0"),
        ("replay.support=false", "replay.support = false does nothing: the rollouts are not filtered"),
        ("optim.minibatches=1000", "more than the 256 sequences of a batch"),
        ("name=../up", "name = '../up': string should match"),
        ('arms={"../up" = {method = "none"}}', "should match pattern"),
        ('arms={"/etc" = {method = "none"}}', "should match pattern"),
        ("delta", "expected key=value"),
        ("eps=0", "eps = 0: input should be greater than 0"),
        ("eps=1", "eps = 1: input should be less than 1"),
        ("delta=0", "delta = 0: input should be greater than 0"),
        ("batches.x=1", "'batches' is a value, not a table"),
        ("optim.advantage=gdpo", "weighs the components of a reward"),
    ],
)
def test_a_mistake_is_refused_with_key_and_expectation(change, words):
    with pytest.raises(RecipeError) as refused:
        load_recipe(TINY, changes=change.split("||"))
    assert words in str(refused.value)
    assert "tiny.toml" in str(refused.value) or "--set" in str(refused.value)


def test_the_trust_region_limits_kl_or_tv_or_both():
    content = load_recipe(TINY).model_dump(exclude={"delta", "eps"}, exclude_none=True, by_alias=True)
    limits = {}
    for name, given in {
        "neither": {},
        "kl": {"delta": 0.01},
        "tv": {"eps": 0.2},
        "both": {"delta": 1, "eps": 0.2},
    }.items():
        limits[name] = check_recipe(content | given, source=name).token_limits
    assert limits == {"neither": (0.05, None), "kl": (0.01, None), "tv": (math.inf, 0.2), "both": (1.0, 0.2)}


def test_a_missing_key_a_missing_file_and_a_broken_file(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text('name = "x\n')
    with pytest.raises(RecipeError, match=r"broken.toml is not valid TOML"):
        load_recipe(broken)
    with pytest.raises(RecipeError, match=r"cannot read recipe .*nowhere.toml"):
        load_recipe(tmp_path / "nowhere.toml")
    (tmp_path / "short.toml").write_text('name = "x"')
    with pytest.raises(RecipeError, match="model is missing; batches is missing; arms is missing"):
        load_recipe(tmp_path / "short.toml")


def test_values_on_the_command_line_are_toml_or_words():
    changes = ["lag.sync_every=3", "rollout.dtype=float16", "rollout.evidence=20", "rollout.tail_log_ratio_cap=1"]
    recipe = load_recipe(TINY, changes=changes)
    rollout = recipe.rollout
    assert (recipe.lag.sync_every, rollout.dtype, rollout.evidence, rollout.tail_log_ratio_cap) == (3, "float16", 20, 1)
    assert load_recipe(TINY, changes=["rollout.evidence=hidden"]).rollout.evidence == "hidden"


def test_a_replay_that_cannot_act_is_refused_with_the_way_out():
    served = ["rollout.engine=openai", "rollout.url=http://x/v1", "rollout.quantization=none", "rollout.top_p=0.9"]
    with pytest.raises(
        RecipeError, match=r'replay.support = true .* rollout.engine = "openai".*replay.support = false'
    ):
        load_recipe(TINY, changes=served)
    assert not load_recipe(TINY, changes=[*served, "replay.support=false"]).replay.support
    hidden = ["rollout.evidence=hidden", "rollout.min_p=0.1"]
    assert load_recipe(TINY, changes=hidden).replay.support
    with pytest.raises(RecipeError, match=r'replay.support = false: rollout.evidence = "hidden".*use "full"'):
        load_recipe(TINY, changes=[*hidden, "replay.support=false"])


def test_one_method_by_name_replaces_the_arms():
    arms = {"none": {"method": "none"}}
    recipe = small_recipe(method="gspo", override={"objective": {"eps_high": 0.3}}, arms=arms)
    assert list(recipe.arms) == ["gspo"]
    assert recipe.arms["gspo"].build().objective.eps_high == 0.3


def test_a_recipe_is_frozen_and_counts_its_updates():
    recipe = small_recipe(batches=3, optim__epochs=2, optim__minibatches=4)
    assert recipe.updates == 24
    with pytest.raises(Exception, match="frozen"):
        recipe.batches = 4  # type: ignore[misc]


def test_an_engine_is_not_given_another_engines_quantization():
    with pytest.raises(RecipeError, match=r"int8. is the transformers engine's; .*--set rollout.quantization=none"):
        load_recipe(TINY, changes=["rollout.engine=vllm"])
    chosen = load_recipe(TINY, changes=["rollout.engine=vllm", "rollout.quantization=none"])
    assert chosen.rollout.quantization is None
