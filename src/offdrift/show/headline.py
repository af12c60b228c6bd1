"""Parts that the views of an audit and of a check share; first the three numbers that matter, by what the log holds.

With log-probs: how far apart the policies are (KL), how much of the batch an importance weight could
use (ESS, which a few tokens ruin), and whether the policies agree on probabilities (Pearson); of the
two engines where the log has both, else of rollout and current policy. Without log-probs: what the
rest of the log says. A number is only judged where the survey's tree has a threshold for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median
from typing import Any

from offdrift.judge import load_rules
from offdrift.judge.kl_choice import EXACT, kl_metrics
from offdrift.notebook import spark_path
from offdrift.show.findings import WORDS, footnote, in_order, verdict_of
from offdrift.show.json_access import Fields, at, clipped, column, items, mapping, number, rows, text
from offdrift.show.numbers import never_negative, percent, short
from offdrift.stats.metrics import METRICS

PAIRS = ("mismatch", "full", "staleness")
PAIR_WORDS = {
    "mismatch": "old vs rollout policy: engine mismatch",
    "full": "current vs rollout policy: mismatch and staleness",
    "staleness": "current vs old policy: staleness",
}
LENGTH_UNITS = {"character": "character", "mixed": "character or token"}
"""What lengths are counted in where it is not tokens: a log of texts alone has no tokens."""


@dataclass(frozen=True)
class Judged:
    """Two limits: beyond the first is to be watched, beyond the second to be acted on."""

    watch: float
    act: float
    above: bool
    comparisons: tuple[str, str, str]
    """What is written below the first limit, between the two, and beyond the second."""

    def of(self, value: float) -> tuple[str, str]:
        """Level and comparison of a value. An estimate below 0 of what cannot be is wrong by its size at least."""
        size = abs(value) if self.above else value
        beyond = [(size > limit) if self.above else (size < limit) for limit in (self.watch, self.act)]
        i = 2 if beyond[1] else 1 if beyond[0] else 0
        if self.above and value < 0:
            return ("ok", "watch", "act")[i], NEGATIVE[i > 0]
        return ("ok", "watch", "act")[i], self.comparisons[i]


NEGATIVE = (
    "estimate below 0: equal to 0 within its error",
    "estimate below 0, which KL cannot be: too few tokens, or wrong log-probs in the log",
)
"""What stands beside an estimate below 0: near it, and far from it."""


def thresholds(audit: Fields) -> dict[str, float]:
    """The thresholds of an audit by name; the built-in ones stand for those that it does not hold."""
    stored = mapping(audit.get("limits"))
    return {**load_rules().limits, **{k: v for k in stored if (v := number(stored[k])) is not None}}


def judged(limits: Mapping[str, Any]) -> dict[str, Judged]:
    """The numbers that are judged, by their slot on the first screen; `limits` as an audit or a check stores them."""
    at = thresholds({"limits": limits})
    some, many = at["data_some"], at["data_many"]
    clean, large, half = at["kl_clean"], at["kl_large"], at["ess_half"]
    agree, broken = at["pearson_clean"], at["pearson_broken"]
    return {
        "missing": Judged(
            some,
            many,
            True,
            (
                f"{100 * some:g} % or less: little is missing",
                f"above {100 * some:g} %: the numbers are about the rest",
                f"above {100 * many:g} %: the rest may not stand for it",
            ),
        ),
        "kl": Judged(
            clean,
            large,
            True,
            (
                f"below {clean:g}: no meaningful drift",
                f"between {clean:g} and {large:g}: watch it",
                f"above {large:g}: find the cause",
            ),
        ),
        "ess": Judged(
            half,
            half,
            False,
            (
                f"{100 * half:g} % or more: no weight is too noisy",
                "",
                f"below {100 * half:g} %: filter before reweighting",
            ),
        ),
        "pearson": Judged(
            agree,
            broken,
            False,
            (
                f"{agree:g} or more: the policies agree",
                f"between {broken:g} and {agree:g}: watch it",
                f"below {broken:g}: not the same policy",
            ),
        ),
    }


@dataclass(frozen=True)
class Headline:
    """One number of the first screen."""

    metric: str
    title: str
    text: str
    unit: str
    about: str
    """Which policies, or of what."""
    level: str
    comparison: str
    """The value beside its threshold."""
    meaning: str
    series: tuple[float | None, ...]
    """The metric at each step, for a line in miniature."""

    @property
    def path(self) -> str:
        """The series as the path of an SVG of 100 by 24, from its smallest value to its largest."""
        return spark_path(self.series)


def headlines(audit: Fields) -> list[Headline]:
    """At most three numbers, the most telling that the log allows.

    Example:
        >>> [h.text for h in headlines({"overall": {"full/k3": 0.0021, "full/ess_frac": 0.98}})]
        ['0.00210', '98.0 %']
    """
    overall, steps = mapping(audit.get("overall")), rows(audit.get("steps"))
    pair, length = main_pair(audit), length_unit(audit)
    judge = judged(mapping(audit.get("limits")))
    entries = [*(_drift(pair, overall, thresholds(audit)) if pair else ()), *_WITHOUT_DRIFT]
    # Before every number stands what it does not know of.
    metric, title, about = max(MISSING, key=lambda row: number(overall.get(row[0])) or 0.0)
    if judge["missing"].of(number(overall.get(metric)) or 0.0)[0] != "ok":
        entries.insert(0, ("missing", title, metric, about, percent))
    chosen: dict[str, Headline] = {}
    for slot, title, metric, about, write in entries:
        value = number(overall.get(metric))
        if value is None or slot in chosen:
            continue
        series = tuple(column(steps, metric))
        level, comparison = judge[slot].of(value) if slot in judge else ("", "")
        if slot == "kl" and value < 0:  # k3 estimates the same KL, and in it no signs cancel
            k3 = number(overall.get(f"{metric.rpartition('/')[0]}/k3")) or 0.0
            if judge[slot].of(k3)[0] == "act":
                level, comparison = "act", NEGATIVE[1]
        if slot in judge and (now := recent(series)) is not None:
            later, words = judge[slot].of(now)
            if WORSE.index(later) > WORSE.index(level):  # an average hides what has only begun
                level, comparison = later, LATELY.format(write(now), words)
        unit = unit_of(metric, length)
        unit = unit if unit != "task" and write is short else ""
        chosen[slot] = Headline(
            metric,
            title,
            write(value),
            unit=unit,
            about=about,
            level=level,
            comparison=comparison,
            meaning=meaning_of(metric, length),
            series=series,
        )
    return list(chosen.values())[:3]


WORSE = ("ok", "watch", "act")
RECENT, LONG = 5, 10
"""Steps whose median is what a number is lately, and from how many steps on that is said."""
LATELY = "but {} in the last 5 steps, {}"


def recent(series: tuple[float | None, ...]) -> float | None:
    """The median of the last five values of a series of ten or more.

    Example:
        >>> recent(tuple(map(float, range(10)))), recent((1.0, 2.0))
        (7.0, None)
    """
    values = [v for v in series if v is not None]
    return median(values[-RECENT:]) if len(values) >= LONG else None


def main_pair(audit: Fields) -> str:
    """The pair of policies that the audit is mainly about: the first that has numbers; "" for none."""
    overall = mapping(audit.get("overall"))
    return next((p for p in PAIRS if kl_metric(overall, p)), "")


def kl_metric(fields: Fields, pair: str, limits: Mapping[str, float] | None = None) -> str:
    """The best measure of the KL of a pair that is there, as the diagnosis chooses it; "" for none."""
    if pair not in PAIRS:
        return ""
    limit = (limits or load_rules().limits)["ratio_mean_z"]
    return best_of(fields, kl_metrics(pair, number(fields.get(f"{pair}/ratio_mean_z")), limit))


def best_of(fields: Fields, names: tuple[str, ...]) -> str:
    """The first of some metrics that is there; "" for none."""
    return next((name for name in names if number(fields.get(name)) is not None), "")


def best_numbers(table: list[dict[str, Any]]) -> list[str]:
    """The few metrics that a table of buckets shows: KL, ESS and the worst token of each pair."""
    present = {k: v for row in table for k, v in row.items() if number(v) is not None}
    names = [
        name for pair in PAIRS for name in (kl_metric(present, pair), f"{pair}/ess_frac", f"{pair}/abs_log_ratio_max")
    ]
    return [name for name in names if name in present]


def writer_of(metric: str) -> Callable[[float | None], str]:
    """Write a metric: an estimated chi2 below 0 as noise, all else as a number."""
    return never_negative if metric.rpartition("/")[2].startswith("chi2") else short


def length_unit(audit: Fields) -> str:
    """Unit in which the lengths of an audit's responses are counted."""
    return LENGTH_UNITS.get(text(at(audit, "counts", "length_unit")), "token")


