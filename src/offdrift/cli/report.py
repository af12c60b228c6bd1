"""`offdrift report`: the page of a run or of an audit again, from what is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import AFTER, AsJson, NoColor, Quiet, Screen, app


@app.command(rich_help_panel=AFTER)
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not, or an audit.")],
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> None:
    """Write the report.html of a run or an audit again from what it stored, and print its table.

    --json prints run.json or audit.json.

    \b
    offdrift report runs/tiny
    offdrift report audits/tiny-none
    """
    screen = Screen(as_json, quiet)
    if (run / "audit.json").is_file():
        from offdrift.audit.conclude import read_audit
        from offdrift.audit.page import write_audit_page
        from offdrift.audit.view import audit_view

        stored = read_audit(run)
        page, view = write_audit_page(stored, run), audit_view(stored, width=screen.width)
    else:
        from offdrift.train.page import write_report
        from offdrift.train.stored import read_run
        from offdrift.train.view import run_summary

        page, view = write_report(run), run_summary(read_run(run), width=screen.width)
        stored = json.loads((run / "run.json").read_text("utf-8")) if as_json else None
    if as_json:
        screen.json(stored, indent=None)
    else:
        screen.show(view, "")
        screen.wrote(report=page)
    screen.next(f"open {page}", "the whole report, in a browser")
