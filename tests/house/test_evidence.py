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
FIELDS = {"claim", "source", "testbed", "command", "notes", "numbers", "verdict"}
COMMANDS = sorted({command for row in CLAIMS for command in row["command"]})


@pytest.mark.parametrize("row", CLAIMS, ids=[row["claim"][:40] for row in CLAIMS])
def test_a_claim_has_every_field_and_what_it_names_exists(row):
    assert set(row) - {"why", "data"} == FIELDS
    assert row["verdict"] in GENERATE["VERDICTS"]
    # What was not decided says why; what was, has a command and numbers.
    assert ("why" in row) == (row["verdict"] in ("undecided", "untestable here"))
    assert bool(row["command"]) == (row["verdict"] != "untestable here")
    assert bool(re.search(r"\d", row["numbers"])) == bool(row["command"])
    assert all((ROOT / file).is_file() for file in row.get("data", ()))
    page, _, heading = row["notes"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert headings.count(heading) == 1


def test_there_are_enough_claims_and_none_twice():
    assert len({row["claim"] + row["testbed"] for row in CLAIMS}) == len(CLAIMS) >= 25
    assert {row["verdict"] for row in CLAIMS} == set(GENERATE["VERDICTS"])


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
