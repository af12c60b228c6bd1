"""Diagnosis while an arm trains: each step's metrics in, new findings out, once each.

Findings are a function of the metrics alone, so a resumed run needs no state of its own: the rows
that are left after cutting back are told again, in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offdrift.judge import Context, Finding, Watcher
from offdrift.train.run_folder import ArmFolder


@dataclass(frozen=True)
class Live:
    """The diagnosis of one arm."""

    watcher: Watcher

    @staticmethod
    def of(files: ArmFolder, context: Context) -> Live:
        """The diagnosis as it stands after the rows that the arm has stored."""
        live = Live(Watcher(context=context))
        for row in files.rows("metrics"):
            live.update(row)
        return live

    def update(self, row: Mapping[str, Any]) -> list[Finding]:
        """What fires for the first time at this step."""
        return self.watcher.update({"step": row["update"], **_numbers(row)})

    def summary(self) -> list[dict[str, Any]]:
        """All findings so far, in short."""
        return [
            {"rule": f.rule, "cause": f.cause, "severity": f.severity, "step": f.step, "steps": f.steps}
            for f in self.watcher.findings
        ]  # fmt: skip


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Only what is a number: null in a stored row was NaN, and both mean unknown."""
    return {
        k: float(v)
        for k, v in row.items()
        if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
    }
