"""The page of a run that is watched: written again as the run goes on, and loaded again by itself.

`offdrift.show.html` says why nothing of a log can run on it. Findings keep their places, so that a link in an alarm
leads to its finding for as long as the page is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offdrift.audit.watch_view import COLUMNS
from offdrift.judge.findings import URGENCY
from offdrift.show.anchors import Anchors
from offdrift.show.charts import MAX_POINTS, Chart, Series, chart_data, extreme_rows, styled
from offdrift.show.findings import WORDS, shown
from offdrift.show.html import render_document, write_document
from offdrift.show.json_access import number, text
from offdrift.show.numbers import short

RENEW_S = 10.0
"""Seconds after which an open page loads itself again."""
WRITE_S = 5.0
"""Least seconds between two writings, unless there is a new finding."""
IDLE_S = 30.0
"""Seconds after which a page is written although nothing is new: it tells a watch that waits from one that is gone."""
TITLES = {
    "KL": ("KL per token", "nat, log scale"),
    "KL max": ("Largest KL of a token", "nat, log scale"),
    "chi2": ("χ² of token weights", "log scale"),
    "ESS": ("Effective sample size", "of the batch, raw ratios"),
    "reward": ("Reward", "mean"),
    "length": ("Response length", "mean"),
    "grad norm": ("Gradient norm", "before clipping"),
}
"""Titles and units of the charts, by the column of the terminal's table."""


class WatchPage:
    """Writes the page of a run that is watched.

    Args:
        file: where; replaced whole each time.
        run: what is watched.
        framework: whose snippet stands first.
        address: what stands before the place of a finding in a link; absent, the file's own address.
        clock: seconds that pass.

    A page that cannot be written is said once, by `problem`, and tried again.
    """

    def __init__(
        self,
        file: Path,
        run: str,
        framework: str,
        *,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file, self.run, self.framework, self.clock = file, run, framework, clock
        self.address = address or file.absolute().as_uri()
        self.problem = ""
        self.rows: dict[str, Mapping[str, float | int]] = {}
        self.findings: list[tuple[str, Mapping[str, Any], str]] = []
        """Source, finding, and the name of its place, in the order in which they were made."""
        self._series: dict[tuple[str, str], tuple[list[float | int], list[float | int]]] = {}
        self._places = Anchors()
        self._began = datetime.now(UTC)
        self._written = -IDLE_S
        self._stale = self._urgent = True

    def show(self, source: str, numbers: Mapping[str, float | int], findings: Sequence[Mapping[str, Any]]) -> None:
        """Take a new row of a source, and what it set off."""
        self.rows[source] = numbers
        for finding in findings:
            place = self._places("finding", f"{source} {text(finding.get('rule'))}")
            self.findings.append((source, finding, place))
        for title, names in COLUMNS:
            value = next((x for name in names if (x := number(numbers.get(name))) is not None), None)
            if value is not None:
                steps, values = self._series.setdefault((title, source), ([], []))
                steps.append(numbers.get("step", len(steps)))
                values.append(value)
                if (rows := extreme_rows(values, 2 * MAX_POINTS)) is not None:
                    rows = extreme_rows(values, MAX_POINTS) or rows
                    self._series[title, source] = [steps[i] for i in rows], [values[i] for i in rows]
        self._stale = True
        self._urgent = self._urgent or bool(findings)

    def link(self, source: str, finding: Mapping[str, Any]) -> str:
        """Return the address of a finding on the page."""
        places = (place for owner, one, place in self.findings if owner == source and one is finding)
        return f"{self.address}#{next(places, '')}"

    def tick(self) -> None:
        """Write the page if it is time to."""
        passed = self.clock() - self._written
        if self._urgent or (self._stale and passed >= WRITE_S) or passed >= IDLE_S:
            self._write(ended=False)

    def close(self) -> None:
        """Write the page for the last time: it renews itself no more."""
        self._write(ended=True)

    def _write(self, *, ended: bool) -> None:
        self._written, self._stale, self._urgent = self.clock(), False, False
        try:
            write_document(self.render(ended=ended), self.file)
        except Exception as e:  # the watch goes on without its page
            self.problem = self.problem or f"--page: {e}"

    def render(self, *, ended: bool) -> str:
        """Return the page as text.

        Args:
            ended: whether the watch is over, so that there is nothing to load again.
        """
        now = datetime.now(UTC)
        charts = []
        for column, (title, unit) in TITLES.items():
            lines = [Series(source, *points) for (name, source), points in self._series.items() if name == column]
            charts.append(Chart(title, unit, lines, column.replace(" ", "-").lower(), log="log scale" in unit))
        charts = [chart for chart in styled(charts) if chart.series]
        columns = [(title, names) for title, names in COLUMNS if any(n in r for n in names for r in self.rows.values())]
        table = []
        for source, row in self.rows.items():
            cells = [short(next((number(row[n]) for n in names if n in row), None)) for _, names in columns]
            table.append((source, f"{row.get('step', 0):.0f}", cells))
        several = len(self.rows) > 1
        views = []
        for source, finding, place in self.findings:
            view = shown(finding, self.framework, place)
            views.append(replace(view, cause=f"{view.cause} · {source}") if several else view)
        views.sort(key=lambda view: URGENCY.index(view.level))  # type: ignore[arg-type]
        context = {
            "run": self.run,
            "ended": ended,
            "renew": 0 if ended else RENEW_S,
            "written": now.timestamp(),
            "when": f"{now:%Y-%m-%d %H:%M:%S} UTC",
            "began": f"{self._began:%Y-%m-%d %H:%M:%S} UTC",
            "findings": views,
            "table": table,
            "titles": [title for title, _ in columns],
            "charts": charts,
            "legend": {s.name: s for chart in charts for s in chart.series}.values(),
            "words": WORDS,
        }
        return render_document("watch.html.j2", context, data=lambda columns: chart_data(charts, columns))
