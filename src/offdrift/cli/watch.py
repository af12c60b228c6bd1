"""`offdrift watch`: follow a run that is being written, and say what goes wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from offdrift.cli.app import app, console
from offdrift.cli.options import (
    FAILED,
    INTERRUPTED,
    SEVERITIES,
    Columns,
    Experts,
    FailOn,
    MethodName,
    RulesFile,
    Temperature,
    pairs,
    severity,
)
from offdrift.errors import BadValueError


@app.command()
def watch(
    run: Annotated[
        Path, typer.Argument(help="A run folder, one of its arms, or a log that grows.")
    ],
    columns: Columns = None,
    rules: RulesFile = None,
    framework: Annotated[
        str, typer.Option(help="Whose configuration the fixes are written in.")
    ] = "offdrift",
    method: MethodName = None,
    temperature: Temperature = None,
    moe: Experts = None,
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.05)] = 2.0,
    until_idle: Annotated[
        float | None, typer.Option(help="End when nothing was added for this many seconds.")
    ] = None,
    fail_on: FailOn = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print steps and findings as JSON lines.")
    ] = False,
) -> None:
    """Follow a run and alert in the terminal: what is wrong, how it is known, and the smallest fix.

    Follows runs of `offdrift train` by their metrics, any other framework's by its log. What was
    there before counts, too: a run is judged from its beginning. Ctrl-C ends it.

    \b
    offdrift watch runs/tiny
    offdrift watch /data/run/token_exports --framework prime-rl --fail-on stop
    """  # fmt: skip
    from offdrift.audit.run_context import run_context
    from offdrift.audit.watch import Log, Row, sources
    from offdrift.audit.watch_view import LiveWatch
    from offdrift.judge import Watcher, load_rules

    limit = severity(fail_on)
    table, names = load_rules(rules), pairs(columns)
    followed, watchers = sources(run, columns=names), {}
    failed, last = False, time.monotonic()

    def take(row: Row, screen: LiveWatch | None) -> bool:
        """Judge one row; whether a finding is severe enough to end the watch."""
        if row.source not in watchers:
            arm = run / "arms" / row.source
            about = run_context(str(arm if arm.is_dir() else run), framework, method=method, temperature=temperature, mixture_of_experts=moe)  # fmt: skip
            watchers[row.source] = Watcher(context=about, rules=table)
        fired = watchers[row.source].update(row.numbers)
        if screen is not None:
            screen.show(row.source, row.numbers, [f.as_dict() for f in fired])
        else:
            typer.echo(json.dumps({"source": row.source, "kind": "step", **row.numbers}))
            for f in fired:
                typer.echo(json.dumps({"source": row.source, "kind": "finding", **f.as_dict()}))
        return any(SEVERITIES.index(f.severity) >= limit for f in fired)

    if not run.exists():
        raise BadValueError(f"there is nothing at {run}; give the folder that the run writes to")
    screen = None if as_json else LiveWatch(console, str(run), framework)
    stopped = False
    try:
        while not failed:
            seen = {s.name for s in followed if not isinstance(s, Log)}
            followed += [s for s in sources(run, columns=names) if not isinstance(s, Log) and s.name not in seen]  # fmt: skip
            for source in followed:
                for row in source.poll():
                    last = time.monotonic()
                    failed = take(row, screen) or failed
            if until_idle is not None and time.monotonic() - last >= until_idle:
                break
            if not failed:
                time.sleep(every)
    except KeyboardInterrupt:
        stopped = True
    try:
        for source in followed:  # the newest step was waiting for a later one
            for row in source.finish():
                failed = take(row, screen) or failed
    finally:
        if screen is not None:
            screen.close()
    for source in followed:
        if isinstance(source, Log) and source.bad_rows + source.late_rows:
            Console(stderr=True).print(f"{source.bad_rows} bad rows were skipped, and {source.late_rows} rows of steps that were judged before", highlight=False)  # fmt: skip
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if failed:
        raise typer.Exit(FAILED)
