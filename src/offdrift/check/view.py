"""The thresholds of a check, one row per metric, as its terminal view and its page show them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offdrift.show.findings import LEVELS, WORDS, in_order, safe, shown_view, verdict_view
from offdrift.show.headline import correlation, headlines
from offdrift.show.json_access import Fields, at, mapping, number, rows, text
from offdrift.show.numbers import short

OUTSIDE = "○"
"""Sign of a missed budget."""
BUDGET = "outside a budget: nothing is broken, but a correction may gain"


class Held(NamedTuple):
    """A metric beside its thresholds."""

    metric: str
    value: float | None
    healthy: str
    """The strictest threshold: "< 0.02"."""
    otherwise: str
    """What missing it means; where that depends on the size, from where on it is worse."""
    level: str
    """Of the worst threshold that is missed."""
    holds: bool
    outside: bool
    """Whether what is missed is a budget, which changes no verdict."""
    sources: tuple[str, ...]
    missed: str
    """What the worst miss says, or nothing."""


def held(check: Fields) -> list[Held]:
    """The rows of `thresholds`, those of one metric together."""
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for row in rows(check.get("thresholds")):
        by_metric.setdefault(text(row.get("metric")), []).append(row)
    return [_held(metric, group) for metric, group in by_metric.items()]


def cited(judged: Iterable[Held]) -> list[str]:
    """The sources of all rows, each once, in the order in which they appear."""
    return list(dict.fromkeys(source for row in judged for source in row.sources))


def correlation_or_short(value: float | None) -> str:
    """A number near 1 keeps the digits that tell it from 1.

    Example:
        >>> correlation_or_short(0.99957), correlation_or_short(0.0123)
        ('0.99957', '0.0123')
    """
    return correlation(value) if value is not None and 0.9 <= value < 1 else short(value)


def _held(metric: str, group: list[dict[str, Any]]) -> Held:
    group = sorted(group, key=_urgency, reverse=True)
    first, *worse = group
    missed = [row for row in group if row.get("holds") is not True]
    budget = first.get("kind") == "budget"
    words = [text(first.get("level")), *(f"{text(r.get('level'))} if {_limit(r, negated=True)}" for r in worse)]  # fmt: skip
    return Held(
        metric,
        number(first.get("value")),
        _limit(first),
        "no change of the verdict" if budget else "; ".join(filter(None, words)),
        text(missed[-1].get("level")) if missed else "ok",
        not missed,
        bool(missed) and budget,
        tuple(dict.fromkeys(s for row in group if (s := text(row.get("source"))))),
        text(missed[-1].get("missed")) if missed else "",
    )


def _urgency(row: Fields) -> int:
    level = text(row.get("level"))
    return LEVELS.index(level) if level in LEVELS else 0


def _limit(row: Fields, *, negated: bool = False) -> str:
    limit, relation = number(row.get("threshold")), text(row.get("relation"))
    signs = {"<": "≥", "<=": ">", ">": "≤", ">=": "<"} if negated else {"<=": "≤", ">=": "≥"}
    return "" if limit is None else f"{signs.get(relation, relation)} {limit:g}".strip()


# A zero-update check in the terminal: verdict, three numbers, what changes them, thresholds, advice.


OWN = "offdrift"
MISTAKES = ("off_by_one", "raw_logprobs", "top_p", "pad_id", "gradient_checkpointing", "tokenization")  # fmt: skip
"""Factors that no sane pair has switched on: their numbers are what making the mistake would cost."""
MATTERS = 1.25
"""A mean KL changed by this factor or more is called a change."""

OWN_KL = "  × before: mean KL over that of the same tokens without the change. own KL: the changed engine against itself unchanged, nat."


def check_view(check: Fields, width: int = 100) -> RenderableType:
    """What `offdrift check` prints.

    Args:
        check: content of `check.json`.
        width: columns of the terminal.
    """
    findings = in_order(check.get("findings"), OWN)
    parts: list[RenderableType] = [
        verdict_view(check.get("verdict"), width=width),
        Text(" · ".join(about(check)), style="dim"),
        _numbers(check),
        *(Padding(shown_view(f, width=width), (0, 0, 1, 0)) for f in findings),
        *_noise(check),
        *_factors(check),
        *_thresholds(check),
        *_recommended(check),
        *_passed(check),
    ]
    if check.get("interrupted"):
        parts.append(Text("Interrupted: what is above was measured before that.", style="yellow"))
    return Group(*parts)


def about(check: Fields) -> list[str]:
    """What was measured, in words: model, prompts, tokens, temperature, time."""
    sampling = mapping(check.get("sampling"))
    words = [safe(text(check.get("model")))]
    words += [
        f"{count:,.0f} {key if count != 1 else key[:-1]}"
        for key in ("prompts", "sequences", "tokens")
        if (count := number(check.get(key))) is not None
    ]
    words += [
        f"{name} {value:g}"
        for name, key in (("temperature", "temperature"), ("top-p", "top_p"))
        if (value := number(sampling.get(key))) is not None and (value != 1 or key == "temperature")
    ]
    seconds = number(check.get("seconds"))
    return words + ([] if seconds is None else [f"{seconds:,.0f} s"])


def _numbers(check: Fields) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for h in headlines({"overall": check.get("baseline")}):
        style = WORDS[h.level][2] if h.level in ("watch", "act") else "bold"
        said = Text(h.said or h.about, style="" if h.said else "dim")
        table.add_row(Text(h.title), Text(f"{h.text} {h.unit}".rstrip(), style=style), said)
    return Padding(table, (1, 0, 1, 0))


def _noise(check: Fields) -> list[RenderableType]:
    """What part of the numbers is chance, or the harness' own."""
    noise = mapping(check.get("noise"))
    lines = []
    error = number(noise.get("kl_mean_se"))
    if error is not None:
        lines.append(f"standard error of the mean KL: {short(error)} nat")
    repeat = mapping(noise.get("repeat"))
    if (same := number(repeat.get("same_tokens_frac"))) is not None:
        apart = short(number(repeat.get("abs_log_ratio_max")))
        lines.append(f"drawn twice: {same:.0%} of responses are the same, log-probs differ by {apart} nat at most")  # fmt: skip
    null = mapping(noise.get("null"))
    if (kl := number(null.get("kl_mean"))) is not None:
        lines.append(f"{safe(text(null.get('rollout')))} against itself: KL {short(kl)} nat")
    return [_heading("Noise"), *(Text(f"  {line}") for line in lines)] if lines else []


