"""Findings as people read them: the same words in the terminal and on a page.

A finding is the mapping that `Finding.as_dict` makes; whatever it lacks is left out. What to do comes
as a snippet for the framework that wrote the log, the others behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offdrift.show.anchors import Anchors, anchor
from offdrift.show.json_access import Fields, mapping, number, rows, text, visible
from offdrift.show.numbers import short

OWN = "offdrift"
LEVELS = ("stop", "act", "watch", "info", "ok")
"""Severities, the most urgent first; "ok" is a verdict only."""

WORDS = {
    "stop": ("■", "Stop", "bold red"),
    "act": ("▲", "Act", "bold yellow"),
    "watch": ("◆", "Watch", "bold cyan"),
    "info": ("●", "Note", "dim"),
    "ok": ("✓", "OK", "bold green"),
    "": ("○", "No verdict", "dim"),
}
"""Sign, word and terminal style of each level: told by more than color."""

SEVERITY_STYLE = {level: WORDS[level][2] for level in ("info", "watch", "act", "stop")}
"""Terminal style of each severity of a finding, the least urgent first."""

CAUSES = {
    "precision": "numerical precision of the engines",
    "raw_logprobs": "log-probs taken before temperature or top-p",
    "misaligned": "log-probs off by one token",
    "one_sided_filter": "a filter that only one side applies",
    "one_sided_cache": "a compressed cache on one side alone",
    "router_flips": "experts routed differently",
    "teacher_mixed": "a teacher whose logits are mixed in, on purpose",
    "wrong_weights": "the engine does not hold the weights it claims",
    "stale_engine": "a stale rollout policy",
    "old_policy_stale": "old log-probs taken at newer weights",
    "token_drift": "moderate drift of tokens",
    "weight_variance": "variance of the importance weights",
    "clip_saturation": "clipping is saturated",
    "optimizer_amplification": "the optimizer amplifies the drift",
    "engine_or_lag": "the engines or the lag; the log cannot tell which",
    "beyond_correction": "more than a correction can repair",
    "length_trap": "the length trap",
    "gate_too_tight": "a gate that is too tight",
    "not_finite": "numbers that are not finite",
    "not_live": "the training does not move",
    "rollout_workers": "rollout workers that are lost or idle",
    "not_logged": "something that is not logged",
    "missing_data": "data that is missing",
}
"""What a person calls each cause; one that is not here is shown by its identifier."""


@dataclass(frozen=True)
class Shown:
    """A finding ready to be shown: texts as they were written, numbers as texts."""

    level: str
    cause: str
    letter: str
    symptom: str
    explanation: str
    fix: str
    refuted_by: str
    confidence: str
    source: str
    when: str
    method: str
    evidence: tuple[tuple[str, str, str, str], ...]
    """Metric, value, threshold, source of the threshold."""
    snippets: tuple[tuple[str, str], ...]
    """Framework and configuration, the detected framework's first."""
    anchor: str = ""
    """Name of its place on a page."""
    page: str = ""
    """File name and place of the page that shows it, where that was stored."""


def shown(finding: Fields, framework: str = OWN, place: str = "") -> Shown:
    """One finding, read without trust in its shape.

    Args:
        framework: whose snippet comes first; `offdrift`'s where there is none for it.
        place: name of its place on the page; absent, by its rule.

    Example:
        >>> s = shown({"cause": "stale_engine", "letter": "B", "severity": "act", "step": 40,
        ...            "steps": 12, "snippets": {"trl": "a", "verl": "b"}}, "verl")
        >>> s.cause, s.when, s.snippets
        ('a stale rollout policy', 'first at step 40, at 12 steps', (('verl', 'b'), ('trl', 'a')))
    """
    severity, cause = text(finding.get("severity")), text(finding.get("cause"))
    plain = {
        key: text(finding.get(key))
        for key in ("letter", "symptom", "explanation", "fix", "refuted_by", "confidence", "source", "method", "page")
    }
    step, count = number(finding.get("step")), number(finding.get("steps"))
    when = [] if step is None else [f"first at step {step:.0f}"]
    when += [f"at {count:.0f} step{'' if count == 1 else 's'}"] if count else []
    stored = mapping(finding.get("snippets")).items()
    code = {name: v.strip("\n") for name, v in stored if isinstance(v, str) and v.strip()}
    first = [name for name in (framework, OWN) if name in code][:1]
    return Shown(
        level=severity if severity in LEVELS else "info",
        cause=CAUSES.get(cause, cause.replace("_", " ")),
        when="over the whole log" if step is None and count == 0 else ", ".join(when),
        evidence=tuple(map(_evidence, rows(finding.get("evidence")))),
        snippets=tuple((name, code[name]) for name in dict.fromkeys([*first, *code])),
        anchor=place or anchor("finding", text(finding.get("rule"))),
        **plain,
    )


