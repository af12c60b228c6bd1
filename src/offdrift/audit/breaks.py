"""`since_breaks`: the numbers of a log from the step on at which something about it changed at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from offdrift.audit.tally import StepTally, Timeline
from offdrift.judge.scatter import Break, break_of

GAPS = tuple(f"{on}/abs_log_ratio_mean" for on in ("mismatch", "full", "staleness"))
"""Metrics whose jump by a factor of `TIMES` parts a log in two."""
TIMES = 2.0
SIGNED = ("advantage/reward_corr",)
"""Metrics whose change of sign does."""


def since_breaks(
    timeline: Timeline, rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Parts of a log that begin where one metric changed at one step and stayed, each with its numbers as a whole.

    What is wrong from a step on is diluted in the numbers of the whole log, and plain in those of its part.

    Args:
        timeline: the points of the log.
        rows: `timeline.rows()`.
        limits: thresholds by name: `window_level` steps at least stand on each side, and the change scores
            `break_score` (`offdrift.judge.scatter.break_of`).

    Returns: rows with "step", "metric", "before", "after", "steps" and "overall", the metrics of the part; for each
        step one.
    """
    found: dict[int, dict[str, Any]] = {}
    for metric in (*GAPS, *SIGNED):
        places = [i for i, row in enumerate(rows) if math.isfinite(row.get(metric, math.nan))]
        values = [rows[i][metric] for i in places]
        if metric in GAPS:
            values = [math.log(max(x, 1e-12)) for x in values]
        broken = break_of(values, int(limits["window_level"]))
        if broken is None or not _changed(broken, metric, limits["break_score"]):
            continue
        first = places[broken.at]
        keys = sorted(timeline.points)[first:]
        part = functools.reduce(StepTally.merge, (timeline.points[key] for key in keys))
        before, after = (math.exp(x) if metric in GAPS else x for x in (broken.before, broken.after))
        row = {"step": rows[first]["step"], "metric": metric, "before": before, "after": after, "steps": len(keys)}
        found.setdefault(first, row | {"overall": part.metrics()})
    return list(found.values())


def _changed(broken: Break, metric: str, score: float) -> bool:
    """Return whether a break is larger than chance and a trifle."""
    if metric in SIGNED:
        return abs(broken.score) > score and broken.before * broken.after < 0
    return broken.score > score and broken.after - broken.before > math.log(TIMES)
