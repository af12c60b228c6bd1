"""The command line: parse, call, print. No mathematics; one file per command.

Commands import what they run when they run, so that help and completion wait for neither torch nor
pyarrow.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from rich.console import Console
from rich.markup import escape
from typer import Typer

from offdrift.cli.exit_codes import ExitCode
from offdrift.errors import OffdriftError

COMMANDS = (
    "check",
    "plan",
    "train",
    "sweep",
    "watch",
    "audit",
    "compare",
    "report",
    "certify",
    "methods",
    "schedules",
    "bound",
    "lab",
)
"""In the order of the help page."""
PARTS = {"lab": ("lab", "lab_runs")}
"""Modules of a command that has several."""


def application(first_word: str = "") -> Typer:
    """The application with the command of this name; by any other word with all of them, as the help page shows."""
    for name in (first_word,) if first_word in COMMANDS else COMMANDS:
        for module in PARTS.get(name, (name,)):
            import_module(f"offdrift.cli.{module}")  # which adds the command
    return import_module("offdrift.cli.app").app


def main() -> None:
    """Run the command line; an expected error is one message and exit status 1, no traceback."""
    # Read by OpenMP when torch is imported. A thread that spins at a barrier keeps the core from the thread
    # that it waits for as soon as another process wants one: see benchmarks/busy.py.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        application(*sys.argv[1:2])(prog_name="offdrift")
        return
    except KeyboardInterrupt:
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except (OffdriftError, OSError) as error:
        kind, text = type(error).__name__, str(error)
    except ModuleNotFoundError as error:
        if (error.name or "offdrift").split(".")[0] == "offdrift":
            raise
        kind = "Missing package"
        text = f"this command needs {error.name}; pip install 'offdrift[train]' brings all of them"
    Console(stderr=True).print(f"[bold red]{kind}[/]: {escape(text)}", highlight=False, soft_wrap=True)
    raise SystemExit(ExitCode.ERROR)
