"""A drafter in a run: it is distilled, handed over, recorded, resumed exactly; recipes in which it cannot act."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from offdrift import models
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.score import score
from offdrift.errors import CheckpointError, RecipeError
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import ACCEPTED, FREE
from offdrift.records.store import read
from offdrift.stats.metrics import METRICS
from offdrift_lab.train.features.drafter import FILE, Drafter, distillation_loss, reward_weights
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.rollout import SpeculativeSettings
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows as rows_of
from tests_lab.train.loop.test_loop import weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DRAFT = {"model": "tiny-qwen3-draft", "tokens": 3, "every": 1, "steps": 2, "lr": 3e-3}


def recipe(speculative: dict[str, Any] | None = None, **changes: Any):
    rollout = {"prompts": 4, "samples": 4, "max_tokens": 6, "speculative": speculative or DRAFT}
    rollout |= changes.pop("rollout", {})
    return small_recipe(rollout=rollout, arms={"arm": {"method": "decoupled_ppo"}}, **changes)


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "throughput/distill_seconds"} for row in rows_of(run, "arm")]


def batches(run: Path):
    return [read(path) for path in sorted((run / "arms/arm/rollouts").glob("*.parquet"))]


@pytest.fixture
def short(monkeypatch):
    short_arms(monkeypatch)


# -- the loss -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    """A policy that is far from flat, its rollouts, and a drafter."""
    policy, _ = load_model("tiny-qwen3", seed=0)
    with torch.no_grad():
        for p in policy.parameters():
            p *= 2.0 if p.ndim > 1 else 1.0
    drafter, _ = load_model("tiny-qwen3-draft", seed=1)
    prompts = [[5, 6, 7][: 1 + i % 3] for i in range(12)]
    engine = TransformersEngine(policy)

    def drawn(evidence="full", **sampling):
        settings = Sampling(max_tokens=7, stop_token_ids=(3, 9), **sampling)
        rollouts = engine.generate(prompts, settings, seed=0, evidence=evidence)
        return rollouts.with_(rewards=torch.arange(12.0) % 3 / 2)

    return drafter, drawn


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8}], ids=str)
def test_the_loss_is_the_kl_of_the_law_that_drew_from_the_drafters_whatever_the_evidence(world, sampling):
    drafter, drawn = world
    full = drawn(**sampling)
    with torch.no_grad():
        loss = distillation_loss(drafter, full)
        logits = score(drafter, full.with_(support=None), temperature=sampling.get("temperature", 1.0)).logits
        mu, logq = full.evidence.logp.double().exp(), logits.double().log_softmax(-1)
        expected = torch.where(mu > 0, mu * (mu.clamp(min=1e-300).log() - logq), 0.0).sum(-1)
        torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(distillation_loss(drafter, drawn("hidden", **sampling)), loss, atol=1e-4, rtol=0)
        sampled = distillation_loss(drafter, drawn("sampled", **sampling))
        picked = full.logp_rollout - logq.gather(1, full.tokens[:, None]).squeeze(1).float()
        torch.testing.assert_close(sampled, picked, atol=1e-5, rtol=0)


def test_the_gradient_is_weighted_by_rewards_and_does_not_depend_on_the_budget(world):
    """Against the gradient of the definition, response by response."""
    start, drawn = world
    rollouts = drawn()
    weight = reward_weights(rollouts.rewards, (0.0, 1.0))
    assert weight.tolist() == (torch.arange(12.0) % 3 / 2).tolist()
    for weighting, w in (("reward", weight), ("none", torch.ones(12))):
        moved = []
        for budget in (20, 10_000):
            settings = SpeculativeSettings(model="tiny-qwen3-draft", every=1, weighting=weighting, lr=1e-3)
            drafter = Drafter(start, settings, reward_range=(0.0, 1.0), token_budget=budget)
            drafter.optimizer = torch.optim.SGD(drafter.model.parameters(), lr=1.0)
            sums = drafter.learn(rollouts, 1)
            moved.append([a.detach() - b.detach() for a, b in zip(start.parameters(), drafter.model.parameters())])
        reference = copy.deepcopy(start)
        losses = distillation_loss(reference, rollouts)
        of_response = torch.stack([part.sum() for part in losses.split(rollouts.lengths.tolist())])
        ((w * of_response).sum() / (w * rollouts.lengths).sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        assert norm > 0.1
        for name, p in enumerate(reference.parameters()):
            for step in moved:
                torch.testing.assert_close(step[name], p.grad, atol=1e-5, rtol=1e-4)
        assert float(sums["speculative/kl"]) == pytest.approx(float(losses.detach().sum()), rel=1e-5)


def test_a_batch_without_rewards_teaches_nothing_and_still_says_how_far_the_drafter_is(world):
    start, drawn = world
    drafter = Drafter(start, SpeculativeSettings(**DRAFT), reward_range=(0.0, 1.0), token_budget=1000)
    rollouts = drawn().with_(rewards=torch.zeros(12))
    assert drafter.learn(rollouts, 3)["speculative/kl"] > 0
    assert drafter.updated == 3
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), drafter.model.parameters()))


def test_a_drafter_that_learns_is_accepted_more_often(world):
    """Distilled on rollouts of one policy, it overlaps with it more; the policy's law is what it was."""
    start, drawn = world
    settings = SpeculativeSettings(**DRAFT | {"steps": 40, "weighting": "none"})
    drafter = Drafter(start, settings, reward_range=(0.0, 1.0), token_budget=4000)
    kl = [float(drafter.learn(drawn(), i)["speculative/kl"]) for i in range(3)]
    assert kl[2] < 0.7 * kl[0]


