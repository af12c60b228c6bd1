"""Every row of the survey's comparison map is here, as a method, as a system, or as both."""

import importlib
import shlex
from dataclasses import fields
from typing import get_args

import pytest

from offdrift.errors import RecipeError
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
            assert said == said.strip(), field.name
            assert said or field.name == "run"
            assert "\n" not in said
    assert row.related
    assert set(row.related) <= set(METHODS) | set(SYSTEMS)
    assert any(related in METHODS for related in row.related)
    assert row.watch
    assert set(row.watch) <= set(METRICS)
    for path in row.here:
        module, _, function = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))


def in_recipe(path):
    """Whether a recipe has a setting of this dotted name."""
    from offdrift_lab.train.settings.recipe import Recipe

    parts = [Recipe]
    for key in path.split("."):
        rows = [row for part in parts for name, row in part.model_fields.items() if key in (name, row.alias)]
        if not rows:
            return False
        parts = [t for t in (rows[0].annotation, *get_args(rows[0].annotation)) if hasattr(t, "model_fields")]
    return True


def fault_of(word):
    """What a recipe says of a value by itself; not of what else it would need."""
    from offdrift_lab.train.settings.recipe import load_recipe

    try:
        load_recipe("recipes/tiny.toml", changes=[word])
    except RecipeError as e:
        return str(e) if "input should be" in str(e) or "unknown key" in str(e) else ""
    return ""


def test_every_recipe_value_that_a_system_names_exists():
    named = [w for row in SYSTEMS.values() for w in row.where.replace(",", "").replace(";", "").split() if "=" in w]
    assert len(named) > 20
    assert [w for w in named if not in_recipe(w.partition("=")[0])] == []
    assert not in_recipe("rollout.kv.bucket")
    assert {word: fault for word in named if (fault := fault_of(word))} == {}
    assert "input should be" in fault_of("buffer.pick=freshest")
    assert "input should be" in fault_of("rollout.kv.policy=attentive")


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_runs_a_system_is_a_recipe_that_is_accepted_and_nothing_claims_more(name):
    from offdrift_lab.train.settings.recipe import load_recipe

    row = SYSTEMS[name]
    claims = ("the trainer: ", "in the trainer ", "--set ", "offdrift schedules", "rollout.", "fusion.teacher")
    assert any(words in row.where for words in claims) == bool(row.run)
    if row.run:
        path, *words = shlex.split(row.run)
        assert set(words[::2]) <= {"--set", "--arms"}
        changes = [value for flag, value in zip(words[::2], words[1::2], strict=True) if flag == "--set"]
        recipe = load_recipe(path, changes=changes)
        arms = row.run.partition("--arms ")[2].split(",") if "--arms" in words else list(recipe.arms)
        assert set(arms) <= set(recipe.arms)
        for arm in arms:
            assert recipe.row(arm)
    assert catalog()[name]["command"] == (f"offdrift train {row.run}" if row.run else None)


def test_systems_have_every_fact_that_lists_and_filters_read():
    rows = catalog()
    method, system = rows["trm_max"], find("R3")
    assert system == rows["r3"]
    only_methods = {
        "used_by",
        "survey_differs",
        "ranges",
        "needs",
        "needs_old",
        "needs_reference",
        "needs_divergences",
        "divergences",
        "advantage",
        "formula",
        "parts",
        "settings",
    }
    assert set(method) - set(system) == only_methods
    assert system["kind"] == "system"
    assert "not part of a loss" in system["where"]


def test_a_summary_stands_alone():
    """Searches, suggestions and audits show one row: nothing above it says what "the same" is."""
    assert not [name for name, row in catalog().items() if row["summary"].startswith(("the same", "The same"))]
