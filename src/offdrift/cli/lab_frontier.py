"""`offdrift lab frontier`: bias and variance of every method against the exact gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from offdrift.cli.app import console, lab
from offdrift.errors import BadValueError

HORIZONS = "8,16,32,64,128,256,512,1024"
INTERRUPTED = 130


@lab.command()
def frontier(
    testbeds: Annotated[str, typer.Option(help="Comma-separated.")] = "walk,chain,flip",
    horizons: Annotated[str, typer.Option(help="Tokens, comma-separated.")] = HORIZONS,
    kl: Annotated[
        float, typer.Option(help="Mean KL(rollout || current) of a token, nat, at every horizon.")
    ] = 1e-3,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 64,
    tokens: Annotated[
        int, typer.Option(help="Sampled per method and horizon, where nothing exact is known.")
    ] = 2**20,
    methods: Annotated[
        str | None, typer.Option(help="Only these rows of the table, comma-separated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of testbeds and samples.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="STEM", help="Also write STEM.png, STEM.html and STEM.json."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How biased and how noisy is each method's gradient as sequences get longer?

    Every row of the method table takes its gradient from sequences of small testbeds whose true
    gradient is known exactly, at a drift per token that is the same at every horizon. All rows and
    horizons take about ten minutes; Ctrl-C shows what is done.

    \b
    offdrift lab frontier --testbeds chain --horizons 8,64,512
    offdrift lab frontier --methods token_is,full_is,minpro,vespo --kl 0.01
    """
    from offdrift.lab.frontier import Estimate
    from offdrift.lab.frontier import frontier as estimates_of
    from offdrift.lab.testbeds import make_testbed
    from offdrift.methods import METHODS, method
    from offdrift.report.figure import write_figure
    from offdrift.report.frontier import frontier_panels, frontier_rows, frontier_table
    from offdrift.rollouts.store import write_atomically

    rows = {n: method(n) for n in _words(methods)} if methods else METHODS
    lengths = sorted({_number(h) for h in _words(horizons)})
    found: dict[str, list[Estimate]] = {}
    interrupted = False
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(_words(testbeds)) * len(lengths) * len(rows))
        try:
            for name in _words(testbeds):
                for horizon in lengths:
                    progress.update(task, description=f"{name}, T = {horizon}")
                    bed = make_testbed(name, horizon=horizon, kl_token=kl, seed=seed)
                    done = []
                    for e in estimates_of(bed, rows=rows, batch=batch, tokens=tokens, seed=seed):
                        done.append(e)
                        progress.advance(task)
                    found.setdefault(name, []).extend(done)
        except KeyboardInterrupt:
            interrupted = True
    results = [frontier_rows(name, es) for name, es in found.items()]
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    else:
        for name, estimates in found.items():
            console.print(frontier_table(name, estimates))
        console.print(
            f"P = <∇J, E[g]>² / (tr Var(g) + bias²) of a step of {batch} sequences, bias and spread in "
            f"units of |∇J|; {kl:g} nat of drift per token.",
            style="dim",
            markup=False,
        )
    if out is not None and found:
        files = write_figure(out, frontier_panels(found), title="Bias and variance of every method")
        table = out.with_name(out.name + ".json")
        text = json.dumps(results, indent=1)
        write_atomically(table, lambda tmp: Path(tmp).write_text(text))
        for path in (*files, table):
            console.print(f"wrote {escape(str(path))}")
    if interrupted:
        console.print("interrupted; horizons that were not finished are left out")
        raise typer.Exit(INTERRUPTED)


def _words(text: str) -> list[str]:
    return [w.strip() for w in text.split(",") if w.strip()]


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadValueError(
            f"--horizons: {text!r} is not a number of tokens; give 8,64,512"
        ) from None