# -- in a run -------------------------------------------------------------------------------------


def test_a_run_records_what_was_proposed_and_the_drafter_follows_the_trainer(short, tmp_path):
    train(recipe(batches=5, lag={"sync_every": 2}), tmp_path)
    metrics, drawn = rows(tmp_path), batches(tmp_path)
    learned = [0, 0, 0, 2, 2]  # weights whose rollouts the drafter had learned from: those of the batch before
    assert [set(b.rollout_version.tolist()) for b in drawn] == [{0}, {0}, {2}, {2}, {4}]
    assert [set(b.speculation.drafter_version.tolist()) for b in drawn] == [{v} for v in learned]
    assert [row["speculative/drafter_lag"] for row in metrics] == [0, 0, 2, 0, 2]
    for row, batch in zip(metrics, drawn, strict=True):
        judged = batch.speculation.origin != FREE
        accepted = (batch.speculation.origin == ACCEPTED).sum() / judged.sum()
        assert row["speculative/accepted_frac"] == pytest.approx(float(accepted))
        overlap = batch.speculation.overlap[judged].double().mean()
        assert row["speculative/overlap_mean"] == pytest.approx(float(overlap))
        passes = batch.speculation.begins(batch.cu_seqlens).sum()
        assert row["speculative/tokens_per_pass"] == pytest.approx(len(batch.tokens) / int(passes))
        assert row["speculative/kl"] > 0
        assert row["optim/grad_norm"] > 0
    assert metrics[-1]["speculative/kl"] < metrics[0]["speculative/kl"]
    assert {name for name in metrics[0] if name.startswith("speculative/")} == {
        name for name in METRICS if name.startswith("speculative/")
    }
    stored = load_file(tmp_path / "arms/arm/drafter/model.safetensors")
    start = dict(models.load_model("tiny-qwen3-draft", seed=0)[0].named_parameters())
    assert any(not torch.equal(stored[name], p) for name, p in start.items() if name in stored)


def test_what_a_frozen_drafter_proposes_falls_behind(short, tmp_path):
    frozen = {"model": "tiny-qwen3-draft", "tokens": 3}
    train(recipe(frozen, batches=4, lag={}), tmp_path)
    metrics = rows(tmp_path)
    assert [row["speculative/drafter_lag"] for row in metrics] == [0, 1, 2, 3]
    assert not any("speculative/kl" in row for row in metrics)
    stored = load_file(tmp_path / "arms/arm/drafter/model.safetensors")
    start = dict(models.load_model("tiny-qwen3-draft", seed=0)[0].named_parameters())
    assert all(torch.equal(stored[name], p) for name, p in start.items() if name in stored)


def test_every_second_update_is_every_second_update(short, tmp_path):
    train(recipe(DRAFT | {"every": 2}, batches=5, lag={}), tmp_path)
    assert [row.get("speculative/kl") is not None for row in rows(tmp_path)] == [False, True, False, True, False]


def test_a_resumed_run_is_the_uninterrupted_one(short, tmp_path):
    """Batches that wait were drawn with an earlier drafter, those to come are drawn with the one of the checkpoint."""
    settings: dict[str, Any] = {"lag": {"sync_every": 2, "queue": 1}}

    class Stop(Exception):
        pass

    def watch(event):
        if event.kind == "update" and event.step == 4:
            raise Stop

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(recipe(**settings), whole)
    with pytest.raises(Stop):
        train(recipe(**settings), cut, watch=watch)
    assert list((cut / "arms/arm/checkpoints").glob(f"batch-*/{FILE}"))
    train(recipe(**settings), cut, resume=True)
    assert rows(cut) == rows(whole)
    for name in ("model", "drafter"):
        a, b = (load_file(run / f"arms/arm/{name}/model.safetensors") for run in (whole, cut))
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert weights(whole, "arm").keys() == weights(cut, "arm").keys()


