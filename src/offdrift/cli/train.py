"""`offdrift train`: a recipe becomes a run and its page."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from offdrift.cli.app import app, console

INTERRUPTED = 130


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML); see recipes/ for examples.")],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a value of the recipe: lag.sync_every=4, rollout.dtype=bfloat16; or all its arms: method=gspo, with override.objective.eps_high=0.3. Repeatable.",
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
    main_process = int(os.environ.get("RANK", "0")) == 0
    screen = console if main_process else Console(quiet=True)
    with screen.status("loading PyTorch and transformers"):  # seconds, on a slow disk many
        if not screen.is_terminal:
            screen.print(f"{escape(str(recipe))}: loading PyTorch and transformers")
        from offdrift.train.loop import agree
        from offdrift.train.loop import train as train_recipe
        from offdrift.train.page import write_report
        from offdrift.train.recipe import load_recipe
        from offdrift.train.stored import read_run
        from offdrift.train.view import LiveProgress, run_summary

    chosen = load_recipe(recipe, changes=changes or [])
    if arms is not None:
        chosen = _only(chosen, arms)
    folder = agree(_run_folder(out, chosen.name, resume) if main_process else None)
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
