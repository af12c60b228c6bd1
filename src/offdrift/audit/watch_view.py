"""A run that is watched, in the terminal: each finding as it is made, and the last numbers of every source.

Where the terminal is narrow, numbers leave the table and the words of the finding stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offdrift.show.findings import SEVERITY_STYLE, WORDS, finding_view, safe, shown
from offdrift.show.json_access import Fields, number
from offdrift.show.numbers import short

COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("KL", ("divergence/kl_rollout_current_mean", "divergence/kl_rollout_old_mean", "mismatch/k3", "full/k3")),
    ("KL max", ("divergence/kl_rollout_current_max", "divergence/kl_rollout_old_max")),
    ("chi2", ("mismatch/chi2_token", "full/chi2_token")),
    ("ESS", ("mismatch/ess_frac", "full/ess_frac")),
    ("reward", ("reward/mean",)),
    ("length", ("response/length_mean",)),
    ("grad norm", ("optim/grad_norm",)),
)  # fmt: skip
"""Columns of the table: each shows the first of these metrics that a source's rows hold. The last leaves first."""
GAP = 2
"""Cells between two columns."""


class LiveWatch:
    """Shows rows (unless `table` is False) and findings; `close` leaves the last state on the screen."""

    def __init__(self, console: Console, title: str, framework: str, *, table: bool = True) -> None:
        self.console, self.title, self.framework, self.table = console, title, framework, table
        self.rows: dict[str, Mapping[str, float | int]] = {}
        self.worst: dict[str, Fields] = {}
        self.fired: dict[str, int] = {}
        # Without a terminal a redrawn table would be printed again and again.
        redrawn = table and console.is_terminal
        self.live = Live(self._view(), console=console, auto_refresh=False) if redrawn else None
        if self.live is not None:
            self.live.start()

    def show(self, source: str, numbers: Mapping[str, float | int], findings: Sequence[Mapping[str, Any]]) -> None:
        """A new row of a source, and what it set off."""
        self.rows[source] = numbers
        for finding in findings:
            self.fired[source] = self.fired.get(source, 0) + 1
            severities = list(SEVERITY_STYLE)
            before = self.worst.get(source)
            if before is None or severities.index(finding["severity"]) > severities.index(before["severity"]):
                self.worst[source] = finding
            self.console.print(Text(f"{safe(source)}, step {finding.get('step')}", style="bold"))
            self.console.print(finding_view(finding, self.framework, self.console.width), crop=False)
        if self.live is not None:
            self.live.update(self._view(), refresh=True)

    def close(self) -> None:
        """End the live display; the table stays."""
        if self.live is not None:
            self.live.update(self._view(), refresh=True)
            self.live.stop()
        elif self.table:
            self.console.print(self._view())

    def _view(self) -> Table | Text:
        if not self.rows:
            return Text(f"waiting for {safe(self.title)} to be written", style="dim")
        status = {source: self._status(source) for source in self.rows}
        columns = [(title, self._cells(names)) for title, names in COLUMNS]
        columns = [(title, cells) for title, cells in columns if any(cells)]
        steps = [f"{row.get('step', 0):.0f}" for row in self.rows.values()]
        names = [safe(source) for source in self.rows]
        taken = [max(map(cell_len, cells)) for cells in (names, ["step", *steps], map(str, status.values()))]
        room = self.console.width - sum(taken) - GAP * (len(taken) - 1)
        visible = []
        for title, cells in columns:
            room -= GAP + max(map(cell_len, [title, *cells]))
            if room < 0:
                break
            visible.append((title, cells))
        table = Table(box=None, pad_edge=False, title=None)
        table.add_column("", overflow="fold")
        table.add_column("step", justify="right", no_wrap=True)
        for title, _ in visible:
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for i, source in enumerate(self.rows):
            table.add_row(Text(names[i]), steps[i], *(cells[i] for _, cells in visible), status[source])
        return table

    def _cells(self, names: Sequence[str]) -> list[str]:
        """The first of these metrics of every source; "" throughout where no source has any."""
        if not any(name in row for name in names for row in self.rows.values()):
            return [""] * len(self.rows)
        return [short(next((number(row[name]) for name in names if name in row), None)) for row in self.rows.values()]

    def _status(self, source: str) -> Text:
        """The worst finding of a source in words, the first of equal ones, and how many more there are."""
        worst, more = self.worst.get(source), self.fired.get(source, 0) - 1
        if worst is None:
            return Text("nothing found", style="green")
        sign, word, style = WORDS[worst["severity"]]
        others = f", {more} more" if more else ""
        return Text(f"{sign} {word}: {safe(shown(worst).cause)}{others}", style=style)
