"""`offdrift lab`: experiments on error bounds, certificates, gradients, masks, lengths, routing and lag."""

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
    from offdrift_lab.exact.search import Tightness

Stem = Annotated[Path | None, typer.Option(metavar="STEM", help="Also write STEM.png, STEM.html and STEM.json.")]


def write_outputs(out: Path, panels: Any, numbers: Any, screen: Screen, **texts: str) -> None:
    """Write a figure as a picture and a page, and its numbers beside them."""
    from offdrift.records.atomic import write_atomically
    from offdrift.show.figures import write_figure

    screen.doing("drawing the figure")
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
    worst there are. 100,000 pairs take about four minutes on two cores of a 2.1 GHz Xeon;
    Ctrl-C shows what was checked.

    \b
    offdrift lab bounds
    offdrift lab bounds --pairs 2000 --plant 0.9
    """
    from offdrift_lab.exact.pairs import batches
    from offdrift_lab.exact.search import arenas, attack, check
    from offdrift_lab.exact.views import bounds_panels, bounds_rows, bounds_table, horizon_table, violations

    if not 0 < plant < math.inf:
        raise typer.BadParameter(f"--plant {plant}: give a factor above 0; 1 leaves the bounds alone")
    outcomes: list[Tightness] = []
    searches: list[Tightness] = []
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
        write_outputs(out, panels, result, screen, title=title, caption=caption)
    if screen.interrupted:
        screen.warn("interrupted; what was not checked is left out")
    next_picture(screen, out, "bounds")
    if result["violations"]:
        raise typer.Exit(ExitCode.VERDICT)
    if screen.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


def next_picture(screen: Screen, out: Path | None, experiment: str) -> None:
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
    statements that are false. All worlds take about three minutes on two cores
    of a 2.1 GHz Xeon; Ctrl-C shows what is done.

    \b
    offdrift lab coverage
    offdrift lab coverage --worlds benign,several-looks --repetitions 100
    offdrift lab coverage --worlds shared-fate --plant answers
    """
    from offdrift_lab.exact.coverage import WORLDS, Tallies, count, simulate, summarize
    from offdrift_lab.exact.views import coverage_rows, coverage_table

    names = list(WORLDS) if worlds is None else words_of(worlds)
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
    horizons take about ten minutes on two cores of a 2.1 GHz Xeon; Ctrl-C shows what is done.

    \b
    offdrift lab frontier --testbeds chain --horizons 8,64,512
    offdrift lab frontier --methods token_is,full_is,minpro,vespo --kl 0.01
    """
    from offdrift.methods import method
    from offdrift_lab.exact.frontier import ROWS, Estimate, make_testbed
    from offdrift_lab.exact.frontier import frontier as estimates_of
    from offdrift_lab.exact.views import frontier_panels, frontier_rows, frontier_table

    rows = {n: method(n) for n in words_of(methods)} if methods else ROWS
    if wrong := [h for h in words_of(horizons) if not h.isdecimal()]:
        raise typer.BadParameter(f"--horizons: {wrong[0]!r} is not a number of tokens; give 8,64,512")
    lengths = sorted({int(h) for h in words_of(horizons)})
    estimates: dict[str, list[Estimate]] = {}
    with screen.until_interrupted() as progress:
        task = progress.add_task("", total=len(words_of(testbeds)) * len(lengths) * len(rows))
        for name in words_of(testbeds):
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
        write_outputs(out, frontier_panels(estimates), results, screen, title=title)
    if screen.interrupted:
        screen.warn("interrupted; horizons that were not finished are left out")
        raise typer.Exit(ExitCode.INTERRUPTED)
    next_picture(screen, out, "frontier")


def words_of(text: str) -> list[str]:
    return [w.strip() for w in text.split(",") if w.strip()]


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
    from offdrift_lab.exact.routing import experiment
    from offdrift_lab.exact.views import routing_table

    screen.doing(f"{pairs:,} mixtures of experts")
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


@lab.command()
def masking(
    screen: Screen,
    pairs: Annotated[int, typer.Option(help="Random pairs of policies.", min=2)] = 400,
    delta: Annotated[float, typer.Option(help="Largest token KL of a kept sequence, nat; also of the family.")] = 0.05,
    tau: Annotated[float, typer.Option(help="Largest |log ratio| of a kept token, nat.")] = 0.2,
    horizons: Annotated[str, typer.Option(help="Tokens of the family, comma-separated.")] = HORIZONS + ",4096",
    rejected: Annotated[str, typer.Option(help="Shares of rejected sequences, comma-separated.")] = "1e-2,1e-4,1e-8",
    constants: Annotated[Literal["paper", "sharp"], typer.Option(help="Constants of the bounds.")] = "sharp",
    seed: Annotated[int, typer.Option(help="Seed of pairs and rewards.")] = 0,
) -> None:
    """Does a mask restore the trust region, and does a high acceptance say that it removes little?

    First, small trees where a few contexts are flipped: what a token mask and a sequence mask keep, the largest
    token KL of the pair (D_max), the bound B* that it implies, and the largest error of the surrogate that each mask
    leaves. Then a family of pairs in which the share of rejected sequences goes to 0 while what masking removes
    from the surrogate stays of order ||A|| T. All numbers are exact.

    \b
    offdrift lab masking
    offdrift lab masking --delta 0.001 --rejected 1e-6 --json
    """
    import torch

    from offdrift_lab.exact.masking import CRITERIA, compare_masks, flipped_pairs, vanishing
    from offdrift_lab.exact.views import masks_rows, masks_table, vanishing_rows_table

    if not (0 < delta < math.inf and 0 < tau < math.inf):
        raise typer.BadParameter(f"--delta {delta:g} --tau {tau:g}: thresholds are above 0, nats")
    lengths = sorted({int(x) for x in numbers_of("--horizons", horizons)})
    shares = numbers_of("--rejected", rejected)
    screen.doing(f"{pairs:,} pairs of policies")
    g = torch.Generator().manual_seed(seed)
    mu, pi = flipped_pairs(pairs, vocab=3, horizon=5, noise=0.05, flip=2.0, touched=0.1, generator=g)
    rewards = torch.rand(pairs, 3**5, generator=g, dtype=torch.float64)
    rows = compare_masks(mu, pi, rewards, tau=tau, delta=delta, constants=constants)
    family = [
        vanishing(t, rejected=share, delta=delta, criterion=criterion)
        for criterion in CRITERIA
        for share in shares
        for t in lengths
    ]
    if screen.as_json:
        about = {"pairs": pairs, "delta": delta, "tau": tau, "constants": constants, "seed": seed, "horizon": 5}
        about |= {"versions": {n: version(n) for n in ("offdrift", "torch")}}
        screen.json(about | {"masks": masks_rows(rows), "vanishing": [vars(v) for v in family]})
    else:
        screen.show(masks_table(rows))
        claimed = float(rows[0].bound_claimed[0])
        screen.out.print(
            f"D_max: largest token KL of the pair, nat; of kept: at contexts whose terms are kept. error: largest "
            "|J(pi) - J(mu) - L'| over rewards in [0, 1]; > B*, > B*(δ): pairs in which it exceeds the pair's bound, "
            f"and the bound of the threshold, {claimed:.3g}. after: 20 steps of ascent on the masked surrogate later.",
            style="dim",
            markup=False,
        )
        screen.show(vanishing_rows_table(family, delta=delta, width=screen.width))
        screen.out.print(
            "exact KL: reject where KL(mu || pi) > delta at a context; limit 1 - exp(-delta). k2 of w: reject where "
            "(log w)^2 / 2 > delta at a token; limit 1 - exp(-sqrt(2 delta)).",
            style="dim",
            markup=False,
        )
    screen.next("offdrift certify --help", "a guarantee that pays for what is rejected, for rollouts of yours")


def numbers_of(option: str, text: str) -> list[float]:
    """Positive numbers of a comma-separated list."""
    try:
        values = [float(word) for word in words_of(text)]
    except ValueError:
        values = []
    if not values or not all(0 < x < math.inf for x in values):
        raise typer.BadParameter(f"{option}: {text!r} is no list of numbers above 0, such as 1e-2,1e-4")
    return values


@lab.command("three-policies", verdict="the bound fails")
def three_policies(
    screen: Screen,
    triples: Annotated[int, typer.Option(help="Random decision processes, each with three policies.", min=9)] = 20_000,
    gammas: Annotated[str, typer.Option(help="Discounts, comma-separated.")] = "0.5,0.9,0.99",
    seed: Annotated[int, typer.Option(help="Seed of processes and policies.")] = 0,
    plant: Annotated[float, typer.Option(help="Multiply every bound with this: below 1, does the check notice?")] = 1.0,
) -> None:
    """Does the discounted three-policy bound hold, how close is it, and does it say where to invest?

    Exact decision processes with a rollout policy, an old policy and a current one: the mismatch α1 = max TV(rollout,
    old), the staleness α0 = max TV(old, current), the bound C (α0 + α1), and the true error of the surrogate. Then
    the rule to invest in the larger of the two: which one, set to zero, leaves the smaller error?

    \b
    offdrift lab three-policies
    offdrift lab three-policies --gammas 0.99 --plant 0.1
    """
    from offdrift_lab.exact.three_policies import advice, batches, hard_process, judge, merged, tightness, violations
    from offdrift_lab.exact.views import THREE_POLICIES, advice_table, three_policies_table

    if not 0 < plant < math.inf:
        raise typer.BadParameter(f"--plant {plant}: give a factor above 0; 1 leaves the bounds alone")
    discounts = tuple(numbers_of("--gammas", gammas))
    if wrong := [x for x in discounts if x >= 1]:
        raise typer.BadParameter(f"--gammas: {wrong[0]:g} is no discount; give numbers below 1")
    parts = []
    with screen.until_interrupted() as progress:
        task = progress.add_task("decision processes", total=triples)
        for _, _, part in batches(triples, gammas=discounts, seed=seed, factor=plant):
            parts.append(part)
            progress.advance(task, len(part.error))
        parts += [judge(*hard_process(b, d), factor=plant) for b in (0.01, 0.1, 0.5) for d in discounts]
    if not parts:
        raise typer.Exit(ExitCode.INTERRUPTED)
    judged, rows = merged(parts), advice(merged(parts))
    wrong_of = {name: violations(judged, name) for name in THREE_POLICIES}
    if screen.as_json:
        about = {"triples": len(judged.error), "gammas": discounts, "seed": seed, "factor": plant}
        about |= {"complete": not screen.interrupted, "versions": {n: version(n) for n in ("offdrift", "torch")}}
        close = {name: tightness(judged, name) for name in THREE_POLICIES}
        bounds_of = {
            name: {"violations": wrong_of[name], "median": float(x.median()), "largest": float(x.max())}
            for name, x in close.items()
        }
        listed = [{**vars(row), "high": None if math.isinf(row.high) else row.high} for row in rows]
        screen.json(about | {"bounds": bounds_of, "advice": listed})
    else:
        screen.show(three_policies_table(judged))
        screen.show(advice_table(rows))
        screen.out.print(
            "C = 2 max|A| gamma / (1 - gamma)^2. error left: with the larger distance set to zero, over the error "
            "before (medians); other way: with the smaller one.",
            style="dim",
            markup=False,
        )
        wrong = sum(wrong_of.values())
        verdict = f"[bold red]{wrong:,} violations[/]" if wrong else "[bold green]No violation[/]"
        planted = "" if plant == 1 else f" (every bound times {plant:g})"
        screen.show(f"{verdict} in {len(judged.error):,} triples{planted}.")
    screen.next("offdrift audit --help", "mismatch and staleness of a log of yours")
    if any(wrong_of.values()):
        raise typer.Exit(ExitCode.VERDICT)
    if screen.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


@lab.command()
def flips(
    screen: Screen,
    tasks: Annotated[str, typer.Option(help="Names of tasks, comma-separated.")] = "threshold,chain,walk",
    horizons: Annotated[str, typer.Option(help="Tokens T, comma-separated.")] = "16,32,64,128",
    counts: Annotated[str, typer.Option(help="Experts K, comma-separated.")] = "4,8,16,32,64",
    rates: Annotated[
        str, typer.Option(help="Memberships of experts that flip per token, K delta, comma-separated.")
    ] = "2e-5,2e-4,2e-3,2e-2",
    dense_kl: Annotated[float, typer.Option(help="KL per token of a dense drift besides the flips, nat.", min=0)] = 0.0,
    pairs: Annotated[int, typer.Option(help="Random mixtures of experts for every setting.", min=2)] = 16,
    seed: Annotated[int, typer.Option(help="Seed of mixtures and noise.")] = 0,
) -> None:
    """How does the bias of token-level weights grow with length T, experts K and the flip rate delta of routes?

    The survey's conjecture is T K delta. Mixtures of experts on three tasks whose gradients are exact at any length;
    the rollout engine's router now and then takes the next best expert. Fits the power of the bias in each quantity,
    and asks whether the token KL alone tells it. Takes about two minutes on two cores
    of a 2.1 GHz Xeon; Ctrl-C shows what is done.

    \b
    offdrift lab flips
    offdrift lab flips --tasks chain,walk --horizons 64,128,256,512
    """
    from offdrift_lab.exact.flips import TASKS, explained, exponents, flip_cells, flip_experiment
    from offdrift_lab.exact.views import explained_table, exponents_table

    names = words_of(tasks)
    if wrong := [n for n in names if n not in TASKS]:
        raise typer.BadParameter(f"--tasks: {wrong[0]!r} is none of {', '.join(TASKS)}")
    lengths, sizes = ([int(x) for x in numbers_of(o, t)] for o, t in (("--horizons", horizons), ("--counts", counts)))
    if min(sizes) < 3:
        raise typer.BadParameter(f"--counts: of {min(sizes)} experts 2 act and none is left to flip to; give 3 or more")
    plan = list(flip_cells(horizons=lengths, rates=numbers_of("--rates", rates), counts=sizes, tasks=names))
    cells = []
    with screen.until_interrupted() as progress:
        task = progress.add_task("", total=len(plan))
        for done in flip_experiment(plan, pairs=pairs, seed=seed, dense_kl=dense_kl):
            cells.append(done)
            progress.update(
                task, description=f"{done[0].task}, T = {done[0].horizon}, K = {done[0].experts}", advance=1
            )
    if not cells:
        raise typer.Exit(ExitCode.INTERRUPTED)
    powers, predictors = exponents(cells), explained(cells)
    if screen.as_json:
        about = {"pairs": pairs, "seed": seed, "dense_kl": dense_kl, "complete": not screen.interrupted}
        about |= {"versions": {n: version(n) for n in ("offdrift", "torch", "numpy")}}
        table = [{**vars(cell), "sweep": sweep} for cell, sweep, _ in cells]
        screen.json(about | {"exponents": [vars(e) for e in powers], "predictors": predictors, "cells": table})
    else:
        screen.show(exponents_table(powers))
        screen.show(explained_table(predictors))
        screen.out.print(
            "In K at equal delta: 2 experts act of K, or a quarter of them. dense / flips: the bias of a drift of all "
            "log-probs with the same token KL, over that of the flips (median).",
            style="dim",
            markup=False,
        )
    if screen.interrupted:
        screen.warn("interrupted; the powers are of what was done so far")
        raise typer.Exit(ExitCode.INTERRUPTED)
    screen.next("offdrift lab routing", "what replaying the routes optimizes instead")
