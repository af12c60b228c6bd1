"""Terminal view of a check: verdict, three numbers, factors, thresholds, recommendation.

The page of a check (`check.page`) shows the same rows of thresholds and factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offdrift.check.paired_view import PAIRED, TOGETHER, compound_lines, paired_lines
from offdrift.show.findings import LEVELS, WORDS, footnote, in_order, safe, shown_view, verdict_view
from offdrift.show.headline import correlation, headlines, thresholds
from offdrift.show.json_access import Fields, at, items, mapping, number, rows, text
from offdrift.show.numbers import short
from offdrift.show.stacks import stack_words

OUTSIDE = "○"
"""Sign of a missed budget."""
BUDGET = "outside, as bfloat16 alone is: nothing is broken"
NAMES = {
    "record_deviation": "largest distance of a reported log-prob from the recorded distribution, nat",
    "drawn_z": "distance of the drawn tokens from the recorded distribution, standard errors",
    "kl_mean": "KL per token, nat",
    "tv_p95": "total variation of a token, 95 % quantile",
    "mismatch/chi2_seq_largest": "chi2 of products over sequences",
    "delta_router": "share of a layer's experts that differ",
}
"""What a metric is that its name does not say."""
BUDGETS = "Conjectured budgets, no limits of health: inside, a correction gains little"
OWN = "offdrift"
MISTAKES = ("off_by_one", "raw_logprobs", "top_p", "pad_id", "gradient_checkpointing", "tokenization")
"""Factors that are mistakes: their numbers are what making the mistake would cost."""
OWN_KL = (
    "  × before: mean KL over that of the same tokens without the change. "
    "own KL: the changed engine against itself unchanged, nat."
)


class ThresholdRow(NamedTuple):
    """A metric and its thresholds."""

    metric: str
    value: float | None
    healthy: str
    """The strictest threshold: "< 0.02"; of a budget, what is inside."""
    otherwise: str
    """Level of a miss; where it depends on the size, also from which size on it is worse."""
    level: str
    """Level of the worst threshold that is missed."""
    holds: bool
    budget: bool
    """Whether the threshold is a conjectured budget, which does not change the verdict."""
    sources: tuple[str, ...]
    missed: str
    """Meaning of the worst miss, or nothing."""

    @property
    def outside(self) -> bool:
        """Whether a budget is missed."""
        return self.budget and not self.holds


def threshold_rows(check: Fields) -> list[ThresholdRow]:
    """The `thresholds` of a check, one row per metric."""
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for row in rows(check.get("thresholds")):
        by_metric.setdefault(text(row.get("metric")), []).append(row)
    merged = []
    for metric, group in by_metric.items():
        group.sort(key=lambda r: LEVELS.index(n) if (n := text(r.get("level"))) in LEVELS else 0, reverse=True)
        first, *worse = group
        missed = [row for row in group if row.get("holds") is not True]
        budget = first.get("kind") == "budget"
        steps = [text(first.get("level"))]
        steps += [f"{text(r.get('level'))} if {_limit(r, negated=True)}" for r in worse]
        merged.append(
            ThresholdRow(
                metric,
                number(first.get("value")),
                healthy=_limit(first),
                otherwise="no change of the verdict" if budget else "; ".join(filter(None, steps)),
                level=text(missed[-1].get("level")) if missed else "ok",
                holds=not missed,
                budget=budget,
                sources=tuple(dict.fromkeys(s for row in group if (s := text(row.get("source"))))),
                missed=text(missed[-1].get("missed")) if missed else "",
            )
        )
    return merged


def cited(table: Iterable[ThresholdRow]) -> list[str]:
    """The sources of all rows, each once, in the order in which they appear."""
    return list(dict.fromkeys(source for row in table for source in row.sources))


def correlation_or_short(value: float | None) -> str:
    """Write a number; one near 1 keeps the digits that tell it from 1.

    Example:
        >>> correlation_or_short(0.99957), correlation_or_short(0.0123)
        ('0.99957', '0.0123')
    """
    return correlation(value) if value is not None and 0.9 <= value < 1 else short(value)


def _limit(row: Fields, *, negated: bool = False) -> str:
    limit, relation = number(row.get("threshold")), text(row.get("relation"))
    signs = {"<": "≥", "<=": ">", ">": "≤", ">=": "<"} if negated else {"<=": "≤", ">=": "≥"}
    return "" if limit is None else f"{signs.get(relation, relation)} {limit:g}".strip()


def check_view(check: Fields, width: int = 100, *, folder: str = "") -> RenderableType:
    """The screen of `offdrift check`, from the content of `check.json`, whose page is in `folder`."""
    findings = in_order(check.get("findings"), OWN)
    parts: list[RenderableType] = [
        verdict_view(check.get("verdict"), width=width),
        Text(" · ".join(about(check)), style="dim"),
        *([] if live_rows(check) else [_numbers(check)]),
        *_live(check),
        *(Group(shown_view(f, width=width, folder=folder), "") for f in findings),
        *([Text(cited, style="dim")] if (cited := footnote(findings)) else []),
        *([] if live_rows(check) else _noise(check)),
        *_deterministic(check),
        *_titled(PAIRED, paired_lines(check)),
        *_bisected(check),
        *_factors(check),
        *_titled(TOGETHER, compound_lines(check)),
        *_thresholds(check),
        *[Text(safe(x), style="dim") for x in [text(check.get("judged_by"))] if x],
        *_recommended(check),
    ]
    limit, passed = number(check.get("max_kl")), check.get("passed") is True
    if isinstance(check.get("passed"), bool) and not live_rows(check) and (limit is not None or not passed):
        exact, drawn = (number(at(check, "baseline", key)) for key in ("kl_mean", "mismatch/k3"))
        kl = short(drawn if exact is None else exact)
        words = f"\n{'passed' if passed else 'FAILED'}: mean KL {kl} nat per token"
        words += "" if limit is None else f", --max-kl {limit:g}"
        words = "\nFAILED: the claim does not hold" if claim_fails(check) else words
        parts.append(Text(words, style="bold green" if passed else "bold red"))
    if check.get("interrupted"):
        parts.append(Text("Interrupted: the numbers above were measured before.", style="yellow"))
    return Group(*parts)


def claim_fails(check: Fields) -> bool:
    """Whether equality was claimed and does not hold, or has another digest than the one that was given."""
    claim = mapping(check.get("claim"))
    return claim.get("equal") is False or claim.get("same_digest") is False


def about(check: Fields) -> list[str]:
    """Model, prompts, sequences, tokens, temperature, top-p and time of a check, in words."""
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
    for h in headlines({"overall": check.get("baseline"), "limits": check.get("limits")}):
        style = WORDS[h.level][2] if h.level in ("watch", "act") else "bold"
        note = Text(h.comparison or h.about, style="" if h.comparison else "dim")
        table.add_row(Text(h.title), Text(f"{h.text} {h.unit}".rstrip(), style=style), note)
    return Padding(table, (1, 0, 1, 0))


def live_rows(check: Fields) -> list[tuple[str, str]]:
    """Numbers of a live check, in words by name; none of another check."""
    live = mapping(check.get("live"))
    checked = mapping(live.get("checkpoint"))
    if not checked:
        return []
    table = [(f"{text(checked.get('folder'))} (to check)", _fit(checked, place=""))]
    for row in rows(live.get("earlier")):
        place, error = number(row.get("position")), number(row.get("position_se"))
        where = "the same weights"
        if place is not None and row.get("same") is not True:
            where = f"position {place:.2f} ± {short(error)}"
        table.append((text(row.get("folder")), _fit(row, place=where)))
    for name, holder, key in (("drawn tokens", check, "precision"), ("tokens that it read", live, "read")):
        row = mapping(holder.get(key))
        table.append((name, text(row.get("why")) or _beside(row)))
    agreement = number(live.get("greedy_agreement"))
    table.append(("greedy tokens", "–" if agreement is None else f"{agreement:.1%} are the checkpoint's likeliest"))
    if part := mapping(live.get("part")):
        sizes = f"{short(number(part.get('left')))} nat left of {short(number(part.get('before')))}"
        table.append(
            ("part", f"{text(part.get('name'))} exchanged: {sizes}; the rest is of {text(part.get('rest_of'))}")
        )
    table.append(("the server calls its weights", text(live.get("weight_label")) or "nothing"))
    return table


def _fit(row: Fields, *, place: str) -> str:
    """Difference of a checkpoint to the server, in words."""
    fits = ""
    if isinstance(row.get("fits"), bool):
        fits = "precision explains it" if row.get("fits") else "precision does not explain it"
    return ", ".join(filter(None, (f"{short(number(row.get('misfit')))} nat per token", place, fits)))


def _beside(row: Fields) -> str:
    """Measured divergence over what precision explains, in words."""
    ratio, multiple = number(row.get("ratio")), number(row.get("multiple"))
    if ratio is None or multiple is None:
        return "–"
    return f"{ratio:.3g} times what {text(row.get('dtype'))} explains (limit {multiple:g})"


LIVE_NOTE = (
    "nat per token: mean of (log pi - log mu)² / 2. position: 0 where the server is at the checkpoint to check, "
    "1 where it is at this one."
)


def _live(check: Fields) -> list[RenderableType]:
    """Table of the weights that a running server may hold."""
    pairs = live_rows(check)
    if not pairs:
        return []
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, words in pairs:
        table.add_row(Text(safe(name), overflow="fold"), Text(safe(words), overflow="fold"))
    return [Padding(table, (1, 0, 0, 0)), Text(f"  {LIVE_NOTE}\n", style="dim")]


def _noise(check: Fields) -> list[RenderableType]:
    """Standard error, repetition and null test: the part of the numbers that is not drift."""
    noise = mapping(check.get("noise"))
    lines = []
    error = number(noise.get("kl_mean_se"))
    if error is not None:
        lines.append(f"standard error of the mean KL: {short(error)} nat")
    repeat = mapping(noise.get("repeat"))
    if (same := number(repeat.get("same_tokens_frac"))) is not None:
        apart = short(number(repeat.get("abs_log_ratio_max")))
        lines.append(f"drawn twice: {same:.0%} of responses are the same, log-probs differ by {apart} nat at most")
    null = mapping(noise.get("null"))
    if (kl := number(null.get("kl_mean"))) is not None:
        lines.append(f"{safe(text(null.get('rollout')))} against itself: KL {short(kl)} nat")
    if words := precision_words(check):
        lines.append(f"precision: {words}")
    return [_heading("Noise"), *(Text(f"  {line}") for line in lines)] if lines else []


def precision_words(check: Fields) -> str:
    """Measured divergence beside what the rollout engine's dtype explains, in a sentence; "" where there is none."""
    row = mapping(check.get("precision"))
    ratio, multiple = number(row.get("ratio")), number(row.get("multiple"))
    if why := safe(text(row.get("why"))):
        return f"not compared: {why}"
    if ratio is None or multiple is None:
        return ""
    explained, measured = short(number(row.get("explained"))), short(number(row.get("measured")))
    dtype = safe(text(row.get("dtype")))
    if row.get("stated") is False:  # a check of before has no such entry
        dtype += " (taken for the engine's, which names none: openai:URL,dtype=float32 does)"
    return (
        f"{dtype} explains {explained} nat (transformers, the same tokens), measured "
        f"{measured}: {ratio:.3g} times; more than {multiple:g} times is other weights or another configuration"
    )


