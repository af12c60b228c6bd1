"""`offdrift compare`: two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from offdrift.cli.app import app, console


@app.command()
def compare(
    run_a: Annotated[
        Path, typer.Argument(help="An audit: the folder that `offdrift audit` wrote.")
    ],
    run_b: Annotated[Path, typer.Argument(help="The audit to compare with it.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("compare.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Two audited runs side by side: metrics, drift over time, findings, what each method would do.

    \b
    offdrift audit runs/tiny/arms/none && offdrift audit runs/tiny/arms/token_tis
    offdrift compare audits/tiny-none audits/tiny-token_tis
    """  # fmt: skip
    from offdrift.audit.compare import comparison_view, differences, write_comparison
    from offdrift.audit.conclude import read_audit

    a, b = read_audit(run_a), read_audit(run_b)
    names = _names(run_a, run_b)
    page = write_comparison(a, b, names, out)
    if as_json:
        typer.echo(json.dumps(differences(a, b), allow_nan=False))
        return
    console.print(comparison_view(a, b, names, width=console.width))
    console.print(f"\npage: {escape(str(page))}")


def _names(a: Path, b: Path) -> tuple[str, str]:
    """Short names that differ."""
    first, second = a.resolve(), b.resolve()
    if first.name != second.name:
        return first.name, second.name
    return f"{first.parent.name}/{first.name}", f"{second.parent.name}/{second.name}"
