"""`offdrift schema`: JSON Schema of files that users write, for editors."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from offdrift.cli.app import THEORY, Screen, app


@app.command(rich_help_panel=THEORY)
def schema(
    screen: Screen,
    kind: Annotated[Literal["recipe", "sweep", "rules"], typer.Argument(help="File that the schema is of.")],
) -> None:
    """Print the JSON Schema of a recipe, a sweep file or a rules file, so that an editor completes and checks it.

    Save it beside the file, and name it in the file's first line, as the recipes of this package do:
    #:schema ./recipe.schema.json

    \b
    offdrift schema recipe > recipe.schema.json
    offdrift schema rules > rules.schema.json
    """
    if kind == "rules":
        from offdrift.judge.schema import rules_schema

        content = rules_schema()
    else:
        from offdrift_lab.train.settings.schema import recipe_schema, sweep_schema

        content = recipe_schema() if kind == "recipe" else sweep_schema()
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    screen.next(f"offdrift schema {kind} > {kind}.schema.json", f"then, in line 1: #:schema ./{kind}.schema.json")
