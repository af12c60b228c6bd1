"""`offdrift train`: a recipe becomes a run and its page."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from offdrift.cli.app import DURING, Screen, app, interruptible
from offdrift.cli.exit_codes import ExitCode
from offdrift.texts import read_json

if TYPE_CHECKING:
    from offdrift.train.recipe import Recipe


@app.command(rich_help_panel=DURING)
def train(
    screen: Screen,
    recipe: Annotated[
        Path, typer.Argument(help="A recipe: a TOML file, or the name of one that comes with the package, as tiny.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the recipe, as in lag.sync_every=4 or "
            "rollout.dtype=bfloat16; method=gspo replaces all its arms, and "
            "override.objective.eps_high=0.3 changes that method. Repeatable.",
        ),
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Only these arms of the recipe, comma-separated.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; default runs/NAME, or runs/NAME-2, ... if taken.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run of this recipe that has not finished (of several, the one in --out) from its "
            "last checkpoint.",
        ),
    ] = False,
) -> None:
    """Train each arm of a recipe under real drift, compare them, and write a report.

    Every arm sees the same prompts, seeds and drift. The run folder holds everything: metrics,
    rollouts with provenance, checkpoints, the trained models, and report.html. --json prints run.json
    at the end.

    Several GPUs: accelerate launch -m offdrift train recipes/tiny.toml; sharded: docs/training.md.

    \b
    offdrift train recipes/tiny.toml
    offdrift train recipes/tiny.toml --set method=gspo --set lag.sync_every=4
    offdrift train recipes/tiny.toml --resume
    """
    main_process = int(os.environ.get("RANK", "0")) == 0
    screen = screen if main_process else Screen(as_json=True, quiet=True)
    with screen.err.status("loading PyTorch and transformers"):  # seconds, on a slow disk many
        if not screen.err.is_terminal:
            screen.note(f"{recipe}: loading PyTorch and transformers")
        from offdrift.train.loop import Event, agree
        from offdrift.train.loop import train as train_recipe
        from offdrift.train.page import write_report
        from offdrift.train.places import recipe_file
        from offdrift.train.recipe import load_recipe
        from offdrift.train.stored import read_run
        from offdrift.train.view import LiveProgress, run_summary

    file = recipe_file(recipe)
    if file != recipe:
        screen.note(f"{recipe}: the package's own, {file}")
    chosen = load_recipe(file, changes=changes or [])
    if arms is not None:
        names = [a.strip() for a in arms.split(",") if a.strip()]
        unknown = [n for n in names if n not in chosen.arms]
        if unknown or not names:
            raise typer.BadParameter(
                f"{chosen.name} has the arms {', '.join(chosen.arms)}; not {', '.join(unknown) or 'none'}"
            )
        chosen = chosen.model_copy(update={"arms": {n: chosen.arms[n] for n in names}})
    folder = agree(_run_folder(chosen, out, resume) if main_process else None)
    screen.err.print(
        f"recipe [bold]{chosen.name}[/]: {len(chosen.arms)} arms of {chosen.updates} updates; "
        f"run folder {escape(str(folder))}",
        soft_wrap=True,
    )
    flags = [w for c in changes or [] for w in ("--set", c)]
    flags += ["--arms", arms] if arms else []
    again = shlex.join(["offdrift", "train", str(recipe), *flags, "--out", str(folder), "--resume"])
    # A polite kill ends like Ctrl-C: the live display is put away and the way back is printed.
    check = interruptible()
    try:
        with LiveProgress(screen.err) as live:

            def watch(event: Event) -> None:
                check()
                live(event)

            train_recipe(chosen, folder, resume=resume, watch=watch)
    except KeyboardInterrupt:
        if main_process:
            screen.warn(f"\ninterrupted; nothing before the last checkpoint is lost. Continue with:\n  {again}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if main_process:
        page = write_report(folder)
        if screen.as_json:
            screen.json(read_json(folder / "run.json"), indent=None)
        else:
            screen.show(run_summary(read_run(folder), width=screen.width), "")
            screen.wrote(report=page)
        first = folder / "arms" / next(iter(chosen.arms))
        screen.next(f"offdrift audit {first}", "what drifted in an arm, why, and the smallest fix")


def _run_folder(recipe: Recipe, out: Path | None, resume: bool) -> Path:
    """The folder to run in: the one asked for, the run to resume, or the next free one."""
    from offdrift.train.context import run_to_continue

    if out is not None:
        if not resume and (out / "run.json").exists():
            raise typer.BadParameter(f"{out} already holds a run; add --resume to continue it, or choose another --out")
        return out
    candidates = [Path("runs") / recipe.name, *(Path("runs") / f"{recipe.name}-{i}" for i in range(2, 10_000))]
    if resume:
        existing = [p for p in candidates if (p / "run.json").exists()]
        if not existing:
            raise typer.BadParameter(f"there is no run of {recipe.name} under runs/; start it without --resume")
        return run_to_continue(recipe, existing)
    return next(p for p in candidates if not p.exists())
