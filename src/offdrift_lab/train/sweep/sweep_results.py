"""Summarize the runs of a sweep: means over seeds with intervals, and differences to the baseline.

Everything is read from the run folders, at any time; a run that is not finished is left out and counted.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from offdrift.judge import load_rules
from offdrift.show.json_access import mapping, number
from offdrift.show.numbers import short
from offdrift.stats import Comparison, Mean, compare_all, over_seeds
from offdrift_lab.evidence.collapse import collapse, held_out_collapse
from offdrift_lab.train.sweep.sweep import HELD_OUT, Cell, CompareSettings, Grid, Setting, nodes_of, stored_json

SMOOTHED = 5
"""Updates in the moving average of the reward in which a collapse is looked for."""
FORMAT = 1


def number_of(cell: Cell, compare: CompareSettings) -> float | None:
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


def collapsed(cell: Cell, compare: CompareSettings, limits: Mapping[str, float] | None = None) -> bool:
    """Whether the run's held-out reward fell by `reward_lost` and stayed there (`offdrift_lab.evidence.collapse`).

    Without a second evaluation the smoothed training reward stands in for it, which is that of the policy that drew:
    where weights are old it falls late, and rises again.

    Args:
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.
    """
    if len(held_out := curve(cell, HELD_OUT)) > 1:
        return held_out_collapse(held_out, recovery=patience(cell, compare, limits), limits=limits) is not None
    rewards = [value for _, value in curve(cell, "reward/mean")]
    smooth = [
        math.fsum(part) / len(part) for i in range(len(rewards)) if (part := rewards[max(0, i + 1 - SMOOTHED) : i + 1])
    ]
    norms = [value for _, value in curve(cell, "optim/grad_norm")]
    return collapse(smooth, norms, recovery=patience(cell, compare, limits), limits=limits).step is not None


def patience(cell: Cell, compare: CompareSettings, limits: Mapping[str, float] | None = None) -> int:
    """Updates for which a reward must stay low to count as collapsed."""
    t = load_rules().limits if limits is None else limits
    return compare.collapse_after or min(int(t["collapse_recovery"]), max(1, cell.recipe.updates // 4))


def reached(cell: Cell) -> int:
    """The last update that a run has recorded; 0 before the first."""
    return max((int(number(row.get("update")) or 0) for row in cell.files.rows("metrics")), default=0)


def results(grid: Grid) -> dict[str, Any]:
    """Summarize the finished runs of a sweep: the content of `sweep.json`.

    Means and intervals are over seeds; differences are paired by seed, and decided together (`compare_all`).
    """
    sweep, compare, settings, t = grid.sweep, grid.sweep.compare, grid.settings, grid.rules.rules.limits
    runs, numbers = [], {setting: {} for setting in settings}
    heads = {}
    for cell in grid.cells:
        status = cell.status
        value = number_of(cell, compare) if status == "finished" else None
        if value is not None:
            numbers[cell.setting][cell.seed] = value
        heads[cell.folder] = stored_json(cell.folder / "run.json")
        runs.append(run_row(cell, grid, heads[cell.folder]) | {"value": value})
    baselines = {s: b for s in settings if (b := grid.baseline_of(s)) is not None}
    alpha = 1 - compare.confidence
    pairs = [(numbers[s], numbers[b]) for s, b in baselines.items()]
    decided = dict(zip(baselines, compare_all(pairs, larger=compare.direction, alpha=alpha), strict=True))
    lowest, highest = limits(grid, [x for own in numbers.values() for x in own.values()])
    table = []
    for setting in settings:
        own = [run for run in runs if all(run[key] == value for key, value in _row(setting).items())]
        row = {
            **_row(setting),
            "name": setting.name,
            **_mean(over_seeds(list(numbers[setting].values()), confidence=compare.confidence).within(lowest, highest)),
            "runs": len(own),
            **{status: sum(run["status"] == status for run in own) for status in ("finished", "failed")},
            "collapsed": sum(bool(run["collapsed"]) for run in own),
        }
        table.append(row | _compared(decided.get(setting), baselines.get(setting), highest - lowest))
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
        "collapse_after": sorted({patience(cell, compare, t) for cell in grid.cells}),
        "reward_lost": t["reward_lost"],
        **grid.started.as_record(grid.rules.words),
        "seeds": list(sweep.seeds),
        "versions": [json.loads(text) for text in sorted(versions)],
        "settings": table,
        "runs": runs,
    }


def run_row(cell: Cell, grid: Grid, head: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a run in `sweep.json`, without its number; `head` is its `run.json`."""
    status = cell.status
    fell = collapsed(cell, grid.sweep.compare, grid.rules.rules.limits) if status == "finished" else None
    return {
        **_row(cell.setting),
        "seed": cell.seed,
        "folder": str(cell.folder.relative_to(grid.folder)),
        "status": status,
        "updates": cell.recipe.updates if status == "finished" else reached(cell),
        "collapsed": fell,
        "seconds": number(head.get("seconds")),
        "nodes": list(dict.fromkeys(str(node.get("name")) for node in nodes_of(cell))),
        "error": cell.error or None,
    }


