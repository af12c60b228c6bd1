"""`Audit`, the result of one log, and `ArmsAudit`, that of a run of several policies, with their comparison."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from offdrift.audit.conclude import FILE_NAME, PAGE, read_audit, write_audit
from offdrift.audit.page import write_audit_page
from offdrift.errors import RecordError
from offdrift.judge import Finding
from offdrift.notebook import box, brief, chart, columns_of, frame, paragraph, table
from offdrift.records.atomic import write_json
from offdrift.show.charts import Chart, Series
from offdrift.show.findings import LEVELS, WORDS, in_order
from offdrift.show.headline import count_words, headlines, meaning_of
from offdrift.show.html import write_document
from offdrift.show.json_access import at, column, number, rows, text
from offdrift.show.numbers import percent, short
from offdrift.show.result import Result, Verdict
from offdrift.texts import as_json

ARMS_FILE, ARMS_PAGE = "arms.json", "arms.html"
"""What the audit of a run of several policies leaves beside a folder for each."""
COMPARED = (
    ("ESS", "mismatch/ess_frac", percent),
    ("ESS, full ratio", "full/ess_frac", percent),
    ("reward", "reward/mean", short),
    ("length", "response/length_mean", short),
    ("lag", "version_lag/mean", short),
)
"""Columns of the comparison behind the KL: title, metric, and how it is written."""


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """The audit of one log: `data` is the content of `audit.json`.

    Example:
        >>> audit = Audit({"verdict": {"level": "ok", "text": "No drift."}, "overall": {"full/k3": 0.001}})
        >>> audit.verdict.level, audit.metrics
        ('ok', {'full/k3': 0.001})
    """

    file: ClassVar[str] = FILE_NAME
    page: ClassVar[str] = PAGE

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> Audit:
        """An audit that `write` or the command stored. Raises: `RecordError` if there is none."""
        return Audit(read_audit(Path(folder)))

    @property
    def suggestion(self) -> str | None:
        """The smallest correction that the log asks for, a row of `METHODS`; None if none helps or is needed."""
        return text(at(self.data, "suggestion", "method")) or None

    def to_frame(self) -> Any:
        """The metrics over time as a frame of pandas or polars, a row for each step.

        Raises: `OffdriftError` if neither is installed.
        """
        return frame(columns_of({k: v for k, v in row.items() if number(v) is not None} for row in self._steps))

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Store `audit.json` and `report.html` in a folder; return the page. Raises: `RecordError`."""
        write_audit(self.data, Path(folder))
        return write_audit_page(self.data, Path(folder))

    @property
    def _steps(self) -> list[dict[str, Any]]:
        return rows(self.data.get("steps"))

    def __repr__(self) -> str:
        """Verdict, how much was read, and what was found."""
        return self._brief(" · ".join(count_words(self.data)))

    def _repr_html_(self) -> str:
        why = text(at(self.data, "suggestion", "why"))
        advice = [paragraph(f"{self.suggestion}: {why}", strong="Suggested:")] if self.suggestion else []
        return self._as_html(" · ".join(count_words(self.data)), headlines(self.data), *advice)


