"""`offdrift report`: the page of a run, a sweep or an audit again, from what is stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import AFTER, Screen, app
from offdrift.texts import read_json


@app.command(rich_help_panel=AFTER)
def report(
    screen: Screen,
    run: Annotated[Path, typer.Argument(help="The folder of a run or a sweep, finished or not, or an audit.")],
    every_step: Annotated[
        bool,
        typer.Option(
            "--every-step",
            help="Keep every step in the page's charts, however large it gets. Without, a page is at most 2 MB: where "
            "its lines do not fit, each keeps its lowest and highest points.",
        ),
    ] = False,
) -> None:
    """Write the page of a run, a sweep or an audit again from what it stored, and print its table.

    All three can be looked at while they are under way; nothing is disturbed. --json prints run.json, sweep.json or
    audit.json.

    \b
    offdrift report runs/tiny
    offdrift report runs/tiny --every-step
    offdrift report runs/sweep
    offdrift report audits/tiny-none
    """
    from offdrift.show.html import PAGE_BYTES

    limit = math.inf if every_step else PAGE_BYTES
    if (run / "audit.json").is_file():
        from offdrift.audit.conclude import read_audit
        from offdrift.audit.page import write_audit_page
        from offdrift.audit.view import audit_view

        stored = read_audit(run)
        page, view = write_audit_page(stored, run, limit=limit), audit_view(stored, width=screen.width)
    elif (run / "sweep.json").is_file():
        from offdrift.records.atomic import plain
        from offdrift.train.page import write_sweep
        from offdrift.train.sweep import stored_sweep
        from offdrift.train.view import sweep_summary

        document, page = write_sweep(stored_sweep(run), limit=limit)
        stored, view = plain(document), sweep_summary(document, width=screen.width)
    else:
        from offdrift.train.page import write_report
        from offdrift.train.stored import read_run
        from offdrift.train.view import run_summary

        page, view = write_report(run, limit=limit), run_summary(read_run(run), width=screen.width)
        stored = read_json(run / "run.json") if screen.as_json else None
    if screen.as_json:
        screen.json(stored, indent=None)
    else:
        screen.show(view, "")
        screen.wrote(report=page)
    screen.next(f"open {page}", "the whole report, in a browser")
