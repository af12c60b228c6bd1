"""The command line run in this process: what it printed where, and its exit status."""

import sys

import pytest

from offdrift import cli


class Done:
    """How a command ended."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, width: int = 140) -> Done:
    """Run `offdrift WORDS` in a terminal of the given width."""
    monkeypatch.setattr(sys, "argv", ["offdrift", *words])
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    return Done(code, *capsys.readouterr())
