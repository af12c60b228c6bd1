"""A batch that a gate rejects whole: AdamW moves on without a gradient, unless it is told not to."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from offdrift.step_policy import StepPolicy
from offdrift_lab.train.features.skip_empty import SkipEmpty
from offdrift_lab.train.loop.run_folder import ArmFolder
from offdrift_lab.train.settings.optim import OptimSettings
from tests_lab.train.loop.test_learning_rate import run_of

REJECTS_STALE = {"method": "trm_max_k2", "override": {"gate.high": 1e-7}}
CHANGES = {"batches": 4, "lag": {"sync_every": 4}, "rollout__dtype": "float32", "arms": {"masked": REJECTS_STALE}}


@pytest.mark.parametrize("skip", [False, True])
def test_weights_stay_where_they_are_without_a_gradient_if_asked_for(tmp_path, monkeypatch, skip):
    """The first update is on-policy and rejects nothing; all later ones reject every sequence."""
    rows, used = run_of(tmp_path / "run", monkeypatch, changes=CHANGES, skip_empty=skip)
    assert [row["optim/empty"] for row in rows] == [0, 1, 1, 1]
    assert [row["optim/grad_norm"] for row in rows[1:]] == [0, 0, 0]
    assert rows[0]["full/k3"] < 1e-9 < rows[1]["full/k3"]
    if skip:
        assert len(used) == 1
        assert [row["optim/step_skipped"] for row in rows] == [0, 1, 1, 1]
    else:
        assert len(used) == 4
    notes = ArmFolder(tmp_path / "run/arms/masked").summary()["notes"]
    assert any("optim.skip_empty" in note for note in notes) != skip


def test_a_skipped_step_leaves_the_weights_of_the_last_gradient(tmp_path, monkeypatch):
    run_of(tmp_path / "one", monkeypatch, changes=CHANGES | {"batches": 1}, skip_empty=True)
    run_of(tmp_path / "four", monkeypatch, changes=CHANGES, skip_empty=True)
    run_of(tmp_path / "moved", monkeypatch, changes=CHANGES)
    one, four, moved = (
        load_file(tmp_path / n / "arms/masked/model/model.safetensors") for n in ("one", "four", "moved")
    )
    assert all(torch.equal(one[k], four[k]) for k in one)
    assert any(not torch.equal(one[k], moved[k]) for k in one)


def momenta(optimizer):
    return torch.cat([state["exp_avg"].flatten() for state in optimizer.state.values()])


@pytest.mark.parametrize(("setting", "left"), [(True, 1.0), ("decay", 0.9**3), ("clear", 0.0)])
def test_what_is_left_of_the_mean_of_gradients_after_three_empty_steps(tmp_path, monkeypatch, setting, left):
    """The first of four updates has a gradient g, of which AdamW keeps (1 - .9) g."""
    after = []
    settle = SkipEmpty.stepped

    def stepped(feature, arm, update):
        found = settle(feature, arm, update)
        after.append(momenta(arm.optimizer))
        return found

    monkeypatch.setattr(SkipEmpty, "stepped", stepped)
    run_of(tmp_path / "run", monkeypatch, changes=CHANGES, skip_empty=setting)
    assert len(after) == 4
    assert after[0].abs().sum() > 0
    torch.testing.assert_close(after[3], left * after[0])


def test_a_step_shrinks_with_acceptance(tmp_path, monkeypatch):
    """trm_max_k2 accepts some of the later batches here: the factor is acceptance over the limit, 1 at most."""
    some = CHANGES | {"arms": {"masked": {"method": "trm_max_k2", "override": {"gate.high": 0.05}}}}
    plain, _ = run_of(tmp_path / "plain", monkeypatch, changes=some)
    rows, _ = run_of(tmp_path / "run", monkeypatch, changes=some, min_acceptance=0.8)
    accepted = [row["gate/acceptance_seq"] for row in rows]
    assert any(0 < x < 0.8 for x in accepted), accepted
    assert [row["optim/lr_scale"] for row in rows] == pytest.approx([min(1.0, x / 0.8) for x in accepted])
    assert [row["optim/lr_scale"] for row in plain] == [1.0] * 4
    assert "optim/step_skipped" not in rows[0]


def test_without_gates_no_step_shrinks(tmp_path, monkeypatch):
    changes = CHANGES | {"arms": {"free": {"method": "none"}}}
    rows, _ = run_of(tmp_path / "run", monkeypatch, changes=changes, min_acceptance=0.8)
    assert [row["optim/lr_scale"] for row in rows] == [1.0] * 4


def test_policies_of_recipes():
    def policy(**optim):
        return OptimSettings(**optim).step_policy

    assert policy() == StepPolicy("step")
    assert policy(skip_empty=True) == StepPolicy("skip")
    assert policy(skip_empty="clear", min_acceptance=0.5) == StepPolicy("clear", 0.5)
    with pytest.raises(ValidationError, match="min_acceptance"):
        policy(min_acceptance=1.5)
    with pytest.raises(ValidationError, match="skip_empty"):
        policy(skip_empty="stop")
