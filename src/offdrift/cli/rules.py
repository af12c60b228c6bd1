"""`offdrift rules`: the built-in thresholds, and what a rules file changes."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offdrift.cli.app import THEORY, Screen, app
from offdrift.cli.complete import rule_names
from offdrift.errors import RecipeError

if TYPE_CHECKING:
    from offdrift.judge import Rules


@app.command(rich_help_panel=THEORY)
def rules(
    screen: Screen,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A rules file to check, or a rule to show in full. Absent: the built-in thresholds are shown.",
            autocompletion=rule_names,
        ),
    ] = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print the thresholds as a rules file to start from, all as comments.")
    ] = False,
) -> None:
    """Show the thresholds that verdicts depend on, one rule in full, or check a file of yours that changes them.

    Such a file is given to any command that judges, with --rules, and to a recipe, as diagnosis.rules. It names what
    it changes alone; a run stores it, and its pages judge by it. docs/rules.md has every rule and the format.

    \b
    offdrift rules
    offdrift rules stale_engine      what shows it, what would refute it
    offdrift rules --toml > mine.toml
    offdrift rules mine.toml
    offdrift audit runs/tiny/arms/none --rules mine.toml
    """
    from offdrift.judge import load_rules
    from offdrift.judge.rules_changes import changes_of
    from offdrift.show.rules import changes_view, thresholds_view, toml_of

    if file is not None and toml:
        raise typer.BadParameter("--toml prints the built-in thresholds; leave the file out")
    if file is not None and not file.exists() and file.suffix != ".toml":
        _show_rule(screen, load_rules(), str(file))
        return
    chosen = load_rules(file)
    if screen.as_json:
        about = chosen.as_record()
        screen.json({"file": chosen.file, "sha256": chosen.sha256, "limits": about["limits"], **changes_of(chosen)})
    elif toml:
        typer.echo(toml_of(chosen), nl=False)
    elif file is None:
        screen.show(thresholds_view(chosen))
    else:
        screen.show(changes_view(chosen, changes_of(chosen)))
    if file is None:
        screen.next("offdrift rules --toml > mine.toml", "thresholds to change; then: offdrift rules mine.toml")
    else:
        screen.next(f"offdrift audit RUN --rules {file}", "judge a run by it")


def _show_rule(screen: Screen, rules: Rules, name: str) -> None:
    """One rule with its condition, meaning, fix and sources; a name that is none is refused with those like it."""
    from offdrift.show.rules import rule_facts, rule_view

    if name not in rules.rules:
        near = get_close_matches(name, rules.rules)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise RecipeError(f"no rule and no file is called {name!r}; {hint}`offdrift docs rules` shows all rules")
    if screen.as_json:
        screen.json(rule_facts(rules, name))
    else:
        screen.show(rule_view(rules, name))
    screen.next("offdrift rules --toml > mine.toml", "thresholds to change, for --rules mine.toml")
