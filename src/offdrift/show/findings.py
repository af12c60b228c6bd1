"""Findings as people read them: the same words in the terminal and on a page.

A finding is the mapping that `Finding.as_dict` makes; whatever it lacks is left out. What to do comes
as a snippet for the framework that wrote the log, the others behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import indent

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offdrift.judge.findings import HALF
from offdrift.judge.verdict import deciding_measurement
from offdrift.show.anchors import Anchors, anchor
from offdrift.show.json_access import Fields, items, mapping, number, rows, text, visible
from offdrift.show.numbers import percent, short

OWN = "offdrift"
SHELL = "shell"
"""Key of a snippet that is a command for any framework."""
PYTHON = "python"
"""Key of a snippet that is code for any framework."""
PLACE_OF_METHOD = "# above the first [table]; where an arm has a method of its own, in its table [arms.NAME]"
"""What stands above a recipe's `method`, which below a table would be a setting of that table."""
SAID_BY = {"temperature_off": "--temperature 0.7", "experts": "--moe or --dense"}
"""Options that say what a log does not, by the reading that lacks it."""
NOTHING = "Nothing:"
"""Start of `refuted_by` where no result speaks against a finding: nothing to show."""
LEVELS = ("stop", "act", "watch", "info", "ok")
"""Severities, the most urgent first; "ok" is a verdict only."""

WORDS = {
    "stop": ("■", "Stop", "bold red"),
    "act": ("▲", "Act", "bold yellow"),
    "watch": ("◆", "Watch", "bold cyan"),
    "info": ("●", "Note", "dim"),
    "ok": ("✓", "OK", "bold green"),
    "interrupted": ("◌", "Interrupted", "bold yellow"),
    "": ("○", "No verdict", "dim"),
}
"""Sign, word and terminal style of each level: told by more than color."""

SEVERITY_STYLE = {level: WORDS[level][2] for level in ("info", "watch", "act", "stop")}
"""Terminal style of each severity of a finding, the least urgent first."""

CAUSES = {
    "precision": "numerical precision of the engines",
    "record": "recorded log-probs that are not of the sampled tokens",
    "not_repeating": "a trainer whose log-probs differ when repeated",
    "end_of_response": "the end of responses",
    "inputs_differ": "different inputs in engine and trainer",
    "long_context": "long contexts",
    "turns": "turns of an episode",
    "sampling_penalty": "a sampling penalty on one side",
    "prefix_cache": "the prefix cache",
    "cache_after_update": "a key-value cache that outlives an update",
    "one_rank": "one rank of the trainer",
    "environment": "one environment",
    "two_kinds": "two kinds of responses",
    "tempered_trainer": "a temperature that only the trainer uses",
    "unexplained": "a cause that this log cannot show",
    "outliers": "single tokens far off",
    "support": "tokens that the trainer cannot draw",
    "raw_logprobs": "a temperature or filter that differs between engine and trainer",
    "misaligned": "log-probs off by one token",
    "one_sided_filter": "a sampling filter that only one side applies",
    "one_sided_cache": "a compressed key-value cache on only one side",
    "router_flips": "experts routed differently",
    "teacher_mixed": "a teacher whose logits are mixed in, on purpose",
    "temperature_or_weights": "a temperature that changed on one side, or other weights",
    "wrong_weights": "the engine does not hold the weights it claims",
    "weights_or_configuration": "weights or configuration that differ",
    "open_settings": "sampling settings that the server fills in",
    "stale_engine": "a stale rollout policy",
    "old_policy_stale": "old log-probs taken at newer weights",
    "normalizer": "a normalizer or a constant of one side",
    "old_policy_other": "old log-probs of another policy",
    "old_policy_copied": "old log-probs that are the engine's",
    "columns_equal": "a column that may be a copy of the other",
    "systematic_gap": "a systematic gap between the engines' log-probs",
    "weight_bias": "importance weights whose mean is not 1",
    "critic": "a critic that explains nothing",
    "advantages": "advantages that contradict the rewards",
    "entropy": "an entropy that collapsed",
    "reward_step": "other prompts or another reward function from one step on",
    "length": "a response length that changed",
    "no_signal": "rewards without a difference",
    "repeated_rows": "responses that stand in the log again",
    "token_drift": "moderate token drift",
    "weight_variance": "variance of the importance weights",
    "clip_saturation": "clipping is saturated",
    "optimizer_amplification": "the optimizer amplifies the drift",
    "engine_or_lag": "the engines or the lag; the log cannot tell which",
    "beyond_correction": "more than a correction can repair",
    "length_trap": "the length trap",
    "gate_too_tight": "a gate that is too tight",
    "step_without_gradient": "an optimizer that steps without a gradient",
    "not_finite": "NaN or infinite numbers",
    "not_live": "training that does not change the policy",
    "rollout_workers": "rollout workers that are lost or idle",
    "not_logged": "fields that are not logged",
    "missing_data": "missing data",
}
"""What a person calls each cause; one that is not here is shown by its identifier."""
SIDES = {
    "raw_logprobs": "log-probs recorded before temperature or top-p, or swapped columns",
    "filter_or_swap": "swapped columns, or a filter that the record does not have",
    "temperature_unseen": "a temperature that agreement cannot show",
    "entropy_off": "entropies that contradict the log-probs",
    "raw_stated": "log-probs recorded before temperature or top-p",
    "broken_record": "log-probs recorded before temperature or top-p",
    "worker_record": "one worker's record that is not of what it drew",
    "untempered_trainer": "a trainer that ignores the sampling temperature",
}
"""What a person calls the cause of a rule that knows on which side it is."""
SURVEY = (
    'survey: "Off-policy drift in LLM RL", 2026, with its decision tree, escalation and anti-patterns; what each '
    "rule and limit rests on: offdrift docs rules"
)
"""Footnote below findings that cite it."""
LEARNING_RATE = re.compile(r"\b(lr|learning_rate)(\s*[=:]\s*|\s+)[1-9][\d.]*e-\d+")
YOUR_HALF = "<half of your current value>"
"""Stands in a shown snippet in place of a learning rate, so that nobody pastes that of another run."""


