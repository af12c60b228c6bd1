"""What a sweep's runs say: means over seeds with intervals, differences to the baseline, and how to read them.

Everything is read from the run folders, at any time; a run that is not finished is left out and counted.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from offdrift.judge.collapse import RECOVERY, collapse
from offdrift.show.json_access import mapping, number
from offdrift.show.numbers import short
from offdrift.stats import Comparison, Mean, compare_all, over_seeds
from offdrift.train.sweep import HELD_OUT, Cell, Compare, Grid, Setting, nodes_of, stored_json

SMOOTHED = 5
"""Updates in the moving average of the reward in which a collapse is looked for."""
FORMAT = 1


def number_of(cell: Cell, compare: Compare) -> float | None:
    """The number of a run that is compared; None if it did not record it."""
    at = compare.at or cell.recipe.updates
    points = {update: value for update, value in curve(cell, compare.metric) if update <= at}
    if at not in points or len(points) < compare.smooth:
        return None
    return math.fsum(list(points.values())[-compare.smooth :]) / compare.smooth


def curve(cell: Cell, metric: str) -> list[tuple[int, float]]:
    """Updates of a run and a metric there, in order; what is missing or not finite is left out."""
    name, key = ("eval", "reward") if metric == HELD_OUT else ("metrics", metric)
    points = [(number(row.get("update")), number(row.get(key))) for row in cell.files.rows(name)]
    return sorted({int(at): value for at, value in points if at is not None and value is not None}.items())


def collapsed(cell: Cell, compare: Compare) -> bool:
    """Whether the run's smoothed reward fell by 30 % and stayed there (`offdrift.judge.collapse`)."""
    rewards = [value for _, value in curve(cell, "reward/mean")]
    smooth = [
        math.fsum(part) / len(part) for i in range(len(rewards)) if (part := rewards[max(0, i + 1 - SMOOTHED) : i + 1])
    ]
    norms = [value for _, value in curve(cell, "optim/grad_norm")]
    return collapse(smooth, norms, recovery=patience(cell, compare)).step is not None


