"""`offdrift lab`: experiments on error bounds, certificates, gradients, gates against length, and routing replay."""

from __future__ import annotations

import json
import math
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from offdrift.cli.app import Screen, lab
from offdrift.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from offdrift.lab.search import Outcome

Stem = Annotated[Path | None, typer.Option(metavar="STEM", help="Also write STEM.png, STEM.html and STEM.json.")]


def _write(out: Path, panels: Any, numbers: Any, screen: Screen, **texts: str) -> None:
    """Write a figure as a picture and a page, and its numbers beside them."""
    from offdrift.records.atomic import write_atomically
    from offdrift.show.charts import write_figure

    picture, page = write_figure(out, panels, **texts)
    table, text = out.with_name(out.name + ".json"), json.dumps(numbers, indent=1, allow_nan=False)
    write_atomically(table, lambda partial: Path(partial).write_text(text))
    screen.wrote(picture=picture, page=page, numbers=table)


@lab.command(verdict="a bound fails")
def bounds(
    screen: Screen,
    pairs: Annotated[int, typer.Option(help="Random pairs of policies.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of pairs and searches.")] = 0,
    adversarial_steps: Annotated[
        int, typer.Option(help="Gradient steps of each search; 0 leaves the search out.", min=0)
    ] = 200,
    restarts: Annotated[int, typer.Option(help="Starts of each search, for every bound.", min=1)] = 8,
    plant: Annotated[float, typer.Option(help="Multiply every bound with this: below 1, does the check notice?")] = 1.0,
    out: Stem = None,
) -> None:
    """Does any error bound fail, and how close do they come?

    Tries every bound, and every statement of docs/certificates.md (numbers are its equations), on random
    pairs of policies and on pairs made to break it. Errors and divergences are exact, and rewards are the
    worst there are. 100,000 pairs take about four minutes; Ctrl-C shows
    what was checked.

    \b
    offdrift lab bounds
    offdrift lab bounds --pairs 2000 --plant 0.9
    """
    from offdrift.lab.pairs import batches
    from offdrift.lab.search import arenas, attack, check
    from offdrift.lab.views import bounds_panels, bounds_rows, bounds_table, horizon_table, violations

    if not 0 < plant < math.inf:
        raise typer.BadParameter(f"--plant {plant}: give a factor above 0; 1 leaves the bounds alone")
    outcomes: list[Outcome] = []
    searches: list[Outcome] = []
    with screen.until_interrupted() as progress:
        task = progress.add_task("random pairs", total=pairs)
        for batch in batches(pairs, seed=seed):
            outcomes.append(check(batch, factor=plant))
            progress.advance(task, len(outcomes[-1].eps))
        places = arenas() if adversarial_steps else []
        task = progress.add_task("", total=adversarial_steps * len(places))
        for arena in places:
            progress.update(task, description=f"search, {arena.name}")
            tick = partial(progress.advance, task)
            batch = attack(arena, restarts=restarts, steps=adversarial_steps, seed=seed, tick=tick)
            searches.append(check(batch, factor=plant))
    result = {"seed": seed, "factor": plant, "complete": not screen.interrupted, **bounds_rows(outcomes, searches)}
    if screen.as_json:
        screen.json(result)
    elif outcomes or searches:
        wrong = violations([*outcomes, *searches])
        verdict = f"[bold red]{wrong:,} violations[/]" if wrong else "[bold green]No violation[/]"
        planted = "" if plant == 1 else f" (every bound times {plant:g})"
        screen.show(bounds_table(outcomes, searches, width=screen.width))
        screen.show(horizon_table(outcomes, searches, width=screen.width))
        screen.show(f"{verdict} in {result['pairs']:,} random pairs and {len(searches)} searches{planted}.")
    if out is not None and (outcomes or searches):
        caption = (
            f"{result['pairs']:,} random pairs of policies and an adversarial search; exact errors, "
            "sharp constants. Worst of all rewards in [0, 1] up to T = 8, from 16 on worst of those "
            "that look at the last state of a policy's memory."
        )
        title = "How close do the bounds come to the worst error?"
        panels = bounds_panels(outcomes, searches)
        _write(out, panels, result, screen, title=title, caption=caption)
    if screen.interrupted:
        screen.warn("interrupted; what was not checked is left out")
    _next_picture(screen, out, "bounds")
    if result["violations"]:
        raise typer.Exit(ExitCode.VERDICT)
    if screen.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _next_picture(screen: Screen, out: Path | None, experiment: str) -> None:
    if out is None:
        screen.next(f"offdrift lab {experiment} --out {experiment}", "the same as a picture and a page")
    else:
        screen.next(f"open {out}.html", "the figure, in a browser")