@dataclass(frozen=True, repr=False)
class ArmsAudit:
    """The audits of the policies of one run, compared; the worst verdict is the run's."""

    arms: Mapping[str, Audit]
    """By name, at least one."""
    file: ClassVar[str] = ARMS_FILE
    page: ClassVar[str] = ARMS_PAGE

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> ArmsAudit:
        """The audits that `write` or the command stored, of every arm. Raises: `RecordError` if there is none."""
        arms = {file.parent.name: Audit.read(file.parent) for file in sorted(Path(folder).glob(f"*/{FILE_NAME}"))}
        if not arms:
            raise RecordError(f"{folder} holds no audit of an arm; run `offdrift audit` on the run first")
        return ArmsAudit(arms)

    @property
    def worst(self) -> str:
        """The arm with the most urgent verdict, the first of several."""
        levels = [*LEVELS, "", "interrupted"]
        return min(self.arms, key=lambda name: levels.index(self.arms[name].verdict.level))

    @property
    def verdict(self) -> Verdict:
        """The most urgent verdict, and whose it is."""
        verdict = self.arms[self.worst].verdict
        alike = [name for name, audit in self.arms.items() if audit.verdict.level == verdict.level]
        others = f" ({len(alike)} of {len(self.arms)} arms)" if len(alike) > 1 else ""
        return Verdict(verdict.level, f"{self.worst}{others}: {verdict.text}", verdict.steps)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all arms, arm by arm; `arms[NAME].findings` are those of one."""
        return tuple(finding for audit in self.arms.values() for finding in audit.findings)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Every number over the whole log, by arm and name."""
        return {name: audit.metrics for name, audit in self.arms.items()}

    @cached_property
    def kl(self) -> str:
        """The best measure of the KL that all arms have; "" if they have none in common."""
        from offdrift.audit.compare import common_kl

        return common_kl(*(audit.data for audit in self.arms.values()))

    def to_frame(self) -> Any:
        """The arms as a frame of pandas or polars, a row for each: name, verdict, and every metric.

        Raises: `OffdriftError` if neither is installed.
        """
        return frame(columns_of({"arm": n, "verdict": a.verdict.level, **a.metrics} for n, a in self.arms.items()))

    def as_dict(self) -> dict[str, Any]:
        """The content of `arms.json`: the run's verdict, the comparison, and the audit of every arm."""
        verdict = self.verdict
        return {
            "format": 1,
            "kind": "arms",
            "verdict": {"level": verdict.level, "text": verdict.text, "steps": list(verdict.steps), "arm": self.worst},
            "comparison": {"kl": self.kl or None, "arms": self._comparison()},
            "arms": {name: dict(audit.data) for name, audit in self.arms.items()},
        }

    def to_json(self, indent: int | None = None) -> str:
        """Everything as JSON, the same as the command's --json."""
        return as_json(self.as_dict(), indent)

    def _comparison(self) -> dict[str, dict[str, Any]]:
        """By arm: verdict, compared metrics (None where unknown), causes, suggested method."""
        return {
            name: {
                "level": audit.verdict.level,
                "metrics": {metric: audit.metrics.get(metric) for _, metric, _ in self._columns},
                "rules": [finding.rule for finding in audit.findings],
                "suggested": audit.suggestion,
            }
            for name, audit in self.arms.items()
        }

    def header(self) -> list[str]:
        """Titles of the columns of `table`."""
        return ["arm", "verdict", *(title for title, _, _ in self._columns), "found", "suggested"]

    def table(self) -> list[list[str]]:
        """The comparison, a row of texts for each arm."""
        lines = []
        for name, audit in self.arms.items():
            numbers = [write(audit.metrics.get(metric)) for _, metric, write in self._columns]
            causes = "; ".join(
                dict.fromkeys(f.cause for f in in_order(audit.data.get("findings")) if f.level != "info")
            )
            sign, word, _ = WORDS[audit.verdict.level]
            lines.append([name, f"{sign} {word}", *numbers, causes or "–", audit.suggestion or "–"])
        return lines

    @property
    def _columns(self) -> list[tuple[str, str, Any]]:
        there = {metric for audit in self.arms.values() for metric in audit.metrics}
        kl = [("KL, nat", self.kl, short)] if self.kl else []
        return [*kl, *(row for row in COMPARED if row[1] in there)]

    def charts(self) -> list[Chart]:
        """The compared metrics over the steps, a line for each arm."""
        made = []
        for title, metric, write in self._columns:
            lines = [Series(n, column(a._steps, "step"), column(a._steps, metric)) for n, a in self.arms.items()]
            chart_of = Chart(
                title,
                "log scale" if metric == self.kl else "",
                lines,
                meaning=meaning_of(metric),
                log=metric == self.kl,
                share=write is percent,
            )
            made += [chart_of] if chart_of.series else []
        return made

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Store `arms.json`, `arms.html` and a folder for each arm; return the page. Raises: `RecordError`."""
        folder = Path(folder)
        for name, audit in self.arms.items():
            audit.write(folder / name)
        write_json(folder / ARMS_FILE, self.as_dict())
        return self.write_page(folder)

    def write_page(self, folder: str | os.PathLike[str]) -> Path:
        """Write `arms.html` alone, and return it."""
        from offdrift.audit.arms_page import ArmNumbers, render_arms

        cells = {arm: row[2:-2] for arm, row in zip(self.arms, self.table(), strict=True)}
        numbers = ArmNumbers(self.header()[2:-2], cells, self.kl, self.charts())
        audits = {arm: audit.data for arm, audit in self.arms.items()}
        page = render_arms(Path(folder).absolute().name, self.verdict, audits, numbers)
        return write_document(page, Path(folder) / ARMS_PAGE)

    def __repr__(self) -> str:
        """Verdict, and the arms by their own."""
        arms = ", ".join(f"{name} {WORDS[audit.verdict.level][1]}" for name, audit in self.arms.items())
        return brief(self.verdict.titled("ArmsAudit"), f"  {len(self.arms)} arms: {arms}")

    def _repr_html_(self) -> str:
        verdict = self.verdict
        sign, word, _ = WORDS[verdict.level]
        lines = [
            [*row, chart(column(audit._steps, self.kl), name=f"KL of {name} by step")]
            for (name, audit), row in zip(self.arms.items(), self.table(), strict=True)
        ]
        head = [*self.header(), "KL by step"]
        return box(paragraph(verdict.text, strong=f"{sign} {word}", level=verdict.level), table(lines, head))
