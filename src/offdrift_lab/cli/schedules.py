"""`offdrift schedules`: how asynchronous runs overlap generation and training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from offdrift.cli.app import THEORY, Screen, app
from offdrift.show.method_table import section
from offdrift_lab.cli.complete import schedule_names
from offdrift_lab.schedules.table import SYMBOLS, catalog, facts, lag_words, schedule


@app.command(rich_help_panel=THEORY)
def schedules(
    screen: Screen,
    name: Annotated[str | None, typer.Argument(help="One schedule, in full.", autocompletion=schedule_names)] = None,
) -> None:
    """Schedules of asynchronous training: what each overlaps, how old its tokens get, what it costs.

    A schedule is a composition of rules for admission, dispatch, weights, too old groups and consumption.

    \b
    offdrift schedules                 all of them
    offdrift schedules areal           one of them, rule by rule
    offdrift schedules --json          rules and numbers
    """
    rows = catalog() if name is None else {name: facts(name)}
    if screen.as_json:
        screen.json(rows)
    else:
        screen.show(schedule_list(rows) if name is None else schedule_page(name))
    if name is None:
        screen.next("offdrift schedules NAME", "one of them, rule by rule")
    else:
        # One arm in place of the recipe's, each of which has a schedule of its own.
        arm = f"--set method=token_tis --set pipeline.schedule={name}"
        screen.next(f"offdrift train recipes/async.toml {arm}", "train with it")


def schedule_list(rows: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """Every row: what it does, the limit of its lag, versions per response."""
    shown: list[RenderableType] = []
    for name, row in rows.items():
        lag = {None: "lag without limit", 0: "on-policy"}.get(row["max_lag"], f"lag ≤ {row['max_lag']}")
        several = " · several versions per response" if row["versions_per_response"] == "several" else ""
        head = Text.assemble((name, "bold"), "  ", (f"{lag}{several}", "dim"))
        shown += [head, Padding(row["summary"], (0, 0, 0, 4))]
    words = Text.assemble((f"{len(rows)} schedules", "bold"), ".  ")
    words.append("lag: updates between the weights that drew a token and the update that trains on it. ", style="dim")
    words.append("The limits are proved for any order of events. ", style="dim")
    return Group(*shown, Text(), words.append("offdrift schedules NAME", style="bold").append(" explains one."))


def schedule_page(name: str) -> RenderableType:
    """Everything that is known of one row."""
    row = facts(name)
    title = Text.assemble((name, "bold"), ("  a schedule", "cyan"), f"\n{row['title']}: {row['summary']}")
    about = [
        ("version lag", lag_words(schedule(name))),
        ("versions", f"{row['versions_per_response']} per response"),
        ("sample", "by length: no certificate" if row["selects"] else "independent of length"),
        ("costs", row["cost"]),
        ("source", row["source"]),
    ]
    symbols = [(symbol, meaning) for symbol, meaning in SYMBOLS.items()]
    return Group(
        title,
        section("Rules", list(row["rules"].items())),
        section("What it bounds, what it costs", about),
        section("Symbols", symbols),
    )