def _deterministic(check: Fields) -> list[RenderableType]:
    """Lines that say for each engine if it repeats its results bit by bit, and with which setting."""
    row = mapping(check.get("deterministic"))
    sides = [side for name in ("rollout", "train") if (side := mapping(row.get(name)))]
    lines = [f"  {safe(text(side.get('engine')))}: {safe(text(side.get('text')))}" for side in sides]
    if why := safe(text(row.get("why"))):
        lines.append(f"  not measured: {why}")
    return [_heading("Deterministic"), *(Text(line) for line in lines)] if lines else []


def _titled(title: str, named: Iterable[tuple[str, str]]) -> list[RenderableType]:
    """Lines with a name each, under a heading; nothing where there are none."""
    lines = [Text.assemble((f"  {name}: ", "bold"), words) for name, words in named]
    return [_heading(title), *lines] if lines else []


STEPS = 12
"""Modules that the screen shows of a bisection: the first that differ; the others are in check.json."""


ELSEWHERE = (
    ": on the same tokens both are one model. What differs comes behind its modules (softcap or scale of the logits), "
    "or is the prompt (chat template, BOS), the sampling (generation_config.json) or the record"
)


def bisected(check: Fields) -> str:
    """Summarize the bisection in one sentence; "" if none was run."""
    row = mapping(check.get("bisect"))
    first, count = mapping(row.get("first")), len(rows(row.get("modules")))
    if why := text(row.get("why")):
        return f"not measured: {safe(why)}"
    if not count:
        return ""
    elsewhere = ELSEWHERE if row.get("elsewhere") is True else ""
    if not first:
        return f"every one of {count} modules has the same bits in both engines{elsewhere}"
    name, within = safe(text(first.get("module"))), safe(text(first.get("within")))
    by = f"by {short(number(first.get('abs_max')))} at most, {short(number(first.get('relative')))} of its size"
    beyond, limit = mapping(row.get("beyond_rounding")), number(row.get("rounding_limit"))
    more = ""
    if limit is not None:
        more = f"; no module differs by more than rounding ({short(limit)} of its size){elsewhere}"
        if beyond:
            size = short(number(beyond.get("relative")))
            module, tied_to = (safe(text(beyond.get(name))) for name in ("module", "tied_to"))
            module += f", tied to {tied_to}" * bool(tied_to)
            more = f"; first by more than rounding in {module} ({size} of its size)"
    if within != name:
        return f"first difference in {within or 'the model'}, before its module {name} ({by}){more}"
    return f"first difference in {name} ({by}){more}"


