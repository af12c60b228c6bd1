"""What an audit concludes from metrics alone: the averages that another program logged, without any token.

The same rules judge them as judge a log of tokens. What only tokens can answer is listed with the recorder that would
answer it, no cause has high confidence, and no correction is suggested: what it would reject is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import fmean, median
from typing import Any, NamedTuple

from offdrift.audit.conclude import FORMAT, KNOWN, PAGE
from offdrift.audit.partial import BAD_ROWS_KEPT
from offdrift.judge import Context, Finding, Rules, decide, diagnose, load_rules, verdict
from offdrift.judge.findings import number
from offdrift.judge.metric_names import metric_names
from offdrift.judge.stack import by_stack
from offdrift.records.atomic import plain
from offdrift.records.readers.metrics import MetricLog
from offdrift.show.anchors import on_page
from offdrift.stats import Alphas

POINTS = 2000
"""Points of a timeline; steps beyond are merged with their neighbors."""
MISSING = "Metrics only: per-token evidence is missing."
EXTREMES = {"max": max, "min": min}
"""How the values of several steps become one, by the end of the metric's name; else by their mean or median."""
GAPS = ("k1", "k3", "chi2_token", "pearson", "prob_diff_mean", "abs_log_ratio_mean")
KL_LIKE = ("k1", "k3", "chi2_token", "pearson")
"""Measures of drift that a verdict without findings names."""


class MetricQuestion(NamedTuple):
    """A question, and the metrics of which any answers it, on average; none where only tokens do."""

    text: str
    metrics: tuple[str, ...] = ()


QUESTIONS = (
    MetricQuestion("How do reward and response length go?", ("reward/mean", "response/length_mean")),
    MetricQuestion("Do rollout and training engine agree, on average?", tuple(f"mismatch/{name}" for name in GAPS)),
    MetricQuestion("How far is the trained policy from what drew the tokens, on average?", ("full/k1", "full/k3")),
    MetricQuestion("How old were the weights that drew?", ("version_lag/mean", "version_lag/max", "old/version_lag")),
    MetricQuestion("How often did a clip act?", ("objective/clip_frac_active", "staleness/clip_frac")),
    MetricQuestion("Which tokens, positions, turns or responses drift?"),
    MetricQuestion("Is one rollout worker, rank or environment apart from the others?"),
    MetricQuestion("Were the log-probs recorded those of the distribution that was sampled?"),
    MetricQuestion("What would each method have kept, and at which effective sample size?"),
    MetricQuestion("What does it prove about the update?"),
)


