"""Random faults of the out-of-sample benchmark: reproducible, acceptable to the trainer, gone where they are repaired."""

import json

import pytest
import torch
from benchmarks import out_of_sample
from benchmarks.out_of_sample import recipe_of, repair
from benchmarks.out_of_sample_cases import (
    KINDS,
    REPAIRS,
    Plant,
    RandomCase,
    Stopping,
    draw,
    recipe_changes,
    spoil,
    stays_if,
)
from benchmarks.out_of_sample_tables import fixes, is_right, render, share, summary

from offdrift.judge import load_rules
from tests.judge import planted_real as planted

CASES = [draw(i, seed=7) for i in range(60)]


def test_a_case_is_a_function_of_seed_and_number():
    assert [draw(i, seed=7) for i in range(60)] == CASES
    assert [draw(i, seed=8) for i in range(60)] != CASES


def test_there_are_clean_runs_single_faults_and_pairs_of_two_causes():
    counts = {len(case.plants) for case in CASES}
    assert counts == {0, 1, 2}
    assert all(len(set(case.causes)) == len(case.plants) for case in CASES)


def test_sizes_are_not_those_that_the_rules_were_made_with():
    tuned = {x for case in planted.CASES for x in case.recipe.values() if isinstance(x, (int, float))}
    drawn = {p.size for case in CASES for p in case.plants if p.how in ("untempered", "sync_every")}
    assert not drawn & tuned


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.number}-{'+'.join(c.causes) or 'clean'}")
def test_the_trainer_takes_every_case(case):
    recipe = recipe_of(case, 1)
    for plant in case.plants:
        for key, value in recipe_changes(plant, {"optim.lr": case.recipe["optim.lr"]}).items():
            part, _, name = key.partition(".")
            if key != "optim.lr":
                assert getattr(getattr(recipe, part), name) == value
    assert bool(spoil(case.plants, 0)) == any(
        not recipe_changes(p, {"optim.lr": 1.0}) or p.how == "untempered" for p in case.plants
    )


@pytest.mark.parametrize("how", sorted({how for parts in REPAIRS.values() for how in parts}))
def test_a_repair_takes_away_what_its_sentence_is_about_and_nothing_else(how):
    fix = next(name for name, parts in REPAIRS.items() if how in parts)
    size = 0.8 if how in ("untempered", "hidden top-p") else 0.2 if how in ("min-p", "top-k") else 4
    plant, other = Plant("x", how, size), Plant("batch_reuse", "epochs", 3)
    base = {"optim.lr": 1e-4}
    case = RandomCase(0, "quantized", "none", 0, base, (plant, other))
    for p in case.plants:
        case.recipe.update(recipe_changes(p, {"optim.lr": 1e-4}))
    left, recipe = repair(fix, recipe_of(case, 1), case)
    assert left.plants == (other,)
    assert recipe.optim.epochs == 3
    assert not recipe.rollout.filtered
    assert recipe.rollout.quantization is None


def test_a_wrong_fix_repairs_nothing():
    case = RandomCase(0, "quantized", "none", 0, {"optim.lr": 1e-4}, (Plant("precision", "rounded", 4),))
    left, recipe = repair("reduce_lag", recipe_of(case, 1), case)
    assert left == case
    assert recipe.arms[planted.ARM].method == "decoupled_token_is"


def test_every_repair_is_of_a_fix_that_the_rules_propose():
    rules = load_rules()
    assert set(REPAIRS) <= set(rules.fixes)
    assert {cause for cause, _ in KINDS.values()} <= {rule.cause for rule in rules.rules.values()}


def test_weights_stay_or_stop_as_they_are_meant_to():
    old, new = torch.zeros(2), torch.ones(2)
    assert stays_if("layers.1.", "model.layers.1.mlp", old, new) is old
    assert stays_if("layers.1.", "model.layers.2.mlp", old, new) is new
    stop = Stopping(2)
    arrived = [[bool(stop(name, old, new).sum()) for name in ("a", "b")] for _ in range(3)]
    assert arrived == [[True, True], [True, True], [False, False]]


