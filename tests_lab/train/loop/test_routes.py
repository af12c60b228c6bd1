"""Routing replay in training: the gradient, however it is computed; recipes that cannot act; whole runs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from offdrift import models
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.routing import (
    Choices,
    at_predictions,
    flips,
    replayed,
    route_lengths,
    router_biases,
    routers,
    routes_of,
    routing_sums,
    rule_of,
)
from offdrift.engines.score import chunks, score
from offdrift.errors import EngineError, RecipeError
from offdrift.methods import METHODS
from offdrift.models import tiny_qwen3_moe_config
from offdrift.records import Sampling
from offdrift.records.rollouts import Routes
from offdrift.records.store import read
from offdrift.stats import summarize
from offdrift.stats.drift import DriftStats
from offdrift.stats.formulas import MARGIN_BINS, margin_counts
from offdrift.stats.metrics import METRICS
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.old_policy import BatchStart, gradient_norms, score_batch
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows, weights
from tests_lab.train.loop.test_processes import WHITENED, check_step_of_two_processes, two_processes
from tests_lab.train.steps import stepped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LAYERS = 3


def smaller() -> Qwen3MoeConfig:
    config = tiny_qwen3_moe_config()
    config.hidden_size, config.moe_intermediate_size, config.initializer_range = 32, 16, 0.2
    return config


@pytest.fixture(scope="module")
def world() -> tuple[nn.Module, Batch]:
    """A mixture of experts, and a ragged batch that other weights of it drew, with their routes."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(smaller()).eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.1 * p.std() * torch.randn_like(p)
    engine = TransformersEngine(other, dtype="bfloat16", record_routes=True)
    prompts = [[5, 6, 7][: 1 + i % 3] for i in range(12)]
    sampling = Sampling(max_tokens=9, stop_token_ids=tuple(range(10)))
    rollouts = engine.generate(prompts, sampling, seed=1, evidence="full")
    rollouts = rollouts.with_(rewards=torch.arange(12.0) % 5, group_ids=torch.arange(12) // 4)
    assert len(set(rollouts.lengths.tolist())) > 3
    advantages = torch.randn(len(rollouts.tokens), generator=torch.Generator().manual_seed(0))
    return model, Batch(rollouts=rollouts, advantages=advantages, replays=True)


def gradients(model: nn.Module, batch: Batch, *, token_budget: int = 10_000, method: str = "none") -> dict[str, Tensor]:
    """What a step of SGD takes off every weight."""
    moved = copy.deepcopy(model)
    optimizer = torch.optim.SGD(moved.parameters(), lr=1.0)
    options: dict[str, Any] = {"token_budget": token_budget, "max_grad_norm": 1e9}
    stepped(Accelerator(cpu=True), moved, optimizer, batch, METHODS[method], **options)
    assert not any(m._forward_hooks for m in routers(moved))
    return {n: p.detach() - dict(model.named_parameters())[n].detach() for n, p in moved.named_parameters()}


def check_same(a: dict[str, Tensor], b: dict[str, Tensor], *, rtol: float = 1e-4) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].abs().max() > 0, name
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * float(a[name].abs().max()), msg=name)


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference among the weights."""
    return max(float((a[n] - b[n]).norm() / a[n].norm()) for n in a)


def test_its_own_routes_change_neither_log_probs_nor_gradient(world):
    model, batch = world
    own = routes_of(model, batch.rollouts)
    assert flips(own.experts, batch.rollouts.routes.experts).float().mean() > 0.05
    rollouts = batch.rollouts.with_(routes=own)
    plain = score_batch(model, rollouts, token_budget=40)
    same = score_batch(model, rollouts, token_budget=40, replays=True)
    torch.testing.assert_close(same.logp, plain.logp, atol=1e-5, rtol=0)
    free = gradients(model, replace(batch, replays=False))
    check_same(gradients(model, replace(batch, rollouts=rollouts)), free)
    assert far(gradients(model, batch), free) > 0.05


def test_without_replay_flips_are_in_the_staleness(world):
    """Of one pair of policies whose routers differ a little: replayed, log-probs move as little as gates do."""
    model, batch = world
    rollouts = batch.rollouts.with_(routes=routes_of(model, batch.rollouts))
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for router in routers(moved):
            router.weight += 0.02 * router.weight.std() * torch.randn(router.weight.shape, generator=generator)
    old = score_batch(model, rollouts, token_budget=40).logp
    free = score_batch(moved, rollouts, token_budget=40).logp - old
    replays = score_batch(moved, rollouts, token_budget=40, replays=True).logp - old
    flipped = flips(routes_of(moved, rollouts).experts, rollouts.routes.experts).any(1)
    before = torch.cat([one.cummax(0).values for one in flipped.split(route_lengths(rollouts).tolist())])
    reached = at_predictions(rollouts, before)
    assert 0.1 < reached.float().mean() < 0.9
    torch.testing.assert_close(free[~reached], replays[~reached], atol=1e-5, rtol=0)
    assert (free - replays)[reached].abs().median() > 1e-4
    assert replays.square().mean() < 0.3 * free.square().mean()


def test_the_gradient_is_that_of_finite_differences(world):
    """Along every router's weights, and along experts': central differences under imposed routes."""
    model, batch = copy.deepcopy(world[0]), world[1].rollouts
    upstream = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(1))

    def value() -> Tensor:
        with replayed(model, batch, batch.routes):
            total = (score(model, batch).logp * upstream).sum()
            if total.requires_grad:
                total.backward()
            return total.detach()

    value()
    checked = {n: p for n, p in model.named_parameters() if "gate.weight" in n or "down_proj" in n or "o_proj" in n}
    assert len(checked) == 3 * LAYERS
    for name, p in checked.items():
        assert p.grad is not None
        slope = p.grad.norm()
        assert slope > 1e-2
        direction, start = p.grad / slope, p.detach().clone()
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                p.copy_(start + sign * 1e-2 * direction)
                sides.append(value())
        p.data.copy_(start)
        assert float((sides[0] - sides[1]) / 2e-2) == pytest.approx(float(slope), rel=1e-2), name


@pytest.mark.parametrize("token_budget", [1, 40])
def test_pieces_give_the_gradient_of_the_whole_batch(world, token_budget):
    model, batch = world
    assert len(list(chunks(batch.rollouts, token_budget=token_budget))) > 2
    check_same(gradients(model, batch, token_budget=token_budget), gradients(model, batch), rtol=2e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("freeze", [False, True])
def test_activations_computed_again_take_the_same_experts(world, reentrant, freeze):
    """Outside of the context, the backward pass would choose experts anew."""
    model, batch = copy.deepcopy(world[0]), world[1]
    if freeze:
        old = score_batch(world[0], batch.rollouts, token_budget=40, note_routes=True, note_gates=True)
        batch = replace(batch, rollouts=batch.rollouts.with_(routes=old.routes))
        with torch.no_grad():
            for router in routers(model):
                router.weight += 0.2 * router.weight.std() * torch.randn_like(router.weight)
    expected = gradients(model, batch, token_budget=40)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    got = gradients(model, batch, token_budget=40)
    trained = {n for n in expected if not (freeze and "gate.weight" in n)}
    check_same({n: got[n] for n in trained}, {n: expected[n] for n in trained})


def test_methods_that_look_ahead_look_at_the_replayed_policy(world):
    model, batch = world
    check_same(
        gradients(model, batch, token_budget=40, method="normalized_tis"),
        gradients(model, batch, method="normalized_tis"),
        rtol=2e-4,
    )


def test_exact_gradient_norms_are_those_of_the_replayed_policy(world):
    model, batch = world
    first = batch.rollouts.select(torch.arange(2))
    free, led = (gradient_norms(model, first, replays=r) for r in (False, True))
    assert ((free - led).abs() / free).max() > 1e-3
    one = first.select(torch.tensor([1]))
    with replayed(model, one, one.routes):
        score(model, one).logp.sum().backward()
    total = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    assert float(led[1]) == pytest.approx(total, rel=1e-4)


def test_routes_of_the_old_pass_are_those_of_its_weights(world):
    model, batch = world
    expected = routes_of(model, batch.rollouts)
    old = BatchStart(Accelerator(cpu=True), Path())
    scores = old.score(model, batch.rollouts, 0, token_budget=40, note_routes=True, note_gates=True)
    assert scores.routes is not None
    assert torch.equal(scores.routes.experts, expected.experts)
    assert torch.equal(scores.routes.cu_seqlens, expected.cu_seqlens)
    assert scores.routes.gates is not None
    torch.testing.assert_close(scores.routes.gates.sum(-1), torch.ones(len(expected.experts), LAYERS))
    part = scores.routes.select(torch.tensor([3, 1]))
    assert part.gates is not None
    assert part.gates.shape == part.experts.shape
    assert old.score(model, batch.rollouts, 0, token_budget=40).routes is None


def test_frozen_gates_leave_routers_without_a_gradient_and_keep_their_weights(world):
    """At the old weights nothing changes; at other routers, the old policy's log-probs are still given."""
    model, batch = copy.deepcopy(world[0]), world[1]
    old = score_batch(model, batch.rollouts, token_budget=40, note_routes=True, note_gates=True)
    rollouts = batch.rollouts.with_(routes=old.routes)
    moved = gradients(model, replace(batch, rollouts=rollouts), token_budget=40)
    names = [n for n in moved if "gate.weight" in n]
    assert len(names) == LAYERS
    assert all(moved[n].abs().max() == 0 for n in names)
    assert all(x.abs().max() > 0 for n, x in moved.items() if n not in names)
    with torch.no_grad():
        for router in routers(model):
            router.weight.copy_(torch.randn_like(router.weight))
    same = score_batch(model, rollouts, token_budget=40, replays=True)
    torch.testing.assert_close(same.logp, old.logp, atol=1e-5, rtol=0)
    rollouts = batch.rollouts.with_(routes=replace(old.routes, gates=None))
    led = score_batch(model, rollouts, token_budget=40, replays=True)
    assert (led.logp - old.logp).abs().max() > 0.01


