"""The diagnosis of an arm, step by step, while it trains or again from what it stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from offdrift.judge import Context, Finding, Rules, Watcher
from offdrift.show.json_access import number

Row = Mapping[str, Any]


@dataclass
class LiveDiagnosis:
    """Diagnosis while an arm trains: metrics of each step in, new findings out, once each.

    Findings are a function of metrics and rules alone, so a resumed run rebuilds them from its stored rows, and a page
    can show those of other rules.
    """

    watcher: Watcher
    held_out: float | None = None
    """Held-out reward that was measured since the last row."""

    @staticmethod
    def of(metrics: Iterable[Row], evals: Iterable[Row], context: Context, rules: Rules | None = None) -> LiveDiagnosis:
        """The diagnosis after the rows that an arm has stored."""
        live = LiveDiagnosis(Watcher(context=context, rules=rules))
        for _ in live.replay(metrics, evals):
            pass
        return live

    def replay(self, metrics: Iterable[Row], evals: Iterable[Row]) -> Iterable[tuple[int, Finding]]:
        """Read stored rows in order; yields each finding with the update at which it fires for the first time."""
        evaluations = {row["update"]: row["reward"] for row in evals if "update" in row and "reward" in row}
        last = 0
        for row in metrics:
            last, self.held_out = row["update"], evaluations.get(row["update"] - 1)
            for finding in self.update(row):
                yield last, finding
        self.held_out = evaluations.get(last)

    def update(self, row: Row) -> list[Finding]:
        """The findings that fire for the first time at this step."""
        # Only finite numbers: null in a stored row was NaN, and both mean unknown.
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        measured = {} if self.held_out is None else {"eval/reward": self.held_out}
        self.held_out = None
        return self.watcher.update({"step": row["update"], **numbers, **measured})

    def summary(self) -> list[dict[str, Any]]:
        """All findings so far, in short."""
        keys = ("rule", "cause", "severity", "step", "steps")
        return [{key: getattr(finding, key) for key in keys} for finding in self.watcher.findings]


FACTS = ("mixture_of_experts", "method", "temperature", "filter_replayed", "cache_replayed")
"""What `run.json` stores of the context of an arm: facts that its metrics do not show."""


def facts_of(context: Context) -> dict[str, Any]:
    """Facts of a context, as `run.json` stores them."""
    return {name: getattr(context, name) for name in FACTS}


def stored_context(head: Row, arm: str) -> Context:
    """The context of an arm from `run.json`; what it lacks, as runs of earlier versions do, is unknown."""
    contexts = head.get("contexts")
    stored = contexts.get(arm) if isinstance(contexts, Mapping) else None
    names = {f.name for f in fields(Context)} & set(FACTS)
    facts = {name: stored[name] for name in names if name in stored} if isinstance(stored, Mapping) else {}
    return Context(framework="offdrift", **facts)


def findings_again(
    metrics: Iterable[Row], evals: Iterable[Row], context: Context, rules: Rules
) -> list[dict[str, Any]]:
    """The lines of `findings.jsonl` that other rules would have written."""
    rows = [{**row, "update": int(update)} for row in metrics if (update := number(row.get("update"))) is not None]
    scored = [{**row, "update": int(at)} for row in evals if (at := number(row.get("update"))) is not None]
    live = LiveDiagnosis(Watcher(context=context, rules=rules))
    return [{"update": update, **finding.as_dict()} for update, finding in live.replay(rows, scored)]
