"""`Rules`: thresholds, rules and fixes, read from TOML. Data, so that a user can change any of it.

The built-in tables are `rules.toml` and `fixes.toml` beside this file. A user's file holds any of

    [thresholds]            kl_large = 0.1                  another value of a known threshold
    [rules.NAME]            severity = "watch"              a key of a known rule, changed
                            enabled = false                 a known rule, switched off
    [rules.NEW]             symptom = "..." ...             a rule of one's own
    [fixes.NAME]            do = "...", snippets.verl = ""  a fix of one's own, or a known one changed
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from offdrift.judge.conditions import RELATIONS, Compared, Condition, Joined, Threshold
from offdrift.judge.findings import Confidence, Severity
from offdrift.judge.readings import READINGS
from offdrift.judge.rules_validation import choice, kind, known, one_of, refuse
from offdrift.methods import METHODS

HERE = Path(__file__).parent
LETTERS = ("A", "A/B", "D", "B", "C", "E", "F", "")
"""Order of findings: the survey's order of fixes, which repairs the engines first."""


@dataclass(frozen=True)
class Fix:
    """The smallest change that helps, in words and as configuration."""

    do: str
    method: str | None = None
    """The row of `METHODS` that it turns on."""
    snippets: Mapping[str, str] = field(default_factory=dict)
    """By framework; `python` and `shell` for any."""


@dataclass(frozen=True)
class Rule:
    """One symptom, what shows it, what causes it, and what to do."""

    cause: str
    symptom: str
    explanation: str
    fix: str
    """A name of the fixes."""
    refuted_by: str
    when: Condition
    letter: str = ""
    severity: Severity = "watch"
    confidence: Confidence = "medium"
    source: str = ""
    suppressed_by: tuple[str, ...] = ()
    """Rules that explain the same numbers better."""
    raised_by: tuple[Condition, ...] = ()
    """Each that holds raises the confidence by one level."""
    transient: bool = False
    """Whether a single occurrence counts: a spike is over before it becomes typical."""
    whole: bool = False
    """Whether it is about the whole log: told without a step, and only if it held at every one."""
    data: bool = False
    """Whether it is about what the log lacks: told before what was concluded from the rest."""
    enabled: bool = True


@dataclass(frozen=True)
class Rules:
    """Everything the diagnosis knows."""

    thresholds: Mapping[str, Threshold]
    rules: Mapping[str, Rule]
    fixes: Mapping[str, Fix]

    @property
    def limits(self) -> dict[str, float]:
        """Thresholds as numbers."""
        return {name: t.value for name, t in self.thresholds.items()}


def load_rules(path: Path | None = None) -> Rules:
    """The built-in rules, with a user's TOML file merged over them.

    Args:
        path: the user's file; None for the built-in rules alone.

    Raises: `RecipeError` naming the file, the table, the key and the value that is wrong, and what it
        could be.

    Example:
        >>> rules = load_rules()
        >>> rules.thresholds["kl_large"].value, rules.rules["token_drift"].letter
        (0.05, 'C')
    """
    if path is None:
        return _built_in()
    return _parse(_merged(_tables(), _toml(path), str(path)), str(path))


@cache
def _built_in() -> Rules:
    return _parse(_tables(), "the built-in rules")


def _tables() -> dict[str, Any]:
    return {**_toml(HERE / "rules.toml"), **_toml(HERE / "fixes.toml")}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise refuse(f"{path} cannot be read: {e.strerror or e}") from e
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise refuse(f"{path} cannot be read as TOML: {e}") from e


TABLES = ("thresholds", "rules", "fixes")


def _merged(base: dict[str, Any], mine: dict[str, Any], file: str) -> dict[str, Any]:
    """The user's tables over the built-in ones, key by key; a rule's conditions are replaced whole."""
    known(file, mine, TABLES)
    merged = dict(base)
    for table in TABLES:
        rows = kind(f"{file}: [{table}]", mine.get(table, {}), dict)
        if table == "thresholds":
            known(f"{file}: [thresholds]", rows, base[table])
        merged[table] = {**base[table], **{n: _over(base[table].get(n), x) for n, x in rows.items()}}
    return merged


