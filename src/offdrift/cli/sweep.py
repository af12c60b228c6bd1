"""`offdrift sweep`: a recipe's arms over seeds and settings, compared with intervals."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sized
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from offdrift.cli.app import DURING, Screen, app
from offdrift.cli.exit_codes import ExitCode


def counted(things: Sized, name: str) -> str:
    """A count with its noun."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


@app.command(rich_help_panel=DURING)
def sweep(
    screen: Screen,
    file: Annotated[Path, typer.Argument(help="A sweep file (TOML); recipes/sweep.toml is an example.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the recipe in every run, as in batches=8. Repeatable.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time, each in a process.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; default runs/NAME.")] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw the compared metric over updates, with bands over seeds: a .svg, .png or .html file.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file, say what would run, and run nothing.")
    ] = False,
) -> None:
    """Run a recipe's arms over seeds and settings, and compare them with intervals.

    A sweep file names a recipe, seeds, arms (of the recipe, or methods of the table), values of settings, and what to
    compare; docs/sweeps.md explains it. Everything is checked before anything runs. Every run has a folder of its
    own, as of `offdrift train`, and differs from its baseline in nothing but its setting: differences are paired by
    seed, and verdicts hold for all comparisons together.

    The same command again goes on where it was interrupted, tries failed runs again, and adds seeds, arms and values
    that have been added to the file. The folder holds sweep.json and sweep.html; --json prints the first.

    \b
    offdrift sweep recipes/sweep.toml --dry-run
    offdrift sweep recipes/sweep.toml
    offdrift sweep recipes/sweep.toml --jobs 2 --out runs/mine --chart mine.svg
    """
    from offdrift.train.sweep import Pace, load_sweep, locked, run_sweep

    if chart is not None and chart.suffix.lower() not in (".html", ".svg", ".png"):  # not after hours
        raise typer.BadParameter(f"--chart {chart}: a chart is a .html, .svg or .png file")
    grid = load_sweep(file, out, changes=changes or [])
    states = [cell.status for cell in grid.cells]
    kinds = ", ".join(f"{states.count(s)} {s}" for s in ("finished", "begun", "failed", "waiting") if s in states)
    screen.err.print(
        f"sweep [bold]{grid.sweep.name}[/]: {counted(grid.settings, 'setting')}, {counted(grid.sweep.seeds, 'seed')}, "
        f"{counted(grid.cells, 'run')} ({kinds}); folder {escape(str(grid.folder))}",
        soft_wrap=True,
    )
    if dry_run:
        rows = [
            {"setting": s.name, "baseline": b.name if (b := grid.baseline_of(s)) else None, "folder": s.folder}
            for s in grid.settings
        ]
        if screen.as_json:
            screen.json({"seeds": list(grid.sweep.seeds), "runs": len(grid.cells), "settings": rows})
        for row in rows:
            screen.show(f"{row['setting']}  compared with {row['baseline']}" if row["baseline"] else row["setting"])
        return
    from offdrift.records.atomic import write_json
    from offdrift.train.page import write_sweep_chart, write_sweep_page
    from offdrift.train.sweep_results import results
    from offdrift.train.view import sweep_summary

    words = [w for c in changes or [] for w in ("--set", c)] + (["--jobs", str(jobs)] if jobs > 1 else [])
    words += [] if chart is None else ["--chart", str(chart)]
    again = shlex.join(["offdrift", "sweep", str(file), *words, *(["--out", str(out)] if out else [])])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill ends like Ctrl-C
    pace = Pace(grid, jobs)
    with locked(grid.folder):
        with screen.until_interrupted("updates") as bar:
            task = bar.add_task("", total=pace.updates[1], completed=pace.updates[0])

            def report(progress) -> None:
                pace.follow(progress)
                cell, (over, _) = progress.cell, pace.updates
                name = f"{cell.setting.name}, seed {cell.seed}"
                bar.update(task, completed=over, description=f"{name}; {pace.left}")
                if progress.done:
                    ended = sum(c.status in ("finished", "failed") for c in grid.cells)
                    error = f": {cell.error.splitlines()[0]}" if cell.status == "failed" else ""
                    screen.note(f"{ended}/{len(grid.cells)}  {name}  {cell.status}{error}; {pace.left}")

            run_sweep(grid, jobs=jobs, report=report)
        document = results(grid)
        write_json(grid.folder / "sweep.json", document)
        page = write_sweep_page(grid, document)
        picture = {} if chart is None else {"chart": write_sweep_chart(chart, grid, document)}
    if screen.as_json:
        from offdrift.records.atomic import plain

        screen.json(plain(document), indent=None)
    else:
        screen.show(sweep_summary(document, width=screen.width), "")
        screen.wrote(results=grid.folder / "sweep.json", page=page, **picture)
    if screen.interrupted:
        screen.warn(f"interrupted; nothing before the last checkpoints is lost. Continue with:\n  {again}")
        raise typer.Exit(ExitCode.INTERRUPTED)
    if any(cell.status == "failed" for cell in grid.cells):
        screen.warn(f"some runs failed; once the cause is gone, try them again with:\n  {again}")
        raise typer.Exit(ExitCode.ERROR)
    screen.next(f"open {page}", "curves with intervals, and every run, in a browser")
