"""Pages and terminal summaries of runs and sweeps, for `offdrift report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import RenderableType

from offdrift.records.atomic import plain
from offdrift.texts import read_json
from offdrift_lab.train.report.page import write_report, write_sweep
from offdrift_lab.train.report.stored import read_run
from offdrift_lab.train.report.view import run_summary, sweep_summary
from offdrift_lab.train.sweep.sweep import stored_sweep

Report = tuple[Path, RenderableType, Any]
"""The page that was written, what the terminal shows, and what --json prints."""


def run_report(folder: Path, *, limit: float | int, width: int, rules: Path | None = None) -> Report:
    """Write the page of a run.

    Args:
        limit: largest size of the page, bytes.
        width: columns of the terminal.
        rules: a rules file to judge by, in place of the rules that it was started with.
    """
    page = write_report(folder, limit=limit, rules=rules)
    return page, run_summary(read_run(folder, rules), width=width), read_json(folder / "run.json")


def sweep_report(folder: Path, *, limit: float | int, width: int, rules: Path | None = None) -> Report:
    """Write the page of a sweep; arguments as of `run_report`."""
    document, page = write_sweep(stored_sweep(folder, rules), limit=limit)
    return page, sweep_summary(document, width=width), plain(document)
