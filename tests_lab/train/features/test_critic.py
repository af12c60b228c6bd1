"""The critic: its values, targets and loss, and PPO with it in a run."""

from __future__ import annotations

import copy
import json
import math
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator, DistributedType

from offdrift.engines import make_engine
from offdrift.engines.score import left_right_padded, score
from offdrift.errors import RecipeError
from offdrift.methods import METHODS
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift.segments import Segments
from offdrift_lab.train.features.critic import Critic, ValueHead, ValueModel, critic_step, value_loss
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.context import _check_launch
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings import recipe
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.steps import stepped

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10], [3, 4]]


@pytest.fixture(scope="module")
def model():
    return load_model("tiny-qwen3", seed=0)[0]


@pytest.fixture(scope="module")
def rollouts(model):
    drawn = make_engine("transformers", model).generate(PROMPTS, Sampling(6, stop_token_ids=tuple(range(8))), seed=0)
    assert len(set(drawn.lengths.tolist())) > 1
    return drawn


def critic_of(model, **settings):
    torch.manual_seed(0)
    critic = Critic.start(model, recipe.CriticSettings(**settings), Accelerator(cpu=True))
    torch.nn.init.normal_(critic.model.head.weight, std=0.02)
    return critic


def step(critic, rollouts, old, returns, **options):
    return critic_step(
        Accelerator(cpu=True), critic, rollouts, old, returns, **{"token_budget": 4096, "max_grad_norm": 1e9, **options}
    )


def test_a_value_is_of_the_prefix_before_its_token(model, rollouts):
    critic = critic_of(model)
    values = critic.values(rollouts, token_budget=4096)
    for i, prompt in enumerate(PROMPTS):
        a, b = rollouts.cu_seqlens[i : i + 2].tolist()
        for t in range(b - a):
            prefix = torch.tensor([prompt + rollouts.tokens[a : a + t].tolist()])
            state = critic.model.body(input_ids=prefix).last_hidden_state[0, -1]
            assert float(critic.model.head(state).detach()) == pytest.approx(float(values[a + t]), abs=1e-5)
    torch.testing.assert_close(critic.values(rollouts, token_budget=8), values, atol=1e-5, rtol=0)


def test_it_begins_at_the_policys_weights_with_no_opinion(model, rollouts):
    fresh = ValueModel(model)
    assert fresh(rollouts).abs().max() == 0
    assert torch.equal(fresh.body.embed_tokens.weight, model.get_input_embeddings().weight)
    assert fresh.body is not model.base_model


def test_returns_are_rewards_to_go_where_lam_is_1_and_one_step_ahead_where_it_is_0(model):
    segments, values = Segments.from_lengths([3, 1]), torch.tensor([0.5, 0.2, 0.7, 0.4])
    rewards = torch.tensor([1.0, 0.25])
    whole = critic_of(model, gamma=0.9, lam=1.0).returns(rewards, values, segments)
    torch.testing.assert_close(whole, torch.tensor([0.81, 0.9, 1.0, 0.25]))
    ahead = critic_of(model, gamma=0.9, lam=0.0).returns(rewards, values, segments)
    torch.testing.assert_close(ahead, torch.tensor([0.18, 0.63, 1.0, 0.25]))


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9),  # within the clip
        (0.5, 0.0, 1.0, 0.32, 0.0),  # past it towards the target: nothing more to gain
        (-0.5, 0.0, 1.0, 1.125, -1.5),  # past it away from the target: pulled back
        (1.2, 1.1, 1.0, 0.02, 0.2),
    ],
)
def test_a_clipped_value_gains_nothing_by_moving_on(value, old, target, loss, gradient):
    v = torch.tensor([value], requires_grad=True)
    found = value_loss(v, torch.tensor([old]), torch.tensor([target]), clip=0.2)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert v.grad.item() == pytest.approx(gradient)
    assert value_loss(v, v.detach(), torch.tensor([target])).item() == pytest.approx((value - target) ** 2 / 2)


def test_a_step_does_not_depend_on_the_token_budget(model, rollouts):
    g = torch.Generator().manual_seed(0)
    returns = torch.rand(len(rollouts.tokens), generator=g)
    after = []
    for budget in (4096, 9):
        critic = critic_of(model, clip=None)
        old = critic.values(rollouts, token_budget=4096)
        sums, maxima = step(critic, rollouts, old, returns, token_budget=budget)
        assert float(sums["critic/vf"]) == pytest.approx(float(((old - returns) ** 2 / 2).sum()), rel=1e-5)
        assert float(sums["critic/error_squared"]) == pytest.approx(float(((old - returns) ** 2).sum()), rel=1e-5)
        after.append((critic.model.head.weight.detach().clone(), maxima["critic/grad_norm"]))
    torch.testing.assert_close(after[0], after[1], atol=2e-5, rtol=1e-3)


def test_values_learn_what_returns_are(model, rollouts):
    critic = critic_of(model, clip=None, lr=3e-3)
    returns = (rollouts.tokens % 3).float()
    error = []
    for _ in range(40):
        old = critic.values(rollouts, token_budget=4096)
        error.append(float((old - returns).square().mean()))
        step(critic, rollouts, old, returns)
    assert error[-1] < 0.2 * error[0]


def shared_of(model, **settings):
    """A critic whose head reads the states of this model, and is not 0."""
    torch.manual_seed(0)
    head = ValueHead(model)
    torch.nn.init.normal_(head.weight, std=0.02)
    return Critic(head, None, recipe.CriticSettings(shared=True, **settings), policy=model)