@lab.command(verdict="a certificate is false too often")
def coverage(
    screen: Screen,
    worlds: Annotated[str | None, typer.Option(help="Names of worlds, comma-separated; absent for all.")] = None,
    repetitions: Annotated[int, typer.Option(help="Batches (or runs of several) of each world.", min=1)] = 600,
    alpha: Annotated[float, typer.Option(help="Probability of error that every certificate states.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of all draws.", min=0)] = 0,
    plant: Annotated[
        Literal["none", "alpha", "answers"],
        typer.Option(
            help="A mistake to make, to see it noticed: intervals at five times their alpha, or answers "
            "to one prompt counted as independent."
        ),
    ] = "none",
    intervals: Annotated[bool, typer.Option("--intervals", help="Also show the interval of every estimate.")] = False,
) -> None:
    """How often is a certificate false, and how often does it certify?

    Draws batches from worlds small enough to know the true gain, certifies each, and counts the
    statements that are false. All worlds take about three minutes; Ctrl-C shows what is done.

    \b
    offdrift lab coverage
    offdrift lab coverage --worlds benign,several-looks --repetitions 100
    offdrift lab coverage --worlds shared-fate --plant answers
    """
    from offdrift.lab.coverage import WORLDS, Tallies, count, simulate, summarize
    from offdrift.lab.views import coverage_rows, coverage_table

    names = list(WORLDS) if worlds is None else _words(worlds)
    if wrong := [n for n in names if n not in WORLDS]:
        raise typer.BadParameter(f"--worlds: {wrong[0]!r} is none of {', '.join(WORLDS)}")
    if not 0 < 5 * alpha < 1:
        raise typer.BadParameter(f"--alpha {alpha}: a probability of error; here below 0.2")
    tallies: Tallies = {}
    with screen.until_interrupted() as progress:
        task = progress.add_task("", total=repetitions * len(names))
        for name in names:
            progress.update(task, description=name)
            world = WORLDS[name]()
            for judgements in simulate(world, repetitions, alpha=alpha, seed=seed, plant=plant):
                count(tallies, world, judgements)
                progress.advance(task)
    rows = summarize(tallies)
    refuted = sum(row.refuted for row in rows)
    if screen.as_json:
        command = f"offdrift lab coverage --repetitions {repetitions} --alpha {alpha:g} --seed {seed}"
        command += f" --worlds {','.join(names)} --plant {plant} --json"
        about = {"command": command, "versions": {n: version(n) for n in ("offdrift", "torch", "numpy")}}
        about |= {"alpha": alpha, "seed": seed, "complete": not screen.interrupted, "refuted": refuted}
        screen.json(about | coverage_rows(rows))
    elif rows:
        result = coverage_rows(rows)
        for name, world in result["worlds"].items():
            chosen = [row for row in rows if row.world == name]
            screen.show(coverage_table(f"{name}: {world['about']}", chosen, intervals=intervals))
        about = "width: mean distance from the truth. Dimmed: not a certificate, shown for comparison."
        screen.out.print(about, style="dim")
        words = f"[bold red]{refuted} certificates are[/]" if refuted else "[bold green]No certificate is[/]"
        screen.show(f"{words} false more often than stated (exact intervals, all rows judged together at 5 %).")
    if screen.interrupted:
        screen.warn("interrupted; the numbers are of what was drawn so far")
    screen.next("offdrift certify --help", "certify rollouts of yours")
    if refuted:
        raise typer.Exit(ExitCode.VERDICT)
    if screen.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


HORIZONS = "8,16,32,64,128,256,512,1024"