def test_routes_of_another_batch_are_refused(world):
    model, batch = world
    short = batch.rollouts.select(torch.arange(5))
    with (
        pytest.raises(EngineError, match=r"routes of \d+ positions, the batch has"),
        replayed(model, short, batch.rollouts.routes),
    ):
        pass


def test_metrics_are_those_of_a_hand_computation(world):
    """Margins of 1/4, -1, 3/8 and 2 are in octaves -2, the lowest, -2 and 1."""
    rollouts = world[1].rollouts.select(torch.tensor([0]))
    rollouts = rollouts.with_(routes=Routes(torch.tensor([[[0, 1]], [[2, 3]]]), torch.tensor([0, 2])))
    rollouts = rollouts.with_(
        tokens=torch.tensor([4, 5]), logp_rollout=torch.zeros(2), cu_seqlens=torch.tensor([0, 2]),
        prompt_tokens=torch.tensor([1]), prompt_cu_seqlens=torch.tensor([0, 1]),
    )  # fmt: skip
    choices = Choices(1)
    logits = torch.tensor([[3.0, 2.0, 1.5, 0.0], [1.0, 3.0, 2.0, 0.0]])
    choices.note(0, logits, torch.ones(2, 2), torch.tensor([[1, 0], [1, 2]]))
    assert choices.margins.flatten().tolist() == [0.5, 1.0]
    assert at_predictions(rollouts, torch.tensor([False, True])).tolist() == [False, True]
    kl = torch.tensor([0.25, 4.0])
    sums = routing_sums(choices, rollouts, replays=False, kl=kl)
    metrics = summarize(_stats(sums))
    expected = {
        "flip_frac": 0.5, "flipped_tokens_frac": 0.5, "delta_router": 0.25, "margin_mean": 0.75,
        "kl_at_flips": 4.0, "kl_elsewhere": 0.25, "bytes_per_token": 2 * 2 * 8 / 2,
    }  # fmt: skip
    for name, value in expected.items():
        assert metrics[f"router/{name}"] == pytest.approx(value), name
    assert "router/delta_router" not in summarize(_stats(routing_sums(choices, rollouts, replays=True, kl=kl)))
    counts = margin_counts(torch.tensor([0.25, -1.0, 0.375, 2.0]))
    assert {i: int(n) for i, n in enumerate(counts) if n} == {0: 1, 14: 2, 17: 1}
    assert len(counts) == MARGIN_BINS
    quantile = METRICS["router/margin_p01"].value
    assert quantile({f"router/margin_bin_{i}": float(100 * (i == 14)) for i in range(MARGIN_BINS)}) == pytest.approx(
        2.0 ** (-2 + 0.01)
    )


