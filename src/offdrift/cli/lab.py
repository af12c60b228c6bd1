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
    from offdrift.lab.views import (
        bounds_panels,
        bounds_rows,
        bounds_table,
        horizon_table,
        violations,
    )
    from offdrift.records.store import write_atomically
    from offdrift.show.figure import write_figure

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
    from offdrift.lab.pairs import batches
    from offdrift.lab.search import arenas, attack, check

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


# `offdrift lab frontier`: bias and variance of every method against the exact gradient.


HORIZONS = "8,16,32,64,128,256,512,1024"
FRONTIER_INTERRUPTED = 130


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
    from offdrift.lab.views import frontier_panels, frontier_rows, frontier_table
    from offdrift.methods import METHODS, method
    from offdrift.records.store import write_atomically
    from offdrift.show.figure import write_figure

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
        raise typer.Exit(FRONTIER_INTERRUPTED)


def _words(text: str) -> list[str]:
    return [w.strip() for w in text.split(",") if w.strip()]


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadValueError(
            f"--horizons: {text!r} is not a number of tokens; give 8,64,512"
        ) from None


# `offdrift lab length-bias`: which gates punish length.


LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@lab.command("length-bias")
def length_bias(
    violation: Annotated[
        float, typer.Option(help="Probability that a drawn token violates the trust region.")
    ] = 1e-3,
    sequences: Annotated[int, typer.Option(help="Drawn sequences.")] = 1000,
    same_at: Annotated[
        int, typer.Option(help="Length at which thresholds are set to accept 90 % alike, tokens.")
    ] = 128,
    recording: Annotated[
        list[Path] | None,
        typer.Option(help="A recorded stream (.npz of benchmarks/record_drift.py). Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the drawn stream.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="STEM", help="Also write STEM.png and STEM.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Acceptance against length, for gates on the worst token, on means and on products.

    Once with independent violations and once per recording; without --recording the two that come
    with the package are used: SmolLM2-135M drawn in bfloat16 and with int8 weights, scored in
    float32.

    \b
    offdrift lab length-bias
    offdrift lab length-bias --violation 1e-4 --out length-bias
    """
    from offdrift.lab.length_bias import curves, independent_stream, packaged, read_recording
    from offdrift.lab.views import length_bias_panels, length_bias_rows, length_bias_table
    from offdrift.show.figure import write_figure

    if not 1 <= same_at <= LENGTHS[-1]:
        raise BadValueError(
            f"--same-at {same_at}: the drawn sequences have 1 to {LENGTHS[-1]} tokens"
        )
    paths = recording or packaged()
    streams = [
        independent_stream(
            sequences=sequences, horizon=LENGTHS[-1], violation=violation, seed=seed
        ),
        *(read_recording(p) for p in paths),
    ]
    results = []
    for stream in streams:
        longest = stream.kl.shape[1]
        lengths = [n for n in LENGTHS if n <= longest]
        for at, how in ((None, "published thresholds"), (min(same_at, longest), "same at T = {}")):
            title = f"{stream.name}; {how.format(at)}"
            results.append((title, curves(stream, lengths=lengths, same_at=at)))
    if as_json:
        typer.echo(json.dumps(length_bias_rows(results), indent=1, allow_nan=False))
    else:
        for title, found in results:
            console.print(length_bias_table(title, found, width=console.width))
        console.print(
            "acceptance = exp(-c T^γ): γ = 1 falls exponentially, γ = 0 does not depend on length.",
            style="dim",
        )
    if out is not None:
        files = write_figure(
            out,
            length_bias_panels(results),
            title="Which gates punish length?",
            caption="Share of sequences accepted, 95 % intervals. TRM paper, Appendix F, Table 2.",
        )
        for path in files:
            console.print(f"wrote {escape(str(path))}")
