"""`RunJudge`: rows of a run that is followed become findings, each said once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offdrift.audit.conclude import run_context
from offdrift.audit.watch import METRICS, Row
from offdrift.judge import Watcher
from offdrift.judge.rules import Rules


@dataclass
class RunJudge:
    """A watcher for every source of a run."""

    run: Path
    rules: Rules
    framework: str
    """Whose configuration fixes are written in."""
    facts: Mapping[str, Any]
    """Further arguments of `run_context`: method, temperature, mixture_of_experts."""

    def __post_init__(self) -> None:
        self.watchers: dict[str, Watcher] = {}

    def judge(self, row: Row) -> list[dict[str, Any]]:
        """Judge one row; returns the findings that it set off for the first time, as `Finding.as_dict`."""
        if row.source not in self.watchers:
            arm = self.run / "arms" / row.source
            about = run_context(str(arm if arm.is_dir() else self.run), self.framework, **self.facts)
            about = replace(about, metrics_only=row.source == METRICS)
            self.watchers[row.source] = Watcher(context=about, rules=self.rules)
        watcher = self.watchers[row.source]
        watcher.context = replace(watcher.context, facets={"worker": row.workers})
        return [finding.as_dict() for finding in watcher.update(row.numbers)]