@dataclass(frozen=True)
class Shown:
    """A finding ready to be shown: texts as they were written, numbers as texts."""

    level: str
    cause: str
    symptom: str
    explanation: str
    fix: str
    refuted_by: str
    decides: str
    confidence: str
    source: str
    when: str
    method: str
    evidence: tuple[tuple[str, str, str, str], ...]
    """What was measured, value, threshold, source of the threshold."""
    snippets: tuple[tuple[str, str], ...]
    """Framework and configuration, the detected framework's first."""
    anchor: str = ""
    """Name of its place on a page."""
    page: str = ""
    """File name and place of the page that shows it, where that was stored."""
    record: str = ""
    """What became of training runs with this finding."""
    step: str = ""
    """Step at which it was first seen; empty over a whole log."""

    def small_print(self, folder: str = "") -> list[str]:
        """Return the lines below a finding in the terminal: what would decide it, how sure it is, where to read on.

        Args:
            folder: where the page of the finding is, as a reader of the terminal would call it.
        """
        facts = [f"confidence {self.confidence}" if self.confidence else "", self.when, self.source]
        lines = (
            ("To confirm: ", self.decides),
            ("This finding is wrong if: ", "" if self.decides else self.refuted_by),
            ("Track record: ", self.record),
            ("", " · ".join(filter(None, facts))),
            (f"Details: {f'{folder}/' if folder else ''}", self.page),
        )
        return [f"{opening}{words}" for opening, words in lines if words]


