"""The recipe of DeepSeek-V3.2's four techniques: each of them is on, and acts."""

from __future__ import annotations

from pathlib import Path

from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe
from tests_lab.train.loop.test_loop import rows

FILE = Path(__file__).parents[3] / "recipes" / "deepseek-v32.toml"
SMALL = "warm_start.steps=0 batches=2 lag.sync_every=2 rollout.prompts=4 rollout.samples=2 rollout.max_tokens=6"


def test_the_four_are_on_and_the_replays_take_their_part_out_of_the_ratios(tmp_path):
    recipe = load_recipe(str(FILE), changes=[*SMALL.split(), "log.eval_prompts=2"])
    row = recipe.row("deepseek_v32")
    assert row.penalty is not None
    assert row.penalty.estimator == "k3_corrected"
    assert [gate.advantage for gate in row.correction.gates] == ["negative"]
    assert recipe.rollout.top_p < 1
    train(recipe, tmp_path / "run")
    replayed, without = (rows(tmp_path / "run", name) for name in recipe.arms)
    assert {"reference/kl"} <= replayed[0].keys()
    # Untrained logits are flat: top-p leaves tokens of 95 % of the mass, which the trainer's softmax has to know.
    assert max(r["mismatch/k3"] for r in replayed) < min(r["mismatch/k3"] for r in without)
    assert max(r["router/flip_frac"] for r in without) > 0
