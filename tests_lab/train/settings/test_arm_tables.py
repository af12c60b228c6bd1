"""An arm's table changes the keys that it names, a recipe's value that no arm reads is refused, old runs resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from offdrift.errors import CheckpointError, RecipeError
from offdrift.records.atomic import plain
from offdrift.texts import read_toml
from offdrift_lab.train.loop.context import begin
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.settings.arm_tables import replaced
from offdrift_lab.train.settings.recipe import Recipe, changed_settings, check_recipe, load_recipe

BASE = """
name = "merged"
model = "tiny-qwen3"
batches = 2
"""
FUSED = {"teacher": "tiny-qwen3", "alpha": 0.3, "decay_updates": 8}
CASES = {
    "replay": ({"support": False}, {"distill": 0.1}, {"support": False, "distill": 0.1, "kv": True}),
    "old_policy": ({"from": "ewma", "decay": 0.5}, {"offload": True}, {"source": "ewma", "decay": 0.5, "offload": True}),
    "old_policy by field": ({"source": "ewma"}, {"from": "batch_start"}, {"source": "batch_start"}),
    "fusion": (FUSED, {"alpha": 0.6}, {"alpha": 0.6, "decay_updates": 8}),
    "fusion without": (FUSED, {"decay_updates": "absent"}, {"alpha": 0.3, "decay_updates": None}),
    "quantized": ({"noise": {"start": 0.1, "stages": 4}}, {"noise": {"end": 0.01}}, {}),
    "quantized without": ({"noise": {"start": 0.1}}, {"noise": "absent"}, {"noise": None}),
}  # fmt: skip


def recipe(table: str, of_recipe: dict, of_arm: dict) -> Recipe:
    content = {
        "name": "x",
        "model": "tiny-qwen3",
        "batches": 2,
        table: of_recipe,
        "rollout": {"top_p": 0.9, "kv": {"budget": 8}} if table == "replay" else {},
        "arms": {"a": {"method": "decoupled_ppo", table: of_arm}, "b": {"method": "decoupled_ppo"}},
    }
    return check_recipe(content, source="test")


OF = {"replay": Recipe.replay_of, "old_policy": Recipe.old_policy_of, "fusion": Recipe.mixture_of, "quantized": Recipe.quantized_of}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_arm_changes_the_keys_that_it_names(case):
    table = case.split()[0]
    of_recipe, of_arm, expected = CASES[case]
    made = recipe(table, of_recipe, of_arm)
    of_a, of_b = OF[table](made, "a"), OF[table](made, "b")
    assert {key: getattr(of_a, key) for key in expected} == expected
    if case == "quantized":
        assert (of_a.noise.start, of_a.noise.end, of_a.noise.stages) == (0.1, 0.01, 4)
    alone = OF[table](recipe(table, of_recipe, {}), "a")
    assert of_b.model_dump() | {"teacher": 0, "warm_start": 0} == alone.model_dump() | {"teacher": 0, "warm_start": 0}
    assert of_a.model_dump() != of_b.model_dump()


def test_what_is_stored_has_the_same_meaning_again():
    for case, (of_recipe, of_arm, _) in CASES.items():
        made = recipe(case.split()[0], of_recipe, of_arm)
        stored = plain(made.model_dump(mode="json", by_alias=True))
        assert changed_settings(made, stored) == []
        again = check_recipe(stored, source="stored")
        for of in OF.values():
            assert (of(again, "a"), of(again, "b")) == (of(made, "a"), of(made, "b"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A recipe whose arm names one key of a table of which the recipe names another."""
    path = tmp_path / "merged.toml"
    path.write_text(
        BASE + "[old_policy]\nfrom = 'ewma'\ndecay = 0.5\n"
        "[arms.a]\nmethod = 'decoupled_ppo'\nold_policy = { offload = true, from = 'second_model' }\n"
        "[arms.b]\nmethod = 'ppo_clip'\n"
    )
    return path


def test_a_run_of_an_earlier_version_goes_on_with_its_meaning(file, tmp_path):
    merged = load_recipe(file)
    earlier = check_recipe(replaced(read_toml(file)), source="earlier")
    assert merged.old_policy_of("a").decay == 0.5
    assert earlier.old_policy_of("a").decay == 0.889
    for name, started in (("earlier", earlier), ("merged", merged)):
        folder = RunFolder(tmp_path / name)
        head = begin(started, folder, False)
        folder.create(head)
        stored = folder.head()["recipe"]
        resumed = load_recipe(file, stored=stored)
        assert resumed.old_policy_of("a").decay == started.old_policy_of("a").decay
        begin(resumed, folder, True)
        (only,) = load_recipe(file, stored=stored | {"arms": {"a": stored["arms"]["a"]}}, arms=["a"]).arms.keys() - {
            "b"
        }
        assert only == "a"
    with pytest.raises(CheckpointError, match=r"\(arms differ\)"):
        begin(load_recipe(file), RunFolder(tmp_path / "earlier"), True)
    other = load_recipe(file, changes=["arms.a.old_policy.decay=0.1"], stored=stored)
    assert other.old_policy_of("a").decay == 0.1


UNREAD = {
    "each arm has its own": (
        "[replay]\nkv = false\n[rollout.kv]\nbudget = 4\n[arms.a]\nmethod = 'none'\nreplay = { kv = true }",
        [],
        r"replay.kv = false does nothing, since no arm reads it: arms.a has one of its own",
    ),
    "no method reads an old policy": (
        "[old_policy]\ndecay = 0.5\nfrom = 'ewma'\n[arms.a]\nmethod = 'none'",
        [],
        r"old_policy.decay = 0.5 does nothing, since no arm reads it: arms.a reads no old policy",
    ),
    "rules": (
        "[pipeline]\nschedule = 'areal'\nrules = { admission = { eta = 2 } }\n"
        "[arms.a]\nmethod = 'token_tis'\nrules = { 'admission.eta' = 1 }",
        [],
        r"pipeline.rules.admission.eta = 2 does nothing",
    ),
    "what is set": (
        "[rollout]\ntop_p = 0.9\n[arms.a]\nmethod = 'none'\nreplay = { support = true }\n[arms.b]\nmethod = 'none'",
        ["replay.support=false"],
        r"replay.support = false does nothing, since no arm reads it: arms.a has one of its own",
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_value_that_no_chosen_arm_reads_is_refused(case, tmp_path):
    text, changes, says = UNREAD[case]
    path = tmp_path / "x.toml"
    path.write_text(BASE + text)
    with pytest.raises(RecipeError, match=says):
        load_recipe(path, changes=changes, arms=["a"] if changes else None)
    assert load_recipe(path, changes=changes, arms=["a"] if changes else None, stored={})
    if changes:  # another arm reads it
        assert not load_recipe(path, changes=changes, arms=["a", "b"]).replay_of("b").support
