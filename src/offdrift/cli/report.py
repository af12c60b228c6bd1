"""`offdrift report`: the page of a run, a sweep or an audit again, from what is stored."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli import REPORTS
from offdrift.cli.app import AFTER, RulesFile, Screen, app
from offdrift.errors import RecordError


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
    rules: RulesFile = None,
) -> None:
    """Write the page of a run, a sweep or an audit again from what it stored, and print its table.

    All three can be looked at while they are under way; nothing is disturbed. --json prints run.json, sweep.json or
    audit.json. It judges by the rules that the run was started with, which its record holds; --rules judges by others.

    \b
    offdrift report runs/tiny
    offdrift report runs/tiny --every-step
    offdrift report runs/tiny --rules mine.toml
    offdrift report runs/sweep
    offdrift report audits/tiny-none
    """
    from offdrift.show.html import PAGE_BYTES

    screen.doing("writing the page")
    limit = math.inf if every_step else PAGE_BYTES
    if (run / "arms.json").is_file():
        from offdrift.audit.arms_view import arms_view
        from offdrift.audit.page import write_audit_page
        from offdrift.audit.rejudge import audit_judged_by
        from offdrift.audit.result import ArmsAudit, Audit

        arms = ArmsAudit({name: Audit(audit_judged_by(run / name, rules)) for name in ArmsAudit.read(run).arms})
        for name, audit in arms.arms.items():
            write_audit_page(audit.data, run / name)
        page, view, stored = arms.write_page(run), arms_view(arms, width=screen.width, folder=str(run)), arms.as_dict()
    elif (run / "audit.json").is_file():
        from offdrift.audit.page import write_audit_page
        from offdrift.audit.rejudge import audit_judged_by
        from offdrift.audit.view import audit_view

        stored = audit_judged_by(run, rules)
        page, view = write_audit_page(stored, run, limit=limit), audit_view(stored, width=screen.width, folder=str(run))
    else:
        kind = next((name for name in REPORTS if (run / name).is_file()), None)
        if kind is None:
            raise RecordError(
                f"{run} {'holds none of' if run.is_dir() else 'is not a folder with'} arms.json, audit.json, "
                f"{', '.join(REPORTS)}; give the folder of a run, a sweep or an audit"
            )
        module, _, function = REPORTS[kind].rpartition(".")
        page, view, stored = getattr(import_module(module), function)(run, limit=limit, width=screen.width, rules=rules)
    if screen.as_json:
        screen.json(stored, indent=None)
    else:
        screen.show(view, "")
        screen.wrote(report=page)
    screen.next(f"open {page}", "the whole report, in a browser")
