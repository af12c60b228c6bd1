"""Quantized rollouts in training: whole runs on a grid, invariant scaling, noise in norms, error tokens."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GemmaConfig

from offdrift.engines.grids import GRIDS, int8, matrices, put_on_grid
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.score import score
from offdrift.errors import RecipeError, SyncError
from offdrift.models import load_model
from offdrift.records import Sampling
from offdrift.records.store import read
from offdrift.stats.metrics import METRICS
from offdrift_lab.train.features.quantization import (
    NoiseSettings,
    Survival,
    error_tokens,
    noise_size,
    noisy_norms,
    norm_readers,
    put_weights_on_grid,
    scale_invariantly,
)
from offdrift_lab.train.features.quantized import EngineGrid
from offdrift_lab.train.loop import arm as arm_module
from offdrift_lab.train.loop import loop as loop_module
from offdrift_lab.train.loop.loop import train
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows, weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DENSE = {"rollout__quantization": "w8a8", "rollout__dtype": "float32", "rollout__evidence": "full"}


@pytest.fixture(scope="module")
def model():
    """A tiny Qwen3 with weights large enough that its policy is far from flat."""
    model, _ = load_model("tiny-qwen3", seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0 if weight.ndim > 1 else 1.0)
    return model


def logits(model, ids=((3, 9, 4, 27, 33, 5),)) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids)).logits


# -- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """Arms with and without the forward pass on the grid, and with each of the other settings, on W8A8 rollouts."""
    folder = tmp_path_factory.mktemp("quantized")
    arms = {
        "plain": {"method": "ppo_clip"},
        "forward": {"method": "ppo_clip", "quantized": {"forward": True}},
        "scaled": {"method": "qurl", "quantized": {"scale": 2.0}},
        "noisy": {"method": "token_tis", "quantized": {"noise": {"start": 0.2, "end": 0.1, "stages": 3}}},
    }
    with pytest.MonkeyPatch.context() as patch:
        check = arm_module.check_sync
        short_arms(patch)
        patch.setattr(arm_module, "check_sync", check)
        train(small_recipe(**DENSE, arms=arms, lag__sync_every=1, optim__lr=1e-3), folder)
    return folder, {name: rows(folder, name) for name in arms}


def test_with_a_forward_pass_on_the_grid_next_to_no_mismatch_is_left(run):
    _, arms = run
    plain = [row["mismatch/k3"] for row in arms["plain"]]
    forward = [row["mismatch/k3"] for row in arms["forward"]]
    assert min(plain) > 1e-6
    assert max(forward) < min(plain) / 20
    kl = {name: [row["divergence/kl_rollout_current_mean"] for row in arms[name]] for name in ("plain", "forward")}
    assert max(kl["forward"]) < min(kl["plain"]) / 20


def test_the_pass_on_the_grid_takes_another_gradient(run):
    folder, arms = run
    assert arms["plain"][0]["optim/grad_norm"] != pytest.approx(arms["forward"][0]["optim/grad_norm"], rel=1e-6)
    plain, forward = (weights(folder, name) for name in ("plain", "forward"))
    assert any(not torch.equal(plain[n], forward[n]) for n in plain)


def test_rollouts_say_their_grid_and_their_processor(run):
    folder, _ = run
    provenance = read(folder / "arms/plain/rollouts/batch-000000.parquet").provenance
    assert provenance.quantization == "w8a8"
    assert provenance.instructions.startswith(("avx", "scalar"))


def test_every_update_says_what_the_grid_lets_through(run):
    _, arms = run
    for row in [*arms["plain"], *arms["scaled"]]:
        assert 0 < row["grid/moved_frac"] < 1
        assert 0.1 < row["grid/update_cosine"] < 1
    first = [arms[name][0]["grid/moved_frac"] for name in ("plain", "scaled")]
    assert first[1] > 1.3 * first[0], "a step is twice as large beside the grid under a scale of 2"


def test_noise_is_annealed_and_the_engine_has_it(run):
    _, arms = run
    sigmas = [row["grid/noise_sigma"] for row in arms["noisy"]]
    assert sigmas == pytest.approx([0, 0, 0.2, 0.2, 0.1, 0.1])
    drift = [row["full/k3"] for row in arms["noisy"]]
    assert min(drift[2:4]) > 5 * max(drift[:2])
    assert "grid/noise_sigma" not in arms["plain"][0]


def test_error_tokens_are_logged_for_quantized_rollouts_alone(run, tmp_path, monkeypatch):
    _, arms = run
    assert all(0 <= row["error_tokens/frac"] <= 1 for row in arms["plain"])
    short_arms(monkeypatch)
    train(small_recipe(batches=1, lag__sync_every=1), tmp_path)
    assert not any(name.startswith(("error_tokens", "grid/")) for name in rows(tmp_path, "trm_max")[0])


@pytest.mark.parametrize("forward", [True, False])
def test_evaluations_draw_from_the_policy_that_is_trained(forward, tmp_path, monkeypatch):
    evaluate, made = loop_module.evaluate, []
    short_arms(monkeypatch)
    monkeypatch.setattr(loop_module, "evaluate", evaluate)
    make = loop_module.make_engine
    monkeypatch.setattr(loop_module, "make_engine", lambda *a, **o: made.append(o["quantization"]) or make(*a, **o))
    train(small_recipe(**DENSE, batches=1, lag__sync_every=1, quantized={"forward": forward}), tmp_path)
    assert set(made) == {"w8a8" if forward else None}


def test_an_engine_whose_grid_keeps_old_codes_is_refused(tmp_path, monkeypatch):
    short_arms(monkeypatch)
    take = TransformersEngine.take_weights

    def stale(self, named, *, version):
        own = dict(self.model.named_parameters())
        kept = ((n, own[n].detach().clone() if n in self._rounded and self._loaded else w) for n, w in named)
        take(self, kept, version=version)
        self._loaded = True

    monkeypatch.setattr(TransformersEngine, "_loaded", False, raising=False)
    monkeypatch.setattr(TransformersEngine, "take_weights", stale)
    with pytest.raises(SyncError):
        train(small_recipe(**DENSE), tmp_path)


@pytest.mark.slow
def test_a_run_on_a_grid_goes_on_where_its_checkpoint_stands(tmp_path, monkeypatch):
    arms = {"a": {"method": "qurl", "quantized": {"forward": True, "scale": 1.5, "noise": {}}}}
    short_arms(monkeypatch)
    recipe = small_recipe(**DENSE, arms=arms, lag__sync_every=1)
    train(recipe, tmp_path / "whole")
    publish = arm_module.Arm.publish

    def stopped(self, source=None):
        if self.version == 5:
            raise KeyboardInterrupt
        publish(self, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arm_module.Arm, "publish", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut", resume=True)
    whole, cut = (weights(tmp_path / name, "a") for name in ("whole", "cut"))
    assert all(torch.equal(whole[n], cut[n]) for n in whole)


@pytest.mark.slow
def test_adapters_train_on_weights_of_a_four_bit_grid(tmp_path, monkeypatch):
    short_arms(monkeypatch)
    recipe = small_recipe(
        rollout__dtype="float32", lora={"base": "nvfp4"}, optim__lr=1e-2, lag__sync_every=1, batches=3
    )
    train(recipe, tmp_path)
    base, _ = load_model("tiny-qwen3", seed=0)
    before = {n: p.detach().clone() for n, p in base.named_parameters()}
    put_weights_on_grid(base, "nvfp4")
    trained = weights(tmp_path, "trm_max")
    moved = 0
    for name, weight in base.named_parameters():
        if name not in matrices(base):
            assert torch.equal(trained[name], before[name])
            continue
        assert not torch.equal(weight, before[name])
        added = trained[name] - weight
        assert torch.linalg.matrix_rank(added, atol=1e-5) <= 16, name
        moved += int(added.abs().sum() > 0)
    assert moved > 0
    assert rows(tmp_path, "trm_max")[0]["full/k3"] < 1e-8


# -- recipes that cannot act ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantized": {"forward": True}}, r"quantized.forward = true.*rollout.quantization = None"),
        ({"quantized": {"scale": 1.5}}, r"quantized.scale = 1.5.*none that the trainer has"),
        ({**DENSE, "lora": {}, "quantized": {"forward": True}}, r"with \[lora\].*lora.base"),
        ({**DENSE, "quantized": {"noise": {}}, "pipeline": {}, "lag": {}}, r"noise with \[pipeline\]"),
        ({"quantized": {"noise": {"start": 1e-3, "end": 1e-2}}}, "exchange the two"),
        ({"rollout__kv_cache_dtype": "fp8"}, r'kv_cache_dtype = "fp8" is vLLM\'s'),
        ({"rollout__quantization": "fp3"}, "'fp3'.*emulates fp8_per_channel, int8, nvfp4, w8a8"),
        (
            {"rollout__engine": "vllm", "rollout__dtype": "float32", "rollout__quantization": "fp8_per_channel"},
            r'half precision alone; set rollout.dtype = "bfloat16"',
        ),
        ({"rollout__engine": "vllm", "rollout__quantization": "nvfp4"}, r'"nvfp4" is the transformers engine\'s.*w8a8'),
    ],
)
def test_settings_that_cannot_act_are_refused(changes, words):
    with pytest.raises(RecipeError, match=words):
        small_recipe(**changes)


def test_a_mixture_with_rounded_inputs_is_refused_for_vllm_alone():
    model, _ = load_model("tiny-qwen3-moe", seed=0)
    for engine in ("transformers", "vllm"):
        recipe = small_recipe(rollout__engine=engine, rollout__quantization="w8a8", model="tiny-qwen3-moe")
        check = partial(EngineGrid("w8a8", compares=True).check, recipe, model)
        if engine == "vllm":
            with pytest.raises(RecipeError, match="fused tensor of experts"):
                check()
        else:
            check()


# -- invariant scaling ----------------------------------------------------------------------------


def test_readers_of_norms_are_those_of_the_architecture(model):
    readers = norm_readers(model)
    at = "model.layers.0"
    assert readers[f"{at}.input_layernorm"] == [f"{at}.self_attn.{x}_proj" for x in "qkv"]
    assert readers[f"{at}.post_attention_layernorm"] == [f"{at}.mlp.{x}_proj" for x in ("gate", "up")]
    assert len(readers) == 2 * 4


@pytest.mark.parametrize(("s", "exact"), [(2.0, True), (0.5, True), (1.5, False)])
def test_scaling_leaves_the_function_and_enlarges_steps_beside_the_grid(model, s, exact):
    scaled = copy.deepcopy(model)
    scale_invariantly(scaled, s)
    if exact:
        assert torch.equal(logits(scaled), logits(model))
    else:
        torch.testing.assert_close(logits(scaled), logits(model), atol=1e-4, rtol=1e-5)
    name = "model.layers.1.mlp.up_proj.weight"
    one, other = (dict(m.named_parameters())[name] for m in (model, scaled))
    assert not torch.equal(one, other)
    assert (int8(one).codes == int8(other).codes).float().mean() > 0.999, "codes do not depend on the scale"
    dims = {name: -1}
    step = 2e-4 * torch.randn(one.shape, generator=torch.Generator().manual_seed(0)).sign()
    moved = {}
    for m in (model, scaled):
        before = Survival.of("int8", dims, m.named_parameters())
        after = {**dict(m.named_parameters()), name: dict(m.named_parameters())[name] + step}
        sums = before.sums(after.items())
        moved[m] = METRICS["grid/moved_frac"].value({k: float(x) for k, x in sums.items()})
    assert moved[scaled] / moved[model] == pytest.approx(s, rel=0.1)


def test_of_a_mixture_attention_is_scaled_and_experts_stay():
    moe, _ = load_model("tiny-qwen3-moe", seed=0)
    scaled = copy.deepcopy(moe)
    scale_invariantly(scaled, 2.0)
    assert torch.equal(logits(scaled), logits(moe))
    other = {n for (n, a), b in zip(moe.named_parameters(), scaled.parameters(), strict=True) if not torch.equal(a, b)}
    assert other == {
        f"model.layers.{i}.{part}.weight"
        for i in range(3)
        for part in ("input_layernorm", *(f"self_attn.{x}_proj" for x in "qkv"))
    }


def test_a_model_whose_norms_add_one_is_refused_and_keeps_its_weights():
    gemma = AutoModelForCausalLM.from_config(
        GemmaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
        )
    ).eval()
    before = copy.deepcopy(gemma.state_dict())
    with pytest.raises(RecipeError, match=r"quantized.scale = 1.5: GemmaForCausalLM is another function"):
        scale_invariantly(gemma, 1.5)
    assert all(torch.equal(before[n], w) for n, w in gemma.state_dict().items())


def test_what_survives_is_counted_by_hand():
    w = torch.tensor([[1.27, 0.10, 0.20, 0.30]])  # distance of two codes 0.01
    before = Survival.of("int8", {"w": -1}, [("w", w), ("b", torch.ones(2))])
    after = w + torch.tensor([[0.0, 0.004, 0.006, 0.011]])
    sums = before.sums([("w", after), ("b", torch.zeros(2))])
    assert (sums["grid/changed"], sums["grid/moved"]) == (3, 2)
    dot = 0.006 * 0.01 + 0.011 * 0.01
    cosine = dot / math.sqrt((0.004**2 + 0.006**2 + 0.011**2) * 2 * 0.01**2)
    assert METRICS["grid/update_cosine"].value({k: float(x) for k, x in sums.items()}) == pytest.approx(
        cosine, rel=1e-4
    )


# -- noise ----------------------------------------------------------------------------------------


def test_noise_follows_the_published_stages():
    published = [0, 0.05, 0.02811707, 0.01581139, 0.0088914, 0.005, 0.00281171, 0.00158114, 0.00088914, 0.0005]
    assert [noise_size(k, 10, NoiseSettings()) for k in range(10)] == pytest.approx(published, abs=1e-8)
    assert noise_size(99, 100, NoiseSettings()) == pytest.approx(5e-4)
    assert noise_size(9, 100, NoiseSettings()) == 0


def test_noise_is_in_norms_alone_and_gone_afterwards(model):
    model = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    norms = tuple(norm_readers(model))
    with noisy_norms(model, norms, sigma=0.05, seed=3):
        moved = {n: w - before[n] for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
        first = {n: w.clone() for n, w in model.state_dict().items()}
    assert set(moved) == {f"{path}.weight" for path in norms}
    assert torch.cat([x.flatten() for x in moved.values()]).std() == pytest.approx(0.05, rel=0.1)
    assert all(torch.equal(before[n], w) for n, w in model.state_dict().items())
    with noisy_norms(model, norms, sigma=0.05, seed=3):
        assert all(torch.equal(first[n], w) for n, w in model.state_dict().items())


# -- error tokens ---------------------------------------------------------------------------------


def test_error_tokens_and_repetitions_are_counted(model):
    engine = TransformersEngine(model, quantization="int8")
    rollouts = engine.generate([[4], [5]], Sampling(max_tokens=8), seed=0)
    tokens = torch.tensor(
        [7, 8, 9, 7, 8, 9, 9, 9, 7, 8, 9, 1, 2, 3, 4, 5]
    )  # 7 8 9 again in the same response, and once
    log_ratio = torch.zeros(16)
    log_ratio[[5, 6, 9]] = -1.5  # one is a repetition, two are late
    log_ratio[[0, 15]] = torch.tensor([-1.3, 1.5])
    sums = error_tokens(rollouts.with_(tokens=tokens), log_ratio)
    assert {name.removeprefix("error_tokens/"): int(x) for name, x in sums.items()} == {
        "errors": 3,
        "repeated": 1,
        "late": 2,
        "repetitions": 1,
    }


# -- the trainer's pass ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "w8a8"])
def test_gradient_checkpointing_computes_the_same_on_a_grid(model, name):
    rollouts = TransformersEngine(model, quantization=name).generate([[4, 9, 3]] * 2, Sampling(max_tokens=6), seed=1)
    gradients = []
    for checkpointing in (False, True):
        trainer = copy.deepcopy(model).train()
        if checkpointing:
            trainer.gradient_checkpointing_enable()
        put_on_grid(trainer, name)
        score(trainer, rollouts).logp.sum().backward()
        gradients.append({n: p.grad for n, p in trainer.named_parameters()})
    for path in gradients[0]:
        torch.testing.assert_close(gradients[1][path], gradients[0][path], atol=1e-5, rtol=1e-4)
    assert set(GRIDS) >= {name}


def test_the_table_has_the_logged_names(run):
    folder, _ = run
    line = json.loads((folder / "arms/plain/metrics.jsonl").read_text().splitlines()[0])
    assert {n for n in line if n.startswith(("grid/", "error_tokens/"))} <= set(METRICS)