def shown(finding: Fields, framework: str = OWN, place: str = "") -> Shown:
    """One finding, read without trust in its shape.

    Args:
        framework: whose snippet comes first; without one, a shell command or Python, which anybody can run, else
            `offdrift`'s.
        place: name of its place on the page; absent, by its rule.

    Example:
        >>> s = shown({"cause": "stale_engine", "severity": "act", "step": 40,
        ...            "steps": 12, "snippets": {"trl": "a", "verl": "b"}}, "verl")
        >>> s.cause, s.when, s.snippets
        ('a stale rollout policy', 'first at step 40, seen in 12 steps', (('verl', 'b'), ('trl', 'a')))
    """
    severity, cause = text(finding.get("severity")), text(finding.get("cause"))
    plain = {
        key: text(finding.get(key))
        for key in (
            "symptom",
            "explanation",
            "fix",
            "refuted_by",
            "decides",
            "confidence",
            "source",
            "method",
            "page",
            "record",
        )
    }
    step, count = number(finding.get("step")), number(finding.get("steps"))
    when = [] if step is None else [f"first at step {step:.0f}"]
    when += [f"seen in {count:.0f} step{'' if count == 1 else 's'}"] if count else []
    stored = mapping(finding.get("snippets")).items()
    code = {name: to_paste(v.strip("\n")) for name, v in stored if isinstance(v, str) and v.strip()}
    if code.get(OWN, "").startswith("method ="):
        code[OWN] = f"{PLACE_OF_METHOD}\n{code[OWN]}"
    first = [name for name in (framework, SHELL, PYTHON, OWN) if name in code][:1]
    plain["decides"] = deciding_measurement(plain["fix"], plain["decides"])
    if plain["refuted_by"].startswith(NOTHING):
        plain["refuted_by"] = ""
    return Shown(
        level=severity if severity in LEVELS else "info",
        cause=SIDES.get(text(finding.get("rule"))) or CAUSES.get(cause, cause.replace("_", " ")),
        when="over the whole log" if step is None and count == 0 else ", ".join(when),
        evidence=tuple(map(_evidence, rows(finding.get("evidence")))),
        snippets=tuple((name, code[name]) for name in dict.fromkeys([*first, *code])),
        anchor=place or anchor("finding", text(finding.get("rule"))),
        step="" if step is None else f"{step:.0f}",
        **plain,
    )


def to_paste(snippet: str) -> str:
    """A snippet as it is shown: half of the reader's own learning rate is left to the reader.

    Example:
        >>> to_paste("GRPOConfig(num_iterations=1, learning_rate=5e-7)  # half of yours")
        'GRPOConfig(num_iterations=1, learning_rate=<half of your current value>)'
    """
    return re.sub(rf"\s*# {HALF}", "", LEARNING_RATE.sub(rf"\1\2{YOUR_HALF}", snippet))


def footnote(findings: Iterable[Shown]) -> str:
    """The citation that these findings need; "" if none of them cites the survey."""
    sources = (source for f in findings for source in (f.source, *(row[-1] for row in f.evidence)))
    return SURVEY if any("survey" in source for source in sources) else ""


def in_order(
    findings: object, framework: str = OWN, kind: str = "finding", names: Anchors | None = None
) -> list[Shown]:
    """All findings, the most severe first; equally severe ones in the order of repair, as they were given.

    Args:
        kind: what the names of their places on the page begin with.
        names: those that the page has already.
    """
    names = Anchors() if names is None else names
    read = [shown(f, framework, names(kind, text(f.get("rule")))) for f in rows(findings)]
    return sorted(read, key=severity)


def finding_matrix(findings: Sequence[tuple[str, Shown]]) -> list[tuple[Shown, dict[str, Shown]]]:
    """A row per symptom, in the order given: its first finding, and by arm the first one that the arm had.

    Args:
        findings: each with the name of its arm.
    """
    table: dict[tuple[str, str], dict[str, Shown]] = {}
    for arm, f in findings:
        table.setdefault((f.symptom or f.cause, f.cause), {}).setdefault(arm, f)
    return [(next(iter(row.values())), row) for row in table.values()]


def severity(finding: Shown) -> int:
    """Place of a finding's level among `LEVELS`, behind all of them for a level that is unknown."""
    return LEVELS.index(finding.level) if finding.level in LEVELS else len(LEVELS)


def finding_view(finding: Fields, framework: str = OWN, width: int = 100) -> RenderableType:
    """One finding in the terminal: symptom, evidence, cause, fix and the snippet to paste.

    Args:
        finding: of `Finding.as_dict`.
        framework: whose snippet is shown.
        width: columns of the terminal.
    """
    return shown_view(shown(finding, framework), width=width)