@lab.command()
def frontier(
    screen: Screen,
    testbeds: Annotated[str, typer.Option(help="Names of testbeds, comma-separated.")] = "walk,chain,flip",
    horizons: Annotated[str, typer.Option(help="Tokens, comma-separated.")] = HORIZONS,
    kl: Annotated[float, typer.Option(help="Mean KL(rollout || current) of a token, nat, at every horizon.")] = 1e-3,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 64,
    tokens: Annotated[int, typer.Option(help="Sampled per method and horizon, where nothing exact is known.")] = 2**20,
    methods: Annotated[str | None, typer.Option(help="Only these rows of the table, comma-separated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of testbeds and samples.")] = 0,
    out: Stem = None,
) -> None:
    """How biased and how noisy is each method's gradient as sequences get longer?

    Every row of the method table takes its gradient from sequences of small testbeds whose true
    gradient is known exactly, at a drift per token that is the same at every horizon. All rows and
    horizons take about ten minutes; Ctrl-C shows what is done.

    \b
    offdrift lab frontier --testbeds chain --horizons 8,64,512
    offdrift lab frontier --methods token_is,full_is,minpro,vespo --kl 0.01
    """
    from offdrift.lab.frontier import Estimate, make_testbed
    from offdrift.lab.frontier import frontier as estimates_of
    from offdrift.lab.views import frontier_panels, frontier_rows, frontier_table
    from offdrift.methods import METHODS, method

    rows = {n: method(n) for n in _words(methods)} if methods else METHODS
    if wrong := [h for h in _words(horizons) if not h.isdecimal()]:
        raise typer.BadParameter(f"--horizons: {wrong[0]!r} is not a number of tokens; give 8,64,512")
    lengths = sorted({int(h) for h in _words(horizons)})
    estimates: dict[str, list[Estimate]] = {}
    with screen.until_interrupted() as progress:
        task = progress.add_task("", total=len(_words(testbeds)) * len(lengths) * len(rows))
        for name in _words(testbeds):
            for horizon in lengths:
                progress.update(task, description=f"{name}, T = {horizon}")
                bed = make_testbed(name, horizon=horizon, kl_token=kl, seed=seed)
                done = []
                for e in estimates_of(bed, rows=rows, batch=batch, tokens=tokens, seed=seed):
                    done.append(e)
                    progress.advance(task)
                estimates.setdefault(name, []).extend(done)
    results = [frontier_rows(name, es) for name, es in estimates.items()]
    if screen.as_json:
        screen.json(results)
    else:
        for name, es in estimates.items():
            screen.show(frontier_table(name, es))
        screen.out.print(
            f"P = <∇J, E[g]>² / (tr Var(g) + bias²) of a step of {batch} sequences, bias and spread in "
            f"units of |∇J|; {kl:g} nat of drift per token.",
            style="dim",
            markup=False,
        )
    if out is not None and estimates:
        title = "Bias and variance of every method"
        _write(out, frontier_panels(estimates), results, screen, title=title)
    if screen.interrupted:
        screen.warn("interrupted; horizons that were not finished are left out")
        raise typer.Exit(ExitCode.INTERRUPTED)
    _next_picture(screen, out, "frontier")


def _words(text: str) -> list[str]:
    return [w.strip() for w in text.split(",") if w.strip()]


@lab.command()
def collapse(
    screen: Screen,
    folders: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders of such.")],
    horizon: Annotated[int, typer.Option(help="Updates ahead of which a collapse is predicted.", min=1)] = 200,
    recovery: Annotated[int, typer.Option(help="Updates that a fall of 30 % must last to be one.", min=1)] = 100,
    window: Annotated[int, typer.Option(help="Updates of the rolling features.", min=1)] = 20,
    smooth: Annotated[int, typer.Option(help="Updates over which rewards are averaged.", min=1)] = 1,
    folds: Annotated[int, typer.Option(help="Parts of the seeds; each is judged by what the others teach.", min=2)] = 5,
) -> None:
    """Can a collapse be predicted from what your runs logged?

    Fits a logistic regression to the four rolling features of the survey's conjecture (chi-squared, effective
    sample size, clip fraction, length), to signals of the stack (KL, correlation, lag, gradient norm), and to both,
    and judges each on runs whose seed it did not see. Runs that collapse and runs that do not are needed, of a few
    seeds. Short runs need short scales: a twentieth of the conjecture's is in the second line.

    \b
    offdrift lab collapse runs/
    offdrift lab collapse runs/ --horizon 10 --recovery 5 --window 5 --smooth 4 --json
    """
    from offdrift.judge.predictor import LoggedRun, compare_predictors
    from offdrift.lab.views import collapse_table
    from offdrift.show.json_access import read_lines

    paths = sorted({p for folder in folders for p in folder.rglob("metrics.jsonl")})
    if not paths:
        raise typer.BadParameter(
            f"{', '.join(map(str, folders))}: no run in there (arms/NAME/metrics.jsonl of `offdrift train` or `sweep`)"
        )
    runs = []
    for number, path in enumerate(paths):
        head = path.parents[2] / "run.json"
        recipe = json.loads(head.read_text(encoding="utf-8")).get("recipe", {}) if head.is_file() else {}
        runs.append(LoggedRun(read_lines(path)[0], recipe.get("seed", number)))
    scale = {"horizon": horizon, "recovery": recovery, "window": window, "smooth": smooth}
    result = compare_predictors(runs, **scale, folds=folds)
    if screen.as_json:
        screen.json({"scale": scale, **result, "versions": {n: version(n) for n in ("offdrift", "numpy")}})
    else:
        screen.show(collapse_table(result))
        gain, low, high = result["gain"]
        rate = result["brier_of_the_base_rate"]
        screen.out.print(
            f"{result['collapsed']} of {result['runs']} runs collapse. The stack adds {gain:+.3f} ({low:+.3f} to "
            f"{high:+.3f}) to the AUROC of the four. Brier: mean squared error of the probability; always saying the "
            f"base rate has {rate:.3f}. Intervals: 95 %, bootstrap of runs.",
            style="dim",
        )


LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@lab.command("length-bias")
def length_bias(
    screen: Screen,
    violation: Annotated[float, typer.Option(help="Probability that a drawn token violates the trust region.")] = 1e-3,
    sequences: Annotated[int, typer.Option(help="Drawn sequences.")] = 1000,
    same_at: Annotated[
        int, typer.Option(help="Length at which thresholds are set to accept 90 % alike, tokens.")
    ] = 128,
    recording: Annotated[
        list[Path] | None, typer.Option(help="A recorded stream (.npz of benchmarks/record_drift.py). Repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the drawn stream.")] = 0,
    out: Stem = None,
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

    if not 1 <= same_at <= LENGTHS[-1]:
        raise typer.BadParameter(f"--same-at {same_at}: the drawn sequences have 1 to {LENGTHS[-1]} tokens")
    paths = recording or packaged()
    streams = [
        independent_stream(sequences=sequences, horizon=LENGTHS[-1], violation=violation, seed=seed),
        *(read_recording(p) for p in paths),
    ]
    results = []
    for stream in streams:
        longest = stream.kl.shape[1]
        lengths = [n for n in LENGTHS if n <= longest]
        for at in (None, min(same_at, longest)):
            thresholds = "published thresholds" if at is None else f"same at T = {at}"
            title = f"{stream.name}; {thresholds}"
            results.append((title, curves(stream, lengths=lengths, same_at=at)))
    rows = length_bias_rows(results)
    if screen.as_json:
        screen.json(rows)
    else:
        for title, accepted in results:
            screen.show(length_bias_table(title, accepted, width=screen.width))
        screen.out.print(
            "acceptance = exp(-c T^γ): γ = 1 falls exponentially, γ = 0 does not depend on length.", style="dim"
        )
    if out is not None:
        _write(
            out,
            length_bias_panels(results),
            rows,
            screen,
            title="Which gates punish length?",
            caption="Share of sequences accepted, 95 % intervals. TRM paper, Appendix F, Table 2.",
        )
    _next_picture(screen, out, "length-bias")


@lab.command()
def routing(
    screen: Screen,
    pairs: Annotated[int, typer.Option(help="Random mixtures of experts.", min=2)] = 400,
    experts: Annotated[int, typer.Option(help="Experts at every context.", min=2)] = 4,
    top_k: Annotated[int, typer.Option(help="Experts that act at a context.", min=1)] = 2,
    mismatch: Annotated[
        float, typer.Option(help="Noise of the rollout engine's router logits, standard deviation.", min=0)
    ] = 0.3,
    update: Annotated[
        float, typer.Option(help="Size of the update of router and experts, standard deviation.", min=0)
    ] = 0.3,
    steps: Annotated[int, typer.Option(help="Steps of gradient ascent on each surrogate.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of mixtures, noise and rewards.")] = 0,
) -> None:
    """What does routing replay optimize, and is it the policy that draws the next batch?

    Surrogates under the trainer's own routes, the rollout's (R3), the old policy's (R2) and frozen gates
    (reference-router replay), on mixtures small enough to enumerate: their distance from the true
    surrogate, the total variations that a loss sees, their gradients, and the return that ascent on each gains.

    \b
    offdrift lab routing
    offdrift lab routing --top-k 1
    offdrift lab routing --mismatch 1 --update 0.1
    """
    from offdrift.lab.routing import experiment
    from offdrift.lab.views import routing_table

    result = experiment(pairs, experts=experts, top_k=top_k, mismatch=mismatch, update=update, steps=steps, seed=seed)
    if screen.as_json:
        about = {"pairs": pairs, "experts": experts, "top_k": top_k, "mismatch": mismatch, "update": update}
        about |= {"steps": steps, "seed": seed, "versions": {n: version(n) for n in ("offdrift", "torch")}}
        screen.json(about | {"schemes": result})
    else:
        screen.show(routing_table(result, steps=steps))
        screen.out.print(
            "error: |L' - L| / |L|, from the one with own routes. α0 = max TV(old, pi), α1 = max TV(mu, old) as the "
            "forward passes see them; the policy that draws next has those of the first row. cos: with the first "
            "row's gradient. var: of one sequence's gradient. router: share of the squared gradient. Medians; "
            "gain: mean of J with own routes, ± its standard error.",
            style="dim",
            markup=False,
        )
    screen.next("offdrift methods r3", "what replays routes in a run, and how to switch it on")
