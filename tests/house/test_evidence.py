"""Every claim of docs/evidence.toml can be followed: its command parses, and its files and headings exist."""

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from benchmarks.regimes import TESTBEDS, recipe_of, settings_of
from typer.main import get_command

from offdrift.cli import application
from offdrift_lab.evidence import claims
from offdrift_lab.train.settings.recipe import load_recipe
from offdrift_lab.train.sweep.sweep import load_sweep

ROOT = Path(__file__).parents[2]
DOCUMENT = tomllib.loads((ROOT / "docs" / "evidence.toml").read_text(encoding="utf-8"))
RESULTS = ROOT / "benchmarks" / "results"
CLAIMS = claims.judged(ROOT / "docs" / "evidence.toml", RESULTS)
FIELDS = {"claim", "source", "testbed", "command", "notes", "numbers", "found", "kind"}
OPTIONAL = {"why", "data", "seeds", "p", "about", "here", "there", "contrast", "unit"}
COMMANDS = sorted({command for row in CLAIMS for command in row["command"]})
OF_SOURCES = {"Trust Region Masking": "trm", "M2PO": "m2po", "VESPO": "vespo", "OAPL": "oapl", "survey of": "survey"}
"""Regimes of the sources that most claims about training come from, by how their names begin."""


@pytest.mark.parametrize("row", DOCUMENT["claim"], ids=[row["claim"][:40] for row in CLAIMS])
def test_a_claim_has_every_field_and_what_it_names_exists(row):
    assert set(row) - OPTIONAL == FIELDS
    assert row["found"] in {*claims.VERDICTS} - {"other regime"}
    # What was not decided says why; what was, has a command and numbers.
    assert ("why" in row) == (row["found"] in ("undecided", "untestable here"))
    assert bool(row["command"]) == (row["found"] != "untestable here")
    assert bool(re.search(r"\d", row["numbers"])) == bool(row["command"])
    assert all((ROOT / file).is_file() for file in row.get("data", ()))
    page, _, heading = row["notes"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert headings.count(heading) == 1


def test_there_are_enough_claims_and_none_twice():
    assert len({row["claim"] + row["testbed"] for row in CLAIMS}) == len(CLAIMS) >= 25
    assert {row["verdict"] for row in CLAIMS} == set(claims.VERDICTS)


@pytest.mark.parametrize("row", CLAIMS, ids=[row["claim"][:40] for row in CLAIMS])
def test_no_verdict_is_forbidden(row):
    assert row["kind"] in ("runs", "counts", "exact", "none")
    assert ("seeds" in row) == (row["kind"] == "runs")
    assert row.get("about", "library") == "library"
    # n pairs have 2^n patterns of signs, two of which are as far out as can be.
    assert "p" not in row or row["p"] >= 2 / 2 ** row["seeds"]
    if row["verdict"] in claims.DECIDED:
        assert not row["far"]
        assert row["kind"] != "runs" or row["stated"] or row.get("about") == "library"
        p = row["p_sign_flip"]
        assert row["kind"] != "runs" or row["seeds"] >= claims.SEEDS or (p is not None and p < claims.LEVEL)
    if row["verdict"] == "other regime":
        assert row["far"]
        assert row["found"] in claims.DECIDED


@pytest.mark.parametrize("row", [r for r in CLAIMS if r["kind"] == "runs"], ids=lambda row: row["claim"][:40])
def test_what_runs_came_to_has_a_regime_and_a_power(row):
    assert row["testbeds"]
    assert row["seeds"] == 1 or row["seen"] or "p" in row
    assert row["seen"] is None or row["seen"].pairs <= max(row["seeds"], 52)
    of_source = {regime for name, regime in OF_SOURCES.items() if row["source"].startswith(name)}
    assert (
        not of_source or row.get("about") == "library" or {row.get("there")} == of_source or "collapse" in row["claim"]
    )


def test_the_page_says_both_regimes_and_the_power_or_why_it_is_unknown():
    shown = runpy.run_path(str(ROOT / "docs" / "generate.py"))["_regime"]
    for row in CLAIMS:
        if row["kind"] == "runs":
            text = shown(row)
            assert all(part in text for part in ("*here*", "*source*", "seed")), row["claim"]
            assert ("shows " in text) != ("power unknown" in text), row["claim"]
        unrun = [name for name, regime in row["testbeds"].items() if regime.get("updates") == 0]
        assert shown(row).count("not measured") == len(unrun)


@pytest.mark.parametrize(("name", "regime"), DOCUMENT["sources"].items())
def test_a_regime_of_a_source_says_where_it_was_read(name, regime):
    assert regime["read"]
    assert set(regime) <= {*claims.COMPARED, "cause", "read"}
    assert any(row.get("there") == name for row in CLAIMS)


@pytest.mark.parametrize("contrast", [c for row in CLAIMS for c in row.get("contrast", [])], ids=str)
def test_no_contrast_is_copied_from_a_text(contrast):
    assert not {"low", "high", "mean"} & set(contrast)
    assert (RESULTS / contrast["data"]).is_file()


@pytest.mark.parametrize("name", TESTBEDS)
def test_a_stored_regime_is_that_of_its_recipe(name):
    stored = json.loads((RESULTS / "regimes.json").read_text(encoding="utf-8"))[name]
    testbed = TESTBEDS[name]
    assert (stored["file"], stored["arm"]) == (testbed.file, testbed.arm)
    assert settings_of(recipe_of(testbed)).items() <= stored.items()


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command of ours. Raises: `ValueError` where it cannot be read."""
    command: Any = get_command(application(words[0]))
    while hasattr(command, "commands"):
        if words[0] not in command.commands:
            raise ValueError(f"no command {words[0]}")
        command, words = command.commands[words[0]], words[1:]
    try:
        return command.make_context(command.name, words).params
    except Exception as e:  # typer's own copy of click
        raise ValueError(str(e)) from e


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_can_be_read(text, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(text)
    if program == "offdrift":
        params = parsed(words)
        if words[0] == "train":
            recipe = load_recipe(params["recipe"], changes=params["changes"] or [])
            assert set((params["arms"] or "").split(",")) - {""} <= set(recipe.arms)
        if words[0] == "sweep":
            assert load_sweep(params["file"]).cells
        return
    assert program == "python"
    script = f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]
    source = (ROOT / script).read_text(encoding="utf-8")
    options = [word for word in words if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in source] == []


@pytest.mark.parametrize("text", ["train recipes/tiny.toml --sett a=1", "lab bonds", "sweep s.toml --jobs 0"])
def test_a_command_that_cannot_be_read_is_noticed(text):
    with pytest.raises(ValueError):
        parsed(shlex.split(text))
