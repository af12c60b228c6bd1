"""The command line: parse, call, print. No mathematics; one file per command.

Commands import what they run when they run, so that help and completion wait for neither torch nor
pyarrow.
"""

from __future__ import annotations

import os
from importlib import import_module

from rich.console import Console
from rich.markup import escape

from offdrift.cli.app import app as app
from offdrift.cli.exit_codes import ExitCode
from offdrift.errors import OffdriftError

# Importing a command adds it to the application, in the order of the help page.
for _command in ["check", "train", "watch", "audit", "compare", "report", "certify", "methods", "bound", "lab"]:
    import_module(f"offdrift.cli.{_command}")


def main() -> None:
    """Run the command line; an expected error is one message and exit status 1, no traceback."""
    # Read by OpenMP when torch is imported. A thread that spins at a barrier keeps the core from the thread
    # that it waits for as soon as another process wants one: see benchmarks/busy.py.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(prog_name="offdrift")
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
