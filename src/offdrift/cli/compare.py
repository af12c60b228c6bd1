"""`offdrift compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import AFTER, RulesFile, Screen, app


@app.command(rich_help_panel=AFTER)
def compare(
    screen: Screen,
    run_a: Annotated[Path, typer.Argument(help="An audit: the folder that `offdrift audit` wrote.")],
    run_b: Annotated[Path, typer.Argument(help="The audit to compare with it.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("compare.html"),
    rules: RulesFile = None,
) -> None:
    """Compare two audited runs: metrics, drift over time, findings, and the effect of each method.

    Each is judged by the rules of its audit; --rules judges both by one file.

    \b
    offdrift audit runs/tiny/arms/none && offdrift audit runs/tiny/arms/token_tis
    offdrift compare audits/tiny-none audits/tiny-token_tis
    """
    from offdrift.audit.compare import comparison_view, differences, write_comparison
    from offdrift.audit.rejudge import audit_judged_by

    screen.doing("reading the audits")
    a, b = audit_judged_by(run_a, rules), audit_judged_by(run_b, rules)
    paths = run_a.resolve(), run_b.resolve()
    names = paths[0].name, paths[1].name
    if names[0] == names[1]:  # short names that differ
        names = f"{paths[0].parent.name}/{names[0]}", f"{paths[1].parent.name}/{names[1]}"
    screen.doing("writing the page")
    page = write_comparison(a, b, names, out)
    if screen.as_json:
        screen.json(differences(a, b), indent=None)
        return
    screen.show(comparison_view(a, b, names, width=screen.width), "")
    screen.wrote(page=page)
    screen.next(f"open {page}", "both runs over time, in a browser")
