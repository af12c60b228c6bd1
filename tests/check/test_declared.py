"""What an engine declares: quantization and the folder it opened, against the trainer's; clean pairs pass."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.check import check
from offdrift.check.declared import compare_folder, folder_findings, quantization_finding, quantization_of
from offdrift.models import load_model, save_for_engine, tiny_tokenizer
from offdrift.records.provenance import Sampling


@pytest.fixture
def folder(tmp_path) -> Path:
    save_for_engine(load_model("tiny-qwen3-moe", seed=0)[0], tiny_tokenizer(), str(tmp_path / "served"))
    return tmp_path / "served"


def edit(folder: Path, file: str, **changes) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def compared(folder: Path) -> dict:
    with Bench(*load_model("tiny-qwen3-moe", seed=0), [[1]], sampling=Sampling(2)) as bench:
        return compare_folder(bench, folder)


def rules(found: dict) -> list[str]:
    return [finding.rule for finding in folder_findings(found)]


def test_the_trainers_own_folder_is_the_same(folder):
    found = compared(folder)
    assert (found["config"], found["generation"], found["quantization"]) == ({}, {}, None)
    assert rules(found) == []


def test_entries_that_change_no_number_are_no_difference(folder):
    edit(folder, "config.json", transformers_version="4.0.0", use_cache=False, torch_dtype="bfloat16")
    edit(folder, "generation_config.json", temperature=1.0, top_k=0, repetition_penalty=1.0)
    assert rules(compared(folder)) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters.rope_theta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_configuration_is_named(folder, change, name):
    edit(folder, "config.json", **change)
    found = compared(folder)
    assert list(found["config"]) == [name]
    (finding,) = folder_findings(found)
    assert (finding.rule, finding.severity) == ("served_config", "act")
    assert name in finding.symptom


@pytest.mark.parametrize("change", [{"temperature": 0.6}, {"top_p": 0.9}, {"eos_token_id": [1, 16]}], ids=str)
def test_other_generation_settings_are_named(folder, change):
    edit(folder, "generation_config.json", **change)
    found = compared(folder)
    assert set(found["generation"]) == set(change)
    assert rules(found) == ["generation_config"]


def test_settings_that_are_the_trainers_too_are_no_difference_but_stand_in_the_record(folder):
    model, tokenizer = load_model("tiny-qwen3-moe", seed=0)
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, True
    save_for_engine(model, tokenizer, str(folder))
    with Bench(model, tokenizer, [[1]], sampling=Sampling(2)) as bench:
        found = compare_folder(bench, folder)
    assert (rules(found), found["not_neutral"]) == ([], {"temperature": 0.6})


def test_quantization_of_one_side_is_a_finding_and_of_both_is_none():
    (finding,) = quantization_finding("fp8_per_channel", None)
    assert (finding.rule, finding.severity) == ("quantization_differs", "act")
    assert quantization_finding(None, None) == quantization_finding(None, "gptq") == []
    assert quantization_finding("compressed-tensors", "compressed-tensors") == []
    assert quantization_finding("gptq_marlin", "gptq") == []
    assert [f.rule for f in quantization_finding("fp8+kv_fp8", "fp8")] == ["quantization_differs"]


def test_a_checkpoint_names_its_quantization_in_either_form():
    stored = {"quant_method": "compressed-tensors"}
    for config in (stored, SimpleNamespace(**stored)):
        model = SimpleNamespace(config=SimpleNamespace(quantization_config=config))
        assert quantization_of(model) == "compressed-tensors"
    assert quantization_of(SimpleNamespace(config=SimpleNamespace())) is None


@pytest.mark.parametrize(("options", "level"), [("", "ok"), (",quantization=int8", "act")], ids=["full", "int8"])
def test_a_check_names_a_grid_that_one_engine_has(options, level):
    """Its divergence alone, 2e-4 nat, is far below every threshold of health."""
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    prompts = [[4 + i, 13, 5] for i in range(4)]
    with Bench(model, tokenizer, prompts, sampling=Sampling(8)) as bench:
        rollout = EngineSpec.parse(f"transformers:float32{options}")
        found = check(bench, rollout, EngineSpec("transformers", "float32"), noise=False)
    assert (found["verdict"]["level"], found["passed"]) == (level, True)
    assert [f["rule"] for f in found["findings"]] == ["quantization_differs"] * (level == "act")