def shown_view(s: Shown, *, width: int = 100, brief: bool = False, folder: str = "") -> RenderableType:
    """`finding_view` of a finding that was read already.

    Args:
        brief: without explanation, snippet and small print.
        folder: where the page of the finding is, as a reader of the terminal would call it.
    """
    sign, word, style = WORDS[s.level]
    title = Text.assemble((f"{sign} {word}", style), "  ", (safe(s.cause), "bold"))
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
        end = "─" * (min(width, 110) - 2)
        parts.append(Text(f"─ {safe(framework)} {end}"[: len(end)], style="green"))
        # Nothing beside the lines, and none broken, so that they can be copied.
        parts += [Whole(safe(code)), Text(end, style="green")]
    if not brief:
        parts += [Text(safe(line), style="dim") for line in s.small_print(folder)]
    return Group(title, *(part if isinstance(part, Whole) else Padding(part, (0, 0, 0, 2)) for part in parts))


class Whole:
    """Lines that stay whole however narrow the terminal is, two columns in; print them with `crop=False`."""

    def __init__(self, lines: str) -> None:
        self.text = Text(indent(lines, "  "), no_wrap=True, overflow="ignore")

    def __rich__(self) -> RenderableType:
        return self.text


def verdict_view(verdict: object, *, width: int = 100) -> RenderableType:
    """The verdict in the terminal, framed.

    Args:
        verdict: mapping of `level`, `text`, `steps`, and `details` that stand below in a soft color.
    """
    level, words = verdict_of(verdict)
    steps = [safe(text(step)) for step in items(mapping(verdict).get("steps"))]
    if len(steps) > 1:
        steps = [f"{i}. {step}" for i, step in enumerate(steps, 1)]
    details = [safe(text(line)) for line in items(mapping(verdict).get("details"))]
    sign, word, style = WORDS[level]
    return Panel(
        Text("\n").join([*map(Text, [safe(words), *steps]), *(Text(line, style="dim") for line in details)]),
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
    return (level if level in (*LEVELS, "interrupted") else ""), words or "No verdict was recorded."


def safe(words: str) -> str:
    """Text for a terminal: nothing in it moves the cursor, colors or reorders."""
    return visible(words).replace("\t", "    ")


def _evidence(row: Fields) -> tuple[str, str, str, str]:
    """The quantity, its value, what it is compared with, and where the limit is from."""
    unit, value, scale = text(row.get("unit")), number(row.get("value")), text(row.get("scale"))
    unit = f" {unit}" if unit not in ("", "1") else ""
    threshold, relation = number(row.get("threshold")), text(row.get("relation"))
    what, source = text(row.get("what")) or text(row.get("metric")), text(row.get("source"))
    if scale == "yes" and value is not None:
        return what, "yes" if value else "no", "", source
    # A threshold is as somebody chose it: without the digits that a measured number has.
    limit = ""
    if threshold is not None:
        chosen = _figure(f"{threshold:g}", f"{100 * threshold:g} %", scale).replace("-", "−")
        limit = f"{relation} {chosen}{unit}"
    if value is None:
        option = SAID_BY.get(text(row.get("metric")))
        return what, f"not known: {option} says it" if option else "not logged", limit, source
    exact = None if threshold is None else _told_apart(value, threshold, 100.0 if scale == "share" else 1.0)
    return (
        what,
        f"{_figure(exact or short(value), f'{exact} %' if exact else percent(value), scale)}{unit}",
        limit,
        source,
    )


def _told_apart(value: float, threshold: float, factor: float) -> str:
    """A value that would be rounded to its threshold, with the digits that tell them apart; else "".

    Args:
        factor: of what is shown, 100 for percent.

    Example:
        >>> _told_apart(0.98996, 0.99, 1.0), _told_apart(0.69996, 0.7, 100.0), _told_apart(0.97, 0.99, 1.0)
        ('0.98996', '69.996', '')
    """
    if value == threshold or f"{value:.3g}" != f"{threshold:.3g}":
        return ""
    digits = next((n for n in range(4, 17) if f"{value:.{n}g}" != f"{threshold:.{n}g}"), 17)
    return f"{factor * value:.{digits + 1}g}".replace("-", "−")


def _figure(number: str, share: str, scale: str) -> str:
    """A number as its scale has it: plain, in percent, or as a multiple."""
    return share if scale == "share" else f"{number} ×" if scale == "times" else number
