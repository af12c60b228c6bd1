"""The laws that a method was held to, for a terminal: the meaning of each, and the smallest batch that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offdrift.show.json_access import mapping, text, visible

TOKENS = 24
"""Tokens of a failing case that are shown."""
MARKS = {True: ("holds", "green"), False: ("fails", "bold red"), None: ("not asked", "dim")}


def law_table(name: str, laws: Mapping[str, Any]) -> RenderableType:
    """All laws of a method, then what is wrong where one fails.

    Args:
        laws: as `Law.as_dict` gives each, by its name.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    failed: list[RenderableType] = []
    for law, result in laws.items():
        word, style = MARKS[result["holds"]]
        why = f" ({result['exempt']})" if result["exempt"] else ""
        grid.add_row(Text(law), Text(word, style=style), Text(result["meaning"] + why, style="dim" if why else ""))
        if result["holds"] is False:
            failed += [Text(), Text.assemble((f"{law}: ", "bold red"), result["meaning"]), *_case(result["failure"])]
    count = sum(result["holds"] is False for result in laws.values())
    verdict = f"{count} of {len(laws)} laws fail" if count else f"all {len(laws)} laws hold, or are not asked"
    title = Text.assemble((visible(name), "bold"), "  ", (verdict, "bold red" if count else "green"))
    return Group(title, Text(), Padding(grid, (0, 0, 0, 2)), *failed)


def _case(failure: Mapping[str, Any]) -> list[RenderableType]:
    """Words for what happened, and the tokens on which it did."""
    words = Padding(Text(visible(text(failure.get("words")))), (0, 0, 0, 2))
    batch = mapping(failure.get("batch"))
    if not batch:
        return [words]
    table = Table(box=None, padding=(0, 2, 0, 0))
    names = [name for name in batch if name != "prompts"]
    for column in ("response", "token", *names):
        table.add_column(column, justify="right", header_style="dim")
    lines = [
        (str(i), str(t), *(f"{batch[name][i][t]:.6g}" for name in names))
        for i, row in enumerate(batch[names[0]])
        for t in range(len(row))
    ]
    for line in lines[:TOKENS]:
        table.add_row(*line)
    more = [Text(f"{len(lines) - TOKENS} more tokens with --json", style="dim")] if len(lines) > TOKENS else []
    return [
        words,
        Padding(Text("the smallest batch found", style="dim"), (0, 0, 0, 2)),
        Padding(table, (0, 0, 0, 2)),
        *more,
    ]
