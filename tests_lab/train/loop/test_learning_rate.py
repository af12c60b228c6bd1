"""The learning rate: its schedule, the guard on response lengths, and both in a run that is interrupted."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from offdrift.errors import RecipeError
from offdrift.methods.lr_scale import LengthSurge, SurgeState
from offdrift_lab.train.loop import step
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.optim import LengthGuardSettings, OptimSettings
from tests_lab.train.conftest import short_arms, small_recipe

ARMS = {"none": {"method": "none"}}


def test_a_schedule_is_torchs_own():
    """Warm-up, then torch's linear and cosine schedules, at every update of runs of several lengths."""
    for warmup, updates, final in ((0, 10, 0.0), (3, 10, 0.1), (1, 7, 0.5)):
        for schedule in ("linear", "cosine"):
            parameter = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([parameter], lr=0.3)
            warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i, w=warmup: (i + 1) / max(1, w))
            n = updates - warmup
            after = (
                torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, final, n)
                if schedule == "linear"
                else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n, eta_min=0.3 * final)
            )
            both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, after], [warmup])
            ours = OptimSettings(lr=0.3, schedule=schedule, warmup=warmup, final=final)
            for i in range(updates):
                assert ours.learning_rate(i, updates) == pytest.approx(optimizer.param_groups[0]["lr"])
                optimizer.step()
                both.step()
    assert {OptimSettings(lr=0.3, warmup=2).learning_rate(i, 9) for i in range(1, 9)} == {0.3}


def test_settings_of_the_guard_are_those_of_the_rule():
    settings = LengthGuardSettings()
    assert set(LengthGuardSettings.model_fields) - {"switch_to"} == set(LengthSurge.__dataclass_fields__)
    state = SurgeState()
    for length in [100.0] * 100 + [121.0]:
        state = LengthSurge(**settings.model_dump(exclude={"switch_to"})).after(state, length)
    assert (state.fired, state.scale) == (True, 0.5)


