"""The command line: parse, call, print. No mathematics; one file per command.

Commands import what they run when they run, so that help and completion wait for neither torch nor
pyarrow. This file needs the standard library alone: what is not installed is named, with the extra that brings it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from importlib import import_module
from importlib.metadata import metadata, requires, version
from io import TextIOWrapper
from typing import TYPE_CHECKING

from offdrift.cli.exit_codes import ExitCode
from offdrift.errors import OffdriftError

if TYPE_CHECKING:
    from typer import Typer

COMMANDS = (
    "check",
    "plan",
    "train",
    "sweep",
    "watch",
    "demo",
    "audit",
    "compare",
    "report",
    "certify",
    "methods",
    "rules",
    "schedules",
    "schema",
    "bound",
    "docs",
    "lab",
)
"""In the order of the help page."""
EXTRAS = {
    **dict.fromkeys(("check", "train", "sweep", "certify", "schema"), "train"),
    "plan": "plan",
    **dict.fromkeys(("watch", "demo", "audit", "compare", "report"), "audit"),
    **dict.fromkeys(("methods", "rules", "schedules", "bound", "docs", "lab"), "cli"),
}
"""What to install for each command: pip install 'offdrift[EXTRA]'. `[train]` brings all of them."""
LAB = "offdrift_lab.cli"
"""Where the commands of the trainer and of experiments stand. Nothing else in this package knows of that one."""
MODULES = {
    **{name: (f"offdrift.cli.{name}",) for name in COMMANDS},
    **{name: (f"{LAB}.{name}",) for name in ("plan", "train", "sweep", "schedules", "schema")},
    "lab": (f"{LAB}.lab", f"{LAB}.lab_runs"),
}
"""Modules that add a command, by its name."""
REPORTS = {"run.json": f"{LAB}.reports.run_report", "sweep.json": f"{LAB}.reports.sweep_report"}
"""Functions that write the page of a folder with this file: `offdrift report` calls them."""


def application(first_word: str = "") -> Typer:
    """The application with the command of this name; by any other word with all of them, as the help page shows."""
    for name in (first_word,) if first_word in COMMANDS else COMMANDS:
        for module in MODULES[name]:
            import_module(module)  # which adds the command
    return import_module("offdrift.cli.app").app


def main() -> None:
    """Run the command line; an expected error is one message and exit status 1, no traceback."""
    # Read by OpenMP when torch is imported. A thread that spins at a barrier keeps the core from the thread
    # that it waits for as soon as another process wants one: see benchmarks/busy.py.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # how schedulers end a job: every command keeps what it has
    for stream in (sys.stdout, sys.stderr):  # a path that is no text is shown escaped; it ends no command
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
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
        kind, text = "Missing package", missing((error.name or "").split(".")[0], *sys.argv[1:2])
    try:
        from rich.console import Console
        from rich.markup import escape
    except ModuleNotFoundError:
        print(f"{kind}: {text}", file=sys.stderr)
    else:
        Console(stderr=True).print(f"[bold red]{kind}[/]: {escape(text)}", highlight=False, soft_wrap=True)
    raise SystemExit(ExitCode.ERROR)


def packages_of(extra: str) -> set[str]:
    """Names by which the packages of an extra are imported, where these are the names that they are installed by.

    Example:
        >>> "safetensors" in packages_of("train"), "safetensors" in packages_of("audit")
        (True, False)
    """
    lines = [line for line in requires("offdrift") or () if f"extra == '{extra}'" in line.replace('"', "'")]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}


def missing(package: str, command: str = "") -> str:
    """Message for a command whose package is not installed, with the pip command that installs it: the command's extra,
    or another that has the package.

    Example:
        >>> missing("transformers", "train")
        "offdrift train needs transformers: pip install 'offdrift[train]'"
        >>> missing("accelerate", "report")
        "offdrift report needs accelerate: pip install 'offdrift[train]'"
    """
    if package in ("typer", "rich"):
        return (
            f"offdrift {version('offdrift')} is installed as a library; its commands need {package}: "
            "pip install 'offdrift[cli]' for methods, rules, schedules, bound and lab, 'offdrift[audit]' for audit, "
            "watch, compare and report, too, 'offdrift[train]' for all"
        )
    extra = EXTRAS.get(command, "train")
    if package not in packages_of(extra):
        others = [
            other for other in metadata("offdrift").get_all("Provides-Extra", ()) if package in packages_of(other)
        ]
        extra = min(others, key=lambda other: len(packages_of(other)), default=extra)
    return f"offdrift {command} needs {package}: pip install 'offdrift[{extra}]'"
