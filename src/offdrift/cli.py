"""The command line: parse, call, print. No mathematics."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from offdrift.errors import OffdriftError

app = typer.Typer(
    name="offdrift",
    help="Measure, correct and certify off-policy drift in reinforcement learning of language models.",
    epilog="Start with:  offdrift train recipes/tiny.toml",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
INTERRUPTED = 130


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML); see recipes/ for examples.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a value of the recipe: lag.sync_every=4, rollout.engine=vllm; or all its arms: method=gspo, with override.objective.eps_high=0.3. Repeatable.",
        ),
    ] = None,
    arms: Annotated[
        str | None, typer.Option(help="Only these arms of the recipe, comma-separated.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder; default runs/NAME, or runs/NAME-2, ... if taken."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the newest run of this recipe (or --out) from its last checkpoint.",
        ),
    ] = False,
) -> None:
    """Train each arm of a recipe under real drift, compare them, and write a report.

    Every arm sees the same prompts, seeds and drift. The run folder holds everything: metrics,
    rollouts with provenance, checkpoints, the trained models, and report.html.

    Several GPUs:  accelerate launch -m offdrift train recipes/tiny.toml
    """  # fmt: skip
    from offdrift.report.page import write_report
    from offdrift.report.stored import read_run
    from offdrift.report.terminal import LiveProgress, run_summary
    from offdrift.train.loop import agree
    from offdrift.train.loop import train as train_recipe
    from offdrift.train.recipe import load_recipe

    chosen = load_recipe(recipe, changes=changes or [])
    if arms is not None:
        chosen = _only(chosen, arms)
    main_process = int(os.environ.get("RANK", "0")) == 0
    folder = agree(_run_folder(out, chosen.name, resume) if main_process else None)
    screen = console if main_process else Console(quiet=True)
    screen.print(f"recipe [bold]{chosen.name}[/]: {len(chosen.arms)} arms of {chosen.updates} updates; run folder {escape(str(folder))}")  # fmt: skip
    given = [w for c in changes or [] for w in ("--set", c)]
    given += ["--arms", arms] if arms else []
    again = shlex.join(["offdrift", "train", str(recipe), *given, "--out", str(folder), "--resume"])
    # A polite kill ends like Ctrl-C: the live display is put away and the way back is printed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with LiveProgress(screen) as watch:
            train_recipe(chosen, folder, resume=resume, watch=watch)
    except KeyboardInterrupt:
        screen.print(f"\ninterrupted; nothing before the last checkpoint is lost. Continue with:\n  {escape(again)}")  # fmt: skip
        raise typer.Exit(INTERRUPTED) from None
    if main_process:
        page = write_report(folder)
        screen.print(run_summary(read_run(folder), width=screen.width))
        screen.print(f"\nreport: {escape(str(page))}")


@app.command()
def bound(
    horizon: Annotated[int, typer.Option("--T", help="Horizon: tokens of the longest sequence.")],
    delta: Annotated[float, typer.Option(help="Largest token KL(rollout || current), nat.")],
    eps: Annotated[
        float | None, typer.Option(help="Largest token TV; default sqrt(delta/2).")
    ] = None,
    kl_seq: Annotated[
        float | None, typer.Option(help="KL of whole sequences, nat; default T delta.")
    ] = None,
    tv_seq: Annotated[
        float | None, typer.Option(help="TV of whole sequences; default sqrt(kl-seq/2).")
    ] = None,
    mean_tv: Annotated[
        float | None, typer.Option(help="Mean TV per position, for the adaptive rows.")
    ] = None,
    reward_range: Annotated[
        float, typer.Option(help="Largest minus smallest possible reward.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every bound on how far the surrogate can be from the true return, with its minimum B*.

    Table 1 of the Trust Region Masking paper:
    offdrift bound --T 4096 --delta 1e-4 --eps 5e-3 --kl-seq 0.01 --tv-seq 0.05
    """  # fmt: skip
    from offdrift.report.bound_table import bound_rows, bound_table

    given = {"horizon": horizon, "delta": delta, "eps": eps, "kl_seq": kl_seq, "tv_seq": tv_seq, "mean_tv": mean_tv, "reward_range": reward_range}  # fmt: skip
    if as_json:
        typer.echo(json.dumps(bound_rows(**given), indent=1))
    else:
        console.print(bound_table(**given))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method or system, in full.")] = None,
    unit: Annotated[
        str | None, typer.Option(help="Over what policies are compared: token, turn, sequence, ...")
    ] = None,
    ratio: Annotated[
        str | None, typer.Option(help="Which ratio it reads: full, mismatch, staleness, none.")
    ] = None,
    evidence: Annotated[
        str | None, typer.Option(help="What a rollout must record: sampled, exact, versions, none.")
    ] = None,
    sign: Annotated[
        str | None, typer.Option(help="Limits by the sign of the advantage: symmetric, by-sign.")
    ] = None,
    stop_gradient: Annotated[
        str | None, typer.Option(help="Whether the ratio is a constant: yes, unit, no, n/a.")
    ] = None,
    bias: Annotated[
        str | None,
        typer.Option(help='Of the expected gradient: "none inside limits", "O(drift)", ...'),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="method, system, or a family: weights, presets, ...")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Part of where it is from: DeepSeek, 2512.23075, ..."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every number.")] = False,
) -> None:
    """Every method: what it does, when it fails, where it is from, how to run it.

    Systems are listed, too: techniques that no loss can contain. Filters add up.

    \b
    offdrift methods                                   all of them
    offdrift methods trm_max                           one of them, in full
    offdrift methods R3                                a system: who would do it
    offdrift methods --unit sequence --ratio full      for whole responses
    offdrift methods --evidence exact --sign symmetric
    offdrift methods --reference DeepSeek --json       facts and numbers
    """
    from offdrift.methods.catalog import catalog, find, select
    from offdrift.report.method_table import method_list, method_page

    filters = {"unit": unit, "ratio": ratio, "evidence": evidence, "sign": sign, "stop_gradient": stop_gradient, "bias": bias, "kind": kind, "reference": reference}  # fmt: skip
    if name is not None:
        if any(value is not None for value in filters.values()):
            raise typer.BadParameter("a name is one row already; give a name or filters")
        row = find(name)
        rows, shown = {row["name"]: row}, method_page(row)
    else:
        rows = select(catalog(), **filters)
        shown = method_list(rows, width=console.width)
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        console.print(shown, highlight=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
) -> None:
    """Write a run's report.html again from what it stored, and print its table."""
    from offdrift.report.page import write_report
    from offdrift.report.stored import read_run
    from offdrift.report.terminal import run_summary

    page = write_report(run)
    console.print(run_summary(read_run(run), width=console.width))
    console.print(f"\nreport: {escape(str(page))}")


