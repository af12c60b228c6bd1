"""One optimizer step: the same gradient however the batch is cut, bounded memory, safe refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator

from offdrift.advantages import advantages
from offdrift.engines.score import chunks, left_right_padded, score
from offdrift.engines.transformers import TransformersEngine
from offdrift.errors import EngineError
from offdrift.methods import METHODS, override
from offdrift.rollouts import Sampling
from offdrift.stats import summarize
from offdrift.train.assess import assess
from offdrift.train.models import tiny_qwen3_config
from offdrift.train.step import Batch, train_step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# thresholds that keep some of the batch below and reject some
GATES = {"trm_max": {"gate.high": 0.02}, "trm_avg_k3": {"gate.high": 0.01}}


@pytest.fixture(scope="module")
def world():
    """A tiny model, and a ragged batch that a stale, coarser copy of it has sampled."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = tiny_qwen3_config()
    config.num_hidden_layers, config.initializer_range = 2, 0.15
    model = Qwen3ForCausalLM(config)
    stale = copy.deepcopy(model)
    with torch.no_grad():
        for p in stale.parameters():
            p += 0.02 * p.std() * torch.randn_like(p)
    engine = TransformersEngine(stale, dtype="bfloat16")
    prompts = [[5, 6, 7][: 1 + i % 3] for i in range(12)]
    sampling = Sampling(max_tokens=9, stop_token_ids=tuple(range(10)))
    rollouts = engine.generate(prompts, sampling, seed=1, evidence="full")
    assert len(set(rollouts.lengths.tolist())) > 3
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(12) // 4
    rollouts = rollouts.with_(rewards=rewards, group_ids=groups)
    return model, Batch(rollouts, advantages(rewards, rollouts.segments))


def step(world, name: str, *, token_budget: int, **options):
    model, batch = copy.deepcopy(world[0]), world[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator = Accelerator(cpu=True)
    row = override(METHODS[name], GATES.get(name, {}))
    if row.needs_old:
        batch = Batch(
            batch.rollouts, batch.advantages, assess(model, batch.rollouts, token_budget=64)
        )
    update = train_step(
        accelerator, model, optimizer, batch, row,
        token_budget=token_budget, max_grad_norm=1e9, **options,
    )  # fmt: skip
    return model, update


@pytest.mark.parametrize("name", ["none", "token_tis", "seq_tis", "trm_max", "trm_avg_k3"])
@pytest.mark.parametrize("token_budget", [1, 30, 64])
def test_accumulation_by_token_budget_gives_the_gradient_of_one_big_batch(
    world, name, token_budget
):
    whole, once = step(world, name, token_budget=10_000)
    cut, many = step(world, name, token_budget=token_budget)
    assert len(list(chunks(world[1].rollouts, token_budget=token_budget))) > 1
    compared = 0
    for a, b, start in zip(whole.parameters(), cut.parameters(), world[0].parameters()):
        torch.testing.assert_close(a - start, b - start, rtol=1e-3, atol=2e-6)
        compared += a.numel()
    assert compared > 200_000
    assert (
        max((a - b).abs().max() for a, b in zip(whole.parameters(), world[0].parameters())) > 1e-3
    )
    expected, got = summarize(once.stats), summarize(many.stats)
    assert got.keys() == expected.keys()
    for key in expected:
        assert got[key] == pytest.approx(expected[key], rel=2e-3, abs=1e-5, nan_ok=True), key


@pytest.mark.parametrize("name", GATES)
def test_the_gates_of_these_tests_keep_some_and_reject_some(world, name):
    _, update = step(world, name, token_budget=64)
    assert 0 < summarize(update.stats)["gate/acceptance_seq"] < 1


def test_every_sequence_is_scored_exactly_once(world):
    rollouts = world[1].rollouts
    for budget in (1, 25, 64, 1000):
        pieces = list(chunks(rollouts, token_budget=budget))
        assert sorted(torch.cat(pieces).tolist()) == list(range(12))
        for piece in pieces:
            padded = left_right_padded(rollouts.select(piece))
            assert padded.ids.numel() <= budget or len(piece) == 1


def test_the_view_shows_each_token_in_the_batchs_order(world):
    model, batch = world
    _, update = step(world, "trm_max", token_budget=30, view=True)
    assert update.tokens is not None
    row = override(METHODS["trm_max"], {"gate.high": 0.02})
    from offdrift.engines.score import divergences

    with torch.no_grad():
        kl = divergences(batch.rollouts, score(model, batch.rollouts).logits)[
            "kl_rollout_current"
        ].lo
    torch.testing.assert_close(update.tokens.kl, kl, rtol=1e-3, atol=1e-6)
    worst = batch.rollouts.segments.max(kl)
    kept = batch.rollouts.segments.max(update.tokens.keep.float()) > 0
    assert kept.tolist() == (worst <= row.correction.gates[0].high).tolist()


def test_rejecting_everything_takes_a_step_of_zero(world):
    model, update = copy.deepcopy(world[0]), None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    row = override(METHODS["trm_max"], {"gate.high": 0.0})
    update = train_step(Accelerator(cpu=True), model, optimizer, world[1], row, token_budget=64, max_grad_norm=1.0)  # fmt: skip
    found = summarize(update.stats)
    assert found["gate/acceptance_seq"] == 0.0
    assert found["optim/loss"] == found["optim/grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), world[0].parameters()))


def test_a_gradient_that_is_no_number_stops_before_the_weights_change(world, monkeypatch):
    model = copy.deepcopy(world[0])
    next(model.parameters()).register_hook(lambda g: g * float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(EngineError, match="gradient norm is nan; the step was not taken"):
        train_step(Accelerator(cpu=True), model, optimizer, world[1], METHODS["none"], token_budget=64, max_grad_norm=1.0)  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), world[0].parameters()))


def test_old_log_probs_are_the_models_own_whatever_the_pieces(world):
    model, batch = world
    with torch.no_grad():
        expected = score(model.eval(), batch.rollouts).logp
    for budget in (20, 1000):
        torch.testing.assert_close(assess(model, batch.rollouts, token_budget=budget).logp, expected, rtol=1e-4, atol=1e-5)  # fmt: skip
