"""`offdrift plan`: which schedule, staleness bound and number of rollout workers suit a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import BEFORE, RulesFile, Screen, app


@app.command(rich_help_panel=BEFORE)
def plan(
    screen: Screen,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Phase times: TOML files, runs or arms of `offdrift train`, audits. A later one replaces what an "
            "earlier one says.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a phase time, as in trainer.group=1.5 or rollout.workers=12. Repeatable.",
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", "-s", help="Simulate this schedule; repeat for more.")
    ] = None,
    bounds: Annotated[str, typer.Option(help="Staleness bounds to try, updates.")] = "1,2,4,8",
    sweep_workers: Annotated[
        bool | None,
        typer.Option(
            "--sweep-workers/--this-split",
            help="Try other splits of the devices. Without either: if no source says rollout.workers.",
        ),
    ] = None,
    drift: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="audit.json or an arm's folder: adds the KL that a lag costs. Absent: a source that has measured it.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the throughput that less lag is worth.")
    ] = 0.05,
    rules: RulesFile = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page to share, such as plan.html.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of lengths and crashes, if not the sources'.")] = None,
) -> None:
    """Which schedule fits my cluster? A simulation of every one of them, decided by the scheduler that runs use.

    It says how fast each schedule is, who waits, how old tokens get, and, from an audit, how far the policies drift.
    Without a source it shows a small example. docs/plan.md explains the phase times, and which of them a run or an
    audit has measured.

    \b
    offdrift plan                                     a 7B model on 16 devices
    offdrift plan cluster.toml                        your own phase times
    offdrift plan runs/async                          as a run has measured them
    offdrift plan runs/async --set rollout.workers=4  with four such workers
    offdrift plan cluster.toml --sweep-workers        other splits of the devices
    offdrift plan cluster.toml --drift audit.json     with the drift to expect
    offdrift plan cluster.toml --page plan.html       a page to share
    offdrift plan -s sync -s areal --bounds 1,2,3
    """
    from offdrift.errors import RecordError
    from offdrift.judge.rules_record import choose_rules, record_above
    from offdrift_lab.plan.compare import plan as simulated
    from offdrift_lab.plan.compare import splits_of
    from offdrift_lab.plan.drift import measured_fit
    from offdrift_lab.plan.measured import gather
    from offdrift_lab.plan.view import plan_view

    try:
        numbers = [int(x) for x in bounds.split(",") if x.strip()]
    except ValueError:
        numbers = [-1]
    if any(n < 0 for n in numbers):
        raise typer.BadParameter(f"--bounds {bounds!r}: give whole numbers of updates, such as 1,2,4")
    inputs = gather(sources or (), [*(changes or ()), *([] if seed is None else [f"run.seed={seed}"])])
    sweeps = "rollout.workers" not in inputs.origins if sweep_workers is None else sweep_workers
    fitted, missing = None, ""
    measured = drift or inputs.drift
    chosen = choose_rules(rules, *(({}, "") if measured is None else record_above(measured)))
    if drift is not None:
        fitted = measured_fit(drift, chosen.rules)
    elif inputs.drift is not None:
        try:
            fitted = measured_fit(inputs.drift, chosen.rules)
        except RecordError as e:  # what a source was not asked for does not stop the plan
            missing = str(e)
    with screen.watching("simulations") as watch:
        watch("simulating the schedules", 0, 0)
        document = simulated(
            inputs.phases,
            names=schedule or (),
            bounds=numbers,
            splits=splits_of(inputs.phases) if sweeps else (),
            drift=fitted,
            tolerance=tolerance,
            rules=chosen.rules,
            progress=watch,
        )
    document |= inputs.facts() | {"no_drift": missing}
    document |= {"judged_by": chosen.words} if fitted is not None else {}
    if page is not None:
        screen.doing("writing the page")
        from offdrift_lab.plan.page import write_plan_page

        write_plan_page(document, page)
    if screen.as_json:
        screen.json(document)
    else:
        screen.show(plan_view(document, width=screen.width))
        if page is not None:
            screen.wrote(page=page)
    best = document["recommended"]
    if not sources:
        screen.next("offdrift plan cluster.toml", "your own phase times; docs/plan.md has an example")
    elif fitted is None:
        screen.next("offdrift audit RUN", "measure drift by lag, for --drift audit.json")
    elif best is not None:
        screen.next(f"offdrift schedules {best['schedule']}", "what it does, rule by rule")
