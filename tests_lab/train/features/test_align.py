"""Gradient alignment control: what a new gradient repeats of the last one, in one step and in a run."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from offdrift.errors import RecipeError
from offdrift.methods.gradient_alignment import gac_projection
from offdrift_lab.train.features.align import Alignment, gradient_dot
from offdrift_lab.train.settings.optim import AlignSettings
from tests_lab.train.conftest import small_recipe
from tests_lab.train.loop.test_learning_rate import run_of


def parameters(*sizes: int) -> dict[str, nn.Parameter]:
    return {str(i): nn.Parameter(torch.zeros(n)) for i, n in enumerate(sizes)}


def set_gradients(weights: dict[str, nn.Parameter], seed: int, towards: float = 0.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    for w in weights.values():
        w.grad = torch.randn(w.shape, generator=g) + towards
    return torch.cat([w.grad for w in weights.values()])


@pytest.mark.parametrize(("threshold", "strength"), [(0.3, 1.0), (0.3, 0.4), (0.9, 1.0), (-1.0, 1.0)])
def test_gradients_in_parts_are_projected_as_one_vector_on_the_raw_last_one(threshold, strength):
    align, weights = Alignment(AlignSettings(threshold=threshold, strength=strength)), parameters(5, 1, 7)
    last, acted = None, 0
    for seed in range(4):
        raw = set_gradients(weights, seed, towards=1.0)
        sums = align.project(weights)
        projected = torch.cat([w.grad for w in weights.values()])
        expected = gac_projection(raw, last, threshold, strength)
        torch.testing.assert_close(projected, expected.grad)
        if last is None:
            assert sums == {}
            assert torch.equal(projected, raw)
        else:
            torch.testing.assert_close(sums["optim/gradient_cosine"].float(), torch.cosine_similarity(raw, last, dim=0))
            removed = (raw - projected).norm() / raw.norm()
            torch.testing.assert_close(sums["optim/gradient_removed_frac"].float(), removed)
            acted += bool(removed > 0)
        last = raw
    assert acted == (0 if threshold == 0.9 else 3)


def test_what_is_no_number_or_has_no_gradient_is_left_alone():
    align, weights = Alignment(AlignSettings(threshold=-1.0)), parameters(3, 2)
    first = set_gradients(weights, 0)
    align.project(weights)
    weights["0"].grad[1] = math.inf
    align.project(weights)
    assert torch.equal(weights["0"].grad, torch.tensor([first[0], math.inf, first[2]]))
    assert torch.equal(torch.cat([*align.last.values()]), first)
    raw = set_gradients(weights, 1)
    weights["1"].grad = None
    align.project(weights)
    assert weights["1"].grad is None
    expected = gac_projection(raw[:3], first[:3], threshold=-1.0).grad
    torch.testing.assert_close(weights["0"].grad, expected)
    assert not align.last["1"].any()


def test_the_product_is_summed_in_float64_over_parts():
    big = [torch.full((1,), 1e4), torch.ones(3)]
    assert gradient_dot(big, big).item() == 1e8 + 3
    with pytest.raises(ValueError, match="zip"):
        gradient_dot(big, big[:1])


def test_a_run_measures_and_projects_and_is_resumed(tmp_path, monkeypatch):
    always = {"align": {"threshold": -1.0}}
    short = {"changes": {"batches": 6}, **always}
    cut = tmp_path / "cut"
    whole, _ = run_of(tmp_path / "whole", monkeypatch, cut=(5, cut), **short)
    assert "optim/gradient_cosine" not in whole[0]
    assert all(-1 < r["optim/gradient_cosine"] < 1 and r["optim/gradient_removed_frac"] > 0 for r in whole[1:])
    # |removed| / |g| = |cosine| where the parallel part is removed whole.
    for r in whole[1:]:
        assert r["optim/gradient_removed_frac"] == pytest.approx(abs(r["optim/gradient_cosine"]), rel=1e-5)
    again, _ = run_of(cut, monkeypatch, resume=True, **short)
    for name in ("optim/grad_norm", "optim/gradient_cosine"):
        assert [r.get(name) for r in again] == [r.get(name) for r in whole]
    folders = [tmp_path / name / "arms/none/model/model.safetensors" for name in ("whole", "cut")]
    ours, theirs = map(load_file, folders)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_measuring_alone_changes_nothing_and_a_skipped_step_is_none(tmp_path, monkeypatch):
    plain, _ = run_of(tmp_path / "plain", monkeypatch, changes={"batches": 3})
    measured, used = run_of(tmp_path / "measured", monkeypatch, changes={"batches": 3}, align={"strength": 0.0})
    assert [r["optim/grad_norm"] for r in measured] == [r["optim/grad_norm"] for r in plain]
    assert len(used) == 3
    assert "optim/step_skipped" not in measured[1]
    skip = {"strength": 0.0, "skip_above": -0.999}
    rows, used = run_of(tmp_path / "skip", monkeypatch, changes={"batches": 3}, align=skip)
    assert [r["optim/step_skipped"] for r in rows] == [0, 1, 1]
    assert len(used) == 1


def test_a_skip_that_leaves_nothing_to_project_is_refused():
    with pytest.raises(RecipeError, match="not above optim"):
        small_recipe(optim={"align": {"threshold": 0.3, "skip_above": 0.2}})
