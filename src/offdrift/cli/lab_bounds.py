"""`offdrift lab bounds`: does any bound fail, and how close do they come?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from offdrift.cli.app import console, lab
from offdrift.errors import BadValueError

if TYPE_CHECKING:
    from offdrift.lab.search import Outcome

FAILED, INTERRUPTED = 1, 130


@lab.command()
def bounds(
    pairs: Annotated[int, typer.Option(help="Random pairs of policies.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of pairs and searches.")] = 0,
    adversarial_steps: Annotated[
        int, typer.Option(help="Gradient steps of each search; 0 leaves the search out.")
    ] = 200,
    restarts: Annotated[int, typer.Option(help="Starts of each search, for every bound.")] = 8,
    plant: Annotated[
        float, typer.Option(help="Multiply every bound with this: below 1, does the check notice?")
    ] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="STEM", help="Also write STEM.png, STEM.html and STEM.json."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try every error bound on random pairs of policies and on pairs made to break it.

    Errors and divergences are exact, rewards the worst there are. Exit status 1 if a bound fails.
    100,000 pairs take about two minutes; Ctrl-C shows what was checked.

    \b
    offdrift lab bounds
    offdrift lab bounds --pairs 2000 --plant 0.9
    """
    from offdrift.report.figure import write_figure
    from offdrift.report.lab_bounds import (
        bounds_panels,
        bounds_rows,
        bounds_table,
        horizon_table,
        violations,
    )
    from offdrift.rollouts.store import write_atomically

    if not 0 < plant < math.inf:
        raise BadValueError(f"--plant {plant}: give a factor above 0; 1 leaves the bounds alone")
    for name, value, least in (("pairs", pairs, 1), ("restarts", restarts, 1), ("adversarial-steps", adversarial_steps, 0)):  # fmt: skip
        if value < least:
            raise BadValueError(f"--{name} {value}: give at least {least}")
    outcomes: list[Outcome] = []
    found: list[Outcome] = []
    interrupted = False
    try:
        _run(outcomes, found, pairs, seed, adversarial_steps, restarts, plant)
    except KeyboardInterrupt:
        interrupted = True
    result = {"seed": seed, "factor": plant, "complete": not interrupted, **bounds_rows(outcomes, found)}  # fmt: skip
    if as_json:
        typer.echo(json.dumps(result, indent=1, allow_nan=False))
    elif outcomes or found:
        console.print(bounds_table(outcomes, found, width=console.width))
        console.print(horizon_table(outcomes, found, width=console.width))
        console.print(_verdict(result["pairs"], len(found), violations([*outcomes, *found]), plant))
    if out is not None and (outcomes or found):
        title = "How close do the bounds come to the worst error?"
        caption = (
            f"{result['pairs']:,} random pairs of policies and an adversarial search; exact errors, "
            "sharp constants. Worst of all rewards in [0, 1] up to T = 8, from 16 on worst of those "
            "that look at the last state of a policy's memory."
        )
        files = write_figure(out, bounds_panels(outcomes, found), title=title, caption=caption)
        table = out.with_name(out.name + ".json")
        text = json.dumps(result, indent=1, allow_nan=False)
        write_atomically(table, lambda partial: Path(partial).write_text(text))
        for path in (*files, table):
            Console(stderr=True).print(f"wrote {escape(str(path))}")
    if result["violations"]:
        raise typer.Exit(FAILED)
    if interrupted:
        Console(stderr=True).print("interrupted; what was not checked is left out")
        raise typer.Exit(INTERRUPTED)


def _run(
    outcomes: list[Outcome],
    found: list[Outcome],
    pairs: int,
    seed: int,
    steps: int,
    restarts: int,
    factor: float,
) -> None:
    """Fill both lists, so that what is there when a person interrupts can be shown."""
    from offdrift.lab.adversary import arenas, attack
    from offdrift.lab.pairs import batches
    from offdrift.lab.search import check

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("random pairs", total=pairs)
        for batch in batches(pairs, seed=seed):
            outcomes.append(check(batch, factor=factor))
            progress.advance(task, len(outcomes[-1].eps))
        places = arenas() if steps else []
        task = progress.add_task("", total=steps * len(places))
        for arena in places:
            progress.update(task, description=f"search, {arena.name}")
            batch = attack(
                arena,
                restarts=restarts,
                steps=steps,
                seed=seed,
                tick=lambda: progress.advance(task),
            )
            found.append(check(batch, factor=factor))


def _verdict(pairs: int, searches: int, wrong: int, factor: float) -> str:
    where = f"{pairs:,} random pairs and {searches} searches"
    planted = "" if factor == 1 else f" (every bound times {factor:g})"
    if wrong:
        return f"[bold red]{wrong:,} violations[/] in {where}{planted}."
    return f"[bold green]No violation[/] in {where}{planted}."