def _over(old: Any, new: Any) -> Any:
    """A row over another; snippets are joined, everything else is replaced."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {**old, "value": new} if isinstance(old, dict) and not isinstance(new, dict) else new
    old = {k: v for k, v in old.items() if not (k in ("all", "any") and {"all", "any"} & new.keys())}
    return {**old, **new, **({"snippets": {**old.get("snippets", {}), **new["snippets"]}} if isinstance(new.get("snippets"), dict) else {})}  # fmt: skip


def _parse(tables: Mapping[str, Any], file: str) -> Rules:
    thresholds = {
        name: _threshold(f"{file}: [thresholds] {name}", name, row) for name, row in tables["thresholds"].items()
    }
    fixes = {n: _fix(f"{file}: [fixes.{n}]", row) for n, row in tables["fixes"].items()}
    rules = {name: _rule(f"{file}: [rules.{name}]", row, thresholds, fixes) for name, row in tables["rules"].items()}
    for name, rule in rules.items():
        for other in rule.suppressed_by:
            one_of(f"{file}: [rules.{name}] suppressed_by", other, sorted(rules))
    order = {n: (not r.data, LETTERS.index(r.letter), i) for i, (n, r) in enumerate(rules.items())}
    ordered = {n: rules[n] for n in sorted(order, key=order.__getitem__) if rules[n].enabled}
    return Rules(MappingProxyType(thresholds), MappingProxyType(ordered), MappingProxyType(fixes))


def _threshold(where: str, name: str, row: Any) -> Threshold:
    row = row if isinstance(row, dict) else {"value": row}
    known(where, row, [f.name for f in fields(Threshold)])
    value = kind(f"{where}.value", row.get("value"), (int, float))
    if name.startswith("window_") and not 1 <= value < math.inf:
        raise refuse(f"{where}.value = {value!r} must be at least 1: it is a number of steps")
    texts = {k: kind(f"{where}.{k}", v, str) for k, v in row.items() if k != "value"}
    return Threshold(float(value), **texts)


def _fix(where: str, row: Any) -> Fix:
    row = kind(where, row, dict)
    known(where, row, [f.name for f in fields(Fix)])
    if (method := row.get("method")) is not None:
        one_of(f"{where} method", method, sorted(METHODS))
    snippets = kind(f"{where} snippets", row.get("snippets", {}), dict)
    checked = {k: kind(f"{where} snippets.{k}", v, str).strip() + "\n" for k, v in snippets.items()}
    return Fix(kind(f"{where} do", row.get("do"), str), method, checked)


TEXTS = ("cause", "symptom", "explanation", "fix", "refuted_by")


def _rule(where: str, row: Any, limits: Mapping[str, Threshold], fixes: Mapping[str, Fix]) -> Rule:
    row = dict(kind(where, row, dict))
    known(where, row, [*(f.name for f in fields(Rule) if f.name != "when"), "all", "any"])
    given = {key: row.pop(key) for key in ("all", "any") if key in row}
    if not given:
        raise refuse(f"{where} has no condition; give it all = [...] or any = [...]")
    when = _joined(where, given, limits)
    for key in TEXTS:
        kind(f"{where} {key}", row.get(key), str)
    one_of(f"{where} fix", row["fix"], sorted(fixes))
    choice(f"{where} severity", row.get("severity", "watch"), get_args(Severity))
    choice(f"{where} confidence", row.get("confidence", "medium"), get_args(Confidence))
    choice(f"{where} letter", row.get("letter", ""), LETTERS)
    kind(f"{where} source", row.get("source", ""), str)
    for key in ("data", "enabled", "transient", "whole"):
        kind(f"{where} {key}", row.get(key, False), bool)
    suppressed = kind(f"{where} suppressed_by", row.pop("suppressed_by", []), list)
    raised = kind(f"{where} raised_by", row.pop("raised_by", []), list)
    return Rule(
        **row,
        when=when,
        suppressed_by=tuple(kind(f"{where} suppressed_by", s, str) for s in suppressed),
        raised_by=tuple(_condition(f"{where} raised_by", c, limits) for c in raised),
    )


def _joined(where: str, given: Mapping[str, Any], limits: Mapping[str, Threshold]) -> Condition:
    parts = []
    for how, entries in given.items():
        entries = kind(f"{where} {how}", entries, list)
        if not entries:
            raise refuse(f"{where} {how} = [] never says anything; give it a condition")
        inner = tuple(_condition(f"{where} {how}", e, limits) for e in entries)
        parts.append(Joined("all" if how == "all" else "any", inner))
    return parts[0] if len(parts) == 1 else Joined("all", tuple(parts))


def _condition(where: str, entry: Any, limits: Mapping[str, Threshold]) -> Condition:
    entry = kind(where, entry, dict)
    if entry.keys() & {"all", "any"}:
        known(where, entry, ("all", "any"))
        return _joined(where, entry, limits)
    known(where, entry, ("metric", *RELATIONS))
    metric = one_of(f"{where} metric", entry.get("metric"), sorted(READINGS))
    relations = [key for key in entry if key != "metric"]
    if len(relations) != 1:
        raise refuse(f"{where}: {metric!r} needs exactly one of {', '.join(RELATIONS)}; it has {relations}")  # fmt: skip
    value = entry[relations[0]]
    if relations[0] == "missing":
        if value is not True:
            raise refuse(f"{where}: missing = {value!r} must be true; to ask that {metric!r} is there, compare it")  # fmt: skip
        return Compared(metric, "missing")
    if isinstance(value, str):
        one_of(f"{where} {metric} {relations[0]}", value, sorted(limits))
    else:
        value = float(kind(f"{where} {metric} {relations[0]}", value, (int, float)))
    return Compared(metric, RELATIONS[relations[0]], value)