def _stats(sums: dict[str, Tensor]) -> DriftStats:
    """Statistics of two tokens with these sums beside them."""
    none = torch.zeros(0, dtype=torch.float64)
    return DriftStats(("n",), torch.tensor([2.0]).double(), (), none, (), none, {}).plus(sums)


SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "qwen3, normalized": Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8,
                                        norm_topk_prob=True),
    "qwen3": Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2),
    "gpt-oss": GptOssConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
    "deepseek, scaled": DeepseekV3Config(
        **{**SMALL, "first_k_dense_replace": 1, "head_dim": 4}, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, moe_intermediate_size=8, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        routed_scaling_factor=2.5,
    ),
    "ernie": Ernie4_5_MoeConfig(**SMALL, moe_num_experts=8, moe_k=2, moe_intermediate_size=8, moe_layer_start_index=0),
}  # fmt: skip


def family(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(FAMILIES[name], dtype=torch.float32).eval()


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "ernie"])
def test_routers_of_several_families_are_led(world, name):
    """Own routes give own log-probs, whatever the activation, scale or bias of the choice; other routes do not."""
    model = family(name)
    for buffer, bias in model.named_buffers():
        if "correction_bias" in buffer:
            bias += torch.randn(len(bias)) * 0.3
    rollouts = world[1].rollouts.select(torch.arange(4))
    rollouts = rollouts.with_(tokens=rollouts.tokens % 32)
    own = routes_of(model, rollouts)
    plain = score_batch(model, rollouts, token_budget=999)
    same = score_batch(model, rollouts.with_(routes=own), token_budget=999, replays=True)
    torch.testing.assert_close(same.logp, plain.logp, atol=2e-5, rtol=0)
    others = replace(own, experts=(own.experts + 1) % 8)
    led = score_batch(model, rollouts.with_(routes=others), token_budget=999, replays=True)
    assert (led.logp - plain.logp).abs().max() > 1e-3


