"""The command line run in this process: what it printed where, and its exit status."""

import sys
from functools import cache
from typing import Any

import pytest
import typer.main

from offdrift import cli


class Done:
    """How a command ended."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr


@cache
def built(application: typer.Typer, commands: tuple[int, ...]) -> Any:
    """The application as it parses words, which takes a tenth of a second to build from so many commands."""
    return BUILD(application)


BUILD = typer.main.get_command


def once(application: typer.Typer) -> Any:
    """Build an application unless it has been with the commands that are imported now."""
    parts = [application, *(group.typer_instance for group in application.registered_groups)]
    return built(application, tuple(len(part.registered_commands) for part in parts if part is not None))


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, width: int = 140) -> Done:
    """Run `offdrift WORDS` in a terminal of the given width."""
    monkeypatch.setattr(sys, "argv", ["offdrift", *words])
    monkeypatch.setattr(typer.main, "get_command", once)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    return Done(code, *capsys.readouterr())