def _bisected(check: Fields) -> list[RenderableType]:
    """The first module that differs, and how the difference goes on."""
    words = bisected(check)
    if not words:
        return []
    modules = rows(at(check, "bisect", "modules"))
    differing = [m for m in modules if number(m.get("abs_max"))]
    parts: list[RenderableType] = [_heading("Layer by layer"), Text(f"  {words}")]
    if differing:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("module", overflow="fold")
        for title in ("largest difference", "of its size"):
            table.add_column(title, justify="right", no_wrap=True)
        for m in [*differing[:STEPS], *(differing[-1:] if len(differing) > STEPS else ())]:
            table.add_row(
                safe(text(m.get("module"))), short(number(m.get("abs_max"))), short(number(m.get("relative")))
            )
        parts.append(table)
    return parts


def _factors(check: Fields) -> list[RenderableType]:
    factors = rows(check.get("factors"))
    parts: list[RenderableType] = []
    titles = ("One setting changed at a time", "What common mistakes would cost here")
    for title, group, baseline in zip(titles, by_kind(factors), (check, None)):
        if group:
            parts += [_heading(title), _factor_table(group, baseline, thresholds(check)["factor_visible"])]
            if baseline and any(number(at(f, "detail", "self_kl_mean")) is not None for f in group):
                parts.append(Text(OWN_KL, style="dim"))
            why = ((_name(f), safe(text(f.get("why")))) for f in group)
            parts += [Text.assemble((f"  {name}: ", "bold"), words) for name, words in why if words]
    for status, style in (("failed", "yellow"), ("not offered", "dim"), ("skipped", "dim")):
        parts += [
            Text(f"  {_name(f)} {status}: {safe(text(f.get('why')))}", style=style)
            for f in factors
            if f.get("status") == status
        ]
    return parts