def _row(setting: Setting) -> dict[str, Any]:
    return {"arm": setting.arm, "values": dict(setting.values)}


def _mean(mean: Mean) -> dict[str, Any]:
    return {"mean": mean.mean, "low": mean.low, "high": mean.high, "n": mean.n}


def limits(grid: Grid, values: Sequence[float]) -> tuple[float, float]:
    """The range that the compared metric cannot leave: that of rewards; else, and where a value does, all numbers."""
    lows, highs = zip(*(cell.recipe.reward_range for cell in grid.cells), strict=True)
    of_rewards = grid.sweep.compare.metric in (HELD_OUT, "reward/mean")
    if of_rewards and all(min(lows) <= x <= max(highs) for x in values):
        return min(lows), max(highs)
    return -math.inf, math.inf


def _compared(comparison: Comparison | None, baseline: Setting | None, reach: float) -> dict[str, Any]:
    if comparison is None or baseline is None:
        return {"baseline": None, "difference": None, "verdict": None}
    difference = asdict(comparison.difference.within(-reach, reach))
    return {
        "baseline": baseline.name,
        "difference": difference | {"p_holm": comparison.p_adjusted},
        "verdict": comparison.verdict,
    }


def sentence(document: Mapping[str, Any]) -> str:
    """State the result of a sweep in one or two sentences."""
    rows = [mapping(row) for row in document["settings"]]
    if not any(run["status"] == "finished" for run in document["runs"]):
        return f"Nothing to compare yet: 0 of {len(document['runs'])} runs are finished."
    by_verdict = {
        word: [row for row in rows if row.get("verdict") == word]
        for word in ("better", "worse", "undecided", "no data")
    }
    parts = []
    for word in ("better", "worse"):
        for row in by_verdict[word]:
            change = mapping(row["difference"])
            parts.append(
                f"{row['name']} is {word} than {row['baseline']}: {signed(change['mean'])} "
                f"({signed(change['low'])} to {signed(change['high'])}, {change['n']} seeds)"
            )
    for word, means in (("undecided", "undecided with these seeds"), ("no data", "no seed to compare yet")):
        if names := [row["name"] for row in by_verdict[word]]:
            parts.append(f"{means}: {', '.join(names) if len(names) <= 4 else f'{len(names)} settings'}")
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
    """Sentences on how to read the table, and on problems of the runs behind it."""
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
    if any(row["n"] in (1, 2) for row in document["settings"]):
        lines.append(
            "One seed has no interval, and two are too few: theirs reaches 12.7 standard errors to either side, and is "
            "cut where the metric ends. Give five seeds or more."
        )
    patience_words = " to ".join(map(str, {min(document["collapse_after"]): 0, max(document["collapse_after"]): 0}))
    lost = f"{100 * document.get('reward_lost', load_rules().limits['reward_lost']):g} %"
    patience_words += " update" if patience_words == "1" else " updates"
    lines.append(
        f"Collapsed: the held-out reward fell {lost} below its best and stayed there for {patience_words} or to the "
        "end (the training reward, where it was evaluated less than twice)."
    )
    return [*lines, *troubles(document)]


def troubles(document: Mapping[str, Any]) -> list[str]:
    """Sentences on problems of the runs of a sweep: not finished, failed, of different machines or versions."""
    lines, runs = [], document["runs"]
    unfinished = [run for run in runs if run["status"] in ("begun", "waiting")]
    if unfinished:
        begun = ", ".join(f"{r['folder']} is at update {r['updates']}" for r in unfinished if r["status"] == "begun")
        lines.append(
            f"{len(unfinished)} of {len(runs)} runs are not finished; the same command goes on"
            f"{f' ({begun})' if begun else ''}. Verdicts that are looked at again and again until one comes are wrong "
            "more often than stated: decide by the last."
        )
    errors = [run for run in runs if run["status"] == "failed"]
    if errors:
        lines.append(
            "Failed runs are left out of means and differences, which flatters a setting that fails where it does "
            "badly."
        )
    lines += [f"Failed: {run['folder']}: {str(run['error']).splitlines()[0]}" for run in errors]
    if any(run["status"] == "finished" and run["value"] is None for run in runs):
        lines.append(f"Some finished runs have no {document['metric']} there; they are left out.")
    if len(nodes := Counter(name for run in runs for name in run.get("nodes", ()))) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in nodes.most_common())
        lines.append(f"Runs by node of the cluster: {counts}. Machines of different kinds differ in their last bits.")
    if len(document["versions"]) > 1:
        lines.append("The runs were made by different versions of the software; sweep.json lists them.")
    return lines
