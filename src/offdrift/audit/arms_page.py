"""The HTML page of a run's audited arms: the run's verdict, a row for each arm, findings by arm, and charts.

The pages of the arms stand beside it, each in the folder of the arm's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from offdrift.audit.conclude import PAGE
from offdrift.show.charts import Chart, chart_data, styled
from offdrift.show.findings import WORDS, finding_matrix, footnote, in_order, severity, verdict_of
from offdrift.show.headline import count_words
from offdrift.show.html import render_document
from offdrift.show.json_access import Fields, at, text
from offdrift.show.result import Verdict


class ArmNumbers(NamedTuple):
    """The compared numbers of all arms."""

    columns: Sequence[str]
    cells: Mapping[str, Sequence[str]]
    """By arm, a text for each column."""
    kl: str
    """Metric behind the column of the KL; "" without one."""
    charts: Sequence[Chart]
    """A series for each arm, by its name."""


def render_arms(name: str, verdict: Verdict, audits: Mapping[str, Fields], numbers: ArmNumbers) -> str:
    """The page as text, the same for the same audits.

    Args:
        name: of the run.
        verdict: of the run.
        audits: contents of `audit.json`, by arm.
    """
    charts = [chart for chart in styled(numbers.charts) if chart.series]
    series = {s.name: s for chart in reversed(charts) for s in reversed(chart.series)}
    findings = [
        (arm, finding)
        for arm, audit in audits.items()
        for finding in in_order(audit.get("findings"), text(at(audit, "source", "framework")))
    ]
    findings.sort(key=lambda pair: severity(pair[1]))
    context = {
        "title": name,
        "verdict": verdict.text,
        "level": verdict.level,
        "steps": verdict.steps,
        "judged_by": next((text(audit.get("judged_by")) for audit in audits.values()), ""),
        "words": WORDS,
        "columns": numbers.columns,
        "kl": numbers.kl,
        "arms": [
            {
                "name": arm,
                "page": f"{quote(arm, safe='', errors='replace')}/{PAGE}",
                "level": verdict_of(audit.get("verdict"))[0],
                "counts": count_words(audit)[:2],
                "cells": numbers.cells[arm],
                "suggested": text(at(audit, "suggestion", "method")),
            }
            for arm, audit in audits.items()
        ],
        "matrix": finding_matrix(findings),
        "footnote": footnote([finding for _, finding in findings]),
        "charts": charts,
        "legend": [series[arm] for arm in audits if arm in series],
    }
    return render_document("arms.html.j2", context, data=lambda columns: chart_data(charts, columns))
