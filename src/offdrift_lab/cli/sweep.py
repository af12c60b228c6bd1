"""`offdrift sweep`: a recipe's arms over seeds and settings, compared with intervals."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from offdrift.cli.app import DURING, RulesFile, Screen, app, interruptible
from offdrift.cli.exit_codes import ExitCode
from offdrift_lab.cli.complete import sweep_names

if TYPE_CHECKING:  # importing it loads torch
    from offdrift_lab.train.sweep.sweep import Grid, Progress


def counted(things: Sized, name: str) -> str:
    """A count with its noun."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


class Interim:
    """Results that are written again as runs end: at most a tenth of the time goes into it."""

    def __init__(self, write: Callable[[], object]) -> None:
        self.write = write
        self.next = time.monotonic()

    def again(self) -> None:
        """Write them, unless the last time is too short ago."""
        begin = time.monotonic()
        if begin >= self.next:
            self.write()
            self.next = 10 * time.monotonic() - 9 * begin


def headline(grid: Grid, states: Sequence[str]) -> str:
    """Return one line on a sweep: its size, how many of its runs are in which state, and its folder."""
    kinds = ", ".join(f"{states.count(s)} {s}" for s in ("finished", "begun", "failed", "waiting") if s in states)
    return (
        f"sweep [bold]{grid.sweep.name}[/]: {counted(grid.settings, 'setting')}, {counted(grid.sweep.seeds, 'seed')}, "
        f"{counted(grid.cells, 'run')} ({kinds}); folder {escape(str(grid.folder))}"
    )


def show_plan(screen: Screen, grid: Grid) -> None:
    """Show the settings of a sweep, each with what it is compared with."""
    rows = [
        {"setting": s.name, "baseline": b.name if (b := grid.baseline_of(s)) else None, "folder": s.folder}
        for s in grid.settings
    ]
    if screen.as_json:
        screen.json({"seeds": list(grid.sweep.seeds), "runs": len(grid.cells), "settings": rows})
    for row in rows:
        screen.show(f"{row['setting']}  compared with {row['baseline']}" if row["baseline"] else row["setting"])


def run_on_screen(screen: Screen, grid: Grid, *, jobs: int | None, **cluster: Any) -> tuple[dict[str, Any], Path]:
    """Make the runs that are missing, with a bar and a line for each that ends; the results, and their page.

    Args:
        cluster: of `run_sweep`.
    """
    from offdrift_lab.train.report.page import write_sweep
    from offdrift_lab.train.sweep.sweep import Pace, locked
    from offdrift_lab.train.sweep.sweep_workers import run_sweep

    check = interruptible()
    pace = Pace(grid, jobs or 1)
    with locked(grid.folder):
        write_sweep(grid)  # so that `offdrift report` shows what there is from now on
        with screen.until_interrupted("updates") as bar:
            task = bar.add_task("", total=pace.updates[1], completed=pace.updates[0])
            written = Interim(lambda: write_sweep(grid))

            def follow(progress: Progress) -> None:
                check()
                pace.follow(progress)
                cell, (over, _) = progress.cell, pace.updates
                name = f"{cell.setting.name}, seed {cell.seed}"
                bar.update(task, completed=over, description=f"{name}; {pace.left}")
                if progress.done:
                    ended = sum(c.status in ("finished", "failed") for c in grid.cells)
                    error = f": {cell.error.splitlines()[0]}" if cell.status == "failed" else ""
                    screen.note(f"{ended}/{len(grid.cells)}  {name}  {cell.status}{error}; {pace.left}")
                    written.again()

            run_sweep(grid, jobs=jobs, report=follow, **cluster)
        return write_sweep(grid)


def command_again(file: Path, changes: Sequence[str], options: Mapping[str, object]) -> str:
    """Return the command of a sweep, with the options that have a value."""
    words = [word for change in changes for word in ("--set", change)]
    words += [str(word) for option, value in options.items() if value is not None for word in (option, value)]
    return shlex.join(["offdrift", "sweep", str(file), *words])