def in_order(
    findings: object, framework: str = OWN, kind: str = "finding", names: Anchors | None = None
) -> list[Shown]:
    """All findings in the order of repair, as they were given; what can wait stands last.

    Args:
        kind: what the names of their places on the page begin with.
        names: those that the page has already.
    """
    names = Anchors() if names is None else names
    read = [shown(f, framework, names(kind, text(f.get("rule")))) for f in rows(findings)]
    return sorted(read, key=lambda s: s.level not in ("stop", "act"))


def finding_view(finding: Fields, framework: str = OWN, width: int = 100) -> RenderableType:
    """One finding in the terminal: symptom, evidence, cause, fix and the snippet to paste.

    Args:
        finding: of `Finding.as_dict`.
        framework: whose snippet is shown.
        width: columns of the terminal.
    """
    return shown_view(shown(finding, framework), width=width)


def shown_view(s: Shown, *, width: int = 100, brief: bool = False) -> RenderableType:
    """`finding_view` of a finding that was read already.

    Args:
        brief: without explanation, snippet and small print.
    """
    sign, word, style = WORDS[s.level]
    title = Text.assemble((f"{sign} {word}", style), "  ", (safe(s.cause), "bold"))
    if s.letter:
        title.append(f"  cause {safe(s.letter)}", style="dim")
    parts: list[RenderableType] = [Text(safe(s.symptom))] if s.symptom else []
    if s.evidence:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for justify in ("left", "right", "left", "left"):
            table.add_column(justify=justify, overflow="fold")
        for metric, value, limit, source in s.evidence:
            cells = (Text(safe(metric)), Text(safe(value), style="bold"), Text(safe(limit)))
            table.add_row(*cells, Text(safe(source), style="dim"))
        parts.append(table)
    if s.explanation and not brief:
        parts.append(Text(safe(s.explanation), style="dim"))
    if s.fix:
        parts.append(Text.assemble(("Fix: ", "bold green"), safe(s.fix)))
    if s.snippets and not brief:
        framework, code = s.snippets[0]
        # Rules above and below and nothing beside the lines, so that they can be copied.
        look: dict[str, Any] = {"box": box.HORIZONTALS, "border_style": "green", "padding": 0}
        panel = Panel(Text(safe(code)), title=Text(safe(framework)), title_align="left", **look)
        panel.width = min(width, 110) - 2
        parts.append(panel)
    if not brief:
        facts = [f"confidence {s.confidence}" if s.confidence else "", s.when, s.source]
        small = [f"Refuted by: {s.refuted_by}"] if s.refuted_by else []
        small += [" · ".join(f for f in facts if f)] if any(facts) else []
        small += [f"On the page: {s.page}"] if s.page else []
        parts += [Text(safe(line), style="dim") for line in small]
    return Group(title, *(Padding(part, (0, 0, 0, 2)) for part in parts))


def verdict_view(verdict: object, *, width: int = 100) -> RenderableType:
    """The verdict in the terminal, framed.

    Args:
        verdict: mapping of `level` and `text`.
    """
    level, words = verdict_of(verdict)
    sign, word, style = WORDS[level]
    return Panel(
        Text(safe(words)),
        title=Text(f"{sign} {word}", style=style),
        title_align="left",
        border_style=style.removeprefix("bold "),
        width=min(width, 110),
    )


def verdict_of(verdict: object) -> tuple[str, str]:
    """Level and text of a verdict; level "" where none was reached.

    Example:
        >>> verdict_of({"level": "act", "text": "Correct it."}), verdict_of(None)
        (('act', 'Correct it.'), ('', 'No verdict was recorded.'))
    """
    fields = mapping(verdict)
    level, words = text(fields.get("level")), text(fields.get("text"))
    return (level if level in LEVELS else ""), words or "No verdict was recorded."


def safe(words: str) -> str:
    """Text for a terminal: nothing in it moves the cursor, colors or reorders."""
    return visible(words).replace("\t", "    ")


def _evidence(row: Fields) -> tuple[str, str, str, str]:
    unit, value = text(row.get("unit")), number(row.get("value"))
    unit = f" {unit}" if unit not in ("", "1") else ""
    threshold, relation = number(row.get("threshold")), text(row.get("relation"))
    limit = "" if threshold is None else f"{relation} {short(threshold)}{unit}"
    if value is None:
        return text(row.get("metric")), "not logged", limit, text(row.get("source"))
    return text(row.get("metric")), f"{short(value)}{unit}", limit, text(row.get("source"))