def _factors(check: Fields) -> list[RenderableType]:
    found = rows(check.get("factors"))
    settings, mistakes = by_kind(found)
    parts: list[RenderableType] = []
    if settings:
        parts += [_heading("One setting changed at a time"), _factor_table(settings, check)]
        if any(number(at(f, "detail", "self_kl_mean")) is not None for f in settings):
            parts.append(Text(OWN_KL, style="dim"))
        parts += _said(settings)
    if mistakes:
        parts += [_heading("What common mistakes would cost here"), _factor_table(mistakes)]
        parts += _said(mistakes)
    return parts + _not_run(found)


def by_kind(found: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Factors that ran, the largest effect first: those that are settings, those that are mistakes."""
    ran = sorted((f for f in found if text(f.get("status")) == "ran"), key=_effect, reverse=True)
    settings = [f for f in ran if text(f.get("factor")) not in MISTAKES]
    return settings, [f for f in ran if text(f.get("factor")) in MISTAKES]


def _factor_table(found: list[dict[str, Any]], check: Fields | None = None) -> Table:
    """Rows of factors; the baseline above them, if the check is given."""
    own = check is not None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("factor", overflow="fold", min_width=14)
    table.add_column("changed", overflow="fold", ratio=1)
    for title in ("KL mean", "KL max", "× before", *(("own KL",) if own else ())):
        table.add_column(title, justify="right", no_wrap=True)
    if check is not None:
        base = mapping(check.get("baseline"))
        kl = (Text(short(number(base.get(key))), style="bold") for key in ("kl_mean", "kl_max"))
        table.add_row(Text("as it is", style="bold"), Text(), *kl, Text("1"), Text("–"))  # fmt: skip
    for f in found:
        ratio = number(f.get("ratio"))
        style = "" if ratio is None or not _changes(ratio) else "yellow" if ratio > 1 else "green"
        cells = [
            Text(_name(f)),
            Text(safe(text(f.get("changed"))), style="dim"),
            Text(short(number(f.get("kl_mean"))), style=style),
            Text(short(number(f.get("kl_max")))),
            Text(times(ratio), style=style),
        ]
        table.add_row(*cells, *([Text(short(number(at(f, "detail", "self_kl_mean"))))] if own else []))  # fmt: skip
    return table


def _said(found: list[dict[str, Any]]) -> list[RenderableType]:
    """What experiments say beside their numbers."""
    return [
        Text.assemble((f"  {_name(f)}: ", "bold"), why)
        for f in found
        if (why := safe(text(f.get("why"))))
    ]


def _name(factor: Fields) -> str:
    """With spaces, where a line may break."""
    return safe(text(factor.get("factor"))).replace("_", " ")


def _not_run(found: list[dict[str, object]]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for status, style in (("failed", "yellow"), ("not offered", "dim"), ("skipped", "dim")):
        for f in found:
            if f.get("status") == status:
                words = f"  {_name(f)} {status}: {safe(text(f.get('why')))}"
                parts.append(Text(words, style=style))
    return parts


def _thresholds(check: Fields) -> list[RenderableType]:
    """One line per metric: its value, what is healthy, and from where on it is worse than unhealthy."""
    judged = held(check)
    if not judged:
        return []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for title in ("healthy", "else", "source"):
        table.add_column(title, overflow="fold")
    sources = cited(judged)
    for row in judged:
        sign, _, style = WORDS["ok"] if row.holds else WORDS.get(row.level, WORDS[""])
        table.add_row(
            Text(OUTSIDE if row.outside else sign, style="dim" if row.outside else style),
            Text(safe(row.metric)),
            Text(correlation_or_short(row.value)),
            Text(safe(row.healthy)),
            Text(safe(row.otherwise)),
            Text(", ".join(f"[{sources.index(s) + 1}]" for s in row.sources), style="dim"),
        )
    notes = [Text(f"  {OUTSIDE} {BUDGET}", style="dim")] if any(r.outside for r in judged) else []
    legend = (Text(f"  [{i}] {safe(s)}", style="dim") for i, s in enumerate(sources, start=1))
    return [_heading("Thresholds"), table, *notes, *legend]


def _recommended(check: Fields) -> list[RenderableType]:
    advice = mapping(check.get("recommended"))
    name, why = safe(text(advice.get("method"))), safe(text(advice.get("why")))
    parts: list[RenderableType] = []
    if name:
        changed = ", ".join(
            f"{safe(path)} = {short(number(value))}"
            for path, value in mapping(advice.get("settings")).items()
        )
        parts.append(Text.assemble("\n", ("Recommended: ", "bold green"), (name, "bold"), f" ({changed}): {why}"))  # fmt: skip
    elif why:
        parts.append(Text.assemble("\n", ("Recommended: ", "bold"), why))
    for framework, code in mapping(advice.get("snippets")).items():
        if isinstance(code, str):
            parts.append(Text(f"\n  # {safe(framework)}", style="dim"))
            parts += [Text(f"  {safe(line)}") for line in code.splitlines()]
    cap = number(at(check, "baseline", "tail_log_ratio_cap"))
    if cap is not None:
        every = short(number(at(check, "baseline", "tail_log_ratio_cap_all")))
        parts.append(Text(f"\nWith the top 20 log-probs recorded, tail_log_ratio_cap = {short(cap)} covers the exact KL of 99 % of tokens ({every}: of all).", style="dim"))  # fmt: skip
    return parts


def _passed(check: Fields) -> list[RenderableType]:
    limit = number(check.get("max_kl"))
    passed = check.get("passed") is True
    if limit is None and passed:
        return []
    kl = short(number(at(check, "baseline", "kl_mean")))
    words = f"{'passed' if passed else 'FAILED'}: mean KL {kl} nat per token"
    words += "" if limit is None else f", --max-kl {limit:g}"
    return [Text(f"\n{words}", style="bold green" if passed else "bold red")]


def _effect(factor: Fields) -> float:
    ratio = number(factor.get("ratio"))
    if ratio is None:
        return -1.0
    return abs(math.log(ratio)) if ratio > 0 else math.inf


def _changes(ratio: float) -> bool:
    return not 1 / MATTERS < ratio < MATTERS


def times(ratio: float | None) -> str:
    """How often the KL before, in words where the digits say nothing.

    Example:
        >>> times(1.234), times(1e-9), times(4e11)
        ('1.23', '< 0.01', '> 10⁴')
    """
    if ratio is None:
        return "–"
    if ratio < 0.01:
        return "< 0.01"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}" if ratio < 1e4 else "> 10⁴"


def _heading(words: str) -> Text:
    return Text(f"\n{words}", style="bold")
