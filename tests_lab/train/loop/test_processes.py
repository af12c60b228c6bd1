"""Runs in processes of their own: killed and resumed, and spread over two of them."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tests.forked import Forked, pair

from offdrift.advantages import advantages
from offdrift.methods import METHODS
from offdrift.models import load_model, tiny_tokenizer
from offdrift.records.rollouts import Rollouts, concatenate
from offdrift.records.store import read
from offdrift.stats import summarize
from offdrift_lab.train.data.environments import ENVIRONMENTS
from offdrift_lab.train.features.critic import Critic, ValueHead, critic_step
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.old_policy import score_batch
from offdrift_lab.train.settings import recipe
from tests_lab.train.conftest import Echo, check_episodes, short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows
from tests_lab.train.steps import stepped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
WORKER = "tests_lab.train.worker"


@pytest.mark.slow
def test_a_process_killed_without_warning_is_resumed_step_for_step(tmp_path):
    torch.set_num_threads(1)
    train(small_recipe(), tmp_path / "whole")
    killed = Forked([WORKER, str(tmp_path / "cut")], tmp_path / "killed")
    for line in killed.lines(killed.out):
        if line.startswith("update trm_max 4"):
            killed.send_signal(signal.SIGKILL)
            break
    assert killed.wait(60).returncode == -signal.SIGKILL
    assert len(rows(tmp_path / "cut")) < 6
    resumed = Forked([WORKER, str(tmp_path / "cut"), "--resume"], tmp_path / "resumed").wait(120)
    assert resumed.returncode == 0, resumed.stderr
    assert "resume trm_max" in resumed.stdout
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert not list(tmp_path.rglob("*.tmp"))


LIMITS = {"weight.cap": 0.5, "gate.high": 8e-5}
ARMS = {
    "normalized_tis": {"method": "normalized_tis", "gates_of": "trm_max", "override": LIMITS},
    "vcpo": {"method": "vcpo"},
    "online_dpo": {"method": "online_dpo"},
}
TURN_ARMS = {
    "turn_ppo": {
        "method": "turn_ppo",
        "override": {"objective.on": "full", "objective.eps_low": 0.01, "objective.eps_high": 0.01},
    },
    "segment_tis": {
        "method": "segment_tis",
        "gates_of": "trm_max",
        "override": {"gate.high": 5e-4, "weight.cap": 1.01},
    },
}
WHITENED = {"lr": 2e-4, "advantage": "reinforce_plus_plus_baseline"}


@pytest.mark.slow
def test_two_processes_take_the_step_that_one_takes_on_the_same_rollouts(tmp_path, monkeypatch):
    """Each process draws and scores half of the batch; normalizers, step-wide statistics, whitening
    and learning-rate scale are of the whole."""
    short_arms(monkeypatch)
    changes = {"arms": ARMS, "optim": WHITENED, "batches": 1}
    run = two_processes(tmp_path / "two", changes)
    for arm in ARMS:
        halves = check_step_of_two_processes(run, arm, changes)
        assert [h.num_sequences for h in halves] == [8, 8]
    assert 0 < rows(run, "normalized_tis")[0]["gate/acceptance_seq"] < 1
    assert 0.3 < rows(run, "vcpo")[0]["optim/lr_scale"] < 1.0
    # Weights of mean 1 are not all below half of it.
    assert rows(run, "normalized_tis")[0]["weight/cap_frac"] > 0


@pytest.mark.slow
def test_two_processes_take_the_step_that_one_takes_on_the_same_episodes(tmp_path, monkeypatch):
    """Episodes of the halves have different lengths and numbers of turns."""
    short_arms(monkeypatch)
    monkeypatch.setitem(ENVIRONMENTS, "echo", Echo())
    changes = {"task": "echo", "arms": TURN_ARMS, "optim": WHITENED, "batches": 1}
    changes |= {"rollout__max_turns": 3, "rollout__max_tokens": 12, "rollout__quantization": "int8"}
    run = two_processes(tmp_path / "two", changes)
    for arm in TURN_ARMS:
        halves = check_step_of_two_processes(run, arm, changes)
        for half in halves:
            check_episodes(half, tiny_tokenizer())
            assert set(half.rollout_version.tolist()) == {0}
        turns = [len(half.segments.turns) for half in halves]
        assert 8 < turns[0] != turns[1]
        assert rows(run, arm)[0]["response/turns_mean"] == pytest.approx(sum(turns) / 16)
    assert rows(run, "turn_ppo")[0]["objective/clip_frac_active"] > 0
    assert rows(run, "segment_tis")[0]["weight/cap_frac"] > 0
    assert 0 < rows(run, "segment_tis")[0]["gate/acceptance_seq"] < 1


def two_processes(run: Path, changes: dict[str, Any]) -> Path:
    """Train in two processes that share every batch."""
    words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    pair([WORKER, str(run), "--short", *words], run.with_name("printed"))
    return run


def check_step_of_two_processes(run: Path, arm: str, changes: dict[str, Any]) -> list[Rollouts]:
    """The first step has the metrics and weights of one process; returns what the two processes drew for it."""
    halves = [read(run / "arms" / arm / "rollouts" / f"batch-000000-rank{r}.parquet") for r in (0, 1)]
    assert not set(halves[0].group_ids.tolist()) & set(halves[1].group_ids.tolist())
    expected, weights = one_process_step(concatenate(halves), arm, changes)
    (row,) = rows(run, arm)
    shared = expected.keys() & row.keys()
    assert len(shared) > 40
    for name in shared:
        value = math.nan if row[name] is None else row[name]  # JSON has no NaN
        assert value == pytest.approx(expected[name], rel=1e-3, abs=1e-6, nan_ok=True), (arm, name)
    moved = load_model(str(run / "arms" / arm / "model"), seed=0)[0].state_dict()  # experts are stored one by one
    # Adam's first step is +-lr: where a gradient is rounding noise its sign is noise, too
    agree = torch.cat([(moved[k] - weights[k]).abs().flatten() < 1e-5 for k in moved])
    assert agree.numel() > 10_000
    assert agree.double().mean() > 0.99, arm
    return halves


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared critic"])
def test_a_critic_of_two_processes_takes_the_steps_of_one(tmp_path, monkeypatch, shared):
    """Two steps on one batch: the values' loss in the second is that after the first."""
    short_arms(monkeypatch)
    settings, steps = {"shared": True} if shared else {"lr": 1e-3}, {"advantage": "gae", "lr": 1e-3, "epochs": 2}
    arms = {"ppo": {"method": "none"}}
    two_processes(tmp_path, {"arms": arms, "critic": settings, "optim": steps, "batches": 1})
    drawn = tmp_path / "arms/ppo/rollouts"
    rollouts = concatenate([read(drawn / f"batch-000000-rank{r}.parquet") for r in (0, 1)])
    model, _ = load_model("tiny-qwen3", seed=0)
    accelerator, limits = Accelerator(cpu=True), {"token_budget": 16384, "max_grad_norm": 1.0}
    head = ValueHead(model)
    parameters = [*model.parameters(), *(head.parameters() if shared else ())]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    critic = Critic.start(model, recipe.CriticSettings(**settings), accelerator)
    critic = Critic(head, optimizer, recipe.CriticSettings(**settings), policy=model) if shared else critic
    values = critic.values(rollouts, token_budget=999)
    returns = critic.returns(rollouts.rewards, values, rollouts.segments)
    gae = advantages(rollouts.rewards, rollouts.segments, how="gae", values=values)
    batch = Batch(rollouts=rollouts, advantages=gae, values=values, returns=returns)
    for row in rows(tmp_path, "ppo"):
        options = {**limits, "critic": critic if shared else None}
        stats = stepped(accelerator, model, optimizer, batch, METHODS["none"], **options).stats
        if not shared:
            stats = stats.plus(*critic_step(accelerator, critic, rollouts, values, returns, **limits))
        expected = summarize(stats)
        for name in ("vf_loss", "vf_explained_var", "value_mean", "grad_norm"):
            assert row[f"critic/{name}"] == pytest.approx(expected[f"critic/{name}"], rel=2e-3, abs=1e-6), name
        for name in ("optim/grad_norm", "full/k3"):
            assert row[name] == pytest.approx(expected[name], rel=2e-3, abs=1e-6), name
    first, second = (row["critic/vf_loss"] for row in rows(tmp_path, "ppo"))
    assert second < 0.99 * first


