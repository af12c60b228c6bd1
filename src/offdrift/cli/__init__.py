"""The command line: parse, call, print. No mathematics; one file per command."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console
from rich.markup import escape

# Importing a command adds it to the application, in the order of the help page.
from offdrift.cli import (  # noqa: F401
    audit,
    bound,
    certify,
    check,
    compare,
    lab,
    methods,
    report,
    train,
    watch,
)
from offdrift.cli.app import app as app
from offdrift.errors import OffdriftError


def main() -> None:
    """Run the command line; an error of ours is one message and exit status 1, never a traceback."""
    try:
        app()
    except OffdriftError as error:
        _fail(error)


def _fail(error: OffdriftError) -> NoReturn:
    Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False, soft_wrap=True)  # fmt: skip
    raise SystemExit(1)