def patience(cell: Cell, compare: Compare) -> int:
    """Updates for which a reward must stay low to count as collapsed."""
    return compare.collapse_after or min(RECOVERY, max(1, cell.recipe.updates // 4))


def reached(cell: Cell) -> int:
    """The last update that a run has recorded; 0 before the first."""
    return max((int(number(row.get("update")) or 0) for row in cell.files.rows("metrics")), default=0)


def results(grid: Grid) -> dict[str, Any]:
    """What the runs that are finished say: the content of `sweep.json`.

    Means and intervals are over seeds; differences are paired by seed, and decided together (`compare_all`).
    """
    sweep, compare, settings = grid.sweep, grid.sweep.compare, grid.settings
    runs, numbers = [], {setting: {} for setting in settings}
    heads = {}
    for cell in grid.cells:
        status = cell.status
        value = number_of(cell, compare) if status == "finished" else None
        if value is not None:
            numbers[cell.setting][cell.seed] = value
        head = heads[cell.folder] = stored_json(cell.folder / "run.json")
        runs.append(
            {
                **_row(cell.setting),
                "seed": cell.seed,
                "folder": str(cell.folder.relative_to(grid.folder)),
                "status": status,
                "updates": cell.recipe.updates if status == "finished" else reached(cell),
                "value": value,
                "collapsed": collapsed(cell, compare) if status == "finished" else None,
                "seconds": number(head.get("seconds")),
                "nodes": list(dict.fromkeys(str(node.get("name")) for node in nodes_of(cell))),
                "error": cell.error or None,
            }
        )
    baselines = {s: b for s in settings if (b := grid.baseline_of(s)) is not None}
    alpha = 1 - compare.confidence
    pairs = [(numbers[s], numbers[b]) for s, b in baselines.items()]
    decided = dict(zip(baselines, compare_all(pairs, larger=compare.direction, alpha=alpha), strict=True))
    table = []
    for setting in settings:
        own = [run for run in runs if all(run[key] == value for key, value in _row(setting).items())]
        row = {
            **_row(setting),
            "name": setting.name,
            **_mean(over_seeds(list(numbers[setting].values()), confidence=compare.confidence)),
            "runs": len(own),
            **{status: sum(run["status"] == status for run in own) for status in ("finished", "failed")},
            "collapsed": sum(bool(run["collapsed"]) for run in own),
        }
        table.append(row | _compared(decided.get(setting), baselines.get(setting)))
    versions = {json.dumps(of, sort_keys=True) for head in heads.values() if (of := mapping(head.get("versions")))}
    return {
        "kind": "sweep",
        "format": FORMAT,
        "name": sweep.name,
        "file": str(grid.source),
        "source": os.path.relpath(grid.source, grid.folder),
        "changes": list(grid.changes),
        "sweep": sweep.model_dump(mode="json", by_alias=True),
        "metric": compare.metric,
        "larger_is": compare.direction,
        "at": compare.at,
        "confidence": compare.confidence,
        "comparisons": len(baselines),
        "collapse_after": sorted({patience(cell, compare) for cell in grid.cells}),
        "seeds": list(sweep.seeds),
        "versions": [json.loads(text) for text in sorted(versions)],
        "settings": table,
        "runs": runs,
    }


def _row(setting: Setting) -> dict[str, Any]:
    return {"arm": setting.arm, "values": dict(setting.values)}


def _mean(mean: Mean) -> dict[str, Any]:
    return {"mean": mean.mean, "low": mean.low, "high": mean.high, "n": mean.n}


def _compared(comparison: Comparison | None, baseline: Setting | None) -> dict[str, Any]:
    if comparison is None or baseline is None:
        return {"baseline": None, "difference": None, "verdict": None}
    difference = asdict(comparison.difference)
    return {
        "baseline": baseline.name,
        "difference": difference | {"p_holm": comparison.p_adjusted},
        "verdict": comparison.verdict,
    }


def sentence(document: Mapping[str, Any]) -> str:
    """What a sweep found, in a sentence or two."""
    rows = [mapping(row) for row in document["settings"]]
    by_verdict = {
        word: [row for row in rows if row.get("verdict") == word] for word in ("better", "worse", "undecided")
    }
    parts = []
    for word in ("better", "worse"):
        for row in by_verdict[word]:
            change = mapping(row["difference"])
            parts.append(
                f"{row['name']} is {word} than {row['baseline']}: {signed(change['mean'])} "
                f"({signed(change['low'])} to {signed(change['high'])}, {change['n']} seeds)"
            )
    open_ones = [row["name"] for row in by_verdict["undecided"]]
    if open_ones:
        listed = ", ".join(open_ones) if len(open_ones) <= 4 else f"{len(open_ones)} settings"
        parts.append(f"undecided with these seeds: {listed}")
    if not parts:
        return "One setting, which is compared with nothing: its mean and interval are below."
    return "; ".join(parts) + "."


def signed(value: float | None) -> str:
    """A difference with its sign.

    Example:
        >>> signed(0.0312), signed(-0.5), signed(None)
        ('+0.0312', '−0.500', '–')
    """
    finite = number(value)
    return "–" if finite is None else f"{'+' if finite > 0 else ''}{short(finite)}"


def explained(document: Mapping[str, Any]) -> list[str]:
    """How to read the table, and what is amiss with the runs behind it."""
    level, count = f"{100 * document['confidence']:g} %", document["comparisons"]
    at = "the last update" if document["at"] is None else f"update {document['at']}"
    smooth = mapping(document["sweep"])["compare"]["smooth"]
    kind = "evaluations" if document["metric"] == HELD_OUT else "updates"
    over = f", mean of {smooth} {kind} up to there" if smooth > 1 else ""
    lines = [
        f"{document['metric']} at {at}{over}; a larger one is {document['larger_is']}. Means over seeds, with Student "
        f"intervals of {level}."
    ]
    if count:
        lines.append(
            "Differences are paired by seed. That any verdict is wrong has a probability of at most "
            f"{100 - 100 * document['confidence']:.3g} % (Holm, comparisons: {count}); an interval excludes 0 exactly "
            "where there is one."
        )
    patience_words = " to ".join(map(str, {min(document["collapse_after"]): 0, max(document["collapse_after"]): 0}))
    lines.append(f"Collapsed: the reward fell 30 % below its best and stayed there for {patience_words} updates.")
    unfinished = [run for run in document["runs"] if run["status"] in ("begun", "waiting")]
    if unfinished:
        begun = ", ".join(f"{r['folder']} is at update {r['updates']}" for r in unfinished if r["status"] == "begun")
        lines.append(
            f"{len(unfinished)} of {len(document['runs'])} runs are not finished; the same command goes on"
            f"{f' ({begun})' if begun else ''}. Verdicts that are looked at again and again until one comes are wrong "
            "more often than stated: decide by the last."
        )
    errors = [run for run in document["runs"] if run["status"] == "failed"]
    if errors:
        lines.append(
            "Failed runs are left out of means and differences, which flatters a setting that fails where it does "
            "badly."
        )
    lines += [f"Failed: {run['folder']}: {str(run['error']).splitlines()[0]}" for run in errors]
    if any(run["status"] == "finished" and run["value"] is None for run in document["runs"]):
        lines.append(f"Some finished runs have no {document['metric']} there; they are left out.")
    if len(nodes := Counter(name for run in document["runs"] for name in run.get("nodes", ()))) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in nodes.most_common())
        lines.append(f"Runs by node of the cluster: {counts}. Machines of different kinds differ in their last bits.")
    if len(document["versions"]) > 1:
        lines.append("The runs were made by different versions of the software; sweep.json lists them.")
    return lines