def test_the_rule_of_a_router_is_told_apart():
    rules = {name: rule_of(routers(family(name))[0]) for name in ("qwen3, normalized", "qwen3", "deepseek, scaled")}
    assert rules["qwen3, normalized"] == ("softmax", True, 1.0)
    assert rules["qwen3"] == ("softmax", False, 1.0)
    assert rules["deepseek, scaled"] == ("sigmoid", True, 2.5)


def test_biases_of_routers_are_found_where_there_are_any():
    biases = router_biases(family("gpt-oss"))
    assert [tuple(b.shape) for b in biases] == [(8,), (8,)]
    with pytest.raises(EngineError, match="have no bias"):
        router_biases(family("qwen3"))
    with pytest.raises(EngineError, match="buffers, which this trainer never changes"):
        router_biases(family("deepseek, scaled"))
    with pytest.raises(EngineError, match="no mixture of experts"):
        router_biases(nn.Linear(2, 2))


R3, R2 = {"routes": "rollout"}, {"routes": "old"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replay": R2}, "and this arm makes none"),
        ({"replay": R2, "arms": {"a": {"method": "decoupled_token_is"}}, "lag": {}}, "does nothing: every batch"),
        ({"replay": {**R3, "freeze_gates": True}}, 'set replay.routes = "old"'),
        ({"replay": {"freeze_gates": True}}, "arms.trm_max: replay.freeze_gates"),
        ({"replay": R3, "pipeline": {}, "lag": {}}, r"with \[pipeline\]"),
        ({"replay": R3, "rollout__engine": "openai", "rollout__url": "http://x/v1"}, 'rollout.engine = "openai"'),
        ({"replay": R3, "task": "echo", "rollout__max_turns": 2}, "episodes"),
        ({"replay": {"freeze_router_bias": True}, "lora": {}}, r"does nothing with \[lora\]"),
        ({"replay": {"routes": "engine"}}, "replay.routes"),
        ({"arms": {"a": {"method": "none", "replay": R2}}}, "arms.a: replay.routes"),
    ],
)
def test_recipes_whose_replay_cannot_act_are_refused(changes, words):
    if changes.get("task") == "echo":
        changes = {**changes, "task": "calculator"}
    with pytest.raises(RecipeError, match=words):
        small_recipe(**changes)


@pytest.mark.parametrize(
    ("model", "replay", "words"),
    [
        ("tiny-qwen3", R3, 'arms.trm_max: replay.routes = "rollout": Qwen3ForCausalLM has no routers'),
        ("tiny-qwen3-moe", {"freeze_router_bias": True}, "routers of Qwen3MoeForCausalLM have no bias"),
    ],
)
def test_models_whose_routers_cannot_be_led_are_refused_before_training(tmp_path, digits, model, replay, words):
    recipe = small_recipe(model=model, replay=replay)
    with pytest.raises(RecipeError, match=words):
        train(recipe, tmp_path / "run")
    assert not list((tmp_path / "run").glob("arms/*"))


def test_router_biases_stay_where_they_were(tmp_path, digits, monkeypatch):
    short_arms(monkeypatch)
    config = copy.deepcopy(FAMILIES["gpt-oss"])
    config.vocab_size, config.eos_token_id, config.pad_token_id = 64, 1, 0
    start = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    models.save_for_engine(start, models.tiny_tokenizer(), tmp_path / "start")
    arms = {"free": {"method": "none"}, "kept": {"method": "none", "replay": {"freeze_router_bias": True}}}
    train(small_recipe(model=str(tmp_path / "start"), arms=arms, batches=1, lag={}), tmp_path / "run")
    before = [b.clone() for b in router_biases(start)]
    for arm in arms:
        trained = models.load_model(str(tmp_path / "run" / "arms" / arm / "model"), seed=0)[0]
        same = [torch.equal(a, b) for a, b in zip(before, router_biases(trained), strict=True)]
        assert same == [arm == "kept"] * 2, arm
        assert not torch.equal(routers(trained)[0].weight, routers(start)[0].weight)


