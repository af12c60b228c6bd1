"""Rules in the terminal: the built-in thresholds, and what a file of the user's changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offdrift.judge import Rules
from offdrift.show.findings import safe


def thresholds_view(rules: Rules) -> RenderableType:
    """Every threshold with its value, unit, meaning and source; the number of rules below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("threshold", overflow="fold")
    table.add_column("value", overflow="fold", justify="right")
    for title in ("unit", "meaning"):
        table.add_column(title, overflow="fold")
    for name, t in rules.thresholds.items():
        about = Text.assemble(safe(t.about), (f" ({safe(t.source)})", "dim"))
        table.add_row(Text(name), f"{t.value:g}", "" if t.unit == "1" else safe(t.unit), about)
    return Group(
        table,
        Text(f"{len(rules.rules)} rules compare readings with them: `offdrift rules NAME` shows one.", style="dim"),
    )


def rule_facts(rules: Rules, name: str) -> dict[str, Any]:
    """One rule as numbers and texts: condition, meaning, fix, and what would refute it."""
    rule, limits = rules.rules[name], rules.thresholds
    fix = rules.fixes[rule.fix]
    return {
        "rule": name,
        "kind": "fact" if rule.fact else "question" if rule.decides and rule.confidence == "low" else "cause",
        "severity": rule.severity,
        "confidence": rule.confidence,
        "symptom": rule.symptom,
        "explanation": rule.explanation,
        "when": rule.when.describe(limits),
        "excluded_by": [condition.describe(limits) for condition in rule.excluded_by],
        "suppressed_by": list(rule.suppressed_by),
        "refuted_by": rule.refuted_by,
        "decides": rule.decides,
        "fix": {"do": fix.do, "method": fix.method, "snippets": dict(fix.snippets)},
        "source": rule.source,
    }


def rule_view(rules: Rules, name: str) -> RenderableType:
    """One rule in full, for a terminal."""
    facts = rule_facts(rules, name)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "shown by": facts["when"],
        "not if": "; ".join(facts["excluded_by"]),
        "explained by": ", ".join(facts["suppressed_by"]),
        "means": facts["explanation"],
        "refuted by": facts["refuted_by"],
        "decided by": facts["decides"],
        "do": facts["fix"]["do"],
        "method": facts["fix"]["method"] or "",
        "source": facts["source"],
    }
    for label, words in rows.items():
        if words:
            table.add_row(label, safe(words))
    head = f"{name}: {facts['symptom']}"
    level = f"a {facts['kind']}; severity {facts['severity']}, confidence {facts['confidence']}"
    return Group(Text(safe(head), style="bold"), Text(level), Text(""), table)


def changes_view(rules: Rules, changed: Mapping[str, Any]) -> RenderableType:
    """Changes of a rules file (`changes_of`), a line each."""
    lines = [
        f"{name}: {row['from']:g} → {row['to']:g}{'' if row['unit'] == '1' else ' ' + row['unit']}"
        for name, row in changed["thresholds"].items()
    ]
    for table in ("rules", "fixes"):
        for name, keys in changed[table].items():
            words = keys if isinstance(keys, str) else f"{', '.join(keys)} changed"
            lines.append(f"{table}.{name}: {words}")
    amount = f"{len(lines)} entr{'y' if len(lines) == 1 else 'ies'}:" if lines else "nothing."
    head = f"{rules.title} is valid; it changes {amount}"
    return Group(Text(safe(head), style="bold"), *(Text(safe(f"  {line}")) for line in lines))


def toml_of(rules: Rules) -> str:
    """The thresholds as a rules file to start from: every value as a comment, with unit and meaning.

    Example:
        >>> from offdrift.judge import load_rules
        >>> [line for line in toml_of(load_rules()).splitlines() if "kl_large " in line]
        ['# kl_large = 0.05  # nat; drift that has a cause']
    """
    rows = [
        f"# {name} = {t.value!r}  # {'' if t.unit == '1' else t.unit + '; '}{t.about}"
        for name, t in rules.thresholds.items()
    ]
    return "\n".join(["[thresholds]", *rows, ""])
