"""`offdrift watch`: follow a run that is being written, and say what goes wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import (
    DURING,
    Columns,
    Experts,
    FailOn,
    MethodName,
    RulesFile,
    Screen,
    Temperature,
    app,
    pairs,
    reaches,
)
from offdrift.cli.exit_codes import ExitCode
from offdrift.errors import BadValueError


@app.command(rich_help_panel=DURING, verdict="a finding as severe as --fail-on")
def watch(
    screen: Screen,
    run: Annotated[Path, typer.Argument(help="A run folder, one of its arms, or a log that grows.")],
    columns: Columns = None,
    rules: RulesFile = None,
    framework: Annotated[str, typer.Option(help="Whose configuration the fixes are written in.")] = "offdrift",
    method: MethodName = None,
    temperature: Temperature = None,
    moe: Experts = None,
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.05)] = 2.0,
    until_idle: Annotated[float | None, typer.Option(help="End when nothing was added for this many seconds.")] = None,
    fail_on: FailOn = None,
) -> None:
    """Follow a run and alert in the terminal: what is wrong, how it is known, and the smallest fix.

    Follows runs of `offdrift train` by their metrics, and any other framework's by its log. A run is
    judged from its beginning, not from when the watch starts. Ctrl-C ends the watch. --json prints
    steps and findings as JSON lines.

    \b
    offdrift watch runs/tiny
    offdrift watch /data/run/token_exports --framework prime-rl --fail-on stop
    """
    from offdrift.audit.conclude import run_context
    from offdrift.audit.watch import LiveWatch, Log, Row, sources
    from offdrift.judge import Watcher, load_rules

    table, names = load_rules(rules), pairs(columns)
    followed, watchers = sources(run, columns=names), {}
    failed, last = False, time.monotonic()

    def judge(row: Row) -> bool:
        """Judge one row; whether a finding is severe enough to end the watch."""
        if row.source not in watchers:
            arm = run / "arms" / row.source
            about = run_context(
                str(arm if arm.is_dir() else run),
                framework,
                method=method,
                temperature=temperature,
                mixture_of_experts=moe,
            )
            watchers[row.source] = Watcher(context=about, rules=table)
        watcher = watchers[row.source]
        watcher.context = replace(watcher.context, facets={"worker": row.workers})
        fired = watcher.update(row.numbers)
        if live is not None:
            live.show(row.source, row.numbers, [f.as_dict() for f in fired])
        else:
            screen.json({"source": row.source, "kind": "step", **row.numbers}, indent=None)
            for f in fired:
                line = {"source": row.source, "kind": "finding", **f.as_dict()}
                screen.json(line, indent=None)
        return any(reaches(f.severity, fail_on) for f in fired)

    if not run.exists():
        raise BadValueError(f"there is nothing at {run}; give the folder that the run writes to")
    live = None if screen.as_json else LiveWatch(screen.out, str(run), framework, table=not screen.quiet)
    stopped = False
    try:
        while not failed:
            arms = {s.name for s in followed if not isinstance(s, Log)}
            followed += [s for s in sources(run, columns=names) if not isinstance(s, Log) and s.name not in arms]
            for source in followed:
                for row in source.poll():
                    last = time.monotonic()
                    failed = judge(row) or failed
            if until_idle is not None and time.monotonic() - last >= until_idle:
                break
            if not failed:
                time.sleep(every)
    except KeyboardInterrupt:
        stopped = True
    try:
        for source in followed:  # the newest step was waiting for a later one
            for row in source.finish():
                failed = judge(row) or failed
    finally:
        if live is not None:
            live.close()
    for source in followed:
        if isinstance(source, Log) and source.bad_rows + source.late_rows:
            screen.warn(
                f"{source.bad_rows} bad rows were skipped, and {source.late_rows} rows of steps that were judged before"
            )
    screen.next(f"offdrift audit {run}", "every metric, cause and fix, from all that was logged")
    if stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if failed:
        raise typer.Exit(ExitCode.VERDICT)
