"""Every claim of docs/evidence.toml can be followed: its command parses, and its files and headings exist."""

import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from benchmarks.regimes import TESTBEDS, recipe_of, settings_of
from typer.main import get_command

from offdrift.cli import application
from offdrift.errors import BadValueError
from offdrift_lab.evidence import claims
from offdrift_lab.train.settings.recipe import load_recipe
from offdrift_lab.train.sweep.sweep import load_sweep

ROOT = Path(__file__).parents[2]
DOCUMENT = tomllib.loads((ROOT / "docs" / "evidence.toml").read_text(encoding="utf-8"))
RESULTS = ROOT / "benchmarks" / "results"
CLAIMS = claims.examined(ROOT / "docs" / "evidence.toml", RESULTS)
FIELDS = {"claim", "source", "testbed", "command", "notes", "numbers", "verdict", "kind"}
OPTIONAL = {"why", "found", "data", "seeds", "p", "about", "here", "there", "contrast", "unit", "no_regime", "says"}
COMMANDS = sorted({command for row in CLAIMS for command in row["command"]})
OF_SOURCES = {"Trust Region Masking": "trm", "M2PO": "m2po", "VESPO": "vespo", "OAPL": "oapl", "survey of": "survey"}
"""Regimes of the sources that most claims about training come from, by how their names begin."""


