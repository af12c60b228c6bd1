"""`offdrift docs`: the documentation that came with the package."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import THEORY, Screen, app
from offdrift.cli.complete import page_names
from offdrift.errors import RecordError


@app.command("docs", rich_help_panel=THEORY)
def docs(
    screen: Screen,
    name: Annotated[
        str | None,
        typer.Argument(help="A page: rules, integrations/trl, or docs/rules.md.", autocompletion=page_names),
    ] = None,
) -> None:
    """Read the documentation of the installed version, offline.

    Messages name a page by its file, as docs/rules.md; this shows it wherever offdrift is installed.

    \b
    offdrift docs                       all pages
    offdrift docs start
    offdrift docs integrations/verl
    offdrift docs rules > rules.md      as Markdown
    """
    from offdrift.show.manual import page_list, page_text, pages, rendered

    found = pages()
    if name is None:
        if screen.as_json:
            screen.json({page: str(path) for page, path in found.items()})
        else:
            screen.show(page_list(found))
        screen.next("offdrift docs NAME", "shows a page")
        return
    page = name.removeprefix("docs/").removesuffix(".md").removesuffix(".ipynb")
    if page not in found:
        near = difflib.get_close_matches(page, found, n=1) or [p for p in found if Path(p).name == page]
        hint = f"did you mean {near[0]}?" if near else "`offdrift docs` lists all pages"
        raise RecordError(f"no page {name!r}; {hint}")
    text = page_text(found[page])
    if screen.as_json:
        screen.json({"page": page, "path": str(found[page]), "markdown": text})
    elif screen.in_terminal:
        screen.show(rendered(text))
    else:
        typer.echo(text, nl=False)