@app.command(rich_help_panel=DURING)
def sweep(
    screen: Screen,
    file: Annotated[
        Path,
        typer.Argument(
            help="A sweep file (TOML), or the name of one that comes with the package, as sweep.",
            autocompletion=sweep_names,
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the recipe in every run, as in batches=8. Repeatable.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Runs at a time, each in a process; default 1, with --ray as many as the cluster has room for.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Ray cluster: auto, host:port, or local. All nodes must see the sweep's folder.",
        ),
    ] = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs of the cluster that a run takes, with --ray.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs of the cluster that a run takes, with --ray.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; default runs/NAME.")] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw the compared metric over updates, with bands over seeds: a .svg, .png or .html file.",
        ),
    ] = None,
    rules: RulesFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file, say what would run, and run nothing.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Compare what is there so far, and run nothing; also while a sweep runs.")
    ] = False,
) -> None:
    """Run a recipe's arms over seeds and settings, and compare them with intervals.

    A sweep file names a recipe, seeds, arms (of the recipe, or methods of the table), values of settings, and what to
    compare; docs/sweeps.md explains it. Everything is checked before anything runs. Every run has a folder of its
    own, as of `offdrift train`, and differs from its baseline in nothing but its setting: differences are paired by
    seed, and verdicts hold for all comparisons together.

    The same command again goes on where it was interrupted, tries failed runs again, and adds seeds, arms and values
    that have been added to the file. The folder holds sweep.json and sweep.html, which are written again whenever a
    run has ended; --json prints the first.

    \b
    offdrift sweep recipes/sweep.toml --dry-run
    offdrift sweep recipes/sweep.toml
    offdrift sweep recipes/sweep.toml --jobs 2 --out runs/mine --chart mine.svg
    offdrift sweep recipes/sweep.toml --ray auto --gpus 1
    offdrift sweep recipes/sweep.toml --report
    """
    from offdrift_lab.train.settings.keys import check_keys
    from offdrift_lab.train.settings.places import recipe_file

    if chart is not None and chart.suffix.lower() not in (".html", ".svg", ".png"):  # not after hours
        raise typer.BadParameter(f"--chart {chart}: a chart is a .html, .svg or .png file")
    own = recipe_file(file)
    check_keys(own, changes or [], part="Sweep", name="a sweep")
    from offdrift_lab.train.data.tasks import check_task_name
    from offdrift_lab.train.sweep.sweep import load_sweep

    if own != file:
        screen.note(f"{file}: the package's own, {own}")
    screen.doing("reading the sweep")
    grid = load_sweep(own, out, changes=changes or [], rules=rules)
    for task in {cell.recipe.task for cell in grid.cells}:
        check_task_name(task)
    states = [cell.status for cell in grid.cells]
    screen.err.print(headline(grid, states), soft_wrap=True)
    if dry_run:
        show_plan(screen, grid)
        return
    screen.doing("comparing what there is" if report else "loading")
    from offdrift_lab.train.report.page import write_sweep, write_sweep_chart
    from offdrift_lab.train.report.view import sweep_summary

    if report:
        document, page = write_sweep(grid)
    else:
        document, page = run_on_screen(screen, grid, jobs=jobs, ray=ray, cpus=cpus, gpus=gpus)
    picture = {} if chart is None else {"chart": write_sweep_chart(chart, grid, document)}
    if screen.as_json:
        from offdrift.records.atomic import plain

        screen.json(plain(document), indent=None)
    else:
        screen.show(sweep_summary(document, width=screen.width), "")
        screen.wrote(results=grid.folder / "sweep.json", page=page, **picture)
    options = {
        "--jobs": jobs,
        "--ray": ray,
        "--cpus": cpus if cpus != 1 else None,
        "--gpus": gpus or None,
        "--out": out,
        "--chart": chart,
        "--rules": rules,
    }
    again = command_again(file, changes or [], options)
    if report:
        if {"begun", "waiting"} & {*states}:
            screen.next(again, "what is not finished, unless it is running now")
        return
    if screen.interrupted:
        screen.warn(f"interrupted; nothing before the last checkpoints is lost. Continue with:\n  {again}")
        raise typer.Exit(ExitCode.INTERRUPTED)
    if any(cell.status == "failed" for cell in grid.cells):
        screen.warn(f"some runs failed; once the cause is gone, try them again with:\n  {again}")
        raise typer.Exit(ExitCode.ERROR)
    screen.next(f"open {page}", "curves with intervals, and every run, in a browser")
