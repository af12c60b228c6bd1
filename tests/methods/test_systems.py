"""Every row of the survey's comparison map is here, as a method, as a system, or as both."""

import importlib
from dataclasses import fields

import pytest

from offdrift.methods import METHODS
from offdrift.methods import describe as axes
from offdrift.methods.describe import catalog
from offdrift.methods.table import SYSTEM_FAMILIES, SYSTEMS, System
from offdrift.show.method_table import find
from offdrift.stats import METRICS

# Row of the map: our rows, and the unit it aggregates over (None where only systems are behind it).
SURVEY: dict[str, tuple[tuple[str, ...], str | None]] = {
    "Vanilla PPO clip": (("ppo_clip",), "token"),
    "Dual-clip PPO": (("dual_clip",), "token"),
    "TOPR": (("topr",), "sequence"),
    "ASPO": (("aspo",), "token"),
    "MinPRO": (("minpro",), "prefix_min"),
    "CTPO": (("ctpo",), "prefix"),
    "M2PO": (("m2po",), "token"),
    "GSPO": (("gspo",), "geometric"),
    "GSPO-token": (("gspo_token",), "geometric"),
    "GMPO": (("gmpo",), "geometric"),
    "GPG": (("gpg",), "token"),
    "CISPO": (("cispo",), "token"),
    "SAPO": (("sapo",), "token"),
    "DPPO-TV": (("dppo_tv",), "token"),
    "DPPO-KL": (("dppo_kl",), "token"),
    "VESPO": (("vespo",), "sequence"),
    "VCPO": (("vcpo",), "sequence"),
    "OAPL": (("oapl",), "sequence"),
    "R²VPO": (("r2vpo_clip", "r2vpo"), "group"),
    "DISPO": (("dispo",), "token"),
    "QUATRO": (("quatro",), "group"),
    "TRM": (("trm_max",), "worst"),
    "Turn-level ST-PPO": (("st_ppo", "turn_ppo"), "turn"),
    "OTB": (("otb",), "token"),
    "KL-cov": (("kl_cov",), "token"),
    "Clip-cov": (("clip_cov",), "token"),
    "R3 (Routing Replay)": (("r3",), None),
    "IcePop": (("icepop",), "token"),
    "Keep Routing": (("keep_routing",), None),
    "Keep Sampling Mask": (("keep_sampling_mask",), None),
    "ESPO": (("espo",), "entropy_group"),
    "FlashRL": (("flashrl",), "token"),
    "FP8-RL": (("fp8_rl", "fp8_calibration"), "token"),
    "Jet-RL": (("jet_rl",), None),
    "QuRL": (("qurl", "uaq"), "token"),
    "QeRL": (("qerl",), None),
    "QaRL / TBPO": (("tbpo", "qarl"), "geometric"),
    "A-3PO": (("a3po",), "token"),
    "ECHO-2": (("echo2", "echo2_provisioning"), "token"),
    "ROLL Flash": (("roll_flash", "roll_flash_scheduler"), "token"),
    "AReaL": (("areal", "areal_admission"), "token"),
    "Periodic Asynchrony": (("periodic_async",), None),
    "Seer": (("seer",), None),
    "DORA": (("dora",), None),
    "Logit Fusion": (("logit_fusion", "logit_fusion_rollouts"), "token"),
    "LR scheduling (Zhang 2026)": (("lr_surge",), None),
    "TBIK": (("tbik",), None),
    "FP16 alignment": (("fp16_alignment",), None),
}
# What the survey's text names besides, without a loss of its own.
ALSO = "alp tim_harness bitwise batch_invariant sglang_deterministic old_logits gac freshper replay_buffer shadow_mask respec one_step_off verl_async async_topologies async_rlhf compassmax r2"


@pytest.mark.parametrize("row", SURVEY)
def test_every_row_of_the_map_is_here(row):
    names, unit = SURVEY[row]
    missing = [name for name in names if name not in METHODS and name not in SYSTEMS]
    assert not missing
    assert (names[0] in METHODS) == (unit is not None)
    if unit is not None:
        assert unit in axes.units(METHODS[names[0]])


def test_the_whole_map_is_held():
    assert len(SURVEY) == 48
    assert set(ALSO.split()) <= set(SYSTEMS)