def conclude_metrics(log: MetricLog, *, context: Context, rules: Rules | None = None) -> dict[str, Any]:
    """The content of `audit.json` for a run of which only metrics are known.

    Args:
        log: the metrics of one run.
        context: what is known about the run besides.
        rules: the diagnosis' rules, if not the built-in ones.
    """
    overall = _merged(log.rows, typical=median)
    per_point = -(-len(log.rows) // POINTS)
    steps = [_merged(log.rows[i : i + per_point]) for i in range(0, len(log.rows), per_point)]
    asked = questions(overall, context.framework)
    open_ones = [q["question"] for q in asked if not q["answered"]]
    differences = [f"{log.names[ours]} is read as {ours}, and differs: {note}." for ours, note in log.notes.items()]
    unread = [f"{len(log.bad):,} rows or values could not be read."] if log.bad else []
    audit = {
        "format": FORMAT,
        "kind": "audit",
        "evidence": "metrics",
        "offdrift": version("offdrift"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": {
            "detected": log.description,
            "format": "metrics",
            "framework": context.framework,
            "files": len(log.files),
            "bytes": log.bytes,
            "paths": list(log.files[:20]),
            "columns": dict(log.names),
        },
        "coverage": {
            "sentences": [MISSING, *unread],
            "remarks": [*_limits(overall, len(asked) - len(open_ones), len(open_ones)), *differences],
        },
        "has": sorted(name for name in overall if name != "step"),
        "counts": {"steps": len(log.rows), "bad_rows": len(log.bad)},
        "overall": overall,
        "steps": steps,
        "steps_per_point": per_point,
        "bad_rows": [b._asdict() for b in log.bad[:BAD_ROWS_KEPT]],
        "questions": asked,
        "methods": [],
        "facets": {},
        "context": {name: getattr(context, name) for name in KNOWN},
        "certificate": {},
        "alphas": Alphas.of(overall).as_dict(),
    }
    return plain(audit | judged_metrics(log.rows, overall, context, rules or load_rules()))


def judged_metrics(
    steps: Sequence[Mapping[str, float | int]], overall: Mapping[str, float | int], context: Context, rules: Rules
) -> dict[str, Any]:
    """The entries of `audit.json` that rules decide, from metrics alone.

    Args:
        steps: the metrics of every step.
        overall: those of the whole run.
        context: what is known about the run besides.
    """
    findings = diagnose(steps, context=replace(context, metrics_only=True), rules=rules)
    suggestion = {
        "method": None,
        "settings": {},
        "row": None,
        "rung": None,
        "why": f"which correction helps, and at what cost, needs the tokens: {_recorder(context.framework)}",
    }
    decided = decide(findings, suggestion)
    return {
        **rules.as_record(),
        "suggestion": decided,
        "stacks": by_stack(context, overall, decided),
        "findings": on_page((f.as_dict() for f in findings), PAGE),
        "verdict": _verdict(findings, overall, rules, context.framework),
    }


def questions(overall: Mapping[str, float | int], framework: str) -> list[dict[str, Any]]:
    """Every question, whether these metrics answer it, and what to record if not.

    Example:
        >>> [q["question"] for q in questions({"reward/mean": 0.5}, "trl") if q["answered"]]
        ['How do reward and response length go?']
    """
    rows = []
    for question in QUESTIONS:
        answered = any(name in overall for name in question.metrics)
        because = "only tokens tell" if not question.metrics else "no such metric was logged"
        row = {"question": question.text, "answered": answered}
        rows.append({**row, "because": "" if answered else because, "log": "" if answered else _recorder(framework)})
    return rows


def _recorder(framework: str) -> str:
    """The sentence that names the recorder of a framework's tokens."""
    how = metric_names().records.get(framework, "offdrift.records.recorder.record(...) in the training loop")
    return f"the tokens of some steps: {how}"


def _verdict(
    findings: Sequence[Finding], overall: Mapping[str, float | int], rules: Rules, framework: str
) -> dict[str, Any]:
    """The verdict, which says what it has not seen, and what would show it."""
    conclusion = verdict(findings, overall, missing=[MISSING], limits=rules.limits)
    if conclusion["level"] == "ok" and not any(
        f"{on}/{name}" in overall for on in ("mismatch", "full") for name in KL_LIKE
    ):
        conclusion["text"] = (
            f"{MISSING} What was logged shows nothing wrong; it is not the KL, and no proof of agreement."
        )
    elif conclusion["level"] == "ok":
        conclusion["text"] = conclusion["text"].replace(
            "No drift that matters", "The averages show no drift that matters"
        )
    return {**conclusion, "steps": [*conclusion["steps"], f"Record {_recorder(framework)}"]}


def _limits(overall: Mapping[str, float | int], answered: int, open_: int) -> list[str]:
    """Sentences on the reach of metrics, and on what follows from the mean |log-ratio|, where it is all there is."""
    words = [
        f"They answer {answered} of {answered + open_} questions, on average over a step; a few tokens far off, one "
        "worker apart or a wrong record can hide in averages."
    ]
    for on, policy in (("mismatch", "the training engine"), ("full", "the trained policy")):
        gap = overall.get(f"{on}/abs_log_ratio_mean")
        if gap is not None and not {f"{on}/k1", f"{on}/k3"} & overall.keys():
            words.append(
                f"The mean |log-ratio| of rollout and {policy} is {gap:.3g} nat: the KL is at most that, and how much "
                "less was not logged."
            )
    return words


def _merged(rows: Sequence[Mapping[str, float | int]], typical: Any = fmean) -> dict[str, float | int]:
    """One row for several: each metric's largest or smallest value where it is named so, else the typical one."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name in row:
            if (value := number(row, name)) is not None:
                columns.setdefault(name, []).append(value)
    merged = {name: EXTREMES.get(name[-3:], typical)(values) for name, values in columns.items() if name != "step"}
    return {"step": columns["step"][0], **merged} if "step" in columns and typical is fmean else merged
