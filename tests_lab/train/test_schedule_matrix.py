"""Every schedule with an old policy: killed and resumed, with a trainer that dawdles, and evaluated after each update.

One run has an arm for every schedule and method, on two workers that all cells share. Old log-probs are exact: engine
and trainer agree to rounding at the weights that drew a token, so the mismatch is as small as theirs only if these were
kept.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from offdrift_lab.schedules import SCHEDULES
from offdrift_lab.train.loop import loop
from offdrift_lab.train.loop.context import RunContext, set_up
from offdrift_lab.train.loop.loop import train_arm
from offdrift_lab.train.loop.run_folder import ArmFolder, RunFolder
from tests_lab.train.conftest import short_arms, small_recipe

METHODS = ("decoupled_ppo", "ppo_clip")
UPDATES, KILLED_AT = 4, 3
SETTINGS = {"workers": 2, "cpus": 0.1, "slots": 3, "steps": 1}
QUICK = ("one_step_off", "verl_partial", "areal")
"""Schedules whose cells are not slow tests: in order, streamed, and with several versions to a response."""


def arm_name(schedule: str, method: str) -> str:
    return f"{schedule}-{method}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the arms of all cells share; evaluations are real."""
    arms = {arm_name(s, m): {"method": m, "schedule": s, "rules": rules(s)} for s in SCHEDULES for m in METHODS}
    recipe = small_recipe(
        lag={},
        pipeline=SETTINGS,
        arms=arms,
        batches=UPDATES,
        rollout={"prompts": 2, "samples": 2, "max_tokens": 5, "dtype": "float32", "evidence": "sampled"},
        optim={"lr": 5e-3, "weight_decay": 4.0},  # which moves the weights also where all rewards are equal
        log={"eval_every": 1, "eval_prompts": 2, "checkpoint_every": 1, "trackers": [], "tokens": True},
    )
    with pytest.MonkeyPatch.context() as patch:
        evaluate = loop.evaluate
        short_arms(patch)
        patch.setattr(loop, "evaluate", evaluate)
        shared = set_up(recipe, RunFolder(tmp_path_factory.mktemp("run")), lambda event: None)
        try:
            yield shared
        finally:
            shared.engine.close()


def rules(schedule: str) -> dict[str, object]:
    """Slices that responses of five tokens notice, and a publication before the run is killed."""
    slices = {"dispatch.slice_tokens": 2} if SCHEDULES[schedule].dispatch.slice_tokens else {}
    return slices | ({"sync_every": 2} if SCHEDULES[schedule].sync_every > 1 else {})


class Killed(Exception):
    """Stands for a signal that ends the process."""


def killed_and_resumed(run: RunContext, name: str) -> None:
    def kill(event) -> None:
        if event.kind == "update" and event.step == KILLED_AT:
            raise Killed

    with pytest.raises(Killed):
        train_arm(replace(run, watch=kill), name, resume=False)
    assert (run.folder.arm(name).path / "checkpoints").exists()
    resumed = []
    train_arm(replace(run, watch=lambda event: resumed.append(event.kind)), name, resume=True)
    assert "resume" in resumed


def slow_trainer(run: RunContext, name: str) -> None:
    """Workers are as far ahead as the schedule lets them, at every update."""
    train_arm(replace(run, watch=lambda event: time.sleep(0.15 * (event.kind == "update"))), name, resume=False)


def evaluated(run: RunContext, name: str) -> None:
    train_arm(run, name, resume=False)
    evaluations = run.folder.arm(name).rows("eval")
    assert [row["update"] for row in evaluations] == list(range(UPDATES + 1))


CELLS = {"killed": killed_and_resumed, "slow": slow_trainer, "evaluated": evaluated}


def cells() -> list[object]:
    """Every schedule in every cell; the method alternates, so that each schedule and each cell meets both."""
    return [
        pytest.param(schedule, METHODS[(i + j) % 2], cell, marks=() if schedule in QUICK else pytest.mark.slow)
        for i, schedule in enumerate(SCHEDULES)
        for j, cell in enumerate(CELLS)
    ]


@pytest.mark.parametrize(("schedule", "method", "cell"), cells())
def test_every_schedule_trains_with_exact_old_log_probs(run, tmp_path, monkeypatch, schedule, method, cell):
    if cell != "evaluated":
        monkeypatch.setattr(loop, "evaluate", lambda arm: None)
    name = arm_name(schedule, method)
    CELLS[cell](replace(run, folder=RunFolder(tmp_path)), name)
    metrics = ArmFolder(tmp_path / "arms" / name).rows("metrics")
    assert [row["update"] for row in metrics] == list(range(1, UPDATES + 1))
    for row in metrics:
        assert row["old/status"] == "exact"
        assert row["mismatch/abs_log_ratio_max"] < 1e-4
    stale = [row for row in metrics if row["version_lag/max"] > 0]
    assert all(row["staleness/abs_log_ratio_max"] > 1e-3 for row in stale)