def main() -> None:
    """Run the command line; an error of ours is one message and exit status 1, never a traceback."""
    try:
        app()
    except OffdriftError as error:
        _fail(error)


def _fail(error: OffdriftError) -> NoReturn:
    Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False, soft_wrap=True)  # fmt: skip
    raise SystemExit(1)


def _only(recipe, arms: str):
    names = [a.strip() for a in arms.split(",") if a.strip()]
    unknown = [n for n in names if n not in recipe.arms]
    if unknown or not names:
        raise typer.BadParameter(f"{recipe.name} has the arms {', '.join(recipe.arms)}; not {', '.join(unknown) or 'none'}")  # fmt: skip
    return recipe.model_copy(update={"arms": {n: recipe.arms[n] for n in names}})


def _run_folder(out: Path | None, name: str, resume: bool) -> Path:
    """The folder to run in: the one asked for, the newest to resume, or the next free one."""
    if out is not None:
        if not resume and (out / "run.json").exists():
            raise typer.BadParameter(f"{out} already holds a run; add --resume to continue it, or choose another --out")  # fmt: skip
        return out
    taken = [Path("runs") / name, *(Path("runs") / f"{name}-{i}" for i in range(2, 10_000))]
    existing = [p for p in taken if (p / "run.json").exists()]
    if resume:
        if not existing:
            raise typer.BadParameter(f"there is no run of {name} under runs/; start it without --resume")  # fmt: skip
        return max(existing, key=lambda p: (p / "run.json").stat().st_mtime)
    return next(p for p in taken if not p.exists())
