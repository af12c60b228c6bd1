"""`offdrift report`: the page of a run or of an audit again, from what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from offdrift.cli.app import app, console


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not, or an audit.")],
) -> None:
    """Write the report.html of a run or an audit again from what it stored, and print its table."""
    page = _audit_report(run) if (run / "audit.json").is_file() else _run_report(run)
    console.print(f"\nreport: {escape(str(page))}")


def _run_report(run: Path) -> Path:
    from offdrift.train.page import write_report
    from offdrift.train.stored import read_run
    from offdrift.train.view import run_summary

    page = write_report(run)
    console.print(run_summary(read_run(run), width=console.width))
    return page


def _audit_report(folder: Path) -> Path:
    from offdrift.audit.conclude import read_audit
    from offdrift.audit.page import write_audit_page
    from offdrift.audit.view import audit_view

    found = read_audit(folder)
    page = write_audit_page(found, folder)
    console.print(audit_view(found, width=console.width))
    return page
