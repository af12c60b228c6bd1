"""`offdrift methods`: the table of methods and systems."""

from __future__ import annotations

from typing import Annotated

import typer

from offdrift.cli.app import THEORY, Screen, app


@app.command(rich_help_panel=THEORY)
def methods(
    screen: Screen,
    name: Annotated[str | None, typer.Argument(help="One method or system, in full.")] = None,
    unit: Annotated[
        str | None, typer.Option(help="Over what policies are compared: token, turn, sequence, ...")
    ] = None,
    ratio: Annotated[str | None, typer.Option(help="Which ratio it reads: full, mismatch, staleness, none.")] = None,
    evidence: Annotated[
        str | None, typer.Option(help="What a rollout must record: sampled, exact, versions, none.")
    ] = None,
    sign: Annotated[str | None, typer.Option(help="Limits by the sign of the advantage: symmetric, by-sign.")] = None,
    stop_gradient: Annotated[
        str | None, typer.Option(help="Whether the ratio is a constant: yes, unit, no, n/a.")
    ] = None,
    certifies: Annotated[
        str | None, typer.Option(help='Whether the objective bounds the gain: "no mismatch", region, "none known", ...')
    ] = None,
    bias: Annotated[
        str | None, typer.Option(help='Of the expected gradient: "none inside limits", "O(drift)", ...')
    ] = None,
    kind: Annotated[str | None, typer.Option(help="method, system, or a family: weights, presets, ...")] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Part of where it is from: DeepSeek, 2512.23075, ...")
    ] = None,
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
    from offdrift.show.method_table import find, method_list, method_page, select, stored

    filters = {
        "unit": unit,
        "ratio": ratio,
        "evidence": evidence,
        "sign": sign,
        "stop_gradient": stop_gradient,
        "certifies": certifies,
        "bias": bias,
        "kind": kind,
        "reference": reference,
    }
    if name is not None:
        if any(value is not None for value in filters.values()):
            raise typer.BadParameter("a name is one row already; give a name or filters")
        row = find(name)
        rows, shown = {row["name"]: row}, method_page(row)
    else:
        row = None
        rows = select(stored()["rows"], **filters)
        shown = method_list(rows, width=screen.width)
    if screen.as_json:
        screen.json(rows)
    else:
        screen.show(shown)
    if row is None:
        screen.next("offdrift methods NAME", "one of them, in full")
    elif row["kind"] == "method":
        screen.next(f"offdrift train recipes/tiny.toml --set method={row['name']}", "train with it")
    else:
        screen.next("offdrift methods --kind system", "all systems")