def test_a_name_is_a_method_or_a_system():
    assert not set(METHODS) & set(SYSTEMS)
    assert len(SYSTEMS) > 30
    assert sum(map(len, SYSTEM_FAMILIES.values())) == len(SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_says_where_it_would_be_and_nothing_that_is_not_here(name):
    row = SYSTEMS[name]
    for field in fields(System):
        said = getattr(row, field.name)
        if isinstance(said, str):
            assert said == said.strip() != "", field.name
            assert "\n" not in said
    assert row.related
    assert set(row.related) <= set(METHODS) | set(SYSTEMS)
    assert any(related in METHODS for related in row.related)
    assert row.watch
    assert set(row.watch) <= set(METRICS)
    for path in row.here:
        module, _, function = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))


def test_every_recipe_value_that_a_system_names_exists():
    from offdrift.train.recipe import load_recipe

    named = [w for row in SYSTEMS.values() for w in row.where.replace(",", "").replace(";", "").split() if "=" in w]
    assert sorted(named) == [
        'buffer.pick="freshness"',
        "draws.max_samples=16",
        "lag.queue=1",
        'lora.base="nvfp4"',
        'old_policy.from="sampling"',
        'optim.advantage="rl_zvp"',
        "optim.align={}",
        "optim.dtype=float16",
        'optim.length_guard.switch_to="bypass_pg_geo_rs"',
        "optim.length_guard={}",
        "optim.perturb={}",
        "quantized.forward=true",
        "quantized.forward=true",
        "quantized.noise={}",
        "quantized.scale=1.5",
        "replay.freeze_gates=true",
        "replay.freeze_router_bias=true",
        'replay.routes="old"',
        'replay.routes="rollout"',
        'replay.routes="rollout"',
        "replay.support=false",
        "rollout.dtype=float16",
        'rollout.kv_cache_dtype="fp8"',
        'rollout.quantization="fp8_per_channel"',
        "rollout.top_p=0.95",
    ]
    alone = ("draws", "lag", "old_policy", "optim", "buffer", "rollout")
    changes = [w for w in named if w.startswith(alone) and "kv_cache" not in w]
    recipe = load_recipe("recipes/tiny.toml", changes=[*changes, "buffer.capacity=64"])
    assert (recipe.rollout.top_p, recipe.replay.support) == (0.95, True)
    assert (recipe.lag.queue, recipe.rollout.dtype, recipe.optim.dtype) == (1, "float16", "float16")
    assert (recipe.old_policy.source, recipe.buffer.pick) == ("sampling", "freshness")
    assert recipe.optim.length_guard.switch_to == "bypass_pg_geo_rs"
    assert recipe.optim.align is not None
    assert recipe.optim.perturb is not None
    assert (recipe.draws.max_samples, recipe.optim.advantage) == (16, "rl_zvp")
    replay = {w for w in named if w.startswith("replay")} - {'replay.routes="rollout"', "replay.support=false"}
    changes = [*replay, "method=decoupled_token_is", "lag.sync_every=2"]
    recipe = load_recipe("recipes/tiny-moe.toml", changes=changes)
    assert (recipe.replay.routes, recipe.replay.freeze_gates, recipe.replay.freeze_router_bias) == ("old", True, True)
    assert load_recipe("recipes/tiny-moe.toml", changes=['replay.routes="rollout"']).replay.records
    changes = ["replay.support=false", "rollout.top_p=0.95"]
    assert not load_recipe("recipes/tiny-moe.toml", changes=changes).replay.support
    on_grid = [w for w in named if w.startswith(("quantized", "rollout.q", "rollout.kv"))]
    in_vllm = ["rollout.engine=vllm", "rollout.dtype=bfloat16"]
    recipe = load_recipe("recipes/quantized.toml", changes=[*on_grid, *in_vllm])
    assert (recipe.quantized.forward, recipe.quantized.scale, recipe.rollout.kv_cache_dtype) == (True, 1.5, "fp8")
    assert load_recipe("recipes/qerl.toml").lora.base == "nvfp4"


def test_systems_have_every_fact_that_lists_and_filters_read():
    rows = catalog()
    method, system = rows["trm_max"], find("R3")
    assert system == rows["r3"]
    only_methods = {
        "needs",
        "needs_old",
        "needs_reference",
        "needs_divergences",
        "advantage",
        "formula",
        "parts",
        "settings",
    }
    only_methods |= {"command"}
    assert set(method) - set(system) == only_methods
    assert system["kind"] == "system"
    assert "not part of a loss" in system["where"]
