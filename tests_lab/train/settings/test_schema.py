"""JSON Schemas of recipes, sweeps and rules: what the loaders take is valid, and a typo is not."""

import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from offdrift.judge.schema import rules_schema
from offdrift.methods import METHODS
from offdrift_lab.train.settings.places import own_recipes
from offdrift_lab.train.settings.schema import recipe_schema, sweep_schema

RULES = Path(__file__).parents[3] / "src" / "offdrift" / "judge"
SCHEMAS = {"recipe": recipe_schema(), "sweep": sweep_schema(), "rules": rules_schema()}
RECIPE = {"name": "mine", "model": "tiny-qwen3", "batches": 2, "method": "gspo"}
SWEEP = {"name": "mine", "recipe": "tiny", "seeds": 3}


def problems(kind: str, content: dict) -> list[str]:
    return [error.message for error in Draft7Validator(SCHEMAS[kind]).iter_errors(content)]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_each_is_a_schema(kind):
    Draft7Validator.check_schema(SCHEMAS[kind])


@pytest.mark.parametrize("file", sorted(own_recipes().glob("*.toml")), ids=lambda f: f.stem)
def test_a_shipped_file_names_its_schema_and_is_valid(file):
    head, _, text = file.read_text("utf-8").partition("\n")
    kind = head.removeprefix("#:schema ./").removesuffix(".schema.json")
    assert (file.parent / f"{kind}.schema.json").is_file()
    assert problems(kind, tomllib.loads(text)) == []


def test_the_built_in_rules_are_valid():
    for name in ("rules", "fixes"):
        assert problems("rules", tomllib.loads((RULES / f"{name}.toml").read_text("utf-8"))) == []


@pytest.mark.parametrize("name", METHODS)
def test_every_method_may_be_chosen(name):
    assert problems("recipe", RECIPE | {"method": name}) == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("recipe", RECIPE),
        ("recipe", RECIPE | {"method": "mine.py:mine", "override": {"gate.high": 0.1}}),
        ("recipe", RECIPE | {"fusion": {"teacher": "tiny-qwen3"}} | {"arms": {"a": {"method": "gspo", "fusion": {"alpha": "absent"}}}}),
        ("sweep", SWEEP | {"seeds": [1, 5], "set": {"lag.sync_every": 4}, "values": {"optim.lr": [1e-4]}}),
        ("sweep", SWEEP | {"arms": ["grpo", "mine.py:mine"]}),
        ("rules", {"thresholds": {"kl_large": 0.1}}),
        ("rules", {"rules": {"stale_engine": {"severity": "watch"}, "token_drift": {"enabled": False}}}),
        ("rules", {"rules": {"mine": {"all": [{"metric": "kl", "above": "kl_large"}], "fix": "inspect"}}}),
    ],
)  # fmt: skip
def test_what_a_loader_takes_is_valid(kind, content):
    assert problems(kind, content) == []


@pytest.mark.parametrize(
    ("kind", "content", "word"),
    [
        ("recipe", RECIPE | {"bacthes": 3}, "bacthes"),
        ("recipe", RECIPE | {"lag": {"sync_evry": 3}}, "sync_evry"),
        ("recipe", RECIPE | {"method": "gpso"}, "gpso"),
        ("recipe", RECIPE | {"batches": "many"}, "many"),
        ("recipe", {"name": "mine", "model": "tiny-qwen3", "batches": 2}, "mine"),
        ("sweep", SWEEP | {"seeds": 0}, "0"),
        ("sweep", SWEEP | {"compare": {"metrics": "x"}}, "metrics"),
        ("rules", {"thresholds": {"kl_larg": 0.1}}, "kl_larg"),
        ("rules", {"rules": {"stale_engine": {"severity": "severe"}}}, "severe"),
        ("rules", {"rules": {"mine": {"all": [{"metric": "kll", "above": 1}]}}}, "kll"),
    ],
)
def test_a_typo_is_found(kind, content, word):
    found = problems(kind, content)
    assert found
    assert word in " ".join(found)


def test_settings_come_with_what_they_are():
    batches = SCHEMAS["recipe"]["properties"]["batches"]
    assert batches["description"] == "Rollout batches to train on, per arm."
    described = [
        bool(entry.get("description"))
        for table in SCHEMAS["recipe"]["definitions"].values()
        for entry in table.get("properties", {}).values()
    ]
    assert sum(described) > 0.8 * len(described)
