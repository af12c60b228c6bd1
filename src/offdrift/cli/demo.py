"""`offdrift demo`: a small log of a run that went wrong, to audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offdrift.cli.app import AFTER, Screen, app


@app.command(rich_help_panel=AFTER)
def demo(
    screen: Screen,
    folder: Annotated[
        Path | None, typer.Argument(help="Where to write it; default drift-demo, or drift-demo-repaired.")
    ] = None,
    repaired: Annotated[
        bool, typer.Option("--repaired", help="The same run without the fault, to compare with.")
    ] = False,
) -> None:
    """Write a small log of a run that went wrong, for a first audit.

    16 updates of 24 responses, 250 KB, in a second; an earlier demo in the folder is replaced. One fault is planted
    (the first lines of `offdrift/audit/demo.py` tell which): find it with the command that is printed.

    \b
    offdrift demo
    offdrift audit drift-demo

    \b
    offdrift demo --repaired && offdrift audit drift-demo-repaired
    offdrift compare audits/drift-demo audits/drift-demo-repaired
    """
    from offdrift.audit.demo import write_demo

    folder = folder or Path("drift-demo-repaired" if repaired else "drift-demo")
    path = write_demo(folder, repaired=repaired)
    if screen.as_json:
        screen.json({"log": str(path)})
    what = "the same run without the fault" if repaired else "one fault is planted in it: the audit says which"
    screen.show(f"16 updates of 24 responses each; {what}")
    screen.wrote(log=path)
    screen.next(f"offdrift audit {folder}", "what drifted, why, and what to do")
