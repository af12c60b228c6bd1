"""Metrics of a step that an adapter logs: about twelve that say most, all of them, or those that are named.

A tracker with 119 charts is not looked at. What is not logged is measured and judged all the same, and stands in
`Adapter.numbers`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from offdrift.errors import MethodError
from offdrift.stats.metrics import METRICS

MAIN: tuple[tuple[str, ...], ...] = (
    ("mismatch/k3",),
    ("staleness/k3",),
    ("full/k3",),
    ("mismatch/pearson", "full/pearson"),
    ("full/ess_frac", "mismatch/ess_frac"),
    ("full/abs_log_ratio_max", "mismatch/abs_log_ratio_max"),
    ("gate/drop_frac_token",),
    ("weight/mean",),
    ("objective/clip_frac_active",),
    ("version_lag/mean",),
    ("unscored_tokens",),
    ("findings_stop",),
    ("findings_act",),
)
"""Metrics that are logged unless others are asked for; of each row the first that a step has."""
BESIDE = ("unscored_tokens", "findings_stop", "findings_act", "findings_watch")
"""Numbers of an adapter that are not in the table of metrics."""
Choice = str | Sequence[str]


def parse_choice(metrics: Choice) -> str:
    """Return a choice as one text, which can be sent to other processes: "main", "all", or names with commas.

    Args:
        metrics: that text, or a list of names of docs/metrics.md, in which * stands for anything ("mismatch/*").

    Raises: `MethodError` naming what is no metric, and one that is near.

    Example:
        >>> parse_choice(["full/k3", "gate/*"]), parse_choice("all")
        ('full/k3,gate/*', 'all')
    """
    names = metrics.split(",") if isinstance(metrics, str) else list(metrics)
    names = [name.strip().removeprefix("offdrift/") for name in names if name.strip()]
    if not names:
        raise MethodError(f'metrics={metrics!r} names no metric; "main" logs about twelve, "all" everything')
    table = (*METRICS, *BESIDE)
    for name in names:
        if name in ("main", "all") and len(names) == 1:
            continue
        if not any(fnmatchcase(known_name, name) for known_name in table):
            near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MethodError(f'metrics: {name!r} is neither a metric of docs/metrics.md, "main" nor "all"{hint}')
    return ",".join(names)


def select(numbers: Mapping[str, float], choice: str) -> dict[str, float]:
    """Return the numbers that a choice logs, in the order in which they came.

    Args:
        choice: as `parse_choice` returns it.

    Example:
        >>> select({"full/k3": 0.1, "full/k1": 0.2, "optim/loss": 1.0}, "main")
        {'full/k3': 0.1}
    """
    if choice == "all":
        return dict(numbers)
    if choice == "main":
        names = {next((name for name in row if name in numbers), "") for row in MAIN}
        return {name: value for name, value in numbers.items() if name in names}
    patterns = choice.split(",")
    return {name: value for name, value in numbers.items() if any(fnmatchcase(name, p) for p in patterns)}