def unit_of(metric: str, length: str = "token") -> str:
    """The unit of a metric; "" for a bare number."""
    row = METRICS.get(metric)
    if row is None or row.unit == "1":
        return ""
    return length if metric.startswith("response/length") else row.unit


def meaning_of(metric: str, length: str = "token") -> str:
    """Formula, unit and better direction of a metric, for a tooltip."""
    row = METRICS.get(metric)
    if row is None:
        return metric
    better = {"worse": "Lower is better.", "better": "Higher is better.", "neither": ""}
    unit = unit_of(metric, length)
    unit = f" [{unit}]" if unit else ""
    return f"{metric} = {row.formula}{unit}. {better[row.larger_is]}".rstrip()


MISSING = (
    ("data/unread_frac", "Not readable", "of rows, or of bytes"),
    ("batch/unscored_frac", "Not comparable", "of the tokens that may train"),
)
_Wanted = tuple[str, str, str, str, Callable[[float | None], str]]


def _drift(pair: str, overall: Fields, limits: Mapping[str, float]) -> list[_Wanted]:
    about = PAIR_WORDS[pair]
    kl = kl_metric(overall, pair, limits)
    grade = "exact" if kl == EXACT[pair] else f"sampled, {kl.rpartition('/')[2]}"
    return [
        ("kl", "KL per token", kl, f"{about} ({grade})", short),
        ("ess", "Effective sample size", f"{pair}/ess_frac", f"{about}; the whole log as one batch", percent),
        ("pearson", "Correlation of probabilities", f"{pair}/pearson", about, correlation),
        ("chi2", "χ² of token weights", f"{pair}/chi2_token", about, never_negative),
        ("worst", "Worst token, |log ratio|", f"{pair}/abs_log_ratio_max", about, short),
    ]


