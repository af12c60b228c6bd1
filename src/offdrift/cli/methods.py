"""`offdrift methods`: the table of methods and systems."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from offdrift.cli.app import THEORY, Screen, app
from offdrift.cli.complete import method_names
from offdrift.cli.exit_codes import ExitCode


@app.command(rich_help_panel=THEORY, verdict="a law of --check fails")
def methods(
    screen: Screen,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this method or system in full; mine.py:mine is one of yours.", autocompletion=method_names
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Hold the method to the laws that those of the table pass.")
    ] = False,
    situation: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="SITUATION",
            help="What an audit said: stale, moe, quantized, async, dense. Suggests three.",
        ),
    ] = None,
    search: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Words in name, summary, weakness, formula or reference.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Span over which policies are compared: token, turn, sequence, ...")
    ] = None,
    ratio: Annotated[str | None, typer.Option(help="Ratio that it uses: full, mismatch, staleness, none.")] = None,
    evidence: Annotated[
        str | None, typer.Option(help="What a rollout must record: sampled, exact, versions, none.")
    ] = None,
    sign: Annotated[str | None, typer.Option(help="Limits by the sign of the advantage: symmetric, by-sign.")] = None,
    stop_gradient: Annotated[
        str | None, typer.Option(help="Is the ratio detached from the gradient: yes, unit, no, n/a.")
    ] = None,
    certifies: Annotated[
        str | None,
        typer.Option(
            help='Condition under which the objective bounds the gain: "no mismatch", region, "none known", ...'
        ),
    ] = None,
    bias: Annotated[
        str | None, typer.Option(help='Bias of the expected gradient: "none inside limits", "O(drift)", ...')
    ] = None,
    kind: Annotated[str | None, typer.Option(help="method, system, or a family: weights, presets, ...")] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text in its reference: DeepSeek, 2512.23075, ...")
    ] = None,
) -> None:
    """Every method: what it does, when it fails, where it is from, how to run it.

    Also lists systems: techniques outside of the loss. With several filters, all must match.

    \b
    offdrift methods                                   all of them
    offdrift methods trm_max                           one of them, in full
    offdrift methods --for stale                       three to begin with
    offdrift methods --search quantized                words anywhere in a row
    offdrift methods R3                                a system: who would do it
    offdrift methods --unit sequence --ratio full      for whole responses
    offdrift methods --evidence exact --sign symmetric
    offdrift methods --reference DeepSeek --json       facts and numbers
    offdrift methods mine.py:mine --check              yours, against all laws
    """
    from rich.console import Group

    from offdrift.show.method_table import (
        chosen,
        find,
        method_list,
        method_page,
        select,
        stored,
        suggested,
        suggestions,
    )

    if check:
        if name is None:
            raise typer.BadParameter("--check holds one method to the laws; name it, as in mine.py:mine")
        _check(screen, name)
        return

    filters = {
        "situation": situation,
        "search": search,
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
        row = _facts(name) if ":" in name else find(name)
        rows, shown = {row["name"]: row}, method_page(row)
    else:
        row = None
        rows = select(stored()["rows"], **filters)
        shown = method_list(rows, width=screen.width)
        if situation is not None:
            situation = chosen("situation", situation)
            rows, shown = suggested(rows, situation), Group(suggestions(situation), shown)
    if screen.as_json:
        screen.json(rows)
    else:
        screen.show(shown)
    if row is None:
        screen.next("offdrift methods NAME", "shows one in full")
    elif "code" in row:
        screen.next(f"offdrift methods {row['name']} --check", "hold it to the laws that those of the table pass")
    elif row["kind"] == "method":
        screen.next(f"offdrift train recipes/tiny.toml --set method={row['name']}", "train with it")
    else:
        screen.next("offdrift methods --kind system", "all systems")


def _facts(name: str) -> dict[str, Any]:
    """Facts of a method in code, which takes torch."""
    from offdrift.methods.describe import code_facts

    return code_facts(name)


def _check(screen: Screen, name: str) -> None:
    """Hold a method to every law; one that fails ends the command."""
    from offdrift.laws.laws import LAWS
    from offdrift.methods import method
    from offdrift.methods.load import code_source, in_code
    from offdrift.show.law_table import law_table

    row = method(name)
    laws: dict[str, Any] = {}
    with screen.progress("laws") as progress:
        task = progress.add_task("", total=len(LAWS))
        for law, of_law in LAWS.items():
            progress.update(task, description=law)
            laws[law] = of_law.as_dict(row)
            progress.advance(task)
    holds = all(result["holds"] is not False for result in laws.values())
    if screen.as_json:
        code = code_source(name).as_dict() if in_code(name) else None
        screen.json({"name": name, "formula": row.describe(), "code": code, "holds": holds, "laws": laws})
    else:
        screen.show(law_table(name, laws))
    if not holds:
        raise typer.Exit(ExitCode.VERDICT)
    screen.next(f"offdrift train recipes/tiny.toml --set method={name}", "train with it")
