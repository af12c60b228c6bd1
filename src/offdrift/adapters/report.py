"""`StepReport`: the numbers of a step become findings in a log, and metrics for a tracker."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from offdrift.adapters.selection import select
from offdrift.judge import Finding, Watcher

PREFIX = "offdrift/"
LOUD = ("stop", "act")
"""Severities of findings that are logged as warnings; the others as information."""


class Reported:
    """Findings and numbers of whatever reports its steps."""

    _report: StepReport

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, in the order in which to repair them."""
        return self._report.watcher.findings

    @property
    def numbers(self) -> dict[str, float]:
        """Every metric of the last step, by its name in docs/metrics.md, logged or not."""
        return self._report.numbers


class StepReport:
    """Judges each step on those before it.

    Args:
        watcher: applies the rules.
        log: where findings are said, each once.
        choice: metrics to log, of `parse_choice`.
    """

    def __init__(self, watcher: Watcher, log: logging.Logger, choice: str) -> None:
        self.watcher, self.log, self.choice = watcher, log, choice
        self.numbers: dict[str, float] = {}
        """Every number of the last step, by its name in docs/metrics.md."""
        self.fired: list[Finding] = []
        """Findings that the last step set off for the first time."""

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judge a step; returns what is chosen of it, by name behind `PREFIX`, with counts of findings so far."""
        self.fired = self.watcher.update({"step": step, **metrics})
        for finding in self.fired:
            snippet = next(iter(finding.snippets.values()), "")
            values = (e for e in finding.evidence if e.value is not None)
            evidence = ", ".join(f"{e.what or e.metric} = {e.value:.3g}" for e in values)
            self.log.log(
                logging.WARNING if finding.severity in LOUD else logging.INFO,
                "%s: %s (%s). %s\n%s",
                *(finding.severity, finding.symptom, evidence, finding.fix, snippet),
            )
        severities = [finding.severity for finding in self.watcher.findings]
        counts = {f"findings_{s}": severities.count(s) for s in ("stop", "act", "watch")}
        self.numbers = {name: float(x) for name, x in {**metrics, **counts}.items()}
        return {f"{PREFIX}{name}": x for name, x in select(self.numbers, self.choice).items()}
