"""The recipe of six practical defaults: the survey's methods with their published values, and each of them trains."""

from __future__ import annotations

from pathlib import Path

from offdrift.methods import METHODS
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe

FILE = Path(__file__).parents[3] / "recipes" / "defaults.toml"
# Survey, 2026, below its comparison map: PPO-clip, GSPO, M2PO, IcePop or Keep Routing, FP8-RL, VCPO.
SIX = ["ppo_clip", "gspo", "m2po", "icepop", "fp8_rl", "vcpo"]


def test_its_arms_are_the_six_as_published():
    recipe = load_recipe(str(FILE))
    assert list(recipe.arms) == SIX
    assert [recipe.row(name) for name in recipe.arms] == [METHODS[name] for name in SIX]
    assert recipe.rollout.quantization == "int8"
    assert recipe.lag.sync_every > 1


def test_each_of_them_takes_a_step_on_stale_rollouts_of_a_quantized_engine(tmp_path):
    changes = "warm_start.steps=0 batches=2 lag.sync_every=2 rollout.prompts=2 rollout.samples=2"
    small = "log.eval_prompts=2 log.eval_every=2 rollout.max_tokens=4"
    words = f"{changes} {small}".split()
    table = train(load_recipe(str(FILE), changes=words), tmp_path / "run")
    assert [row["arm"] for row in table] == SIX
    assert {row["updates"] for row in table} == {2}