def correlation(value: float | None) -> str:
    """Five decimals, cut and not rounded: 0.99999 is not 1."""
    return "–" if value is None else f"{math.floor(value * 1e5) / 1e5:.5f}".replace("-", "−")


_WITHOUT_DRIFT: list[_Wanted] = [
    ("reward", "Mean reward", "reward/mean", "of all sequences", short),
    ("length", "Mean response length", "response/length_mean", "of all sequences", short),
    ("longest", "Longest response", "response/length_max", "", short),
    ("lag", "Mean version lag", "version_lag/mean", "updates between sampling and training", short),
    ("entropy", "Entropy", "current/entropy", "of the training policy", short),
]


# -- pages ----------------------------------------------------------------------------------------


def count_words(audit: Fields) -> list[str]:
    """Amounts that were read, in words: sequences, tokens, steps, files."""
    counts = mapping(audit.get("counts"))
    totals = [(key, number(counts.get(key))) for key in ("sequences", "tokens", "steps")]
    words = [f"{n:,.0f} {key if n != 1 else key[:-1]}" for key, n in totals if n is not None]
    files = number(at(audit, "source", "files"))
    return words + ([] if files is None else [f"{files:,.0f} file{'' if files == 1 else 's'}"])


def common_context(fields: Fields) -> dict[str, Any]:
    """Context that the pages of an audit and of a check share."""
    framework = text(at(fields, "source", "framework"))
    level, words = verdict_of(fields.get("verdict"))
    findings = in_order(fields.get("findings"), framework)
    return {
        "verdict": words,
        "details": [text(line) for line in items(at(fields, "verdict", "details"))],
        "level": level,
        "judged_by": text(fields.get("judged_by")),
        "words": WORDS,
        "findings": findings,
        "footnote": footnote(findings),
        "counts": count_words(fields),
        "created": text(fields.get("created")),
        "version": text(fields.get("offdrift")),
        "framework": framework,
        "title": title_of(fields),
        "pair_words": PAIR_WORDS,
    }


def title_of(audit: Fields) -> str:
    """Name of the log: its file, or the folder that all of its files are in.

    Example:
        >>> title_of({"source": {"paths": ["runs/a/log/0.parquet", "runs/a/log/1.parquet"]}})
        'a/log'
    """
    paths = [PurePath(text(p)) for p in items(at(audit, "source", "paths"))]
    if not paths:
        return "a log"
    alone = len(paths) == 1 or len({p.anchor for p in paths}) > 1
    name = paths[0] if alone else PurePath(os.path.commonpath([p.parent for p in paths]))
    return clipped("/".join(name.parts[-2:]) or str(paths[0]), 200)


def all_numbers(overall: Fields, length: str = "token") -> list[dict[str, str]]:
    """Every metric of the whole log with unit, formula and better direction, in the table's order."""
    order = {name: i for i, name in enumerate(METRICS)}
    better = {"worse": "lower", "better": "higher", "neither": ""}
    table = []
    for name in sorted(overall, key=lambda n: (order.get(n, len(order)), n)):
        value, row = number(overall[name]), METRICS.get(name)
        table.append(
            {
                "name": name,
                "value": writer_of(name)(value),
                "sort": "" if value is None else repr(value),
                "unit": unit_of(name, length),
                "formula": row.formula if row else "",
                "better": better[row.larger_is] if row else "",
            }
        )
    return table
