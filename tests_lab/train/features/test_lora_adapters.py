"""Low-rank adapters: one copy of the base, merged weights for the engine, adapters alone in what is stored."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from offdrift.engines.hf import TransformersEngine
from offdrift.errors import RecipeError
from offdrift.models import load_model
from offdrift_lab.train.features.lora_adapters import (
    adapted_layers,
    adapters_off,
    add_adapters,
    merged_weights,
    remove_adapters,
)
from offdrift_lab.train.loop import loop
from offdrift_lab.train.loop.old_policy import Snapshots
from offdrift_lab.train.settings.sections import LoraSettings
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_learning_rate import run_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
IDS = torch.arange(4, 20)[None]


@pytest.fixture
def tiny(monkeypatch):
    short_arms(monkeypatch)
    return load_model("tiny-qwen3", seed=0)[0]


def drawn_adapters(model, **settings):
    """Adapters as after some training: no B is 0."""
    add_adapters(model, LoraSettings(**settings), seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    return model


def test_merged_weights_are_the_adapted_model_and_without_them_it_is_the_base(tiny):
    base, names = tiny(IDS).logits.detach(), [n for n, _ in tiny.named_parameters()]
    before = {n: w.clone() for n, w in tiny.named_parameters()}
    model = add_adapters(tiny, LoraSettings(rank=3, alpha=6.0), seed=1)
    assert torch.equal(model(IDS).logits, base)  # B = 0
    drawn_adapters(model, rank=3, alpha=6.0)
    adapted = model(IDS).logits.detach()
    assert (adapted - base).abs().max() > 0.01
    merged = dict(merged_weights(model))
    assert [*merged] == names
    layer = model.model.layers[1].mlp.up_proj
    by_hand = layer.base_layer.weight + 6.0 / 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(merged["model.layers.1.mlp.up_proj.weight"], by_hand)
    engine = TransformersEngine(load_model("tiny-qwen3", seed=5)[0])
    engine.load_weights(merged_weights(model), version=1)
    torch.testing.assert_close(engine.model(IDS).logits, adapted, rtol=1e-4, atol=1e-5)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, base)
    assert torch.equal(model(IDS).logits, adapted)
    assert trained == [n for n, p in model.named_parameters() if p.requires_grad]
    remove_adapters(model)
    assert all(torch.equal(before[n], w) and w.requires_grad for n, w in model.named_parameters())


def test_snapshots_hold_adapters_alone_and_score_as_their_version_did(tiny, tmp_path):
    model, accelerator = drawn_adapters(tiny, rank=2, targets=("q_proj",)), Accelerator(cpu=True)
    then = model(IDS).logits.detach()
    snapshots = Snapshots(accelerator, tmp_path)
    snapshots.retain({0}, model, 0)
    assert sum(w.numel() for w in snapshots.kept[0].values()) == 2 * 2 * (32 + 128)  # layers, rank, in + out
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.1
    now = model(IDS).logits.detach()
    assert not torch.equal(now, then)
    with snapshots.policy(0, model, 1) as old:
        assert torch.equal(old(IDS).logits, then)
    assert torch.equal(model(IDS).logits, now)


def test_a_run_trains_adapters_stores_them_alone_and_is_resumed(tmp_path, monkeypatch):
    from peft import PeftModel

    arms = {"decoupled": {"method": "decoupled_ppo"}, "second": {"method": "none"}}
    changes = {"batches": 6, "arms": arms, "lora": {"rank": 4, "alpha": 8.0}}
    bases = []
    start = loop.start_arm
    monkeypatch.setattr(loop, "start_arm", lambda run, *a, **k: (bases.append(run), start(run, *a, **k))[1])
    cut = tmp_path / "cut"
    whole, _ = run_of(tmp_path / "whole", monkeypatch, cut=(5, cut), changes=changes)
    base = load_model("tiny-qwen3", seed=0)[0]
    start_weights = {n: w.detach().clone() for n, w in base.named_parameters()}
    folder = tmp_path / "whole/arms/decoupled"
    stored, merged = (
        load_file(folder / "checkpoints/batch-000004/model.safetensors"),
        load_file(folder / "model/model.safetensors"),
    )
    assert stored
    assert all("lora_" in name for name in stored)
    moved = {n for n, w in start_weights.items() if not torch.equal(w, merged[n])}
    assert moved == {n for n in start_weights if n.endswith("_proj.weight")}
    adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
    logits = adapted(IDS).logits
    base = load_model("tiny-qwen3", seed=0)[0]
    base.load_state_dict(merged, strict=False)
    torch.testing.assert_close(base(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    # The second arm starts where the first did, on the same copy of the base.
    remove_adapters(bases[0].model)
    assert all(torch.equal(start_weights[n], w) for n, w in bases[0].model.named_parameters())
    again, _ = run_of(cut, monkeypatch, resume=True, changes=changes)
    assert [r["optim/grad_norm"] for r in again] == [r["optim/grad_norm"] for r in whole]
    for arm in arms:
        ours, theirs = (load_file(tmp_path / f"{run}/arms/{arm}/model/model.safetensors") for run in ("whole", "cut"))
        assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_the_reference_is_the_base_and_a_synchronization_is_verified(tmp_path, monkeypatch):
    from offdrift_lab.train.loop import arm

    check = arm.check_sync
    real = loop.train  # check_sync as it is: merged weights in the engine against adapters in the trainer
    short_arms(monkeypatch)
    gaps = []
    monkeypatch.setattr(arm, "check_sync", lambda *args, **options: gaps.append(check(*args, **options)))
    arms = {"penalized": {"method": "deepseek_v32", "override": {"penalty.estimator": "k2"}}}
    settings = {"batches": 4, "lag": {"sync_every": 1}, "arms": arms, "optim": {"lr": 3e-2}, "lora": {"rank": 2}}
    real(small_recipe(rollout={"prompts": 4, "samples": 4, "max_tokens": 6, "dtype": "float32"}, **settings), tmp_path)
    rows = [json.loads(x) for x in (tmp_path / "arms/penalized/metrics.jsonl").read_text().splitlines()]
    kl = [r["reference/kl"] for r in rows]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert min(kl[1:]) > 1e-6
    assert len(gaps) == 4
    assert max(gaps) < 1e-4


@pytest.mark.parametrize(
    ("error", "model", "lora"),
    [
        ("embeddings and of the output head", "tiny-qwen3", {"targets": ("embed_tokens",)}),
        ("embeddings and of the output head", "tiny-qwen3-moe", {"targets": ("lm_head",)}),
        ("experts of this model", "tiny-qwen3-moe", {}),
        ("lora.targets = .*nothing_proj", "tiny-qwen3", {"targets": ("nothing_proj",)}),
    ],
)
def test_what_cannot_be_adapted_is_refused_and_leaves_the_model(error, model, lora):
    base = load_model(model, seed=0)[0]
    with pytest.raises(RecipeError, match=error):
        add_adapters(base, LoraSettings(**lora), seed=0)
    assert not adapted_layers(base)
    assert all(p.requires_grad for p in base.parameters())


def test_dropout_is_refused():
    with pytest.raises(RecipeError, match="would score another policy"):
        small_recipe(lora={"dropout": 0.1})
