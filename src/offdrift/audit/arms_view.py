"""The audits of a run's arms in the terminal: the run's verdict, a row for each arm, and what to do about the worst."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offdrift.audit.result import ArmsAudit
from offdrift.show.findings import WORDS, in_order, safe, shown_view, verdict_view
from offdrift.show.headline import count_words
from offdrift.show.json_access import at, text


def arms_view(run: ArmsAudit, width: int = 100, *, folder: str = "") -> RenderableType:
    """Build the terminal report of an audit of several arms, which stands in `folder`."""
    verdict = run.verdict
    stored = {"level": verdict.level, "text": verdict.text, "steps": list(verdict.steps)}
    numbers = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    causes_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for i, title in enumerate(run.header()[:-2]):
        numbers.add_column(title, justify="left" if i < 2 else "right", overflow="fold")
    for (arm, audit), (_, level, *cells, causes, suggested) in zip(run.arms.items(), run.table(), strict=True):
        name = Text(safe(arm), style="bold")
        numbers.add_row(name, Text(level, style=WORDS[audit.verdict.level][2]), *(Text(safe(x)) for x in cells))
        advice = f"; suggested: {suggested}" if audit.suggestion else ""
        causes_table.add_row(name, Text(safe(f"{causes}{advice}")))
    worst = run.arms[run.worst].data
    about = Text(f"KL: {run.kl}\n" if run.kl else "", style="dim")
    parts: list[RenderableType] = [Text(f"{len(run.arms)} arms", style="dim"), verdict_view(stored, width=width)]
    parts += [numbers, about, causes_table, Text("")]
    parts.append(Text(f"{safe(run.worst)}: {' · '.join(count_words(worst))}", style="dim"))
    for finding in in_order(worst.get("findings"), text(at(worst, "source", "framework")))[:1]:
        parts.append(Group(shown_view(finding, width=width, folder=f"{folder}/{run.worst}" if folder else ""), ""))
    return Group(*parts)
