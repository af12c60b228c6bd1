"""`LiveMetrics`: the last numbers and all findings of a run that is watched, as Prometheus takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from offdrift.alarms.exposition import Family, exposition, metric_name
from offdrift.judge.findings import URGENCY
from offdrift.show.json_access import text
from offdrift.stats.metrics import METRICS

OTHER = "offdrift_other"
"""Family of the numbers whose names are not in the table of metrics; each has its name as a label."""
COLUMNS = ("step", "update")
"""What a row has beside its metrics; the step is a family of its own."""


class LiveMetrics:
    """Numbers and findings to serve; one thread adds, others read.

    A metric of the table (docs/metrics.md) is a gauge of its own: `full/k3` is `offdrift_full_k3`. Labels are the run
    and the source: an arm, "log" or "metrics".
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.time) -> None:
        self.run, self.clock = run, clock
        self._lock = threading.Lock()
        self._rows: dict[str, Mapping[str, float | int]] = {}
        self._at: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._findings: list[tuple[str, Mapping[str, Any]]] = []

    def show(self, source: str, numbers: Mapping[str, float | int], findings: Sequence[Mapping[str, Any]]) -> None:
        """Take a new row of a source, and what it set off."""
        with self._lock:
            self._rows[source], self._at[source] = dict(numbers), self.clock()
            self._steps[source] = self._steps.get(source, 0) + 1
            self._findings += [(source, finding) for finding in findings]

    def text(self) -> str:
        """Return everything in Prometheus' text format."""
        info = Family("offdrift_watch_info", "gauge", "1 while the watch runs, with its version.")
        info.samples.append(({"run": self.run, "version": version("offdrift")}, 1))
        step = Family("offdrift_step", "gauge", "Number of the last step that was judged.")
        at = Family("offdrift_step_timestamp_seconds", "gauge", "When the last step was judged, in Unix time.")
        count = Family("offdrift_steps_total", "counter", "Steps that were judged.")
        with self._lock:
            for source, row in self._rows.items():
                labels = {"run": self.run, "source": source}
                step.samples.append((labels, row.get("step", 0)))
                at.samples.append((labels, self._at[source]))
                count.samples.append((labels, self._steps[source]))
            return exposition([info, step, at, count, *self._of_findings(), *self._of_metrics()])

    def _of_findings(self) -> list[Family]:
        counts = Family("offdrift_findings", "gauge", "Findings so far, by severity.")
        each = Family("offdrift_finding_step", "gauge", "Step at which a finding was first made, one series for each.")
        for source in self._rows:
            severities = [text(f.get("severity")) for owner, f in self._findings if owner == source]
            for severity in URGENCY:
                labels = {"run": self.run, "source": source, "severity": severity}
                counts.samples.append((labels, severities.count(severity)))
        for source, finding in self._findings:
            names = {name: text(finding.get(name)) for name in ("severity", "rule", "cause")}
            labels = {"run": self.run, "source": source, **names, "what": text(finding.get("symptom"))}
            each.samples.append((labels, finding.get("step") or 0))
        return [counts, each]

    def _of_metrics(self) -> list[Family]:
        families = {
            name: Family(metric_name(name), "gauge", f"{row.formula} ({row.unit}).") for name, row in METRICS.items()
        }
        other = Family(OTHER, "gauge", "A number that the run logs under a name of its own.")
        for source, row in self._rows.items():
            labels = {"run": self.run, "source": source}
            for name, value in row.items():
                if name in families:
                    families[name].samples.append((labels, value))
                elif name not in COLUMNS:
                    other.samples.append(({**labels, "name": name}, value))
        return [*families.values(), other]
