"""The terminal while a run is watched: one row per source, findings above it as they appear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offdrift.show.findings import SEVERITY_STYLE, finding_view
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
"""What is shown of each source: the first of these metrics that its rows hold."""


class LiveWatch:
    """Shows rows (unless `table` is False) and findings; `close` leaves the last state on the screen."""

    def __init__(self, console: Console, title: str, framework: str, *, table: bool = True) -> None:
        self.console, self.title, self.framework, self.table = console, title, framework, table
        self.rows: dict[str, Mapping[str, float | int]] = {}
        self.worst: dict[str, str] = {}
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
            before = self.worst.get(source, severities[0])
            self.worst[source] = max(before, finding["severity"], key=severities.index)
            head = Text(f"{source}, step {finding.get('step')}: ", style="bold")
            self.console.print(head, finding_view(finding, self.framework, self.console.width))
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
            return Text(f"waiting for {self.title} to be written", style="dim")
        shown = [
            (title, names) for title, names in COLUMNS if any(n in row for n in names for row in self.rows.values())
        ]
        table = Table(box=None, pad_edge=False, title=None)
        table.add_column("")
        table.add_column("step", justify="right")
        for title, _ in shown:
            table.add_column(title, justify="right")
        table.add_column("")
        for source, row in self.rows.items():
            numbers = [short(_first(row, names)) for _, names in shown]
            table.add_row(Text(source), f"{row.get('step', 0):.0f}", *numbers, self._status(source))
        return table

    def _status(self, source: str) -> Text:
        severity, count = self.worst.get(source), self.fired.get(source, 0)
        if severity is None:
            return Text("nothing found", style="green")
        said = f"{severity}: {count} finding{'s' if count > 1 else ''}"
        return Text(said, style=SEVERITY_STYLE[severity])


def _first(row: Mapping[str, float | int], names: Sequence[str]) -> float | int | None:
    return next((row[n] for n in names if n in row), None)
