"""A batch that a gate rejects whole: AdamW moves on without a gradient, unless it is told not to."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from offdrift_lab.train.loop.run_folder import ArmFolder
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
