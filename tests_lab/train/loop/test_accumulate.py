"""Several draws that make up one batch: the step is that of one draw as large."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from offdrift.errors import RecipeError
from offdrift.records import store
from offdrift_lab.train.data.source import Source
from tests_lab.train.conftest import small_recipe
from tests_lab.train.loop.test_learning_rate import run_of

COMPARED = ("optim/grad_norm", "optim/loss", "full/k3", "batch/tokens", "certificate/lower", "reward/mean")


@pytest.mark.parametrize("method", ["token_is", "normalized_tis"])
def test_the_step_is_that_of_one_draw_twice_as_large(tmp_path, monkeypatch, method):
    """Every draw is a half of what the other run drew at once; queue, minibatches and lag as there."""
    arms = {"arms": {method: {"method": method}}, "batches": 4, "lag": {"sync_every": 2, "queue": 1}}
    once, _ = run_of(tmp_path / "once", monkeypatch, changes=arms, minibatches=2)
    asked = []

    def half(self, index):
        asked.append(index)
        whole = store.read(tmp_path / f"once/arms/{method}/rollouts" / f"batch-{index // 2:06d}.parquet")
        part = whole.select(torch.arange(8) + 8 * (index % 2))
        part = part.with_(group_ids=part.group_ids % 2)
        store.write(part, self.path(index))
        return part

    monkeypatch.setattr(Source, "draw", half)
    halves = {**arms, "rollout": {"prompts": 2, "samples": 4, "max_tokens": 6}}
    added, _ = run_of(tmp_path / "added", monkeypatch, changes=halves, minibatches=2, accumulate=2)
    assert asked == [*range(8)]
    compared = [name for name in COMPARED if name in once[0]]
    assert len(compared) >= 5
    for name in compared:
        assert [r[name] for r in added] == pytest.approx([r[name] for r in once], rel=1e-6), name
    ours, theirs = (load_file(tmp_path / f"{run}/arms/{method}/model/model.safetensors") for run in ("once", "added"))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


def test_draws_that_wait_are_resumed(tmp_path, monkeypatch):
    settings = {"changes": {"batches": 6, "lag": {"sync_every": 2, "queue": 1}}, "accumulate": 2}
    cut = tmp_path / "cut"
    whole, _ = run_of(tmp_path / "whole", monkeypatch, cut=(5, cut), **settings)
    assert whole[0]["batch/updates_before"] == 0
    again, _ = run_of(cut, monkeypatch, resume=True, **settings)
    assert [r["optim/grad_norm"] for r in again] == [r["optim/grad_norm"] for r in whole]
    files = [sorted(p.name for p in (tmp_path / run).rglob("rollouts/*.parquet")) for run in ("whole", "cut")]
    assert files[0] == files[1]
    assert len(files[0]) == 12


def test_a_buffer_picks_what_was_drawn_one_by_one():
    with pytest.raises(RecipeError, match="in its place"):
        small_recipe(buffer={"capacity": 16}, optim={"accumulate": 2})
