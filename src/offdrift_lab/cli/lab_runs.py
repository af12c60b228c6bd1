"""`offdrift lab`, the experiments on what runs recorded: gates and bounds against length, safe lags, collapses."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import RulesFile, Screen, lab
from offdrift.texts import read_json
from offdrift_lab.cli.lab import Stem, next_picture, words_of, write_outputs

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS_OF_RESPONSES = "16,32,64,128,256,512,1024,2048,4096,8192"


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
    from offdrift_lab.exact.length_bias import curves, independent_stream, packaged, read_recording
    from offdrift_lab.exact.run_views import length_bias_panels, length_bias_rows, length_bias_table

    if not 1 <= same_at <= LENGTHS[-1]:
        raise typer.BadParameter(f"--same-at {same_at}: the drawn sequences have 1 to {LENGTHS[-1]} tokens")
    paths = recording or packaged()
    streams = [
        independent_stream(sequences=sequences, horizon=LENGTHS[-1], violation=violation, seed=seed),
        *(read_recording(p) for p in paths),
    ]
    screen.doing("acceptance by length")
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
        write_outputs(
            out,
            length_bias_panels(results),
            rows,
            screen,
            title="Which gates punish length?",
            caption="Share of sequences accepted, 95 % intervals. TRM paper, Appendix F, Table 2.",
        )
    next_picture(screen, out, "length-bias")


@lab.command()
def lengths(
    screen: Screen,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Drift of yours: a run, an arm of one, audit.json or check.json. Repeatable; stands in place of the "
            "drifts that come with the package.",
        ),
    ] = None,
    beside: Annotated[bool, typer.Option("--beside", help="Show them beside your own.")] = False,
    tokens: Annotated[str, typer.Option(help="Lengths of a response, tokens, comma-separated.")] = LENGTHS_OF_RESPONSES,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: a .html, .svg or .png file.")] = None,
) -> None:
    """How long may responses be until no error bound says anything, for drift that was measured?

    Of every drift (engines in half precision, on grids, with an FP8 cache; mixtures of experts; weights that are some
    updates old) the smallest bound at each length, and the length from which it is not below the range of the reward.
    Takes for granted that longer responses drift as much per token.

    \b
    offdrift lab lengths
    offdrift lab lengths --from runs/mine --beside --chart lengths.svg
    """
    from offdrift.prove.measured import measured_drift
    from offdrift.show.figures import write_chart
    from offdrift_lab.exact.lengths import MEASURED, Drift, length_chart, length_rows, length_table, summary

    if beside and not measured:
        raise typer.BadParameter("--beside puts the package's drifts beside yours: name yours with --from")
    if wrong := [t for t in words_of(tokens) if not t.isdecimal() or int(t) < 1]:
        raise typer.BadParameter(f"--tokens: {wrong[0]!r} is not a number of tokens; give 16,256,4096")
    drifts = [] if measured and not beside else list(MEASURED)
    for path in measured or ():
        drift = measured_drift(path)
        if "delta" not in drift.premises:
            raise typer.BadParameter(
                f"--from {path} recorded no exact divergences, so that the largest token KL is not known; record them "
                '(rollout.evidence = "full" or "hidden"), or give a check.json'
            )
        drifts.append(Drift(path.name, drift.premises["kl_rate"], drift.premises["delta"], drift.source))
    screen.doing("bounds at every length")
    rows = length_rows(drifts, sorted({int(t) for t in words_of(tokens)}))
    if screen.as_json:
        screen.json(rows)
    else:
        screen.show(length_table(rows, width=screen.width))
    if chart is not None:
        caption = (
            "Given: mean and largest KL of a token as measured, at every length alike. " + summary(rows) + ". What is "
            "above 1 certifies only a surrogate gain that is larger still."
        )
        title = "How long may responses be until no bound says anything?"
        screen.wrote(chart=write_chart(chart, [length_chart(rows)], title=title, caption=caption))
    screen.next("offdrift bound --from RUN", "every bound for the drift of a run")


@lab.command("lag-law")
def lag_law(
    screen: Screen,
    sweeps: Annotated[
        list[str],
        typer.Argument(
            help="Folders of `offdrift sweep`, or files that --json of this wrote. NAME=SWEEP names the task family; "
            "sweeps of one name are taken together.",
        ),
    ],
    arms: Annotated[str | None, typer.Option(help="Only runs of these arms, comma-separated.")] = None,
    keep: Annotated[float, typer.Option(help="Share of its held-out reward that a stable run keeps.")] = 0.7,
    draws: Annotated[int, typer.Option(help="Bootstrap samples behind every interval.", min=20)] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
    out: Stem = None,
) -> None:
    """Does the effective sample size say how much lag is safe, L_max = c ESS^α?

    Every run of the sweeps is a point: the lag between its synchronizations, the effective share of its
    sequences at the end of the first such stretch, and whether it kept its reward. In each sweep (a task
    family) the boundary of stable runs is fitted, and tested on the other sweeps, beside ESS alone and lag alone.
    Learning rates should differ within a sweep: at one rate ESS falls with the lag, and no fit can tell the two apart.

    \b
    offdrift sweep recipes/staleness.toml
    offdrift lab lag-law runs/staleness
    offdrift lab lag-law a=runs/staleness a=runs/lag-law b=runs/staleness-sums
    offdrift lab lag-law runs/lag-law runs/more --arms oapl,oapl_1 --out law
    """
    from offdrift_lab.exact.lag_law import judge, read_runs, verdict
    from offdrift_lab.exact.run_views import lag_law_panels, lag_law_tables

    runs = []
    for argument in sweeps:
        family, _, path = ("", "", argument) if Path(argument).exists() else argument.rpartition("=")
        runs += read_runs(Path(path), arms=words_of(arms or ""), family=family)
    families = {run.family for run in runs}
    with screen.until_interrupted() as progress:
        task = progress.add_task("fits and tests", total=len(families) ** 2)
        result = judge(runs, keep=keep, draws=draws, seed=seed, tick=partial(progress.advance, task))
        words = verdict(result)
    if screen.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    versions = {name: version(name) for name in ("offdrift", "torch", "numpy")}
    result = {"kind": "lag-law", "verdict": words, "arms": arms, "versions": versions, **result}
    if screen.as_json:
        screen.json(result)
    else:
        for table in lag_law_tables(result):
            screen.show(table)
        screen.out.print(
            "Intervals of α, of the law's AUROC and of its difference to that of ESS alone: a bootstrap over settings. "
            "1/α is the weight of the lag over that of ESS: 1 by the conjecture, 0 if the lag says nothing beside ESS. "
            "50 ESS right: runs that the conjectured law (c = 50, α = 1) sorts rightly.",
            style="dim",
            markup=False,
        )
        screen.show(f"L_max = c ESS^α: [bold]{words}[/].")
    if out is not None:
        caption = f"Stable: kept {keep:.0%} of its held-out reward. ESS at the end of the first stretch between syncs."
        title = "How much lag is safe?"
        write_outputs(out, lag_law_panels(runs, result), result, screen, title=title, caption=caption)
    if out is None:
        screen.next(f"offdrift lab lag-law {' '.join(sweeps)} --out lag-law", "the same as a picture and a page")
    else:
        screen.next(f"open {out}.html", "the figure, in a browser")


@lab.command()
def collapse(
    screen: Screen,
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of such.")],
    horizon: Annotated[
        int | None,
        typer.Option(help="Updates ahead of which a collapse is predicted; default `collapse_within`, 200.", min=1),
    ] = None,
    recovery: Annotated[
        int | None,
        typer.Option(help="Updates that a fall must last to be one; default `collapse_recovery`, 100.", min=1),
    ] = None,
    rules: RulesFile = None,
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
    offdrift lab collapse runs/ --horizon 10 --recovery 5 --window 5 --json
    """
    from offdrift.judge import load_rules
    from offdrift.show.json_access import at, mapping, read_lines
    from offdrift.show.json_access import number as number_of
    from offdrift_lab.evidence.predictor import LoggedRun, compare_predictors
    from offdrift_lab.exact.run_views import collapse_table

    paths = sorted({p for folder in folders for p in folder.rglob("metrics.jsonl")})
    if not paths:
        raise typer.BadParameter(
            f"{', '.join(map(str, folders))}: no run in there (arms/NAME/metrics.jsonl of `offdrift train` or `sweep`)"
        )
    runs = []
    for number, path in enumerate(paths):
        head = path.parents[2] / "run.json"
        seed: float | None = None
        with suppress(OSError, ValueError):  # a run without its head is one of its own seed
            seed = number_of(at(mapping(read_json(head)), "recipe", "seed"))
        runs.append(LoggedRun(read_lines(path)[0], number if seed is None else int(seed)))
    limits = load_rules(rules).limits
    scale = {
        "horizon": int(limits["collapse_within"]) if horizon is None else horizon,
        "recovery": int(limits["collapse_recovery"]) if recovery is None else recovery,
        "window": window,
        "smooth": smooth,
    }
    screen.doing(f"predicting collapses of {len(runs)} runs")
    result = compare_predictors(runs, **scale, folds=folds, limits=limits)
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
