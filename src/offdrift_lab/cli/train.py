"""`offdrift train`: a recipe becomes a run and its page."""

from __future__ import annotations

import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from offdrift.cli.app import DURING, RulesFile, Screen, app, interruptible
from offdrift.cli.exit_codes import ExitCode
from offdrift.texts import read_json
from offdrift_lab.cli.complete import recipe_names

if TYPE_CHECKING:
    from offdrift_lab.train.settings.recipe import Recipe


@app.command(rich_help_panel=DURING)
def train(
    screen: Screen,
    recipe: Annotated[
        Path,
        typer.Argument(
            help="A recipe: a TOML file, or the name of one that comes with the package, as tiny.",
            autocompletion=recipe_names,
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the recipe, as in lag.sync_every=4 or "
            "rollout.dtype=bfloat16; method=gspo (or method=mine.py:mine) replaces all its arms, and "
            "override.objective.eps_high=0.3 changes that method. Repeatable.",
        ),
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Only these arms of the recipe, comma-separated.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; default runs/NAME, or runs/NAME-2, ... if taken.")
    ] = None,
    rules: RulesFile = None,
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
    from offdrift_lab.train.settings.keys import check_keys
    from offdrift_lab.train.settings.places import recipe_file

    main_process = int(os.environ.get("RANK", "0")) == 0
    screen = screen if main_process else Screen(as_json=True, quiet=True)
    file = recipe_file(recipe)
    check_keys(file, changes or [])
    if not screen.err.is_terminal:
        screen.note(f"{recipe}: loading PyTorch and transformers")
    screen.doing("loading PyTorch and transformers")  # seconds, on a slow disk many
    from offdrift.judge import load_rules
    from offdrift.methods.load import without_loading
    from offdrift_lab.train.data.tasks import check_task_name
    from offdrift_lab.train.loop.context import rules_of_run
    from offdrift_lab.train.loop.loop import Event, agree
    from offdrift_lab.train.loop.loop import train as train_recipe
    from offdrift_lab.train.loop.run_folder import checked_head
    from offdrift_lab.train.report.page import write_report
    from offdrift_lab.train.report.view import LiveProgress
    from offdrift_lab.train.settings.recipe import load_recipe

    if file != recipe:
        screen.note(f"{recipe}: the package's own, {file}")
    names = None if arms is None else [a.strip() for a in arms.split(",") if a.strip()]
    with without_loading() if resume else nullcontext():  # code of a run that changed since must not run
        chosen = _only(load_recipe(file, changes=changes or [], arms=names, stored={} if resume else None), names)
        folder = agree(_run_folder(chosen, out, resume) if main_process else None)
    head = checked_head(folder) if resume else {}
    if resume:
        chosen = _only(load_recipe(file, changes=changes or [], stored=head["recipe"], arms=names), names)
    check_task_name(chosen.task)
    given = None if rules is None else load_rules(rules)
    judged = rules_of_run(chosen, head, given, str(folder / "run.json"))
    screen.err.print(
        f"recipe [bold]{chosen.name}[/]: {len(chosen.arms)} arms of {chosen.updates} updates; "
        f"run folder {escape(str(folder))}",
        soft_wrap=True,
    )
    again = _resuming(recipe, changes or [], arms, folder)
    # A polite kill ends like Ctrl-C: the live display is put away and the way back is printed.
    check, page = interruptible(), folder
    try:
        with LiveProgress(screen.err, limits=judged.limits) as live:

            def watch(event: Event) -> None:
                check()
                live(event)

            train_recipe(chosen, folder, resume=resume, rules=judged, watch=watch)
            if main_process:
                live(Event("stage", text="writing the page"))
                page = write_report(folder)
    except KeyboardInterrupt:
        if main_process:
            screen.warn(f"\ninterrupted; nothing before the last checkpoint is lost. Continue with:\n  {again}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if main_process:
        _show(screen, folder, page)
        first = folder / "arms" / next(iter(chosen.arms))
        screen.next(f"offdrift audit {first}", "what drifted in an arm, why, and the smallest fix")


def _show(screen: Screen, folder: Path, page: Path) -> None:
    """Print a finished run: its table, or `run.json`."""
    from offdrift_lab.train.report.stored import read_run
    from offdrift_lab.train.report.view import run_summary

    if screen.as_json:
        screen.json(read_json(folder / "run.json"), indent=None)
    else:
        screen.show(run_summary(read_run(folder), width=screen.width), "")
        screen.wrote(report=page)


def _resuming(recipe: Path, changes: list[str], arms: str | None, folder: Path) -> str:
    """The command that continues a run; its rules are in its record."""
    flags = [w for c in changes for w in ("--set", c)]
    flags += ["--arms", arms] if arms else []
    return shlex.join(["offdrift", "train", str(recipe), *flags, "--out", str(folder), "--resume"])


def _only(recipe: Recipe, arms: list[str] | None) -> Recipe:
    """The recipe with these of its arms."""
    if arms is None:
        return recipe
    unknown = [name for name in arms if name not in recipe.arms]
    if unknown or not arms:
        raise typer.BadParameter(
            f"{recipe.name} has the arms {', '.join(recipe.arms)}; not {', '.join(unknown) or 'none'}"
        )
    return recipe.model_copy(update={"arms": {name: recipe.arms[name] for name in arms}})


def _run_folder(recipe: Recipe, out: Path | None, resume: bool) -> Path:
    """The folder to run in: the one asked for, the run to resume, or the next free one."""
    from offdrift_lab.train.loop.context import run_to_continue

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