def test_a_checkpoint_of_another_drafter_is_refused(world, tmp_path):
    start, drawn = world
    drafter = Drafter(start, SpeculativeSettings(**DRAFT), reward_range=(0.0, 1.0), token_budget=1000)
    drafter.learn(drawn(), 1)
    drafter.save(tmp_path)
    again = Drafter(start, SpeculativeSettings(**DRAFT), reward_range=(0.0, 1.0), token_budget=1000)
    again.load(tmp_path)
    assert (again.version, again.updated) == (0, 1)
    for one in (drafter, again):
        one.learn(drawn(), 2)
    assert all(torch.equal(a, b) for a, b in zip(drafter.model.parameters(), again.model.parameters()))
    tensors = load_file(tmp_path / FILE)
    save_file({k: v for k, v in tensors.items() if "norm" not in k}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=f"{FILE} is not of this recipe's drafter"):
        again.load(tmp_path)


# -- recipes in which it cannot act -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": {"engine": "vllm"}}, r'rollout.engine = "vllm" takes no drafter'),
        ({"rollout": {"engine": "openai", "url": "http://localhost:1/v1"}}, r'rollout.engine = "openai"'),
        ({"fusion": {"teacher": "tiny-qwen3"}}, r"no tokens are proposed with \[fusion\]"),
        ({"rollout": {"kv": {"budget": 8}}}, "no tokens are proposed with rollout.kv"),
        ({"rollout": {"max_tokens": 1}}, "does nothing with rollout.max_tokens = 1"),
        ({"pipeline": {}, "lag": {}}, r"no tokens are proposed with \[pipeline\]"),
        ({"task": "calculator", "rollout": {"max_turns": 2}}, 'no tokens are proposed with task = "calculator"'),
        ({"replay": {"routes": "rollout"}, "model": "tiny-qwen3-moe"}, "no tokens are proposed with arms.arm: replay"),
        ({"speculative": {"model": "x", "lr": 0.1}}, "speculative.lr does nothing without rollout.speculative.every"),
        ({"speculative": {"model": "x", "steps": 2}}, "speculative.steps does nothing without"),
        ({"speculative": {"model": "x", "weighting": "none"}}, "speculative.weighting does nothing without"),
        ({"speculative": {"model": "x", "every": 7}}, "every = 7 is more than the 6 updates"),
        ({"speculative": {"model": "siblings", "every": 1}}, "every does nothing with .*siblings"),
        ({"speculative": {"model": "siblings", "warm_start": 1}}, "warm_start does nothing with .*siblings"),
        ({"speculative": {"model": "siblings"}, "rollout": {"samples": 1}}, "a response has no siblings"),
        ({"speculative": {"model": "x", "lag": 1}}, "rollout.speculative has model, tokens, warm_start, every"),
    ],
    ids=str,
)
def test_recipes_in_which_a_drafter_cannot_act_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        recipe(**settings)


def test_siblings_draft_in_a_run_and_a_resumed_run_draws_the_same(short, tmp_path):
    """No weights, no lessons; what was accepted is recorded by token."""
    settings = recipe({"model": "siblings", "tokens": 3}, batches=2, rollout={"samples": 8})
    train(settings, tmp_path / "run")
    metrics, drawn = rows(tmp_path / "run"), batches(tmp_path / "run")
    assert "throughput/distill_seconds" not in rows_of(tmp_path / "run", "arm")[0]
    for row, batch in zip(metrics, drawn, strict=True):
        assert batch.speculation is not None
        assert 0 < row["speculative/accepted_frac"] < 1
        assert row["speculative/tokens_per_pass"] > 1
        assert row["speculative/drafter_lag"] == 0
        # The first answer to each prompt had nothing to read.
        first = batch.speculation.origin[: int(batch.lengths[0])]
        assert (first == FREE).sum() >= 1
    assert not any("speculative/kl" in row for row in metrics)
    train(settings, tmp_path / "again")
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(drawn, batches(tmp_path / "again"), strict=True))


def test_a_drafter_with_another_vocabulary_is_refused_before_anything_is_drawn(short, tmp_path, monkeypatch):
    config = models.tiny_qwen3_draft_config()
    config.vocab_size = 50
    monkeypatch.setattr(models, "tiny_qwen3_draft_config", lambda: config)
    with pytest.raises(RecipeError, match="vocabulary of 50 tokens, tiny-qwen3 one of 64"):
        train(recipe(), tmp_path)


def test_several_processes_are_refused(short, tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(RecipeError, match=r"rollout.speculative with 2 processes"):
        train(recipe(), tmp_path)


def test_the_recipe_says_what_it_is():
    text = json.dumps(recipe().model_dump(mode="json")["rollout"]["speculative"])
    assert json.loads(text) == {**DRAFT, "warm_start": 0, "weighting": "reward"}