@pytest.mark.parametrize("row", DOCUMENT["claim"], ids=[row["claim"][:40] for row in CLAIMS])
def test_a_claim_has_every_field_and_what_it_names_exists(row):
    assert set(row) - OPTIONAL == FIELDS
    assert bool(row["command"]) == (row["verdict"] != "untestable here")
    assert bool(re.search(r"\d", row["numbers"])) == bool(row["command"])
    assert all((ROOT / file).is_file() for file in row.get("data", ()))
    page, _, heading = row["notes"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert headings.count(heading) == 1


def test_there_are_enough_claims_and_none_twice():
    assert len({row["claim"] + row["testbed"] for row in CLAIMS}) == len(CLAIMS) >= 25
    assert {row["verdict"] for row in CLAIMS} == set(claims.VERDICTS)


@pytest.mark.parametrize("row", CLAIMS, ids=[row["claim"][:40] for row in CLAIMS])
def test_no_verdict_says_more_than_its_rules_allow(row):
    assert row["refused"] == []


def planted(claim: str, *without: str, **changed: Any) -> dict[str, Any]:
    """A row of the page with other fields."""
    row = next(row for row in DOCUMENT["claim"] if row["claim"].startswith(claim))
    return {k: v for k, v in row.items() if k not in without} | changed


CLIP = "PPO's clip on tokens exacerbates"
GRIDS = "Routing replay lowers the mean mismatch"
DISPO, GMPO = "DISPO trains stably", "GMPO trains stably"
FIGURES = {"data": "figures.json", "sweep": "figures-lag", "less": "start"}
PLANTS = {
    "another regime is no verdict": planted(CLIP, "found", verdict="falsified here"),
    "runs called counts": planted(CLIP, "found", "contrast", "seeds", "says", verdict="falsified here", kind="counts"),
    "runs called counts, and no word of the source": planted(
        CLIP, "found", "there", "contrast", "seeds", "says", verdict="falsified here", kind="counts"
    ),
    "runs called enumerated": planted(
        CLIP, "found", "there", "contrast", "seeds", "says", verdict="falsified here", kind="exact",
        command=["offdrift lab masking"],
    ),
    "runs called a simulation": planted(
        CLIP, "found", "there", "here", "seeds", "contrast", "says", verdict="falsified here", kind="counts",
        no_regime="simulation", command=["offdrift lab lag-law a"],
    ),
    "one seed": planted("Keeping the sampling mask", "why", "there", verdict="reproduced"),
    "one seed at another regime": planted("Keeping the sampling mask", "why", verdict="other regime", found="reproduced"),
    "four pairs called eight": planted("Updates that rest on few", seeds=8),
    "four pairs called eight, decided": planted("Updates that rest on few", "why", verdict="reproduced", seeds=8),
    "a p that the pairs do not have": planted("Updates that rest on few", p=0.01),
    "a p in place of the pairs": planted(DISPO, "contrast", p=0.01),
    "a difference that is not told from 0": planted(
        "Truncated token weights keep training stable when", "why", verdict="undecided", found="falsified here"
    ),
    "a difference that is told, and left undecided": planted(GMPO, "found", "says", verdict="undecided", why="few"),
    "the wrong way round": planted(DISPO, found="reproduced"),
    "a claim of the other sign": planted(DISPO, says="less"),
    "no word of the direction": planted(DISPO, "says"),
    "the same seeds twice": planted(
        DISPO, contrast=[{"data": "staleness_more.json", "arm": a, "less": "start"} for a in ("dispo", "gmpo")], seeds=16
    ),
    "pairs of another sweep": planted(DISPO, contrast=[FIGURES | {"arm": "loose_max"}], says="more", found="reproduced"),
    "undecided without a reason": planted("Updates that rest on few", "why"),
    "counts without the source's regime": planted(GRIDS, "why", "there", "here", verdict="falsified here"),
    "the source's regime without one's own": planted(GRIDS, "why", "here", verdict="falsified here"),
    "a source that states no size": planted(GRIDS, "why", verdict="falsified here", there="tis"),
    "another regime that is the same": planted("Where a mask rejects a whole", verdict="other regime", found="reproduced"),
    "two testbeds, each near in one part": planted(
        CLIP, "found", verdict="falsified here", here=["backwards, lag 15", "SmolLM2, lag 8"]
    ),
    "a verdict that is none": planted(CLIP, verdict="true"),
}  # fmt: skip


@pytest.mark.parametrize("row", PLANTS.values(), ids=PLANTS)
def test_a_verdict_that_says_too_much_is_refused(row, tmp_path):
    # As a file: tables of regimes, and the one claim.
    content = (ROOT / "docs" / "evidence.toml").read_text(encoding="utf-8").partition("[[claim]]")[0]
    content += "[[claim]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in row.items())
    (tmp_path / "evidence.toml").write_text(content, encoding="utf-8")
    with pytest.raises(BadValueError, match="says more than its rules allow"):
        claims.judged(tmp_path / "evidence.toml", RESULTS)


def _toml(value: Any) -> str:
    """A value on one line of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{k}" = {_toml(v)}' for k, v in value.items()) + " }"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("claim", [CLIP, GRIDS, "Keeping the sampling mask", "Updates that rest on few"])
def test_the_same_rows_unchanged_are_not(claim, tmp_path):
    content = (ROOT / "docs" / "evidence.toml").read_text(encoding="utf-8").partition("[[claim]]")[0]
    content += "[[claim]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in planted(claim).items())
    (tmp_path / "evidence.toml").write_text(content, encoding="utf-8")
    assert len(claims.judged(tmp_path / "evidence.toml", RESULTS)) == 1


@pytest.mark.parametrize(
    "row", [r for r in CLAIMS if r.get("contrast") and "interval" not in r["contrast"][0]], ids=str
)
def test_what_pairs_come_to_stands_among_the_numbers(row):
    for contrast in row["contrast"]:
        mean = fmean(claims.pairs(contrast, RESULTS))
        texts = {f"{mean:{sign}.{digits}f}".replace("0.", ".", 1) for sign in "+ " for digits in (2, 3)}
        assert any(text.strip() in row["numbers"] for text in texts), mean


@pytest.mark.parametrize("row", [r for r in CLAIMS if r["kind"] == "runs"], ids=lambda row: row["claim"][:40])
def test_what_runs_came_to_has_a_regime_and_a_power(row):
    assert row["testbeds"]
    assert row["seeds"] == 1 or row["seen"] or "p" in row
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
    # The size is one that the text names, and none of those is smaller.
    sizes = [
        float(n) * {"B": 1e9, "T": 1e12}[unit]
        for n, unit in re.findall(r"(?<![A-Z\d.])(\d+(?:\.\d+)?)(B|T)\b", regime["read"])
    ]
    assert "parameters" not in regime or regime["parameters"] == min(sizes)
    assert set(regime) <= {*claims.COMPARED, "cause", "read"}
    assert any(row.get("there") == name for row in CLAIMS)


@pytest.mark.parametrize("contrast", [c for row in CLAIMS for c in row.get("contrast", [])], ids=str)
def test_no_contrast_is_copied_from_a_text(contrast):
    assert not {"low", "high", "mean"} & set(contrast)
    assert (RESULTS / contrast["data"]).is_file()


@pytest.mark.parametrize(("name", "regime"), DOCUMENT["testbeds"].items())
def test_a_testbed_that_is_written_by_hand_is_a_model_that_runs_here(name, regime):
    measured = json.loads((RESULTS / "regimes.json").read_text(encoding="utf-8"))
    sizes = [row["parameters"] for row in measured.values()]
    sizes += [134_515_008, 50_000]  # SmolLM2-135M; the policy of frontier_neural.py
    assert min(abs(regime["parameters"] / size - 1) for size in sizes) < 0.02, name
    assert regime.get("cause") or regime.get("lr"), name


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