def test_a_shared_head_reads_the_policys_last_states(model, rollouts):
    critic = shared_of(model)
    inputs = left_right_padded(rollouts)
    states = model.base_model(
        input_ids=inputs.ids, attention_mask=inputs.attention, position_ids=inputs.positions
    ).last_hidden_state
    first = int(rollouts.prompt_cu_seqlens.diff().max()) - 1
    expected = critic.model(states[inputs.rows, first + inputs.columns])
    for budget in (4096, 8):
        torch.testing.assert_close(critic.values(rollouts, token_budget=budget), expected, atol=1e-5, rtol=0)
    assert not model.get_output_embeddings()._forward_pre_hooks
    assert ValueHead(model)(states[0]).abs().max() == 0


@pytest.mark.parametrize("budget", [4096, 9])
def test_a_shared_critic_adds_its_share_to_the_gradient_of_body_and_head(model, rollouts, budget):
    """Of a step of SGD: less the step without a critic, it is coef times the gradient of the mean loss of values."""
    g = torch.Generator().manual_seed(0)
    n = len(rollouts.tokens)
    old, returns, advantages = torch.zeros(n), torch.rand(n, generator=g), torch.randn(n, generator=g)
    batch = Batch(rollouts=rollouts, advantages=advantages, values=old, returns=returns)
    moved = []
    for with_critic in (True, False):
        policy = copy.deepcopy(model)
        critic = shared_of(policy, coef=0.25, clip=None) if with_critic else None
        parameters = [*policy.parameters(), *(critic.model.parameters() if critic else ())]
        optimizer, limits = torch.optim.SGD(parameters, lr=1.0), {"token_budget": budget, "max_grad_norm": 1e9}
        update = stepped(Accelerator(cpu=True), policy, optimizer, batch, METHODS["none"], critic=critic, **limits)
        moved.append(parameters)
        if critic is not None:
            numbers = update.stats.to_host()
    policy = copy.deepcopy(model)
    critic = shared_of(policy)
    loss = (critic.model(score(policy, rollouts, with_states=True).states) - returns).square().mean() / 2
    used = [*policy.parameters(), *critic.model.parameters()]
    gradients = torch.autograd.grad(loss, used, allow_unused=True)
    compared = 0
    for start, with_, without, slope in zip(model.parameters(), moved[0], moved[1], gradients):
        expected = torch.zeros_like(start) if slope is None else slope
        torch.testing.assert_close(without.detach() - with_.detach(), 0.25 * expected, rtol=1e-3, atol=3e-6)
        compared += int((expected.abs() > 1e-5).sum())
    assert compared > 10_000
    for head, now, slope in zip(critic.model.parameters(), moved[0][-2:], gradients[-2:], strict=True):
        torch.testing.assert_close(head.detach() - now.detach(), 0.25 * slope, rtol=1e-3, atol=3e-6)
    assert numbers["critic/vf"] == pytest.approx(loss.item() * n, rel=1e-4)
    norm = math.sqrt(sum(float(x.square().sum()) for x in gradients[-2:]))
    assert numbers["critic/grad_norm"] == pytest.approx(0.25 * norm, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"critic": {"shared": True}}, r"critic\.shared does nothing"),
        ({"critic": {"gamma": 0.9}}, r"critic\.gamma does nothing"),
        ({"optim": {"advantage": "gae"}, "critic": {"coef": 0.1}}, r"critic\.coef = 0\.1 does nothing without"),
        ({"optim": {"advantage": "gae"}, "critic": {"shared": True, "lr": 1e-3}}, r"critic\.lr = 0\.001 does nothing"),
    ],
)
def test_settings_of_the_other_kind_or_of_no_critic_are_refused(changes, problem):
    with pytest.raises(RecipeError, match=problem):
        small_recipe(**changes)


@pytest.mark.parametrize("settings", [{"lr": 1e-3, "lam": 0.95}, {"shared": True, "lam": 0.95}], ids=["own", "shared"])
def test_ppo_trains_with_a_critic_and_resumes_to_the_same_numbers(tmp_path, monkeypatch, settings):
    short_arms(monkeypatch)
    changes = {"batches": 4, "optim": {"advantage": "gae", "lr": 1e-4}, "critic": settings}
    recipe_ = small_recipe(**changes, arms={"ppo": {"method": "ppo_clip"}})
    train(recipe_, tmp_path / "whole")
    whole = metrics_of(tmp_path / "whole")
    assert all(math.isfinite(row["critic/vf_loss"]) and row["critic/grad_norm"] > 0 for row in whole)
    assert whole[0]["critic/value_mean"] == 0
    assert whole[0]["critic/vf_explained_var"] == pytest.approx(0, abs=1e-6)
    assert whole[-1]["critic/value_mean"] != 0

    def interrupted(event):
        if event.kind == "update" and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe_, tmp_path / "parts", watch=interrupted)
    train(recipe_, tmp_path / "parts", resume=True)
    for a, b in zip(whole, metrics_of(tmp_path / "parts"), strict=True):
        for key in ("critic/vf_loss", "critic/vf_explained_var", "reward/mean", "optim/loss"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, nan_ok=True), (a["update"], key)


def metrics_of(run):
    return [json.loads(line) for line in (run / "arms/ppo/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("wanted", [{"critic": {"shared": True}}, {"optim": {"gradient_norms": "exact"}}])
def test_what_needs_whole_weights_is_refused_where_they_are_sharded(wanted):
    launched = Mock(Accelerator, distributed_type=DistributedType.FSDP, num_processes=2, gradient_accumulation_steps=1)
    optim = {"advantage": "gae" if "critic" in wanted else "opob", **wanted.get("optim", {})}
    with pytest.raises(RecipeError, match="needs whole weights in every process"):
        _check_launch(small_recipe(**{**wanted, "optim": optim}), launched)
