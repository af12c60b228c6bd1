"""Every claim of docs/evidence.toml can be followed: its command parses, and its files and headings exist."""

import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from offdrift.cli import application
from offdrift_lab.train.settings.recipe import load_recipe
from offdrift_lab.train.sweep.sweep import load_sweep

ROOT = Path(__file__).parents[2]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
CLAIMS = tomllib.loads((ROOT / "docs" / "evidence.toml").read_text(encoding="utf-8"))["claim"]
FIELDS = {"claim", "source", "testbed", "command", "notes", "numbers", "verdict", "kind"}
OPTIONAL = {"why", "data", "seeds", "p", "about", "regime", "seen"}
DECIDED = ("reproduced", "falsified here")
SEEDS, LEVEL = 8, 0.05
COMMANDS = sorted({command for row in CLAIMS for command in row["command"]})


@pytest.mark.parametrize("row", CLAIMS, ids=[row["claim"][:40] for row in CLAIMS])
def test_a_claim_has_every_field_and_what_it_names_exists(row):
    assert set(row) - OPTIONAL == FIELDS
    assert row["verdict"] in GENERATE["VERDICTS"]
    # What was not decided says why; what was, has a command and numbers.
    assert ("why" in row) == (row["verdict"] in ("other regime", "undecided", "untestable here"))
    assert bool(row["command"]) == (row["verdict"] != "untestable here")
    assert bool(re.search(r"\d", row["numbers"])) == bool(row["command"])
    assert all((ROOT / file).is_file() for file in row.get("data", ()))
    page, _, heading = row["notes"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert headings.count(heading) == 1


def test_there_are_enough_claims_and_none_twice():
    assert len({row["claim"] + row["testbed"] for row in CLAIMS}) == len(CLAIMS) >= 25
    assert {row["verdict"] for row in CLAIMS} == set(GENERATE["VERDICTS"])


def forbidden(row: dict[str, Any]) -> str | None:
    """The rule that a claim's verdict breaks; None if it may stand."""
    far = [key for key in ("parameters", "tokens", "kl", "lr") if ratio_of_regimes(row, key) >= 10]
    causes = {side.get("cause", "").split(" ")[0].strip(",") for side in row.get("regime", {}).values()} - {""}
    if row["verdict"] in DECIDED:
        if row["kind"] == "runs" and row["seeds"] < SEEDS and row.get("p", 1.0) >= LEVEL:
            return f"{row['seeds']} seeds and no sign-flip p below {LEVEL}"
        if far or len(causes) > 1:
            return f"decided in another regime than the source's: {', '.join(far) or 'cause'}"
    if row["verdict"] == "other regime" and row["kind"] != "runs" and not far:
        return "no regime that differs"
    return None


def ratio_of_regimes(row: dict[str, Any], key: str) -> float:
    sides = [side[key] for side in row.get("regime", {}).values() if key in side]
    return max(sides) / min(sides) if len(sides) == 2 else 1.0


@pytest.mark.parametrize("row", CLAIMS, ids=[row["claim"][:40] for row in CLAIMS])
def test_no_verdict_is_forbidden(row):
    assert forbidden(row) is None
    assert row["kind"] in ("runs", "counts", "exact", "none")
    assert ("seeds" in row) == (row["kind"] == "runs")
    assert row.get("about", "library") == "library"
    # n pairs have 2^n patterns of signs, two of which are as far out as can be.
    assert "p" not in row or row["p"] >= 2 / 2 ** row["seeds"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"seeds": 4}, "4 seeds"),
        ({"seeds": 1, "verdict": "falsified here"}, "1 seeds"),
        ({"seeds": 7, "p": 0.06}, "7 seeds"),
        ({"regime": {"here": {"tokens": 7}, "source": {"tokens": 4000}}}, "tokens"),
        ({"regime": {"here": {"cause": "lag"}, "source": {"cause": "engine"}}}, "cause"),
        ({"verdict": "other regime", "kind": "counts"}, "no regime"),
    ],
)
def test_a_forbidden_verdict_is_refused(changes, rule):
    good = {"verdict": "reproduced", "kind": "runs", "seeds": 8}
    assert forbidden(good) is None
    assert forbidden(good | {"seeds": 7, "p": 0.02}) is None
    assert rule in (forbidden(good | changes) or "")


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