@pytest.mark.slow
def test_two_processes_project_perturb_and_adapt_alike(tmp_path):
    """The last gradient, sizes of noise and adapters are the same in both, to the last bit."""
    layer = {"lr": 1e-3, "align": {"threshold": -1.0}, "perturb": {"sigma": 0.01, "lr": 0.1}, "accumulate": 2}
    arms = {"penalized": {"method": "deepseek_v32"}, "vcpo": {"method": "vcpo"}}
    settings = {"arms": arms, "optim": {**layer, "token_budget": 40}, "lora": {"rank": 2}, "batches": 3}
    words = ["--short", "--sums", *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    printed = pair([WORKER, str(tmp_path / "two"), *words], tmp_path / "printed")
    lines = [
        json.loads(line.removeprefix("sums ")) for text in printed for line in text.splitlines() if line[:5] == "sums "
    ]
    for arm in arms:
        first, second = (line for line in lines if line[0] == arm)
        assert first == second
        assert min(first[1:]) > 1


def one_process_step(rollouts: Rollouts, arm: str, changes: dict[str, Any]):
    """What the first step of that run must be, computed here on both halves together."""
    whole = small_recipe(**changes)
    model, _ = load_model(whole.model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)
    how = WHITENED["advantage"]
    replay = whole.replay_of(arm)
    replayed = {"replays": replay.routes == "rollout", "distill": replay.distill}
    batch = Batch(rollouts=rollouts, advantages=advantages(rollouts.rewards, rollouts.segments, how=how), **replayed)
    row = whole.arms[arm].build()
    if row.scores_old:
        batch = replace(batch, old=score_batch(model, rollouts, token_budget=64))
    if row.needs_reference:
        batch = replace(batch, logp_ref=score_batch(model, rollouts, token_budget=64).logp)
    update = stepped(Accelerator(cpu=True), model, optimizer, batch, row, token_budget=16384, max_grad_norm=1.0)  # fmt: skip
    return summarize(update.stats), dict(model.state_dict())
