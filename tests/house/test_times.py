"""A time that is stated says on which machine it was measured."""

import re
from pathlib import Path

import pytest
import typer.main

from offdrift.cli import application

ROOT = Path(__file__).parents[2]
TIME = re.compile(r"(?i)\b(?:seconds?|minutes?|hours?)\b(?! old)")
MEASURED = re.compile(r"(?i)\b(?:takes?|took|of CPU|CPU (?:seconds|minutes)|on two (?:CPU )?cores|half an hour)\b")
MACHINE = re.compile(r"2\.1 GHz Xeon|AMD EPYC")
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def unnamed(text: str) -> list[str]:
    """Sentences that state how long something takes, in a text that names no machine."""
    sentences = re.split(r"(?<=[.;])\s", " ".join(text.split()))
    stated = [s for s in sentences if TIME.search(s) and MEASURED.search(s)]
    return [] if MACHINE.search(text) else stated


def comments(path: Path) -> str:
    """The lines of comments that a file opens with."""
    lines = path.read_text("utf-8").splitlines()
    return "\n".join(line.lstrip("# ") for line in lines[: next(i for i, x in enumerate(lines) if x[:1] != "#")])


def helps() -> dict[str, str]:
    """Help text of every command."""
    root = typer.main.get_command(application())
    found = {}
    for name, command in root.commands.items():
        for sub, inner in getattr(command, "commands", {name: command}).items():
            found[name if sub == name else f"{name} {sub}"] = inner.help
    return found


@pytest.mark.parametrize("path", [ROOT / "Makefile", *RECIPES], ids=lambda path: path.name)
def test_a_file_that_states_a_time_names_the_machine(path):
    assert unnamed(comments(path)) == []


def test_a_help_text_that_states_a_time_names_the_machine():
    texts = helps()
    assert {"check", "lab bounds", "train"} <= {*texts}
    assert {name: stated for name, text in texts.items() if (stated := unnamed(text))} == {}


def test_a_time_without_a_machine_is_noticed():
    assert unnamed("A sweep. 32 runs take five minutes on two cores; see docs.") != []
    assert unnamed("Weights that are ten minutes old. Ends after a minute.") == []
    assert unnamed("32 runs take five minutes of a core of a 2.1 GHz Xeon.") == []
