"""The page of a check, from `check.json` alone: verdict, headlines, experiments, thresholds, recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from offdrift.check.check import PAGE
from offdrift.check.paired_view import compound_lines, paired_lines
from offdrift.check.view import (
    BUDGET,
    BUDGETS,
    LIVE_NOTE,
    NAMES,
    OUTSIDE,
    bisected,
    by_kind,
    cited,
    correlation_or_short,
    live_rows,
    precision_words,
    threshold_rows,
    times,
)
from offdrift.show.charts import Chart, Series, chart_data
from offdrift.show.headline import Headline, all_numbers, best_of, common_context, correlation, judged, thresholds
from offdrift.show.html import STYLES, render_document, write_document
from offdrift.show.json_access import Fields, at, mapping, number, rows, text
from offdrift.show.numbers import duration, flatten, percent, short
from offdrift.show.stacks import stack_words

FACTOR_NUMBERS = (
    ("kl_mean", "KL, mean", "Mean exact KL(rollout || training) of a token with this factor changed, nats."),
    ("ratio", "× baseline", "Mean KL over that of the unchanged pair: below 1 the factor is part of the cause."),
    ("kl_max", "KL, max", "Largest KL of a token, nats."),
    ("tv_max", "TV, max", "Largest total variation of a token."),
    ("abs_log_ratio_max", "|log ratio|, max", "Largest |log-ratio| of a sampled token, nats."),
    ("pearson", "Pearson", "Correlation of the sampled tokens' probabilities."),
)  # fmt: skip
HEADLINES = (
    ("kl", "KL per token", "nat", short, "mean over sampled tokens",
     ("kl_mean", "divergence/kl_rollout_old_mean", "divergence/kl_rollout_current_mean", "mismatch/k3", "full/k3")),
    ("tv", "Largest TV of a token", "", short, "over the whole vocabulary",
     ("tv_max", "divergence/tv_rollout_old_max", "divergence/tv_rollout_current_max")),
    ("pearson", "Correlation of probabilities", "", correlation, "of the sampled tokens",
     ("pearson", "mismatch/pearson", "full/pearson")),
    ("ess", "Effective sample size", "", percent, "of the sampled tokens",
     ("mismatch/ess_frac", "full/ess_frac")),
    ("worst", "Worst token, |log ratio|", "nat", short, "",
     ("abs_log_ratio_max", "mismatch/abs_log_ratio_max", "full/abs_log_ratio_max")),
)  # fmt: skip
"""Judged as, title, unit, how it is written, over what, and metrics by preference."""
LOWEST = 10**-7.8
"""Smallest share of the largest KL that the chart shows: the axis has eight decades."""


def write_check_page(check: Mapping[str, Any], folder: Path) -> Path:
    """Write `check.html` of a `check.json`, missing parts left out, atomically, and return its path.

    Raises: `RecordError` if it cannot be written.
    """
    return write_document(render_check(check), folder / PAGE)


def render_check(check: Mapping[str, Any]) -> str:
    """The page of a check as text, the same for the same check."""
    factors = rows(check.get("factors"))
    chart = factor_chart(check)
    titles = ("One setting changed at a time", "What common mistakes would cost here")
    counts = [(k, number(check.get(k))) for k in ("prompts", "sequences", "tokens")]
    seconds = number(check.get("seconds"))
    took = [] if seconds is None else [f"took {duration(seconds)}"]
    recommended = mapping(check.get("recommended"))
    later = mapping(recommended.get("then")) if not text(recommended.get("method")) else {}
    configurations = mapping(recommended.get("snippets")) or mapping(later.get("snippets"))
    snippets = {k: v for k, v in configurations.items() if isinstance(v, str)}
    context = {
        **common_context(check),
        "title": text(check.get("model")) or "two engines",
        "sides": [
            f"{name}: {' '.join(filter(None, (text(at(check, name, k)) for k in keys))) or '?'}"
            for name, keys in dict.fromkeys(("rollout", "train"), ("engine", "engine_version", "dtype")).items()
        ],
        "counts": [f"{n:,.0f} {k}" for k, n in counts if n is not None] + took,
        "headlines": [] if live_rows(check) else check_headlines(check),
        "live": live_rows(check),
        "live_note": LIVE_NOTE,
        "passed": check.get("passed") if isinstance(check.get("passed"), bool) else None,
        "max_kl": number(check.get("max_kl")),
        "interrupted": bool(check.get("interrupted")),
        "experiments": [(title, group) for title, group in zip(titles, by_kind(factors)) if group],
        "factor_numbers": FACTOR_NUMBERS,
        "write": {"pearson": correlation, "ratio": times},
        "number_of": number,
        "marked": partial(_marked, limits=thresholds(check)),
        "not_run": [f for f in factors if text(f.get("status")) != "ran"],
        "chart": chart,
        "thresholds": _thresholds(check),
        "recommended": recommended,
        "acceptance": percent(number(recommended.get("acceptance"))),
        "settings": list(flatten(mapping(recommended.get("settings")))),
        "later": text(later.get("method")),
        "later_settings": list(flatten(mapping(later.get("settings")))),
        "branches": rows(check.get("branches")),
        "stacks": stack_words(check),
        "snippets": list(snippets.items()),
        "numbers": all_numbers(mapping(check.get("baseline"))),
        "noise": [(k, _short_if_number(v)) for k, v in flatten(mapping(check.get("noise")))],
        "equality": _equality(check),
        "provenance": [
            *flatten({k: mapping(check.get(k)) for k in ("rollout", "train", "sampling")}),
            ("checked with", f"offdrift {text(check.get('offdrift'))}".strip()),
        ],
    }
    styles = (*STYLES, "check.css")
    return render_document("check.html.j2", context, data=lambda columns: chart_data([chart], columns), styles=styles)


def check_headlines(check: Fields) -> list[Headline]:
    """KL per token, largest TV of a token and correlation of the unchanged pair, or what stands in."""
    baseline = mapping(check.get("baseline"))
    headlines, judge = [], judged(mapping(check.get("limits")))
    for slot, title, unit, write, about, names in HEADLINES:
        metric = best_of(baseline, names)
        if not metric:
            continue
        value = number(baseline[metric]) or 0.0
        level, judgement = judge[slot].of(value) if slot in judge else ("", "")
        meaning = f"{metric}, at the same weights."
        headlines.append(
            Headline(
                metric,
                title,
                write(value),
                unit=unit,
                about=about,
                level=level,
                comparison=judgement,
                meaning=meaning,
                series=(),
            )
        )
    return headlines[:3]


def factor_chart(check: Fields) -> Chart:
    """Mean KL with each factor changed, beside that of the unchanged pair."""
    settings, mistakes = by_kind(rows(check.get("factors")))
    ran = [f for f in [*settings, *mistakes] if number(f.get("kl_mean")) is not None]
    base = next((b for f in ran if (b := number(f.get("baseline_kl_mean"))) is not None), None)
    means = [number(f.get("kl_mean")) or 0.0 for f in ran]
    series = Series(
        "KL, mean",
        [text(f.get("factor")) for f in ran],
        [max(kl, LOWEST * max(means)) for kl in means],
        kind="dots",
        color="arm-0",
        texts=[f"{short(number(f.get('kl_mean')))} nat: {text(f.get('changed'))}" for f in ran],
    )
    return Chart(
        "KL with one factor changed",
        "nat, log scale",
        [series],
        "factors",
        "Mean KL of a token with one factor changed at a time; the line is the unchanged pair. A factor "
        "that lowers the KL is part of the cause. Values near zero are drawn at the bottom.",
        log=True,
        lines=((base, f"unchanged: {short(base)}"),) if base else (),
        x_title="",
        wide=True,
    )


def _marked(factor: Fields, limits: Mapping[str, float]) -> str:
    """Mark of a factor by KL with it over that without: "better" below `factor_better`, "flagged" above
    `factor_worse`."""
    ratio = number(factor.get("ratio"))
    if ratio is None:
        return ""
    return "better" if ratio < limits["factor_better"] else "flagged" if ratio > limits["factor_worse"] else ""


def _thresholds(check: Fields) -> dict[str, Any]:
    """Limits of health, budgets, sources and, where a budget is missed, the note about it."""
    table = threshold_rows(check)
    sources = cited(table)
    shown = [
        {
            "metric": row.metric,
            "value": correlation_or_short(row.value),
            "healthy": row.healthy,
            "otherwise": row.otherwise,
            "holds": f"{OUTSIDE} outside" if row.outside else "✓ yes" if row.holds else "✗ no",
            "flagged": not (row.holds or row.outside),
            "cited": [sources.index(s) + 1 for s in row.sources],
            "missed": row.missed,
            "name": NAMES.get(row.metric, ""),
            "budget": row.budget,
        }
        for row in table
    ]
    note = f"{OUTSIDE} {BUDGET}" if any(row.outside for row in table) else ""
    return {
        "rows": [row for row in shown if not row["budget"]],
        "budgets": [row for row in shown if row["budget"]],
        "about_budgets": BUDGETS,
        "sources": sources,
        "note": note,
    }


def _equality(check: Fields) -> list[tuple[str, str]]:
    """Rows on determinism of each engine and on the first module whose output differs."""
    row = mapping(check.get("deterministic"))
    sides = [(name, text(at(row, name, "text"))) for name in ("rollout", "train")]
    lines = [(f"{name} engine deterministic", words) for name, words in sides if words]
    if why := text(row.get("why")):
        lines.append(("deterministic", f"not measured: {why}"))
    lines += [("claim", words) for words in (text(at(check, "claim", "text")),) if words]
    lines += paired_lines(check)
    lines += [(f"together: {name}", words) for name, words in compound_lines(check)]
    lines += [("explained by precision", words) for words in (precision_words(check),) if words]
    return lines + [("layer by layer", words) for words in (bisected(check),) if words]


def _short_if_number(value: str) -> str:
    try:
        return short(float(value))
    except ValueError:
        return value