ARMS = {
    "none": {"method": "decoupled_token_is", "replay": {"routes": "record"}},
    "r2": {"method": "decoupled_token_is", "replay": R2},
    "frozen": {"method": "decoupled_token_is", "replay": {**R2, "freeze_gates": True}},
    "r3": {"method": "decoupled_token_is", "replay": R3},
}


def recipe_of_arms(**changes: Any):
    changes = {"arms": ARMS, "model": "tiny-qwen3-moe", "batches": 4, "optim__lr": 3e-3, **changes}
    return small_recipe(**{"optim__minibatches": 2, "lag": {}, "certificate__looks": "once", **changes})


@pytest.fixture
def short(monkeypatch, digits) -> None:
    short_arms(monkeypatch)
    monkeypatch.setattr(models, "tiny_qwen3_moe_config", smaller)


@pytest.fixture
def finished(tmp_path, short) -> Path:
    train(recipe_of_arms(), tmp_path / "whole")
    return tmp_path / "whole"


def test_a_run_replays_what_its_arms_say_and_resumes_bit_for_bit(finished, tmp_path, monkeypatch):
    by_arm = {arm: rows(finished, arm) for arm in ARMS}
    first = {arm: r[0] for arm, r in by_arm.items()}
    # Of one batch by the same weights: R3 has the engine's experts in every pass, R2 its own in both.
    assert first["r3"]["divergence/kl_rollout_current_mean"] < 0.7 * first["none"]["divergence/kl_rollout_current_mean"]
    assert first["none"]["router/flip_frac"] > 0
    assert first["none"]["router/kl_at_flips"] > 2 * first["none"]["router/kl_elsewhere"]
    assert first["none"]["router/delta_router"] > 0
    assert "router/delta_router" not in first["r3"]
    assert first["r2"]["router/flip_frac"] == 0
    for arm, r in by_arm.items():
        assert abs(r[0]["staleness/abs_log_ratio_max"]) < 1e-5, arm
    # In the second update on a batch the weights have moved, and routers would choose anew: where routes are replayed,
    # they do not get to.
    for arm, r in by_arm.items():
        assert all(second["router/flip_frac"] > first["router/flip_frac"] for first, second in zip(r[::2], r[1::2])), (
            arm
        )
        assert all(("router/delta_router" in row) == (arm == "none") for row in r), arm
    start = dict(models.load_model("tiny-qwen3-moe", seed=0)[0].named_parameters())
    for arm in ARMS:
        gates = [(w - start[n]).abs().max() for n, w in weights(finished, arm).items() if "gate.weight" in n]
        assert len(gates) == LAYERS
        assert (max(gates) == 0) == (arm == "frozen"), arm
    stored = read(finished / "arms" / "r3" / "rollouts" / "batch-000000.parquet")
    assert stored.routes is not None
    size = sum(r["router/bytes_per_token"] * r["batch/tokens"] for r in by_arm["r3"][:2])
    assert size == pytest.approx(len(stored.routes.experts) * LAYERS * 4)

    def stop(event) -> None:
        if event.kind == "update" and event.step == 5:
            raise KeyboardInterrupt

    for arm in ("r2", "r3"):
        cut = tmp_path / f"cut-{arm}"
        recipe = recipe_of_arms(arms={arm: ARMS[arm]})
        with pytest.raises(KeyboardInterrupt):
            train(recipe, cut, watch=stop)
        train(recipe, cut, resume=True)
        assert (json.loads((cut / "arms" / arm / "summary.json").read_text())["updates"]) == 8
        assert rows(cut, arm) == rows(finished, arm)
        assert all(torch.equal(w, weights(finished, arm)[n]) for n, w in weights(cut, arm).items())


@pytest.mark.slow
def test_two_processes_replay_what_one_replays(tmp_path, digits, monkeypatch):
    short_arms(monkeypatch)
    arms = {"r3": {"method": "token_tis", "replay": R3}}
    changes = {"arms": arms, "model": "tiny-qwen3-moe", "batches": 1, "optim": WHITENED}
    run = two_processes(tmp_path / "two", changes)
    halves = check_step_of_two_processes(run, "r3", changes)
    assert all(half.routes is not None for half in halves)
    assert rows(run, "r3")[0]["router/flip_frac"] > 0
