"""The HTML page of a run's audited arms: the run's verdict, a row for each arm, findings by arm, and charts.

The pages of the arms stand beside it, each in the folder of the arm's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from offdrift.audit.conclude import PAGE
from offdrift.show.charts import chart_data, styled
from offdrift.show.findings import WORDS, finding_matrix, footnote, in_order, severity
from offdrift.show.headline import count_words
from offdrift.show.html import render_document
from offdrift.show.json_access import at, text

if TYPE_CHECKING:
    from offdrift.audit.result import ArmsAudit


def render_arms(run: ArmsAudit, name: str) -> str:
    """The page as text, the same for the same audits of a run of that name."""
    charts = [chart for chart in styled(run.charts()) if chart.series]
    series = {s.name: s for chart in reversed(charts) for s in reversed(chart.series)}
    found = [
        (arm, finding)
        for arm, audit in run.arms.items()
        for finding in in_order(audit.data.get("findings"), text(at(audit.data, "source", "framework")))
    ]
    found.sort(key=lambda pair: severity(pair[1]))
    verdict = run.verdict
    worst = run.arms[run.worst].data
    context = {
        "title": name,
        "verdict": verdict.text,
        "level": verdict.level,
        "steps": verdict.steps,
        "judged_by": text(worst.get("judged_by")),
        "words": WORDS,
        "columns": run.header()[2:-2],
        "kl": run.kl,
        "arms": [
            {
                "name": arm,
                "page": f"{quote(arm, safe='', errors='replace')}/{PAGE}",
                "level": audit.verdict.level,
                "counts": count_words(audit.data)[:2],
                "cells": row[2:-2],
                "suggested": audit.suggestion,
            }
            for (arm, audit), row in zip(run.arms.items(), run.table(), strict=True)
        ],
        "matrix": finding_matrix(found),
        "footnote": footnote([finding for _, finding in found]),
        "charts": charts,
        "legend": [series[arm] for arm in run.arms if arm in series],
    }
    return render_document("arms.html.j2", context, data=lambda columns: chart_data(charts, columns))