def run_of(folder, monkeypatch, *, cut=None, lengths=None, resume=False, changes=None, **optim):
    """Metrics of a short run, and the learning rate that the optimizer really had in each of its steps.

    Args:
        cut: an update and a folder, which gets what a run killed after that update (of its first arm) leaves.
    """
    short_arms(monkeypatch)
    used = []
    real = torch.optim.AdamW.step

    def watched(self, *args, **kwargs):
        used.append(self.param_groups[0]["lr"])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    if lengths is not None:  # planted: what the step says of its responses
        statistics = step._with_batch_stats

        def planted(stats, batch, version):
            return statistics(stats, batch, version).plus({"length": lengths[version], "length/n": 1.0})

        monkeypatch.setattr(step, "_with_batch_stats", planted)

    def watch(event):
        if cut is not None and event.kind == "update" and event.step == cut[0] and not cut[1].exists():
            shutil.copytree(folder, cut[1])

    settings = {"batches": 8, "arms": ARMS, "log__checkpoint_every": 2, "optim": {"lr": 1e-3, **optim}}
    recipe = small_recipe(**settings | (changes or {}))
    train(recipe, folder, resume=resume, watch=watch)
    rows = (folder / f"arms/{next(iter(recipe.arms))}/metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows], used


def test_the_schedule_acts_and_is_resumed(tmp_path, monkeypatch):
    settings = {"schedule": "cosine", "warmup": 2, "final": 0.1}
    cut = tmp_path / "cut"
    rows, used = run_of(tmp_path / "whole", monkeypatch, cut=(5, cut), **settings)
    expected = [OptimSettings(lr=1e-3, **settings).learning_rate(i, 8) for i in range(8)]
    assert used == pytest.approx(expected)
    assert [r["optim/lr"] for r in rows] == pytest.approx(expected)
    again, _ = run_of(cut, monkeypatch, resume=True, **settings)
    assert [r["optim/grad_norm"] for r in again] == [r["optim/grad_norm"] for r in rows]


def test_a_surge_of_length_halves_the_learning_rate_also_of_a_resumed_run(tmp_path, monkeypatch):
    guard = {"length_guard": {"window": 2, "cooldown": 1}}
    surge = {"lengths": [10.0, 10.0, 10.0, 13.0, 13.0, 13.0, 10.0, 10.0]}
    cut = tmp_path / "cut"
    rows, used = run_of(tmp_path / "whole", monkeypatch, cut=(7, cut), **guard, **surge)
    assert used == pytest.approx([1e-3] * 4 + [5e-4] * 4)
    assert [r["optim/lr"] for r in rows] == pytest.approx(used)
    again, _ = run_of(cut, monkeypatch, resume=True, **guard, **surge)
    assert [r["optim/grad_norm"] for r in again] == [r["optim/grad_norm"] for r in rows]


@pytest.mark.parametrize("method", ["bypass_pg_geo_rs", "r2vpo"])  # the second adapts a multiplier of its own
def test_a_surge_changes_the_method_also_of_a_resumed_run(tmp_path, monkeypatch, method):
    """From the first batch after the surge on, with the old policy that it reads; also where two updates share a batch."""
    short = {"changes": {"batches": 5, "arms": {"none": {"method": "none"}}}, "minibatches": 2}
    guard = {"length_guard": {"window": 2, "switch_to": method}} | short
    surge = {"lengths": [10.0, 10.0, 13.0, 13.0, 13.0, 13.0, 13.0, 13.0, 13.0, 13.0]}
    cut = tmp_path / "cut"
    rows, _ = run_of(tmp_path / "whole", monkeypatch, cut=(9, cut), **guard, **surge)
    assert [r["optim/method"] for r in rows] == ["none"] * 4 + [method] * 6
    assert [r["optim/method_switched"] for r in rows] == [False] * 4 + [True] * 6
    reads_old = method == "r2vpo"
    assert ["gate/0/drop_frac_token" in r for r in rows] == [False] * 4 + [not reads_old] * 6
    summary = json.loads((tmp_path / "whole/arms/none/summary.json").read_text())
    assert f"none until then, {method} from update 5 on" in " ".join(summary["notes"])
    assert ["mismatch/k3" in r for r in rows] == [False] * 4 + [reads_old] * 6
    again, _ = run_of(cut, monkeypatch, resume=True, **guard, **surge)
    for name in ("optim/grad_norm", "optim/method", "optim/lr"):
        assert [r[name] for r in again] == [r[name] for r in rows]


def test_without_a_surge_the_guard_changes_nothing(tmp_path, monkeypatch):
    calm = {"lengths": [10.0, 11.0] * 2, "changes": {"batches": 4}}
    guarded, _ = run_of(tmp_path / "guarded", monkeypatch, length_guard={"window": 2}, **calm)
    plain, _ = run_of(tmp_path / "plain", monkeypatch, **calm)
    assert [r["optim/grad_norm"] for r in guarded] == [r["optim/grad_norm"] for r in plain]


def test_weight_decay_and_betas_reach_the_optimizer(tmp_path, monkeypatch):
    few = {"changes": {"batches": 3}}
    plain, _ = run_of(tmp_path / "a", monkeypatch, **few)
    decayed, _ = run_of(tmp_path / "b", monkeypatch, weight_decay=0.5, betas=(0.5, 0.9), **few)
    assert plain[0]["optim/grad_norm"] == decayed[0]["optim/grad_norm"]
    assert plain[-1]["optim/grad_norm"] != decayed[-1]["optim/grad_norm"]


@pytest.mark.parametrize(
    ("error", "switch_to", "changes"),
    [
        ('switch_to = "nothing": arms.none: no method', "nothing", {}),
        ("what arms.none trains with from the start", "none", {}),
        ("rollout.evidence", "trm_max", {"rollout__evidence": "sampled"}),
        (
            "another old policy than arms.ppo keeps",
            "ppo_ewma",
            {"arms": {"ppo": {"method": "decoupled_ppo"}}},
        ),
    ],
)
def test_a_switch_that_could_not_act_is_refused(error, switch_to, changes):
    with pytest.raises(RecipeError, match=error):
        small_recipe(**{"arms": ARMS, "optim": {"length_guard": {"switch_to": switch_to}}, **changes})


@pytest.mark.parametrize(
    ("error", "optim"),
    [
        ("optim.final = 0.5 does nothing", {"final": 0.5}),
        ("optim.warmup = 8 is not over", {"warmup": 8}),
        ("optim.length_guard.factor = 1.5", {"length_guard": {"factor": 1.5}}),
    ],
)
def test_what_cannot_act_is_refused(error, optim):
    with pytest.raises(RecipeError, match=error):
        small_recipe(batches=8, optim=optim)
