"""Compressed KV caches: what the engine lets go, the record of it, its replay in training, and the distillation."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offdrift.engines.hf import TransformersEngine
from offdrift.engines.hf_cache import EvictingLayer
from offdrift.engines.retention import (
    attention_modules,
    distillation,
    imposed,
    need_led,
    retention_sums,
    sampled_distillation,
)
from offdrift.engines.score import chunks, computed_cells, divergences, left_right_padded, score
from offdrift.errors import EngineError, RecipeError
from offdrift.methods import METHODS
from offdrift.records import Sampling
from offdrift.records.provenance import Eviction
from offdrift.records.rollouts import Rollouts
from offdrift.records.store import read
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.loop.old_policy import score_batch
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows, weights
from tests_lab.train.loop.test_processes import WHITENED, check_step_of_two_processes, two_processes
from tests_lab.train.loop.test_routes import check_same, far
from tests_lab.train.steps import stepped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW, ATTENTION = Eviction("window", 6, 2), Eviction("attention", 6, 3)
EVICTIONS = pytest.mark.parametrize("eviction", [WINDOW, ATTENTION, Eviction("window", 5, 0)], ids=str)


def made(config: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    """Two query heads share each key-value head."""
    return made(Qwen3Config(**SMALL))


def drawn(model: Any, eviction: Eviction | None, *, batch_size: int = 64, **changes: Any) -> Rollouts:
    """Ragged prompts, shorter and longer than the budget, some of them asked several times; responses that stop."""
    engine = TransformersEngine(model, eviction=eviction, batch_size=batch_size)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13][: 1 + 2 * (i // 4) % 9] for i in range(24)]
    sampling = Sampling(**{"max_tokens": 14, "stop_token_ids": tuple(range(40, 47)), **changes})
    return engine.generate(prompts, sampling, seed=3, evidence="full")


def gap(model: nn.Module, rollouts: Rollouts) -> float:
    with torch.no_grad():
        return float((score(model, rollouts).logp - rollouts.logp_rollout).abs().max())


@EVICTIONS
def test_at_equal_weights_the_trainer_has_the_engines_log_probs(model, eviction):
    rollouts = drawn(model, eviction)
    lengths = rollouts.lengths
    assert lengths.min() == 1
    assert lengths.max() == 14
    assert gap(model, rollouts) < 2e-5
    assert gap(model, rollouts.with_(retention=None)) > 0.5
    assert rollouts.provenance.eviction == eviction
    # The record of another batch of the same shape is another policy.
    shifted = replace(rollouts.retention, visible_until=(rollouts.retention.visible_until + 1))
    assert gap(model, rollouts.with_(retention=shifted)) > 0.1


@pytest.mark.parametrize(("dtype", "evidence"), [("bfloat16", "hidden"), ("float16", 5), ("float32", "hidden")])
def test_every_precision_and_evidence_goes_with_it(model, dtype, evidence):
    """Filtered draws of an engine that rounds: what is left under the record is rounding."""
    engine = TransformersEngine(model, eviction=ATTENTION, dtype=dtype)
    rollouts = engine.generate([[5, 6, 7, 8]] * 8, Sampling(max_tokens=16, top_p=0.95), seed=0, evidence=evidence)
    with torch.no_grad():
        scored, whole = score(model, rollouts), score(model, rollouts.with_(retention=None))
    off = (scored.logp - rollouts.logp_rollout).abs().mean()
    assert off < (1e-5 if dtype == "float32" else 0.1)
    assert (whole.logp - rollouts.logp_rollout).abs().mean() > 0.5
    kl = divergences(rollouts, scored.logits)["kl_rollout_current"].lo.mean()
    assert kl < 0.1 * divergences(rollouts, whole.logits)["kl_rollout_current"].lo.mean()


def test_experts_and_keys_are_replayed_together():
    """A mixture of experts drawn in bfloat16, with a compressed cache: each record takes its part of the mismatch off."""
    model = made(Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16))
    engine = TransformersEngine(model, dtype="bfloat16", eviction=ATTENTION, record_routes=True)
    rollouts = engine.generate([[5, 6, 7, 8]] * 24, Sampling(max_tokens=12), seed=0)

    def off(rollouts: Rollouts, *, replays: bool) -> float:
        scores = score_batch(model, rollouts, token_budget=100, replays=replays)
        return float((scores.logp - rollouts.logp_rollout).abs().mean())

    both = off(rollouts, replays=True)
    assert both < 0.05
    assert off(rollouts, replays=False) > 1.5 * both
    assert off(rollouts.with_(retention=None), replays=True) > 10 * both


def test_a_budget_for_everything_changes_nothing(model):
    plain, kept = drawn(model, None), drawn(model, Eviction("window", 99, 4))
    assert torch.equal(plain.tokens, kept.tokens)
    torch.testing.assert_close(plain.logp_rollout, kept.logp_rollout, atol=1e-5, rtol=0)
    sums = retention_sums(kept)
    assert sums["kv/kept"] == sums["kv/pairs"] > 0
    assert plain.retention is None


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_window_keeps_the_first_and_the_latest_keys(model, sinks):
    """The key at place k >= sinks goes when budget - sinks later ones have been read, and not before the prompt has."""
    rollouts = drawn(model, Eviction("window", 6, sinks))
    expected = []
    for prompt, response in zip(rollouts.prompt_cu_seqlens.diff().tolist(), rollouts.lengths.tolist(), strict=True):
        n = prompt + response - 1
        expected += [n if k < sinks else min(n, max(prompt, k + 6 - sinks)) for k in range(n)]
    assert rollouts.retention.visible_until.flatten().tolist() == expected
    assert rollouts.retention.visible_until.shape[1:] == (1, 1)
    assert rollouts.retention.visible_until.dtype == torch.int16


def test_attention_lets_go_what_has_received_the_least(model):
    """A plain loop over the weights of attention, as one full pass under the recorded masks has them."""
    rollouts = drawn(model, ATTENTION)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    checked = 0
    for i in range(rollouts.num_sequences):
        one = rollouts.select(torch.tensor([i]))
        inputs, prompt = left_right_padded(one), int(one.prompt_cu_seqlens[1])
        with torch.no_grad(), imposed(eager, one.retention, inputs.positions, computed_cells(inputs)):
            by_layer = eager(input_ids=inputs.ids, output_attentions=True, use_cache=False).attentions
        n = inputs.ids.shape[1] - 1
        for layer, of_layer in enumerate(by_layer):
            for head in range(2):
                received = of_layer[0, 2 * head : 2 * head + 2].double().sum(0)  # [query, key]
                until, alive = [n] * n, list(range(prompt))
                for q in range(prompt, n):
                    alive.append(q)
                    while len(alive) > ATTENTION.budget:
                        free = [k for k in alive if k <= q - ATTENTION.protected]
                        gone = min(free, key=lambda k: float(received[:q, k].sum()))
                        alive.remove(gone)
                        until[gone] = q
                assert one.retention.visible_until[:, layer, head].tolist() == until
                checked += sum(u < n for u in until)
    assert checked > 300
    assert rollouts.retention.visible_until.shape[1:] == (3, 2)
    assert not torch.equal(rollouts.retention.visible_until[:, 0, 0], rollouts.retention.visible_until[:, 2, 1])


def test_the_cache_stays_as_large_as_its_budget(model, monkeypatch):
    sizes, update = [], EvictingLayer.update

    def watched(layer, *args, **options):
        result = update(layer, *args, **options)
        sizes.append(result[0].shape[2])
        return result

    monkeypatch.setattr(EvictingLayer, "update", watched)
    drawn(model, WINDOW)
    assert sizes[:3] == [9, 9, 9]  # the prompts, whole
    assert set(sizes[3:]) == {6}
    assert len(sizes) > 30


@EVICTIONS
def test_tokens_do_not_depend_on_what_else_is_drawn(model, eviction):
    whole = drawn(model, eviction)
    engine = TransformersEngine(model, eviction=eviction)
    again = engine.rescore(whole)
    torch.testing.assert_close(again.logp_rollout, whole.logp_rollout, atol=1e-5, rtol=0)
    assert torch.equal(again.retention.visible_until, whole.retention.visible_until)
    alone = [engine.rescore(whole.select(torch.tensor([i]))) for i in range(whole.num_sequences)]
    logp, until = torch.cat([x.logp_rollout for x in alone]), torch.cat([x.retention.visible_until for x in alone])
    torch.testing.assert_close(logp, whole.logp_rollout, atol=1e-5, rtol=0)
    assert torch.equal(until, whole.retention.visible_until)
    assert torch.equal(drawn(model, eviction, batch_size=5).tokens, whole.tokens)


FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "deepseek": DeepseekV3Config(
        **{**SMALL, "head_dim": 4, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=8,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_of_several_families_is_led(family, implementation):
    model = made(FAMILIES[family])
    model.set_attn_implementation(implementation)
    for eviction in (WINDOW, ATTENTION):
        rollouts = drawn(model, eviction)
        assert gap(model, rollouts) < 5e-5
        assert gap(model, rollouts.with_(retention=None)) > 0.2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2), "layers of its own"),
        (MistralConfig(**SMALL, sliding_window=8), "layers of its own"),
        (GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2), "0 attention modules in 2 layers"),
    ],
    ids=["gpt-oss", "mistral", "gpt2"],
)
def test_models_whose_cache_cannot_be_compressed_are_refused(config, words):
    with pytest.raises(EngineError, match=words):
        TransformersEngine(made(config), eviction=WINDOW)


def test_attention_that_does_not_follow_is_refused(model, monkeypatch):
    need_led(model)
    forward = type(attention_modules(model)[0]).forward
    blind = lambda self, *args, attention_mask, **options: forward(self, *args, attention_mask=None, **options)  # noqa: E731
    monkeypatch.setattr(type(attention_modules(model)[0]), "forward", blind)
    with pytest.raises(EngineError, match="does not follow the masks"):
        need_led(model)


def test_caches_and_records_that_do_not_fit_are_refused(model):
    with pytest.raises(EngineError, match="protected = 6 of budget = 6"):
        TransformersEngine(model, eviction=Eviction("window", 6, 6))
    engine = TransformersEngine(model, eviction=WINDOW)
    with pytest.raises(EngineError, match="which streams do not"):
        engine.open_stream(Sampling(max_tokens=3))
    rollouts = drawn(model, ATTENTION)
    other = replace(rollouts.retention, visible_until=rollouts.retention.visible_until[:, :2])
    with pytest.raises(EngineError, match="retention of 2 layers, the model has 3"):
        score(model, rollouts.with_(retention=other))
    with pytest.raises(EngineError, match="positions, the batch has"):
        score(model, rollouts.with_(retention=rollouts.retention.select(torch.arange(3))))
    assert not any(m._forward_pre_hooks for m in attention_modules(model))


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(model) -> Batch:
    """A ragged batch that other weights drew with the attention policy."""
    other = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for p in other.parameters():
            p += 0.05 * p.std() * torch.randn_like(p) if p.ndim > 1 else 0
    rollouts = drawn(other, ATTENTION).select(torch.arange(0, 24, 2))
    rollouts = rollouts.with_(rewards=torch.arange(12.0) % 5, group_ids=torch.arange(12) // 4)
    noise = torch.randn(len(rollouts.tokens), generator=torch.Generator().manual_seed(0))
    return Batch(rollouts=rollouts, advantages=noise)


def gradients(model: Any, batch: Batch, *, token_budget: int = 10_000, **options: Any) -> dict[str, Tensor]:
    """What a step of SGD adds to every weight, less 0: the negative gradient."""
    moved = copy.deepcopy(model)
    optimizer = torch.optim.SGD(moved.parameters(), lr=1.0)
    options = {"token_budget": token_budget, "max_grad_norm": 1e9, **options}
    update = stepped(Accelerator(cpu=True), moved, optimizer, batch, METHODS["none"], **options)
    assert not any(m._forward_pre_hooks for m in attention_modules(moved))
    assert update.stats is not None
    return {n: p.detach() - dict(model.named_parameters())[n].detach() for n, p in moved.named_parameters()}


def test_the_gradient_is_that_of_finite_differences(model, batch):
    """Under imposed masks, along projections of every layer; norms and rotations stay in float32."""
    model, rollouts = copy.deepcopy(model).double(), batch.rollouts
    upstream = torch.randn(len(rollouts.tokens), generator=torch.Generator().manual_seed(1)).double()
    (score(model, rollouts).logp * upstream).sum().backward()
    checked = {n: p for n, p in model.named_parameters() if any(x in n for x in ("q_proj", "k_proj", "v_proj"))}
    assert len(checked) == 9
    for name, p in checked.items():
        slope, start = p.grad.norm(), p.detach().clone()
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                p.copy_(start + sign * 1e-3 * p.grad / slope)
                sides.append(float((score(model, rollouts).logp * upstream).sum()))
        p.data.copy_(start)
        assert (sides[0] - sides[1]) / 2e-3 == pytest.approx(float(slope), rel=1e-3), name


@pytest.mark.parametrize("distill", [0.0, 0.3])
def test_pieces_give_the_gradient_of_the_whole_batch(model, batch, distill):
    batch = replace(batch, distill=distill)
    assert len(list(chunks(batch.rollouts, token_budget=60))) > 2
    check_same(gradients(model, batch, token_budget=60), gradients(model, batch), rtol=2e-4)


@pytest.mark.parametrize("distill", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_computed_again_see_the_same_keys(model, batch, reentrant, distill):
    model, batch = copy.deepcopy(model), replace(batch, distill=distill)
    expected = gradients(model, batch, token_budget=60)
    assert (
        far(gradients(model, replace(batch, rollouts=batch.rollouts.with_(retention=None), distill=0)), expected) > 0.1
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    check_same(gradients(model, batch, token_budget=60), expected)


# --- distillation ----------------------------------------------------------------------------------------------------


def test_the_terms_are_the_sources_and_their_gradients_reach_the_dense_policy_alone():
    dense = torch.tensor([-0.5, -1.2, -0.9], dtype=torch.float64, requires_grad=True)
    shadow = torch.tensor([-0.6, -1.0, -1.1], dtype=torch.float64, requires_grad=True)
    k3 = sampled_distillation(dense, shadow)
    torch.testing.assert_close(k3, torch.tensor([0.00483742, 0.02140276, 0.01873075]).double(), atol=1e-8, rtol=0)
    k3.sum().backward()
    assert shadow.grad is None
    torch.testing.assert_close(dense.grad, 1 - (shadow - dense).exp().detach())
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 7, generator=g, dtype=torch.float64) for _ in range(2))
    a[:, 2] = b[:, 2] = -torch.inf
    b.requires_grad_()
    out = torch.tensor([2])  # a token that the sampler's filters left out
    masked = lambda x: distillation(x.index_fill(1, out, -torch.inf), b.detach())  # noqa: E731
    assert torch.autograd.gradcheck(masked, a.index_fill(1, out, 0.0).requires_grad_())
    distillation(a.requires_grad_(), b).sum().backward()
    assert b.grad is None
    assert a.grad.abs().max() > 0
    p, q = a.detach().softmax(-1), b.detach().softmax(-1)
    by_hand = torch.special.xlogy(p, p / q.where(q > 0, 1.0)).sum(-1)
    torch.testing.assert_close(distillation(a, b).detach(), by_hand)
    assert (distillation(a, a).detach().abs() < 1e-15).all()


@pytest.mark.parametrize("by", ["exact", "k3"])
def test_a_step_adds_the_terms_gradient(model, batch, by):
    """The step with the term, less the step without, is the term's gradient, from passes of the test's own."""
    rollouts, weight = batch.rollouts, 0.7
    less = gradients(model, batch)
    more = gradients(model, replace(batch, distill=weight, distill_by=by), token_budget=60)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        shadow = score(plain, rollouts)
    dense = score(plain, rollouts.with_(retention=None), keep_graph=True)
    if by == "exact":
        logp, target = dense.logits.log_softmax(-1), shadow.logits.log_softmax(-1)
        term = (logp.exp() * (logp - target)).sum()
    else:
        d = shadow.logp - dense.logp
        term = (d.exp() - 1 - d).sum()
    (weight * term / len(rollouts.tokens)).backward()
    got = {n: more[n] - less[n] for n in more}
    check_same(got, {n: -p.grad for n, p in plain.named_parameters()}, rtol=1e-3)
    update = stepped(
        Accelerator(cpu=True),
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.0),
        replace(batch, distill=weight, distill_by=by),
        METHODS["none"],
        token_budget=60,
        max_grad_norm=1e9,
    )
    host = update.stats.to_host()
    assert host["kv/distill"] == pytest.approx(float(term.detach()), rel=1e-4)


# --- whole runs ------------------------------------------------------------------------------------------------------

KV = {"policy": "attention", "budget": 5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replay": {"kv": False}}, "replay.kv = false does nothing: the engine's cache keeps every key"),
        ({"replay": {"distill": 0.1}}, "replay.distill = 0.1 does nothing"),
        ({"rollout__kv": KV, "replay": {"distill": 0.1, "kv": False}}, "leave one of the two out"),
        ({"rollout__kv": KV, "replay": {"distill_by": "k3"}}, "does nothing without replay.distill"),
        ({"rollout__kv": KV, "replay": {"distill": 0.1}, "optim__perturb": {}}, "with optim.perturb"),
        ({"rollout__kv": {**KV, "sinks": 2}}, 'rollout.kv.sinks = 2 does nothing with rollout.kv.policy = "attention"'),
        (
            {"rollout__kv": {"budget": 5, "recent": 2}},
            'rollout.kv.recent = 2 does nothing with rollout.kv.policy = "win',
        ),
        ({"rollout__kv": {**KV, "recent": 5}}, "rollout.kv.recent = 5 leaves no key of rollout.kv.budget = 5"),
        ({"rollout__kv": {"policy": "window"}}, "rollout.kv.budget is missing"),
        ({"rollout__kv": KV, "rollout__engine": "vllm"}, 'with rollout.engine = "vllm"'),
        ({"rollout__kv": KV, "pipeline": {}, "lag": {}}, r"with \[pipeline\]"),
        ({"rollout__kv": KV, "task": "calculator", "rollout__max_turns": 2}, "episodes are read anew"),
    ],
)
def test_recipes_that_cannot_act_are_refused(changes, words):
    with pytest.raises(RecipeError, match=words):
        small_recipe(**changes)


def test_a_model_that_cannot_be_led_is_refused_before_training(tmp_path, digits):
    from offdrift.models import save_for_engine, tiny_tokenizer

    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, eos_token_id=1, pad_token_id=0)
    save_for_engine(made(config), tiny_tokenizer(), tmp_path / "start")
    with pytest.raises(RecipeError, match=r"rollout.kv.budget = 5: GPT2LMHeadModel has 0 attention modules"):
        train(small_recipe(model=str(tmp_path / "start"), rollout__kv=KV), tmp_path / "run")
    assert not list((tmp_path / "run").glob("arms/*"))


ARMS = {
    "none": {"method": "none", "replay": {"kv": False}},
    "replay": {"method": "decoupled_ppo"},
    "distill": {"method": "none", "replay": {"distill": 0.1}},
}


def recipe_of_arms(**changes: Any) -> Any:
    changes = {"arms": ARMS, "batches": 4, "optim__lr": 1e-3, "rollout__kv": KV, "rollout__dtype": "float32", **changes}
    return small_recipe(
        **{"optim__token_budget": 100, "certificate__looks": "once", "lag": {"sync_every": 2}, **changes}
    )


def test_runs_replay_what_their_arms_say_and_resume_bit_for_bit(tmp_path, digits, monkeypatch):
    short_arms(monkeypatch)
    train(recipe_of_arms(), tmp_path / "whole")
    by_arm = {arm: rows(tmp_path / "whole", arm) for arm in ARMS}
    for arm, r in by_arm.items():
        assert len(r) == 4
        # Batches 0 and 2 are drawn by the weights that train on them.
        equal, stale = [r[0], r[2]], [r[1], r[3]]
        assert all(0.3 < row["kv/kept_frac"] < 0.95 for row in r)
        if arm == "none":
            assert all(row["full/abs_log_ratio_max"] > 0.1 for row in r)
            assert all(row["divergence/kl_rollout_current_mean"] > 1e-3 for row in r)
        else:
            assert all(row["full/abs_log_ratio_max"] < 1e-5 for row in equal), arm
            assert all(row["full/abs_log_ratio_max"] > 1e-4 for row in stale), arm
            assert all(row["divergence/kl_rollout_current_max"] < 1e-9 for row in equal), arm
        if arm == "replay":  # the old policy's own pass sees what the step's sees
            assert all(row["mismatch/abs_log_ratio_max"] < 1e-5 for row in r)
    # Of one batch by the same weights: what the distilled arm measures of its dense pass is what the first one has.
    first = {arm: r[0] for arm, r in by_arm.items()}
    measured = first["none"]["divergence/kl_rollout_current_mean"]
    assert first["distill"]["kv/kl_dense"] == pytest.approx(measured, rel=1e-4)
    assert first["distill"]["kv/distill"] > 0
    assert "kv/distill" not in first["replay"]
    stored = read(tmp_path / "whole/arms/none/rollouts/batch-000000.parquet")
    assert stored.retention is not None  # recorded, not imposed
    assert stored.provenance.eviction == Eviction("attention", 5, 2)
    size = stored.retention.visible_until.numel() * 2
    assert first["none"]["kv/bytes_per_token"] == pytest.approx(size / len(stored.tokens))

    def stop(event: Any) -> None:
        if event.kind == "update" and event.step == 3:
            raise KeyboardInterrupt

    recipe = recipe_of_arms(arms={"distill": ARMS["distill"]})
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "cut", watch=stop)
    train(recipe, tmp_path / "cut", resume=True)
    assert rows(tmp_path / "cut", "distill") == by_arm["distill"]
    assert all(
        torch.equal(w, weights(tmp_path / "whole", "distill")[n])
        for n, w in weights(tmp_path / "cut", "distill").items()
    )


def test_windows_adapters_and_filters_go_together(tmp_path, digits, monkeypatch):
    """A window's record, a reference policy, sampling masks and adapters in one run: every ratio is 1."""
    short_arms(monkeypatch)
    arms = {"a": {"method": "grpo", "replay": {"distill": 0.1, "distill_by": "k3"}}}
    kv = {"budget": 5, "sinks": 1}
    train(recipe_of_arms(arms=arms, rollout__kv=kv, rollout__top_p=0.9, lora={}, lag={}, batches=2), tmp_path)
    for row in rows(tmp_path, "a"):
        assert row["full/abs_log_ratio_max"] < 1e-5
        assert math.isfinite(row["kv/distill"])
        assert row["optim/grad_norm"] > 0


@pytest.mark.slow
def test_two_processes_replay_what_one_replays(tmp_path, digits, monkeypatch):
    short_arms(monkeypatch)
    arms = {"distill": {"method": "token_tis", "replay": {"distill": 0.5}}}
    changes = {"arms": arms, "batches": 1, "optim": WHITENED, "rollout__kv": KV}
    run = two_processes(tmp_path / "two", changes)
    halves = check_step_of_two_processes(run, "distill", changes)
    assert all(half.retention is not None for half in halves)