def row(plants, causes, before, after, *, k3=(0.1, 0.01)):
    return {
        "case": {"plants": [{"cause": c} for c in plants], "regime": "quantized"},
        "causes": causes, "applied": "configuration", "fix": "reduce_lag", "causes_after": [],
        "first": {"k3": k3[0], "held_out": [0.8, before]}, "fixed": {"k3": k3[1], "held_out": [0.8, after]},
    }  # fmt: skip


def test_the_tables_count_what_they_say():
    rows = [
        row(["precision"], ["precision"], 0.2, 0.7),
        row(["precision"], ["stale_engine", "precision"], 0.7, 0.1, k3=(0.01, 0.1)),
        row(["batch_reuse", "precision"], ["clip_saturation"], 0.5, 0.5),
        {**row([], [], 0.8, 0.8), "fixed": None, "fix": None, "applied": "no finding"},
    ]
    numbers = summary(rows)
    assert [is_right(r) for r in rows] == [True, False, True, True]
    assert numbers["one cause, first"] == share(1, 2)
    assert numbers["one cause, among the findings"] == share(2, 2)
    assert numbers["one cause, KL above .02, first"] == share(1, 1)
    assert numbers["two causes, both among the findings"] == share(0, 1)
    effect = fixes(rows[:3])
    assert effect["KL at most half"] == share(2, 3)
    assert effect["loss averted"] == share(1, 2)
    assert effect["loss brought about"] == share(1, 1)
    assert "| **precision** |" in render({"seed": 0, "runs": rows})
    beside = render({"seed": 1, "runs": rows}, {"seed": 0, "runs": rows[:1]})
    assert f"| one cause, first | {share(1, 2)} | {share(1, 1)} |" in beside
    assert f"| all fixes: KL at most half | {share(2, 3)} | {share(1, 1)} |" in beside


@pytest.fixture
def few(tmp_path):
    """One run of each of two starts, a third of the first start, and one of vLLM."""
    cases = [RandomCase(i, "quantized", "none", start, {}) for i, start in enumerate((0, 1, 0))]
    cases.append(RandomCase(3, "quantized", "none", 0, {"rollout.engine": "vllm"}))
    return [(case, tmp_path / str(case.number)) for case in cases]


def test_what_is_done_is_not_done_again_and_vllm_waits_for_a_machine_that_has_it(few, monkeypatch, capsys):
    few[1][1].mkdir()
    (few[1][1] / "row.json").write_text("{}")
    monkeypatch.setattr(out_of_sample, "find_spec", lambda name: None)
    assert [case.number for case, _ in out_of_sample.chosen(few, None)] == [0, 2]
    assert "left out: 1, whose responses vLLM draws" in capsys.readouterr().out
    monkeypatch.setattr(out_of_sample, "find_spec", lambda name: name)
    assert [case.number for case, _ in out_of_sample.chosen(few, None)] == [0, 2, 3]
    assert [case.number for case, _ in out_of_sample.chosen(few, "vllm")] == [3]
    assert [case.number for case, _ in out_of_sample.chosen(few, "transformers")] == [0, 2]


def test_the_file_holds_the_rows_that_are_there_in_the_order_of_the_cases(few, tmp_path):
    for number in (2, 0):
        few[number][1].mkdir()
        content = {"case": {"number": number}, "first": {"k3": 0.1, "reward/mean": [1.0]}, "fixed": None}
        (few[number][1] / "row.json").write_text(json.dumps(content))
    assert out_of_sample.store(tmp_path / "new" / "out.json", {"seed": 1}, few) == 2
    content = json.loads((tmp_path / "new" / "out.json").read_text())
    assert [row["case"]["number"] for row in content["runs"]] == [0, 2]
    assert content["runs"][0]["first"] == {"k3": 0.1}