def by_kind(factors: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Factors that ran, the largest effect first: those that are settings, those that are mistakes."""

    def effect(factor: Fields) -> float:
        ratio = number(factor.get("ratio"))
        if ratio is None:
            return -1.0
        return abs(math.log(ratio)) if ratio > 0 else math.inf

    ran = sorted((f for f in factors if text(f.get("status")) == "ran"), key=effect, reverse=True)
    settings = [f for f in ran if text(f.get("factor")) not in MISTAKES]
    return settings, [f for f in ran if text(f.get("factor")) in MISTAKES]


def _factor_table(factors: list[dict[str, Any]], check: Fields | None, visible: float) -> Table:
    """One row per factor, colored from a change by the factor `visible` on; with a check, its baseline in the first row
    and a column of own KL."""
    own = check is not None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("factor", overflow="fold", min_width=14)
    table.add_column("changed", overflow="fold", ratio=1)
    for title in ("KL mean", "KL max", "× before", *(("own KL",) if own else ())):
        table.add_column(title, justify="right", no_wrap=True)
    if check is not None:
        base = mapping(check.get("baseline"))
        kl = (Text(short(number(base.get(key))), style="bold") for key in ("kl_mean", "kl_max"))
        table.add_row(Text("as it is", style="bold"), Text(), *kl, Text("1"), Text("–"))
    for f in factors:
        ratio = number(f.get("ratio"))
        style = ""
        if ratio is not None and not 1 / visible < ratio < visible:
            style = "yellow" if ratio > 1 else "green"
        cells = [
            Text(_name(f)),
            Text(safe(text(f.get("changed"))), style="dim"),
            Text(short(number(f.get("kl_mean"))), style=style),
            Text(short(number(f.get("kl_max")))),
            Text(times(ratio), style=style),
        ]
        if own:
            cells.append(Text(short(number(at(f, "detail", "self_kl_mean")))))
        table.add_row(*cells)
    return table


def _name(factor: Fields) -> str:
    """Name of a factor, with spaces where a line may break."""
    return safe(text(factor.get("factor"))).replace("_", " ")


def _thresholds(check: Fields) -> list[RenderableType]:
    """Limits of health, one line per metric with the level of a miss; then budgets, which are no such limits."""
    table_rows = threshold_rows(check)
    if not table_rows:
        return []
    sources = cited(table_rows)
    legend = (Text(f"  [{i}] {safe(s)}", style="dim") for i, s in enumerate(sources, start=1))
    budgets = [row for row in table_rows if row.budget]
    parts: list[RenderableType] = [_heading("Thresholds")]
    if health := [row for row in table_rows if not row.budget]:
        parts.append(_threshold_table(health, ("healthy", "else"), sources))
    if budgets:
        parts += [Text(f"  {BUDGETS}"), _threshold_table(budgets, ("inside",), sources)]
        parts += [Text(f"  {OUTSIDE} {BUDGET}", style="dim")] if any(row.outside for row in budgets) else []
    named = "; ".join(f"{row.metric}: {NAMES[row.metric]}" for row in table_rows if row.metric in NAMES)
    return [*parts, *([Text(f"  {named}", style="dim")] if named else []), *legend]


def _threshold_table(table_rows: list[ThresholdRow], titles: tuple[str, ...], sources: list[str]) -> Table:
    """Rows with their values; `titles` are those of the limit and, of limits of health, of a miss."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for title in (*titles, "source"):
        table.add_column(title, overflow="fold")
    for row in table_rows:
        sign, _, style = WORDS["ok"] if row.holds else WORDS.get(row.level, WORDS[""])
        table.add_row(
            Text(OUTSIDE if row.outside else sign, style="dim" if row.outside else style),
            Text(safe(row.metric)),
            Text(correlation_or_short(row.value)),
            *(Text(safe(words)) for words in (row.healthy, row.otherwise)[: len(titles)]),
            Text(", ".join(f"[{sources.index(s) + 1}]" for s in row.sources), style="dim"),
        )
    return table


def _recommended(check: Fields) -> list[RenderableType]:
    advice = mapping(check.get("recommended"))
    parts: list[RenderableType] = []
    later = mapping(advice.get("then")) if not text(advice.get("method")) else {}
    if text(advice.get("method")) or text(advice.get("why")):
        parts.append(_advice_line("Recommended: ", advice))
    if later:
        parts.append(_advice_line("If it grows: ", {k: later.get(k) for k in ("method", "settings")}))
    for framework, code in mapping(advice.get("snippets")).items() or mapping(later.get("snippets")).items():
        if isinstance(code, str):
            parts.append(Text(f"\n  # {safe(framework)}", style="dim"))
            parts += [Text(f"  {safe(line)}") for line in code.splitlines()]
    if source := text(at(advice, "unit", "source")):
        parts.append(Text(f"\nSource of the mismatch: {safe(source)}.{unit_words(advice)}", style="dim"))
    parts += _branches(check)
    parts += [Text(safe(words), style="dim") for words in stack_words(check)]
    cap = number(at(check, "baseline", "tail_log_ratio_cap"))
    if cap is not None:
        every = short(number(at(check, "baseline", "tail_log_ratio_cap_all")))
        words = (
            f"\nWith the top 20 log-probs recorded, rollout.tail_log_ratio_cap = {short(cap)} (largest |log-ratio| of "
            f"the rest, nat) covers the exact KL of 99 % of tokens; {every} that of all."
        )
        parts.append(Text(words, style="dim"))
    return parts


def _advice_line(heading: str, advice: Fields) -> Text:
    name, why = safe(text(advice.get("method"))), safe(text(advice.get("why")))
    if not name:
        return Text.assemble("\n", (heading, "bold"), why)
    changed = ", ".join(f"{safe(k)} = {short(number(v))}" for k, v in mapping(advice.get("settings")).items())
    words = f" ({changed})" if changed else ""
    return Text.assemble("\n", (heading, "bold green"), (name, "bold"), f"{words}{': ' if why else ''}{why}")


def unit_words(advice: Fields) -> str:
    """Say whether the method that would be recommended corrects in a unit that shows the source."""
    name, units = text(at(advice, "unit", "method")), ", ".join(text(x) for x in items(at(advice, "unit", "units")))
    if not name or not units:
        return ""
    verb = "fits" if at(advice, "unit", "fits") is True else "hides it"
    return f" {safe(name)} corrects by {safe(units)}, which {verb}."


def _branches(check: Fields) -> list[RenderableType]:
    stacks = rows(check.get("branches"))
    parts: list[RenderableType] = [Text("\nBy the kind of stack", style="bold")] if stacks else []
    for row in stacks:
        here = " (this pair)" if row.get("here") is True else ""
        words = f"{safe(text(row.get('pick')))}. {safe(text(row.get('why')))}"
        parts.append(Text.assemble("  ", (f"{safe(text(row.get('name')))}{here}: ", "bold"), words))
    return parts


def times(ratio: float | None) -> str:
    """Write a multiple of the KL before; extremes are cut off.

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
